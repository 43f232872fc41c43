"""What lies next to the weights is resharded with them, carried, or named in a note."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from saved_values import loaded
from unshard import CorruptError, IncompleteError

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

MODEL, EMA = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
LORA = {
    "base_model.model.q.base_layer.weight": torch.randn(6, 4),
    "base_model.model.q.lora_A.default.weight": torch.randn(2, 4),
    "base_model.model.q.lora_B.default.weight": torch.randn(6, 2),
}


def lmms(place: Path, *, ema_world: int = 4, names: int | None = None) -> Path:
    """Save as lmms-engine does, with the averages of some tensors or of all."""
    save_ranks(place / MODEL, some_tensors(0), 4)
    average = dict(list(some_tensors(1).items())[:names])
    save_ranks(place / EMA, average, ema_world)
    (place / "config.json").write_text('{"model_type": "custom"}')
    return place


def not_copied(report: unshard.ReshardReport) -> list[str]:
    return [note for note in report.notes if note.startswith("not copied")]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("ema_world", "names"), [(4, None), (4, 2), (2, None)])
def test_averages_are_resharded_as_the_model_is(
    tmp_path: Path, world: int, ema_world: int, names: int | None
) -> None:
    source = lmms(tmp_path / "checkpoint-4", ema_world=ema_world, names=names)
    output = tmp_path / "out/checkpoint-4"
    report = unshard.reshard(source, output, world_size=world, verify="full")
    for weights, seed, count in (("model", 0, None), ("ema", 1, names)):
        own = tmp_path / weights
        unshard.merge(output, own, weights=weights, names="training")  # type: ignore[arg-type]
        truth = {**some_tensors(0), **dict(list(some_tensors(seed).items())[:count])}
        assert_same(merged(own), truth)
    for rank in range(world):
        path = output / EMA / f"model_world_size_{world}_rank_{rank}.pt"
        assert list(loaded(path)) == list(some_tensors(1))[:names]
        assert f"{EMA}/{path.name}" in report.files
    assert not not_copied(report)
    again = tmp_path / "again/checkpoint-4"
    unshard.reshard(output, again, world_size=4, verify="full")
    assert len(list((again / EMA).iterdir())) == 4


@pytest.mark.parametrize("to", ["verl", "dcp", "accelerate"])
def test_averages_without_a_place_are_named(tmp_path: Path, to: str) -> None:
    source = lmms(tmp_path / "checkpoint-4")
    report = unshard.reshard(source, tmp_path / "out", world_size=2, to=to)
    assert not_copied(report) == [f"not copied from checkpoint-4: {EMA}"]


def test_a_run_without_averages_yet_is_resharded(tmp_path: Path) -> None:
    source = lmms(tmp_path / "checkpoint-4")
    for path in (source / EMA).iterdir():
        path.unlink()
    unshard.reshard(source, tmp_path / "out", world_size=2, verify="full")
    assert not (tmp_path / "out" / EMA).exists()


def test_damaged_averages_are_noticed(tmp_path: Path) -> None:
    source = lmms(tmp_path / "checkpoint-4")
    path = source / EMA / "model_world_size_4_rank_1.pt"
    data = bytearray(path.read_bytes())
    largest = max(loaded(path).values(), key=lambda one: one.to_local().numel()).to_local()
    at = data.find(largest.contiguous().view(torch.uint8).numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="does not match its checksum"):
        unshard.reshard(source, tmp_path / "out", world_size=2, verify="full")
    path.unlink()
    with pytest.raises(IncompleteError, match="rank"):
        unshard.reshard(source, tmp_path / "out", world_size=2)


META = json.dumps({"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"})
CONFIG = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q"]})


@pytest.mark.parametrize("to", [None, "verl", "lmms", "dcp", "accelerate"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("actor/lora_train_meta.json", META),
        ("actor/adapter_config.json", CONFIG),
        ("actor/lora_adapter/adapter_config.json", CONFIG),
        ("lora_train_meta.json", META),
        ("../adapter_config.json", CONFIG),
    ],
)
def test_the_alpha_of_an_adapter_is_carried(
    tmp_path: Path, to: str | None, name: str, text: str
) -> None:
    step = tmp_path / "run/global_step_3"
    save_ranks(step / "actor", LORA, 2)
    path = step / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    output = tmp_path / "out/global_step_3"
    report = unshard.reshard(step, output, world_size=3, to=to, verify="full")
    assert (output / path.name).read_text() == text
    assert path.name in report.others
    for place, own in ((step, "a"), (output, "b")):
        unshard.merge(place, tmp_path / own, lora="fuse", names="training")
    assert_same(merged(tmp_path / "b"), merged(tmp_path / "a"))


@pytest.mark.parametrize("to", [None, "dcp"])
def test_all_that_is_not_carried_is_named(tmp_path: Path, to: str | None) -> None:
    actor = tmp_path / "global_step_3/actor"
    save_ranks(actor, some_tensors(), 2)
    (actor / "huggingface").mkdir()
    (actor / "huggingface/config.json").write_text('{"model_type": "custom"}')
    clean = unshard.reshard(actor, tmp_path / "clean", world_size=3, to=to)
    assert not not_copied(clean)
    for name in ("ema.pt", "huggingface/model.safetensors", "router/state.bin"):
        (actor / name).parent.mkdir(exist_ok=True)
        (actor / name).write_bytes(b"1")
    (tmp_path / "global_step_3/data.pt").write_bytes(b"1")  # of the trainer, not next to them
    report = unshard.reshard(actor, tmp_path / "out", world_size=3, to=to)
    names = "ema.pt, huggingface/model.safetensors, router"
    assert not_copied(report) == [f"not copied from actor: {names}"]


def test_a_model_of_lmms_engine_alone_keeps_its_folder_and_config(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-4"
    save_ranks(source / MODEL, some_tensors(), 2)
    (source / "config.json").write_text('{"model_type": "custom"}')
    (source / "ema_state").write_bytes(b"1")
    report = unshard.reshard(source, tmp_path / "out", world_size=3)
    assert (report.format, report.others) == ("lmms", ("config.json",))
    assert len(list((tmp_path / "out" / MODEL).iterdir())) == 3
    assert not_copied(report) == ["not copied from checkpoint-4: ema_state"]


def test_what_lies_next_to_two_folders_of_dcp_is_named(tmp_path: Path) -> None:
    step = tmp_path / "step_3"
    weight = torch.rand(4, 3)
    save({"model": {"w": weight}}, checkpoint_id=step / "model", no_dist=True)
    state = {"state": {"w": {"exp_avg": weight}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    save({"optim": state}, checkpoint_id=step / "optim", no_dist=True)
    (step / "dataloader.pt").write_bytes(b"1")
    report = unshard.reshard(step, tmp_path / "out", world_size=2)
    assert not_copied(report) == ["not copied from step_3: dataloader.pt"]


def test_a_config_that_is_not_a_models_is_named(tmp_path: Path) -> None:
    source = lmms(tmp_path / "checkpoint-4")
    (source / "config.json").write_text("{}")
    report = unshard.reshard(source, tmp_path / "out", world_size=2)
    assert not_copied(report) == ["not copied from checkpoint-4: config.json"]


def test_a_folder_with_a_name_that_other_notes_contain_is_named(tmp_path: Path) -> None:
    source = save_ranks(tmp_path / "source", some_tensors(), 2)
    (source / "optimizer").mkdir()
    (source / "optimizer/state.bin").write_bytes(b"1")
    report = unshard.reshard(source, tmp_path / "out", world_size=2, to="dcp")
    assert any("no state of an optimizer was found" in note for note in report.notes)
    assert not_copied(report) == ["not copied from source: optimizer"]
