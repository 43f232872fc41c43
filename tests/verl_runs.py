"""Runs that verl 0.9.1 saved, in an environment of its own."""

import os
import subprocess
from pathlib import Path

import pytest

__all__ = ["VERL", "needs_verl", "saved_by_verl"]

TESTS = Path(__file__).parent
VERL = os.environ.get("UNSHARD_VERL_PYTHON", "")


needs_verl = pytest.mark.skipif(
    not VERL, reason="UNSHARD_VERL_PYTHON names no interpreter with verl 0.9.1"
)


def saved_by_verl(run: Path, kind: str) -> None:
    """Have verl train and save a model or an adapter, as `verl_child.py` says, into a new run."""
    run.mkdir(parents=True)
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    child = subprocess.run(
        [VERL, str(TESTS / "verl_child.py"), str(run), kind],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not child.returncode, child.stderr[-4000:]
