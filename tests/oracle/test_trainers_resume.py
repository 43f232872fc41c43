"""The trainers' own code loads what `reshard` writes, and goes on as if nothing had happened."""

import os
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from oracle.writers.lmms_engine import resume_with_lmms_engine, train_with_lmms_engine
from oracle.writers.trainer import trainer_goes_on
from oracle.writers.workers import WorkerPool
from ranks import assert_same, contents
from saved_values import loaded, same

PYTHON = os.environ.get("UNSHARD_VERL_PYTHON", "")
TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]


def went_on(directory: Path, world: int, before: int) -> None:
    """Compare what was loaded and trained with the run that was not interrupted."""

    def saved(name: str) -> Any:
        return torch.load(directory / f"{name}.pt", weights_only=False)

    assert same(saved("resume-before"), saved("train-before"))
    for rank in range(world):
        assert saved(f"resume-draws-{rank}") == saved(f"train-draws-{rank % before}")
    after, gone_on = saved("train-after"), saved("resume-after")
    for part in ("model", "state"):
        torch.testing.assert_close(gone_on[part], after[part], rtol=1e-5, atol=1e-7)


@pytest.mark.ray
@pytest.mark.skipif(not PYTHON, reason="UNSHARD_VERL_PYTHON names no interpreter with verl 0.9.1")
def test_verls_checkpoint_manager_loads_it(tmp_path: Path) -> None:
    paths = [str(Path(unshard.__file__).parents[1]), str(TESTS), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [PYTHON, str(TESTS / "verl_child.py"), str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    line = child.stdout.readline()
    while line and line != "trained\n":
        line = child.stdout.readline()
    if line:
        unshard.reshard(tmp_path, tmp_path / "resharded", world_size=3, verify="full")
        written = contents(tmp_path / "resharded")
    _, errors = child.communicate("go on\n")
    assert not child.returncode, errors[-4000:]
    assert contents(tmp_path / "resharded") == written
    went_on(tmp_path, 3, 2)


def test_lmms_engines_trainer_loads_it(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker_pool.run(train_with_lmms_engine, 4, tmp_path)
    report = unshard.reshard(tmp_path, tmp_path / "checkpoint-9", world_size=3, verify="full")
    assert any("dataloaders of 4 ranks" in note for note in report.notes)
    worker_pool.run(resume_with_lmms_engine, 3, tmp_path)
    went_on(tmp_path, 3, 4)


@pytest.mark.slow
def test_the_hf_trainer_goes_on_with_its_own_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    """On other ranks with as many sentences a step, `resume_from_checkpoint` gives the same run."""
    run = partial(trainer_goes_on, config=None, step=2)
    worker_pool.run(partial(run, resume=False), 2, tmp_path)
    source, output = tmp_path / "run" / "checkpoint-2", tmp_path / "resharded" / "checkpoint-2"
    unshard.reshard(source, output, world_size=3, verify="full")
    worker_pool.run(partial(run, resume=True), 3, tmp_path)
    found = loaded(tmp_path / "loaded-3.pt")
    assert found["step"] == 2
    assert same(found["scheduler"], loaded(source / "scheduler.pt"))
    with unshard.open_checkpoint(source, framework="pt", names="training") as model:
        assert_same(found["model"], dict(model.items()))
    assert_moments(found["optimizer"], source)
    ours, truth = (loaded(tmp_path / f"went-on-{world}.pt") for world in (3, 2))
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


def test_the_hf_trainer_goes_on_with_fsdp_from_deepspeed(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    """Its own files are written of its own; no other format has them."""
    with tarfile.open(TESTS / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "deepspeed" / "hf_trainer_zero2" / "checkpoint-4"
    output = tmp_path / "resharded" / "checkpoint-4"
    unshard.reshard(source, output, world_size=2, to="accelerate", verify="full")
    run = partial(trainer_goes_on, config=source, step=4, resume=True)
    worker_pool.run(run, 2, tmp_path)
    found = loaded(tmp_path / "loaded-2.pt")
    assert found["step"] == 4
    assert same(found["scheduler"], loaded(source / "scheduler.pt"))
    with unshard.open_checkpoint(source, framework="pt", names="training") as model:
        truth = dict(model.items())  # without the tied head
    assert_same({name: found["model"][name] for name in truth}, truth)
    assert_moments(found["optimizer"], source)
    again = unshard.reshard(output, tmp_path / "one", world_size=1)  # where it has no rank
    assert {"rng_state.pth", "trainer_state.json", "scheduler.pt"} <= set(again.others)


def assert_moments(found: dict[str, Any], source: Path) -> None:
    with unshard.open_checkpoint(
        source, framework="pt", part="optimizer", names="training"
    ) as state:
        moments = {name: one for name, one in state.items() if not name.endswith(".step")}
    ours = {
        f"state.{name}.{key}": one
        for name, fields in found["state"].items()
        for key, one in fields.items()
        if key != "step"
    }
    assert_same(ours, moments)
