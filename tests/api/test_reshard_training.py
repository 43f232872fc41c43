"""Scheduler and random state, written into other formats: trainers restore what was saved."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unshard
from optimizers import like, save_optimizer
from ranks import save_ranks, some_tensors
from saved_values import loaded, same
from training_states import WRITERS, draw, seeded

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

SCHEDULER = {"last_epoch": 7, "base_lrs": [0.1, 0.2], "_last_lr": [0.05, 0.1]}
DEVICES = [torch.arange(16, dtype=torch.uint8) + rank for rank in range(2)]


def from_extra_state(folder: str) -> Callable[[Path, int], Any]:
    def read(output: Path, rank: int) -> Any:
        found = loaded(output / folder / f"extra_state_world_size_2_rank_{rank}.pt")
        return found.get("lr_scheduler", found.get("lr_scheduler_state")), found["rng"]

    return read


def from_accelerate(output: Path, rank: int) -> Any:
    found = loaded(output / f"random_states_{rank}.pkl")
    names = {"random": "random_state", "numpy": "numpy_random_seed", "cpu": "torch_manual_seed"}
    return loaded(output / "scheduler.bin"), {key: found[one] for key, one in names.items()}


READERS = {
    "verl": from_extra_state(""),
    "lmms": from_extra_state("extra_state"),
    "accelerate": from_accelerate,
}


@pytest.mark.parametrize("to", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_rank_draws_the_numbers_it_would_have_drawn(
    tmp_path: Path, writer: str, to: str
) -> None:
    own = writer in {"verl", "lmms-engine"}  # save the state of a rank's own device only
    devices = [one if own else DEVICES for one in DEVICES]
    step = WRITERS[writer](
        tmp_path, [seeded(rank, SCHEDULER, cuda=devices[rank]) for rank in range(2)]
    )
    report = unshard.reshard(step, tmp_path / "out", world_size=2, to=to)
    for rank in range(2):
        seeded(rank)
        expected = draw()
        scheduler, rng = READERS[to](tmp_path / "out", rank)
        assert same(scheduler, SCHEDULER)
        random.setstate(rng["random"])
        np.random.set_state(rng["numpy"])  # noqa: NPY002
        torch.set_rng_state(rng["cpu"])
        assert draw() == expected
        if to != "accelerate":
            assert same(rng["cuda"], DEVICES[rank])
    is_left_out = any("random state of devices (cuda) is left out" in one for one in report.notes)
    assert is_left_out is (to == "accelerate")


def test_verl_gets_no_random_state_that_it_could_not_load(tmp_path: Path) -> None:
    step = WRITERS["HF Trainer"](tmp_path, [seeded(rank, SCHEDULER) for rank in range(2)])
    for device, is_there in (("cuda", False), ("cpu", True)):
        output = tmp_path / device
        report = unshard.reshard(step, output, world_size=3, to="verl", device=device)
        found = loaded(output / "extra_state_world_size_3_rank_2.pt")
        assert ("rng" in found) is is_there
        assert any("loads random state only" in one for one in report.notes) is not is_there
        assert any("random state of 2 ranks" in one for one in report.notes) is is_there


def test_what_a_format_has_no_place_for_is_reported(tmp_path: Path) -> None:
    def told(source: Path, to: str) -> str:
        report = unshard.reshard(source, tmp_path / f"{source.name}-{to}", world_size=2, to=to)
        return "\n".join(report.notes)

    step = WRITERS["verl"](tmp_path, [seeded(rank, SCHEDULER) for rank in range(2)])
    assert "no place in one DCP directory" in told(step, "dcp")
    assert "no state of an optimizer was found" in told(step, "accelerate")
    assert "dataloader_state is not written" in told(step, "lmms")
    counted = WRITERS["lmms-engine"](tmp_path, [seeded(rank, SCHEDULER) for rank in range(2)])
    assert "compute_tracker, total_tokens: left out" in told(counted, "verl")
    save_ranks(tmp_path / "bare", some_tensors(), 2)
    save_optimizer(tmp_path / "bare", {"exp_avg": like(some_tensors(), 1)}, 2)
    unshard.merge(tmp_path / "bare", tmp_path / "merged", optimizer=True, config="none")
    assert "optimizer: optimizer.json, optimizer.safetensors (not read)" in told(
        tmp_path / "merged", "dcp"
    )
    assert "no scheduler and no random state" in told(tmp_path / "bare", "lmms")


def test_what_ranks_lack_or_say_otherwise_is_reported(tmp_path: Path) -> None:
    states = [seeded(rank, {**SCHEDULER, "last_epoch": rank}) for rank in range(3)]
    step = WRITERS["verl"](tmp_path, states)
    lost, odd = (next(step.rglob(f"extra_state_*_rank_{rank}.pt")) for rank in (1, 2))
    for to in ("lmms", "dcp"):
        report = unshard.reshard(step, tmp_path / f"all-{to}", world_size=2, to=to)
        assert any("lr_scheduler differs between ranks" in note for note in report.notes)
    lost.unlink()
    torch.save(["neither"], odd)
    for to in ("lmms", "dcp", "accelerate"):
        report = unshard.reshard(step, tmp_path / to, world_size=3, to=to)
        assert f"{lost.name}: missing" in report.notes
        assert f"{odd.name}: has unexpected contents: left out" in report.notes


def test_milestones_that_are_floats_stay(tmp_path: Path) -> None:
    """As `MultiStepLR(optimizer, [0.5 * steps, 0.75 * steps])` has them, keys of a Counter."""
    scheduler = {**SCHEDULER, "milestones": Counter([12.5, 30.0])}
    step = WRITERS["verl"](tmp_path, [seeded(rank, scheduler) for rank in range(2)])
    unshard.reshard(step, tmp_path / "verl", world_size=3)
    unshard.merge(step, tmp_path / "merged", config="none")
    for file in ("verl/extra_state_world_size_3_rank_2.pt", "merged/extra_state_merged.pt"):
        found = loaded(tmp_path / file)["lr_scheduler"]
        assert same(found, scheduler)
        assert 12.5 in found["milestones"]
