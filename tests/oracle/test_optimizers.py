"""The state of an optimizer, from what torch saves, against what torch itself gathers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from oracle.writers.optimizers import (
    STEPS,
    fsdp1_optimizers,
    fsdp2_optimizers,
    hybrid_optimizers,
)
from oracle.writers.optimizers import Trained as Model
from oracle.writers.samples import Samples
from oracle.writers.workers import WorkerPool
from ranks import assert_same
from saved_values import loaded, parts_of, same
from unshard import CorruptError, IncompleteError, NotMergeableError, UsageError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (unavailable|disabled)"),
]

Trained = Callable[[str], Path]
WRITERS = {
    "fsdp2": (fsdp2_optimizers, 3),
    "hybrid": (hybrid_optimizers, 4),
    "fsdp1": (fsdp1_optimizers, 2),
}
LAYOUTS = {
    "verl": ("verl", "all"),
    "lmms": ("lmms", "grouped"),
    "named": ("named", "all"),
    "flattened": ("flattened", "all"),
    "momentum": ("momentum", "momentum"),
    "dcp": ("dcp", "all"),
    "dcp-zstd": ("dcp-zstd", "all"),
    "accelerate": ("accelerate", "all"),
    "titan": ("titan", "all"),
}


@pytest.fixture(scope="module")
def trained(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return `trained(writer)`: the directory of what it saves, not to be changed."""
    known: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in known:
            directory = tmp_path_factory.mktemp(name)
            scenario, world = WRITERS[name]
            worker_pool.run(scenario, world, directory)
            known[name] = directory
        return known[name]

    return write


def state_of(path: Path) -> dict[str, torch.Tensor]:
    with unshard.open_checkpoint(path, framework="pt", part="optimizer") as opened:
        return dict(opened.items())


def truth_of(directory: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(directory / f"truth-{name}.pt")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writer", ["fsdp2", "hybrid"])
def test_every_moment_is_what_torch_gathers(trained: Trained, writer: str, layout: str) -> None:
    folder, truth = LAYOUTS[layout]
    directory = trained(writer)
    assert_same(state_of(directory / folder), truth_of(directory, truth))


@pytest.mark.parametrize("folder", ["dcp", "dcp-zstd", "accelerate", "titan"])
def test_files_of_ranks_made_of_dcp_are_those_that_torch_saves(
    trained: Trained, tmp_path: Path, folder: str
) -> None:
    """A tied head, a frozen matrix and a buffer are what they are in a rank's own state dict."""
    directory = trained("fsdp2")
    truth = directory / "verl" / "global_step_3" / "actor"
    output = tmp_path / "out"
    unshard.reshard(directory / folder, output, world_size=3, to="verl", device="cpu")
    for path in truth.iterdir():
        assert same(parts_of(output / path.name), parts_of(path)), path.name


@pytest.mark.parametrize("folder", ["named", "flattened"])
def test_names_in_files_of_ranks_stay(trained: Trained, tmp_path: Path, folder: str) -> None:
    """As verl's engine of VeOmni saves them, flattened; over 2 ranks and back to 3."""
    source = trained("fsdp2") / folder
    report = unshard.reshard(source, tmp_path / "two", world_size=2, verify="full")
    assert not any("parameter groups" in note for note in report.notes)
    assert_same(state_of(tmp_path / "two"), truth_of(trained("fsdp2"), "all"))
    unshard.reshard(tmp_path / "two", tmp_path / "three", world_size=3, verify="full")
    for path in source.iterdir():
        assert same(parts_of(tmp_path / "three" / path.name), parts_of(path)), path.name


@pytest.mark.parametrize("folder", ["bins", "dcp"])
def test_fsdp1_by_name_is_what_torch_gathers(trained: Trained, folder: str) -> None:
    directory = trained("fsdp1")
    assert_same(state_of(directory / folder), truth_of(directory, "all"))


def test_fsdp1_by_number_is_refused(trained: Trained) -> None:
    with pytest.raises(NotMergeableError, match="flat parameters of FSDP1"):
        state_of(trained("fsdp1") / "numbered")


@pytest.mark.parametrize(
    ("scenario", "step"), [("accelerate_fsdp1", "step_1"), ("accelerate_fsdp2", "checkpoint_1")]
)
def test_the_state_of_accelerate_is_what_torch_loads(
    samples: Samples, scenario: str, step: str
) -> None:
    place = samples.write(scenario, 2).directory / step
    loaded = _load_state_dict_from_keys(checkpoint_id=place / "optimizer_0")["optimizer"]
    truth = {
        f"state.{name}.{key}": tensor
        for name, fields in loaded["state"].items()
        for key, tensor in fields.items()
    }
    assert len(truth) > 20
    assert_same(state_of(place), truth)


def save_flattened(directory: Path, *, decay: tuple[float, float]) -> torch.optim.Optimizer:
    """Train equal layers, matrices and vectors apart, and save the optimizer flattened."""
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
    given = [[one for one in model.parameters() if one.ndim == ndim] for ndim in (1, 2)]
    optimizer = torch.optim.AdamW(
        [{"params": own, "weight_decay": one} for own, one in zip(given, decay, strict=True)]
    )
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    save({**model.state_dict(), "optimizer": moments}, checkpoint_id=directory, no_dist=True)
    return optimizer


@pytest.mark.parametrize("decay", [(0.0, 0.0), (0.0, 0.1)])
def test_groups_that_were_flattened_are_groups_again(
    tmp_path: Path, decay: tuple[float, float]
) -> None:
    """With equal values, too: the order of the parameters shows where the second one begins."""
    optimizer = save_flattened(tmp_path / "flat", decay=decay)
    reports = (
        unshard.reshard(tmp_path / "flat", tmp_path / "verl", world_size=1, to="verl"),
        unshard.merge(tmp_path / "flat", tmp_path / "merged", optimizer=True, config="none"),
    )
    for report in reports:
        assert any("without its parameter groups" in note for note in report.notes)
    truth = optimizer.state_dict()
    found = loaded(tmp_path / "verl" / "optim_world_size_1_rank_0.pt")
    assert same(found["param_groups"], truth["param_groups"])
    for number, fields in truth["state"].items():
        own = {key: one.to_local() for key, one in found["state"][number].items() if one.ndim}
        assert same(own, {key: one for key, one in fields.items() if one.ndim})
    again = unshard.reshard(tmp_path / "flat", tmp_path / "again", world_size=3)
    assert not any("parameter groups" in note for note in again.notes)  # nothing was concluded


def written(output: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob("optimizer*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("size", [None, 2000])
def test_a_merge_writes_it_next_to_the_model(
    trained: Trained, tmp_path: Path, size: int | None
) -> None:
    directory = trained("fsdp2")
    source = directory / "lmms"
    unshard.merge(source, tmp_path / "model", max_shard_size=size, config="none")
    report = unshard.merge(
        source, tmp_path / "out", optimizer=True, verify="full", max_shard_size=size, config="none"
    )
    truth = truth_of(directory, "grouped")
    assert_same(written(tmp_path / "out"), truth)
    for path in (tmp_path / "model").iterdir():  # the model is what it is without
        if path.name != "unshard.json":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())["output"]
    listed = {**record["files"], **record["companions"]}
    for path in (tmp_path / "out").glob("optimizer*"):
        assert listed[path.name] == path.stat().st_size
    assert "optimizer.json" in report.companions
    index = tmp_path / "out" / "optimizer.safetensors.index.json"
    assert index.exists() is (size is not None)
    if size is not None:
        assert json.loads(index.read_text())["weight_map"].keys() == truth.keys()
    fields = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert fields["step"] == STEPS
    decayed, rest = fields["param_groups"]
    assert (decayed["weight_decay"], rest["weight_decay"], rest["amsgrad"]) == (0.1, 0.0, True)
    assert decayed["params"][0] == "embed.weight"
    assert {*decayed["params"], *rest["params"]} == {
        name.removeprefix("state.").rpartition(".")[0] for name in truth
    }


def test_a_merge_of_compressed_items(trained: Trained, tmp_path: Path) -> None:
    report = unshard.merge(
        trained("fsdp2") / "dcp-zstd", tmp_path / "out", optimizer=True, config="none"
    )
    assert_same(written(tmp_path / "out"), truth_of(trained("fsdp2"), "all"))
    assert json.loads((tmp_path / "out" / "optimizer.json").read_text())["step"] == STEPS
    assert not report.loadable  # there is no config.json


def test_torch_loads_what_was_merged(trained: Trained, tmp_path: Path) -> None:
    """A flattened state dict, of which `optimizer.json` has the hyper-parameters."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    unshard.merge(
        trained("fsdp2") / "lmms", tmp_path, overwrite=True, optimizer=True, config="none"
    )
    model = Model()
    trainable = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.5, amsgrad=True)
    groups = json.loads((tmp_path / "optimizer.json").read_text())["param_groups"]
    flat: dict[str, Any] = {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in {**group, "weight_decay": 0.1}.items()
        if key != "params"
    }
    flat |= written(tmp_path)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    truth = truth_of(trained("fsdp2"), "grouped")
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            assert torch.equal(tensor, truth[f"state.{name}.{key}"])
    assert optimizer.param_groups[0]["lr"] == groups[0]["lr"]


def test_inspect_shows_it(trained: Trained) -> None:
    found = unshard.inspect(trained("fsdp2") / "lmms").optimizer
    assert found is not None
    count = len(truth_of(trained("fsdp2"), "grouped")) // 4
    assert found.tensors == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"), count
    )
    assert (found.step, found.names, found.problem) == (STEPS, "by order", "")
    assert [group["weight_decay"] for group in found.groups] == [0.1, 0.0]
    assert sum(int(str(group["parameters"])) for group in found.groups) == count
    named = unshard.inspect(trained("fsdp2") / "titan").optimizer
    assert named is not None
    assert named.names == "recorded"
    refused = unshard.inspect(trained("fsdp1") / "numbered").optimizer
    assert refused is not None
    assert "flat parameters" in refused.problem


def test_a_checkpoint_without_one(trained: Trained, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(trained("fsdp2") / "verl" / "global_step_3" / "actor", source)
    for path in source.glob("optim_*"):
        path.unlink()
    assert unshard.inspect(source).optimizer is None
    with pytest.raises(NotMergeableError, match="no state of an optimizer"):
        unshard.merge(source, tmp_path / "out", optimizer=True)
    assert not (tmp_path / "out").exists()


def test_numbers_that_may_be_two_parameters_are_refused(trained: Trained) -> None:
    either = r"may be layers\.0\.down\.bias or layers\.0\.norm\.weight"
    with pytest.raises(NotMergeableError, match=either):
        state_of(trained("fsdp2") / "unnamed")


def copied(source: Path, place: Path) -> list[Path]:
    """Copy a directory, and return the optimizer's files in it."""
    shutil.copytree(source, place)
    return sorted(place.rglob("optim*_rank_*.pt"))


def test_a_missing_rank_is_named(trained: Trained, tmp_path: Path) -> None:
    files = copied(trained("fsdp2") / "verl", tmp_path / "run")
    files[1].unlink()
    with pytest.raises(IncompleteError, match="rank 1") as raised:
        state_of(tmp_path / "run")
    assert files[1].name in str(raised.value)


def test_a_replica_makes_up_for_a_missing_rank(trained: Trained, tmp_path: Path) -> None:
    files = copied(trained("hybrid") / "verl", tmp_path / "run")
    files[1].unlink()
    assert_same(state_of(tmp_path / "run"), truth_of(trained("hybrid"), "all"))


Saved = dict[str, Any]


def trained_on(saved: Saved) -> None:
    saved["state"][0]["step"] += 1


def other_rate(saved: Saved) -> None:
    saved["param_groups"][0]["lr"] = 3


def fewer(saved: Saved) -> None:
    saved["state"].popitem()


def without_rate(saved: Saved) -> None:
    saved["param_groups"][0]["lr"] = math.nan


def test_a_rate_that_is_not_a_number_is_equal_on_all_ranks(
    trained: Trained, tmp_path: Path
) -> None:
    for path in copied(trained("fsdp2") / "verl", tmp_path / "run"):
        saved = torch.load(path, weights_only=False)
        without_rate(saved)
        torch.save(saved, path)
    state_of(tmp_path / "run")


CHANGES: dict[Callable[[Saved], None], str] = {
    trained_on: r"tensor state\.0\.step",
    other_rate: "lr of group 0",
    without_rate: "lr of group 0",
    fewer: "the tensors of parameter",
}


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_that_disagree_are_refused(
    trained: Trained, tmp_path: Path, change: Callable[[Saved], None]
) -> None:
    path = copied(trained("fsdp2") / "verl", tmp_path / "run")[2]
    saved = torch.load(path, weights_only=False)
    change(saved)
    torch.save(saved, path)
    with pytest.raises(
        CorruptError, match=f"rank 2 disagrees with rank 0 about {CHANGES[change]}"
    ) as raised:
        state_of(tmp_path / "run")
    assert path.name in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [{"quantize": "fp8-block"}, {"lora": "both"}, {"push_to_hub": "me/model"}, {"weights": "ema"}],
)
def test_options_that_exclude_it(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="optimizer=True"):
        unshard.MergeOptions(optimizer=True, **options)  # type: ignore[arg-type]


def test_an_average_has_none(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="optimizer=True"):
        unshard.average([trained("fsdp2") / "verl"], tmp_path / "out", optimizer=True)
