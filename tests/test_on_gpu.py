"""The script for a GPU goes all its ways on a CPU, and refuses to begin without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "on_gpu.py"


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_all_that_it_checks_is_equal_on_a_cpu(tmp_path: Path) -> None:
    small = ("--device", "cpu", "--billions", "0.01", "--rounds", "1")
    done = run(*small, "--directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for line in (
        "| DCP, tensors on cpu | 30 tensors, 0 differ |",
        "| rank files, tensors on cpu | 30 tensors, 0 differ |",
        "| torch.save, tensors on cpu | 30 tensors, 0 differ |",
        "| random state of cpu | equal |",
        "| the same tensors | equal |",
    ):
        assert line in done.stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_way_without() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "`--device cpu --billions 0.05`" in done.stderr
