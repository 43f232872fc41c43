"""The state of an optimizer in an output: names of the hub, other outputs in the way, damage."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import torch

import unshard
from optimizers import KEYS, like, save_optimizer
from ranks import assert_same, merged, save_ranks
from saved_values import loaded, same
from tiny_models import tiny_config, tiny_model
from unshard import CheckpointError, ConversionError, OutputError, UnshardError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

WORLD = 2


def mixture() -> dict[str, torch.Tensor]:
    """A mixture of experts with all experts in one tensor."""
    return dict(tiny_model("qwen3_moe").state_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of verl of a mixture of experts, and next to it one model per kind of moment."""
    place = tmp_path_factory.mktemp("moe")
    tensors = mixture()
    moments = {key: like(tensors, seed) for seed, key in enumerate(KEYS)}
    for name, own in {"run": tensors, **moments}.items():
        save_ranks(place / name, own, WORLD)
        tiny_config("qwen3_moe").save_pretrained(place / name)
    save_optimizer(place / "run", moments, WORLD)
    return place


def test_moments_of_experts_are_divided_as_the_experts_are(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    unshard.merge(trained / "run", tmp_path / "out", optimizer=True, verify="full")
    model = (
        merged(tmp_path / "out").keys()
        - load_file(tmp_path / "out" / "optimizer.safetensors").keys()
    )
    truth = {f"state.{name}.step": torch.tensor(7.0) for name in model}
    for key in KEYS:  # each kind was merged as a model of its own
        unshard.merge(trained / key, tmp_path / key)
        truth |= {f"state.{name}.{key}": one for name, one in merged(tmp_path / key).items()}
    assert "state.model.layers.0.mlp.experts.3.up_proj.weight.exp_avg" in truth
    assert_same(load_file(tmp_path / "out" / "optimizer.safetensors"), truth)
    fields = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert sorted(fields["param_groups"][0]["params"]) == sorted(model)
    assert (fields["step"], fields["param_groups"][0]["lr"]) == (7.0, 0.1)


@pytest.mark.parametrize("names", ["hub", "training"])
def test_an_open_checkpoint_has_the_names_asked_for(trained: Path, names: str) -> None:
    fused = "state.model.layers.0.mlp.experts.gate_up_proj.exp_avg"
    apart = "state.model.layers.0.mlp.experts.0.gate_proj.weight.exp_avg"
    options = {"framework": "pt", "part": "optimizer", "names": names}
    with unshard.open_checkpoint(trained / "run", **options) as state:  # type: ignore[call-overload]
        assert (fused in state, apart in state) == (names == "training", names == "hub")
        whole = like(mixture(), 0)["model.layers.0.mlp.experts.gate_up_proj"]
        found = state[fused] if names == "training" else state[apart]
        rows = whole if names == "training" else whole[0, : len(found)]
        assert torch.equal(found, rows)
        assert json.loads(state.metadata()["optimizer"])["step"] == 7.0


def test_files_that_are_not_written_are_those_of_a_merge(trained: Path, tmp_path: Path) -> None:
    unshard.merge(trained / "run", tmp_path / "out", optimizer=True, max_shard_size=4000)
    with unshard.virtual(trained / "run", optimizer=True, max_shard_size=4000) as files:
        assert {"optimizer.json", "optimizer.safetensors.index.json"} <= files.keys()
        for path in (tmp_path / "out").iterdir():
            assert files.open(path.name).read() == path.read_bytes(), path.name


def test_what_is_left_out_of_the_model_has_no_moments(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    report = unshard.merge(
        trained / "run", tmp_path, overwrite=True, optimizer=True, include="norm"
    )
    names = {name.rpartition(".")[0] for name in load_file(tmp_path / "optimizer.safetensors")}
    assert names == {f"state.{name}" for name in load_file(tmp_path / "model.safetensors")}
    assert any(note.startswith("left out, like their parameters: ") for note in report.notes)


def test_a_later_merge_without_it_removes_it(trained: Path, tmp_path: Path) -> None:
    unshard.merge(trained / "run", tmp_path / "out", optimizer=True)
    unshard.merge(trained / "run", tmp_path / "out", overwrite=True)
    assert not list((tmp_path / "out").glob("optimizer*"))


def test_in_place_it_is_replaced_and_no_one_elses_is(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    (run / "optimizer.safetensors").write_bytes(b"of another tool")
    with pytest.raises(OutputError, match=r"optimizer\.safetensors"):
        unshard.merge(run, run, overwrite=True, optimizer=True)
    (run / "optimizer.safetensors").unlink()
    unshard.merge(run, run, overwrite=True, optimizer=True)
    before = (run / "optimizer.safetensors").read_bytes()
    unshard.merge(run, run, overwrite=True, optimizer=True, names="training")
    assert (run / "optimizer.safetensors").read_bytes() != before
    unshard.merge(run, run, overwrite=True)
    assert not (run / "optimizer.safetensors").exists()
    assert not (run / "optimizer.json").exists()


def test_a_fused_adapter_has_no_moments(tmp_path: Path) -> None:
    path = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {
        f"{path}.base_layer.weight": torch.randn(8, 6),
        f"{path}.lora_A.default.weight": torch.randn(2, 6),
        f"{path}.lora_B.default.weight": torch.randn(8, 2),
    }
    save_ranks(tmp_path / "run", tensors, WORLD)
    save_optimizer(tmp_path / "run", {key: like(tensors, 0) for key in KEYS}, WORLD)
    with pytest.raises(ConversionError, match="its values are computed"):
        unshard.merge(
            tmp_path / "run", tmp_path / "out", optimizer=True, lora_alpha=4, config="none"
        )
    with unshard.open_checkpoint(tmp_path / "run", part="optimizer") as state:
        assert f"state.{path}.lora_A.default.weight.exp_avg" in state


def test_state_of_other_shapes_and_values_is_read_as_it_is(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(5, 3), "b.weight": torch.randn(4)}
    save_ranks(tmp_path, tensors, WORLD)
    rows = {"a.weight": torch.randn(5), "b.weight": torch.randn(4)}
    save_optimizer(
        tmp_path, {"exp_avg_sq_row": rows}, WORLD, extra={"RMS": 0.25}, group={"betas": (0, 1)}
    )
    with unshard.open_checkpoint(tmp_path, framework="pt", part="optimizer") as state:
        assert torch.equal(state["state.a.weight.exp_avg_sq_row"], rows["a.weight"])
        fields = json.loads(state.metadata()["optimizer"])
    assert fields["values"] == {"a.weight": {"RMS": 0.25}, "b.weight": {"RMS": 0.25}}
    assert fields["param_groups"] == [
        {"lr": 0.1, "betas": [0, 1], "params": ["a.weight", "b.weight"]}
    ]


def test_blocks_of_8_bits_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(5, 3)}
    save_ranks(tmp_path, tensors, WORLD)
    save_optimizer(tmp_path, {"state1": like(tensors, 0), "absmax1": like(tensors, 1)}, WORLD)
    with pytest.raises(UnshardError, match="8-bit optimizer"):
        unshard.open_checkpoint(tmp_path, part="optimizer")


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"a.weight": torch.randn(5, 3)}, WORLD)
    save_optimizer(tmp_path, {key: {"a.weight": torch.randn(5, 4)} for key in KEYS}, WORLD)
    with pytest.raises(UnshardError, match="does not fit the model"):
        unshard.open_checkpoint(tmp_path, part="optimizer")


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_an_error_or_does_not_matter(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    tensors = {"a.weight": torch.randn(5, 3), "b.weight": torch.randn(4)}
    save_ranks(tmp_path / "run", tensors, WORLD)
    save_optimizer(tmp_path / "run", {key: like(tensors, 0) for key in KEYS}, WORLD)
    path = tmp_path / "run" / f"optim_world_size_{WORLD}_rank_{seed % WORLD}.pt"
    data = bytearray(path.read_bytes())
    if seed % 3 == 0:
        del data[random.randrange(len(data)) :]
    else:
        for _ in range(seed):
            data[random.randrange(len(data))] = random.randrange(256)
    path.write_bytes(data)
    with (
        suppress(CheckpointError),
        unshard.open_checkpoint(tmp_path / "run", part="optimizer") as state,
    ):
        assert {one.shape for one in state.values()} == {(), (5, 3), (4,)}
    found = unshard.inspect(tmp_path / "run").optimizer  # never an error: the model is whole
    assert found is not None


def test_large_tensors_inside_a_list_are_resharded(tmp_path: Path) -> None:
    """As SOAP and Shampoo save a preconditioner per dimension; small ones are read at once."""
    tensors = {"a.weight": torch.randn(5, 3)}
    save_ranks(tmp_path / "a", tensors, WORLD)
    factors = [torch.randn(200, 200), torch.randn(3, 3)]
    save_optimizer(tmp_path / "a", {"exp_avg": like(tensors, 1)}, WORLD, extra={"GG": factors})
    merging = unshard.merge(tmp_path / "a", tmp_path / "merged", optimizer=True, config="none")
    assert any("state: GG of a.weight" in one for one in merging.notes)
    unshard.reshard(tmp_path / "a", tmp_path / "three", world_size=3, verify="full")
    unshard.reshard(tmp_path / "three", tmp_path / "one", world_size=1)
    for world, place in ((3, "three"), (1, "one")):
        for rank in range(world):
            path = tmp_path / place / f"optim_world_size_{world}_rank_{rank}.pt"
            assert same(loaded(path)["state"][0]["GG"], factors)
    with pytest.raises(UnshardError, match=r"GG\.0: cannot be written") as refused:
        unshard.reshard(tmp_path / "a", tmp_path / "dcp", world_size=2, to="dcp")
    assert "in their own format" in str(refused.value)
    changed = tmp_path / "three" / "optim_world_size_3_rank_1.pt"
    saved = loaded(changed)
    saved["state"][0]["GG"][0][7, 7] = 2.0
    torch.save(saved, changed)
    with pytest.raises(CheckpointError, match="rank 1 disagrees with rank 0"):
        unshard.reshard(tmp_path / "three", tmp_path / "out", world_size=1)


@pytest.mark.parametrize("to", ["dcp", "accelerate"])
def test_an_optimizer_without_state_keeps_its_groups(tmp_path: Path, to: str) -> None:
    """As that of SGD without momentum, or of any before its first step."""
    tensors = {"a.weight": torch.randn(5, 3), "b.weight": torch.randn(4)}
    save_ranks(tmp_path / "a", tensors, WORLD)
    group = {"lr": 0.1, "betas": (0.5, 0.75), "params": [0, 1]}
    for rank in range(WORLD):
        path = tmp_path / "a" / f"optim_world_size_{WORLD}_rank_{rank}.pt"
        torch.save({"state": {}, "param_groups": [group]}, path)
    unshard.reshard(tmp_path / "a", tmp_path / to, world_size=3, to=to, verify="full")
    report = unshard.reshard(tmp_path / to, tmp_path / "out", world_size=2, to="verl")
    assert not any("no state of an optimizer" in note for note in report.notes)
    found = loaded(tmp_path / "out" / "optim_world_size_2_rank_1.pt")
    assert same(found, {"state": {}, "param_groups": [group]})
