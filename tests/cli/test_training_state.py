"""Scheduler and random state through a merge: what resumes from the output goes on as before."""

import json
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from transformers import get_scheduler

import unshard
from adapters import adapted
from command import unshard as run_command
from ranks import merged, save_ranks, snapshot, some_tensors
from training_states import WRITERS, Saved, draw, seeded
from unshard import UnsafeError
from unshard.api.sources import read_checkpoint
from unshard.containers.torch_files.writer import SavedTensor
from unshard.keywords import Lora
from unshard.read.training_state.reader import TrainingState, read_training_state
from unshard.tensors.dtypes import BY_NAME
from unshard.write.companions import state_file_names, write_training_state

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

BARE = ("--config", "none")
EXTRA_STATE, SCHEDULER = "extra_state_merged.pt", "lr_scheduler_state.json"
DATA = Path(__file__).parent.parent / "data" / "extra_state.tar.xz"
VERSIONS = ("2.2", "2.4", "2.5", "2.6", "2.8", "2.9", "2.10", "2.12", "2.15")

each_writer = pytest.mark.parametrize("writer", WRITERS)


def load(output: Path) -> Any:
    return torch.load(output / EXTRA_STATE, weights_only=True)


def told(report: unshard.Report) -> list[str]:
    """Return what was reported of training state."""
    return [one for one in report.warnings if one.startswith("training state: ")]


# --- schedulers ----------------------------------------------------------------------------------


def sequential(optimizer: Optimizer) -> schedulers.SequentialLR:
    parts = [
        schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=3),
        schedulers.ExponentialLR(optimizer, 0.9),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


class Warmup:
    """A schedule that is an object: its attributes are saved."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "object": lambda o: schedulers.LambdaLR(o, Warmup(4)),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=9, eta_min=0.001),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=4),
    "multi step": lambda o: schedulers.MultiStepLR(o, milestones=[2, 5, 5, 8]),
    "sequential": sequential,
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "transformers": lambda o: get_scheduler("cosine", o, 3, 12),
}


def optimizer() -> SGD:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.02)]
    return SGD(groups, lr=0.1, momentum=0.9)


def steps(scheduler: Any, count: int) -> list[list[float]]:
    """Step so many times; return the learning rates after each step."""
    rates = []
    for number in range(count):
        scheduler.optimizer.step()
        is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        scheduler.step(number % 5) if is_plateau else scheduler.step()
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
    return rates


@each_writer
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, name: str, writer: str
) -> None:
    original = SCHEDULERS[name](optimizer())
    steps(original, 5)
    saved = original.state_dict()
    step = WRITERS[writer](tmp_path, [Saved(saved), Saved(saved)])
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert told(report) == []
    resumed = SCHEDULERS[name](optimizer())
    resumed.optimizer.load_state_dict(original.optimizer.state_dict())
    resumed.load_state_dict(load(tmp_path / "out")["lr_scheduler"])
    assert repr(resumed.state_dict()) == repr(saved)
    assert steps(resumed, 6) == steps(original, 6)


def test_the_scheduler_is_also_json(tmp_path: Path) -> None:
    original = schedulers.MultiStepLR(optimizer(), milestones=[2, 5, 5])
    steps(original, 3)
    step = WRITERS["verl"](tmp_path, [Saved(original.state_dict())])
    unshard.merge(step, tmp_path / "out", config="none")
    found = json.loads((tmp_path / "out" / SCHEDULER).read_text())
    assert found["milestones"] == {"2": 1, "5": 2}
    assert found["last_epoch"] == 3
    assert found["base_lrs"] == [0.1, 0.02]


def test_json_holds_as_text_what_it_has_no_form_for(tmp_path: Path) -> None:
    tensor = SavedTensor(BY_NAME["float32"], (2,), bytes(8))
    values = {"best": float("inf"), "t": tensor, "s": {3, 1}, "b": b"x", "l": (1, None, True)}
    write_training_state(TrainingState({"lr_scheduler": values}), tmp_path)
    assert json.loads((tmp_path / SCHEDULER).read_text()) == {
        "best": "inf",
        "t": "a tensor of float32, shape [2]",
        "s": "[1, 3]",
        "b": "b'x'",
        "l": [1, None, True],
    }


def test_without_a_scheduler_no_json_is_written(tmp_path: Path) -> None:
    step = WRITERS["verl"](tmp_path, [Saved(None)])
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert report.companions == (EXTRA_STATE,)
    assert not (tmp_path / "out" / SCHEDULER).exists()
    assert load(tmp_path / "out")["lr_scheduler"] is None
    assert state_file_names(TrainingState()) == ()
    write_training_state(TrainingState(), tmp_path / "nowhere")


def test_several_schedulers_of_accelerate_are_all_kept(tmp_path: Path) -> None:
    step = WRITERS["accelerate"](tmp_path, [Saved({"last_epoch": 0})])
    for number in range(1, 11):
        torch.save({"last_epoch": number}, step / f"scheduler_{number}.bin")
    unshard.merge(step, tmp_path / "out", config="none")
    found = load(tmp_path / "out")
    assert found["lr_scheduler"] == {"last_epoch": 0}
    assert found["lr_schedulers"] == [{"last_epoch": number} for number in range(11)]
    assert json.loads((tmp_path / "out" / SCHEDULER).read_text()) == found["lr_schedulers"]


def test_ranks_that_disagree_on_the_scheduler_are_reported(tmp_path: Path) -> None:
    ranks = [Saved({"last_epoch": number}) for number in range(3)]
    report = unshard.merge(WRITERS["verl"](tmp_path, ranks), tmp_path / "out", config="none")
    assert any("lr_scheduler differs between ranks" in one for one in told(report))
    assert len(load(tmp_path / "out")["lr_scheduler_by_rank"]) == 3


# --- random state --------------------------------------------------------------------------------


def restore(rng: Any) -> None:
    """Set the generators of this process as the guide says."""
    torch.set_rng_state(rng["cpu"])
    np.random.set_state(rng["numpy"])  # noqa: NPY002
    random.setstate(rng["random"])


@each_writer
def test_every_generator_goes_on_from_where_it_was(tmp_path: Path, writer: str) -> None:
    ranks, drawn = [], []
    for number in range(3):
        ranks.append(seeded(number))
        drawn.append(draw())
    unshard.merge(WRITERS[writer](tmp_path, ranks), tmp_path / "out", config="none")
    found = load(tmp_path / "out")
    restore(found["rng"])
    assert draw() == drawn[0]
    for number in (2, 0, 1):
        restore(found["rng_by_rank"][number])
        assert draw() == drawn[number]


def test_the_other_values_of_lmms_engine_are_kept(tmp_path: Path) -> None:
    unshard.merge(
        WRITERS["lmms-engine"](tmp_path, [Saved(), Saved()]), tmp_path / "out", config="none"
    )
    found = load(tmp_path / "out")
    assert found["total_tokens"] == 12345
    assert found["accumulated_grad_steps"] == 0
    assert found["compute_tracker"] == {"total_flops": 1e18, "start_time": 1.5}
    assert "compute_tracker_by_rank" not in found


def test_the_step_of_accelerate_is_kept(tmp_path: Path) -> None:
    unshard.merge(WRITERS["accelerate"](tmp_path, [Saved()]), tmp_path / "out", config="none")
    assert load(tmp_path / "out")["step"] == 7


def device(number: int) -> torch.Tensor:
    """A state as a CUDA generator has it: 16 bytes, seed and offset."""
    return torch.tensor([number, 0, 0, 0, 0, 0, 0, 0] * 2, dtype=torch.uint8)


@each_writer
def test_the_guide_resumes_devices_in_rank_order(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SCHEDULERS["cosine"](optimizer())
    steps(original, 3)
    ranks = [seeded(n, original.state_dict(), cuda=device(n)) for n in range(12)]
    unshard.merge(WRITERS[writer](tmp_path, ranks), tmp_path / "out", config="none")
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.extend)
    lr_scheduler = SCHEDULERS["cosine"](optimizer())

    extra_state = torch.load(tmp_path / "out" / EXTRA_STATE)
    lr_scheduler.load_state_dict(extra_state["lr_scheduler"])
    torch.set_rng_state(extra_state["rng"]["cpu"])
    torch.cuda.set_rng_state_all(extra_state["rng"]["cuda"])

    assert type(extra_state["rng"]["cuda"]) is list
    assert all(one.dtype is torch.uint8 for one in given)
    assert [one.tolist() for one in given] == [device(number).tolist() for number in range(12)]
    assert torch.equal(torch.get_rng_state(), ranks[0].cpu)


@pytest.mark.parametrize("writer", ["HF Trainer", "accelerate"])
def test_of_the_devices_that_every_rank_saves_each_gives_its_own(
    tmp_path: Path, writer: str
) -> None:
    saw = [[device(10 * rank + number) for number in range(2)] for rank in range(4)]
    ranks = [seeded(rank, cuda=saw[rank]) for rank in range(4)]
    unshard.merge(WRITERS[writer](tmp_path, ranks), tmp_path / "out", config="none")
    found = load(tmp_path / "out")
    assert [one[0].item() for one in found["rng"]["cuda"]] == [0, 11, 20, 31]
    assert [one[0].item() for one in found["rng_by_rank"][3]["cuda"]] == [30, 31]


@pytest.mark.parametrize("version", VERSIONS)
def test_extra_state_of_every_torch_version(tmp_path: Path, version: str) -> None:
    world = 2 if version == "2.2" else 3
    save_ranks(tmp_path / "ckpt", some_tensors(), world)
    with tarfile.open(DATA) as archive:
        name = f"extra_state_world_size_{world}_rank_0.pt"
        data = archive.extractfile(f"torch-{version}/{name}")
        assert data is not None
        (tmp_path / "ckpt" / name).write_bytes(data.read())
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert len(told(report)) == 1
    assert f"extra_state_world_size_{world}_rank_1.pt" in told(report)[0]
    found = load(tmp_path / "out")
    theirs = torch.load(tmp_path / "ckpt" / name, weights_only=False)
    assert found["lr_scheduler"] == theirs["lr_scheduler"]
    restore(theirs["rng"])
    drawn = draw()
    restore(found["rng"])
    assert draw() == drawn


# --- what is missing, damaged, hostile -----------------------------------------------------------


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """What verl leaves of three ranks with a device each."""
    ranks = [seeded(number, {"last_epoch": 3}, cuda=device(number)) for number in range(3)]
    return WRITERS["verl"](tmp_path / "run", ranks)


def rank_file(step: Path, rank: int) -> Path:
    return step / "actor" / f"extra_state_world_size_3_rank_{rank}.pt"


def test_ranks_that_are_missing_are_named(step: Path, tmp_path: Path) -> None:
    rank_file(step, 1).unlink()
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert rank_file(step, 1).name in told(report)[0]
    assert any("rng.cuda was left out" in one for one in told(report))
    found = load(tmp_path / "out")
    assert found["lr_scheduler"] == {"last_epoch": 3}
    assert "cuda" not in found["rng"]
    assert found["rng_by_rank"][1] is None
    assert found["rng_by_rank"][2]["cuda"].tolist() == device(2).tolist()


def test_a_damaged_file_is_named_and_the_model_is_whole(step: Path, tmp_path: Path) -> None:
    data = rank_file(step, 0).read_bytes()
    rank_file(step, 0).write_bytes(data[: len(data) // 2])
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert merged(tmp_path / "out").keys() == some_tensors().keys()
    said = "\n".join(told(report))
    assert f"{rank_file(step, 0)}: truncated" in said
    assert "the model is complete without it" in said
    assert "rng is that of rank 1" in said
    assert load(tmp_path / "out")["rng_by_rank"][0] is None


def test_where_no_file_can_be_read_nothing_is_written(step: Path, tmp_path: Path) -> None:
    for rank in range(3):
        rank_file(step, rank).write_bytes(b"")
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert not (tmp_path / "out" / EXTRA_STATE).exists()
    assert report.companions == ()
    assert all(str(rank_file(step, rank)) in "".join(told(report)) for rank in range(3))


def test_of_very_many_damaged_files_a_few_are_named(tmp_path: Path) -> None:
    step = WRITERS["verl"](tmp_path, [Saved()] * 8)
    for rank in range(8):
        (step / "actor" / f"extra_state_world_size_8_rank_{rank}.pt").write_bytes(b"")
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert len(told(report)) == 4
    assert "and 5 more files cannot be read" in told(report)[-1]


@pytest.mark.parametrize("content", [[1, 2], {"rng": 3}, torch.ones(3), None])
def test_a_file_that_holds_something_else_is_named(
    step: Path, tmp_path: Path, content: object
) -> None:
    torch.save(content, rank_file(step, 2))
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert f"{rank_file(step, 2)}: has unexpected contents" in told(report)[0]


def test_what_is_not_a_file_is_named(step: Path, tmp_path: Path) -> None:
    rank_file(step, 2).unlink()
    rank_file(step, 2).mkdir()
    report = unshard.merge(step, tmp_path / "out", config="none")
    assert f"{rank_file(step, 2)}: cannot be opened: not a regular file" in told(report)[0]


@pytest.mark.slow
def test_whatever_is_damaged_the_model_is_merged(step: Path, tmp_path: Path) -> None:
    """Only a pickle that became dangerous may end the merge."""
    location = read_checkpoint(step, unshard.MergeOptions()).location
    whole = rank_file(step, 1).read_bytes()
    chance = random.Random(5)
    damaged = 0
    for _ in range(120):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            at = chance.randrange(chance.choice((600, 12_000, len(data))))
            data[at] = chance.choice((0, 255, chance.randrange(256), data[at] ^ 1))
        rank_file(step, 1).write_bytes(data[: chance.choice((len(data), chance.randrange(20_000)))])
        try:
            state = read_training_state(location, 3)
        except UnsafeError:
            continue
        write_training_state(state, tmp_path)
        assert len(load(tmp_path)["rng_by_rank"]) == 3
        damaged += bool(state.warnings)
    assert damaged > 40


class Unknown:
    """What no reader knows."""


def test_values_of_unknown_classes_are_named(tmp_path: Path) -> None:
    saved = Saved({"last_epoch": 3, "hook": Unknown(), "list": [Unknown()]})
    report = unshard.merge(WRITERS["verl"](tmp_path, [saved] * 5), tmp_path / "out", config="none")
    assert load(tmp_path / "out")["lr_scheduler"] == {"last_epoch": 3, "list": [None]}
    assert len(told(report)) == 1
    assert "lr_scheduler.hook: an instance of test_training_state.Unknown" in told(report)[0]
    assert "lr_scheduler.list[0]" in told(report)[0]
    assert "_rank_0.pt" in told(report)[0]
    assert "and 2 more" in told(report)[0]


class Attack:
    """What runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@each_writer
def test_a_file_that_runs_commands_is_refused(tmp_path: Path, writer: str) -> None:
    step = WRITERS[writer](tmp_path / "run", [Saved(Attack())])
    before = snapshot(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(UnsafeError) as caught:
            unshard.merge(step, tmp_path / "out", dry_run=dry_run, config="none")
        assert "system" in caught.value.subject
        assert "extra_state=False" in caught.value.hint
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "out").exists()
    unshard.merge(step, tmp_path / "out", extra_state=False, config="none")
    assert not (tmp_path / "out" / EXTRA_STATE).exists()


# --- the merge around it -------------------------------------------------------------------------


def test_it_can_be_left_out(step: Path, tmp_path: Path) -> None:
    report = unshard.merge(step, tmp_path / "out", extra_state=False, config="none")
    assert report.companions == ()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "unshard.json",
    }
    done = run_command("merge", step, tmp_path / "two", "--no-extra-state", *BARE)
    assert done.returncode == 0
    assert not (tmp_path / "two" / EXTRA_STATE).exists()


def test_a_dry_run_lists_it_and_the_terminal_names_it(step: Path, tmp_path: Path) -> None:
    done = run_command("merge", step, tmp_path / "out", "--dry-run", *BARE)
    assert f"  {EXTRA_STATE}\n  {SCHEDULER}\n" in done.stdout
    assert not (tmp_path / "out").exists()
    done = run_command("merge", step, tmp_path / "out", *BARE)
    assert f"with {EXTRA_STATE}, {SCHEDULER}\n" in done.stdout


def test_it_is_the_same_whatever_the_settings_and_nothing_is_touched(
    step: Path, tmp_path: Path
) -> None:
    before = snapshot(step)
    for name, workers in (("one", 1), ("two", 4)):
        unshard.merge(step, tmp_path / name, workers=workers, config="none")
    for name in (EXTRA_STATE, SCHEDULER):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert snapshot(step) == before


def test_a_merge_in_place_adds_it_and_is_read_as_before(step: Path) -> None:
    actor = step / "actor"
    unshard.merge(step, actor, overwrite=True, config="none")
    assert load(actor)["lr_scheduler"] == {"last_epoch": 3}
    again = unshard.merge(step, step.parent / "out", config="none")
    assert told(again) == []
    assert unshard.inspect(step).world_size == 3


def test_an_output_is_read_as_a_model_and_nothing_else(step: Path, tmp_path: Path) -> None:
    unshard.merge(step, tmp_path / "out", config="none")
    found = unshard.inspect(tmp_path / "out")
    assert len(found.tensors) == 3
    report = unshard.merge(tmp_path / "out", tmp_path / "again", config="none")
    assert report.companions == ()


def test_an_overwritten_output_gets_the_new_state(step: Path, tmp_path: Path) -> None:
    unshard.merge(step, tmp_path / "out", config="none")
    for rank in range(3):
        extra_state = torch.load(rank_file(step, rank), weights_only=False)
        torch.save(extra_state | {"lr_scheduler": {"last_epoch": 9}}, rank_file(step, rank))
    unshard.merge(step, tmp_path / "out", overwrite=True, config="none")
    assert load(tmp_path / "out")["lr_scheduler"] == {"last_epoch": 9}


def test_it_is_not_pushed_to_the_hub(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step / "actor" / "config.json").write_text("{}")
    pushed: list[str] = []

    def push(_directory: Path, repo: str, names: list[str], **_how: bool) -> str:
        pushed.extend(names)
        return repo

    monkeypatch.setattr("unshard.write.hub.push", push)
    monkeypatch.setattr("unshard.write.hub.check_repo", lambda _repo, **_how: None)
    report = unshard.merge(step, tmp_path / "out", push_to_hub="someone/model")
    assert pushed == ["model.safetensors", "config.json", "unshard.json"]
    assert report.companions == ("config.json", EXTRA_STATE, SCHEDULER)


@pytest.mark.parametrize(("lora", "is_written"), [("adapter", False), ("both", True)])
def test_an_adapter_by_itself_comes_without_it(
    tmp_path: Path,
    lora: Lora,
    is_written: bool,  # noqa: FBT001
) -> None:
    adapted(tmp_path / "ckpt")
    for rank in range(2):
        name = f"extra_state_world_size_2_rank_{rank}.pt"
        torch.save({"lr_scheduler": {"last_epoch": 1}}, tmp_path / "ckpt" / name)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora=lora)
    assert (EXTRA_STATE in report.companions) is is_written
    assert [path.parent.name for path in (tmp_path / "out").rglob(EXTRA_STATE)] == (
        ["out"] if is_written else []
    )


@pytest.mark.slow
def test_memory_grows_by_little_per_rank(tmp_path: Path) -> None:
    """About 60 KB of a rank's state; the files of 200 ranks take 2.9 MB."""
    one = seeded(1)
    step = WRITERS["HF Trainer"](tmp_path, [one] * 200)
    source = read_checkpoint(step, unshard.MergeOptions())
    location = source.location
    tracemalloc.start()
    try:
        state = read_training_state(location, 200)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert state.values.keys() == {"rng", "rng_by_rank"}
    assert peak < 200 * 100_000
