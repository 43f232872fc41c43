"""The program of the profile that is there without a configuration, against numpy."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from evaluation.running import child_environment
from unshard.evaluate.server.evaluators import weights

PROGRAM = [sys.executable, "-m", "unshard.evaluate.server.evaluators.weights"]


def run(model: Path, output: Path, tasks: str) -> "subprocess.CompletedProcess[str]":
    command = [*PROGRAM, str(model), str(output), tasks]
    return subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, check=False
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    spoiled = random.normal(size=(1000, 7)).astype(ml_dtypes.bfloat16)
    spoiled[3, 2:4] = np.nan, -np.inf
    tensors = {
        "spoiled": spoiled,
        "large": random.normal(size=(33, 5, 4)).astype(np.float32) * -900,
        "scalar": np.array(2.5, np.float64),
        "nothing": np.zeros((0, 3), np.float16),
        "counter": np.array([10**9], np.int64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("piece", [weights._PIECE, 60])
def test_its_numbers_are_numpys(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(weights, "_PIECE", piece)
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["weights", str(model), str(output), "size,values"])
    weights.main()
    random = np.random.default_rng(0)
    parts = [random.normal(size=7000).astype(ml_dtypes.bfloat16).astype(np.float64)]
    parts[0][23:25] = 0
    parts += [(random.normal(size=660).astype(np.float32) * -900).astype(np.float64)]
    parts += [np.array([2.5])]
    whole = np.concatenate(parts)
    found = json.loads(output.read_text())
    count = 7000 + 660 + 1 + 0 + 1
    assert found["size"] == {"parameters": count, "bytes": 14000 + 2640 + 8 + 8}
    assert (found["values"]["nonfinite"], found["values"]["largest"]) == (2, np.abs(whole).max())
    rms = np.sqrt(np.square(whole).sum() / (7000 - 2 + 661))
    assert found["values"]["rms"] == pytest.approx(rms, rel=1e-12)


def test_a_task_that_it_does_not_know(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path / "results.json", "size,mmlu")
    assert (done.returncode, "mmlu: unknown" in done.stderr) == (1, True)
    assert not (tmp_path / "results.json").exists()


def test_it_runs_as_the_profile_starts_it(model: Path, tmp_path: Path) -> None:
    done = run(model, tmp_path / "results.json", "size")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"size"}
