"""What an overwrite may take away: never the sources, never a state of another step left behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard import MergeOptions, OutputError
from unshard.merger import FSDP2Merger

STATE = {"extra_state_merged.pt", "lr_scheduler_state.json"}


def with_state(step_dir: Path, epoch: int, seed: int) -> Path:
    """Save a step of verl with its scheduler."""
    actor = save_ranks(step_dir / "actor", some_tensors(seed), 2)
    for rank in range(2):
        state = {"lr_scheduler": {"last_epoch": epoch}, "rng": {"cpu": torch.get_rng_state()}}
        torch.save(state, actor / f"extra_state_world_size_2_rank_{rank}.pt")
    return step_dir


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model as a trainer without shards leaves it."""
    directory = tmp_path / "run" / "checkpoint-5"
    directory.mkdir(parents=True)
    save_file(some_tensors(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


def test_a_model_is_never_merged_into_itself(whole: Path) -> None:
    before = snapshot(whole)
    with pytest.raises(OutputError, match="holds the weights that are merged"):
        unshard.merge(whole, whole, overwrite=True, dtype="bfloat16")
    with pytest.raises(OutputError, match=r"model\.safetensors"):
        unshard.merge(whole, whole, overwrite=True, dry_run=True)
    with pytest.raises(OutputError):
        FSDP2Merger().merge(whole)
    assert snapshot(whole) == before


def test_an_average_does_not_take_the_place_of_its_sources(whole: Path, tmp_path: Path) -> None:
    other = save_ranks(tmp_path / "other", some_tensors(1), 2)
    before = snapshot(whole)
    with pytest.raises(OutputError, match="would be lost"):
        unshard.average([whole, other], whole, options=MergeOptions(overwrite=True))
    assert snapshot(whole) == before


def test_through_a_link_it_is_still_itself(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(whole)
    before = snapshot(whole)
    with pytest.raises(OutputError):
        unshard.merge(whole, tmp_path / "link", overwrite=True)
    assert snapshot(whole) == before


@pytest.mark.parametrize("place", ["apart", "in place"])
def test_the_state_of_another_step_does_not_stay(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    first, second = (with_state(run / f"global_step_{n}", n, n) for n in (10, 20))
    out = run if place == "in place" else tmp_path / "out"
    unshard.merge(first, out, overwrite=True)
    assert names(out) >= STATE
    assert torch.load(out / "extra_state_merged.pt")["lr_scheduler"]["last_epoch"] == 10
    unshard.merge(second, out, overwrite=True)
    assert torch.load(out / "extra_state_merged.pt")["lr_scheduler"]["last_epoch"] == 20
    recorded = json.loads((out / "unshard.json").read_text())["output"]["training_state"]
    assert set(recorded) == STATE
    unshard.merge(first, out, overwrite=True, extra_state=False)
    assert not names(out) & STATE
    assert_same(merged(out), some_tensors(10))


def test_an_average_leaves_no_state_of_a_merge(tmp_path: Path) -> None:
    steps = [with_state(tmp_path / f"global_step_{n}", n, n) for n in (10, 20)]
    unshard.merge(steps[0], tmp_path / "out")
    unshard.average(steps, tmp_path / "out", options=MergeOptions(overwrite=True))
    assert not names(tmp_path / "out") & STATE


def test_a_state_that_somebody_else_put_there_stays(tmp_path: Path) -> None:
    step = with_state(tmp_path / "global_step_10", 10, 10)
    unshard.merge(step, tmp_path / "out", extra_state=False)
    (tmp_path / "out" / "extra_state_merged.pt").write_text("mine")
    unshard.merge(step, tmp_path / "out", extra_state=False, overwrite=True)
    assert (tmp_path / "out" / "extra_state_merged.pt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_config_that_was_asked_for_takes_the_place_of_the_old(tmp_path: Path, kind: str) -> None:
    step = save_ranks(tmp_path / "global_step_1" / "actor", some_tensors(), 2).parent
    for name in ("config.json", "tokenizer.json"):
        (step / name).write_text('{"mine": "old"}')
    given = tmp_path / "given"
    given.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (given / name).write_text('{"mine": "new"}')
    config = given / "config.json" if kind == "file" else given
    unshard.merge(step, step, overwrite=True, config=config)
    assert json.loads((step / "config.json").read_text())["mine"] == "new"
    kept = json.loads((step / "tokenizer.json").read_text())["mine"]
    assert kept == ("old" if kind == "file" else "new")
    unshard.merge(step, step, overwrite=True)  # without it, what is there stays
    assert json.loads((step / "config.json").read_text())["mine"] == "new"
