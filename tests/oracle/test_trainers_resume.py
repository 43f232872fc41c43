"""The trainers' own code loads what `reshard` writes, and goes on as if nothing had happened."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from oracle.writers.lmms_engine import resume_with_lmms_engine, train_with_lmms_engine
from oracle.writers.workers import WorkerPool
from ranks import contents
from saved_values import same

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
