"""The process that merges stays below 128 MB, whatever the model's size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks import save_ranks

LIMIT = 128_000_000
ROWS, COLUMNS, COUNT = 4100, 4096, 16  # 16 x 67 MB = 1.07 GB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensor = torch.zeros(ROWS, COLUMNS)
    tensors = {f"layers.{index}.weight": tensor for index in range(COUNT)}
    return save_ranks(tmp_path_factory.mktemp("memory") / "ckpt", tensors, 2)


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_gigabyte_is_merged_in_128_mb(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    command = ["merge", str(checkpoint), str(tmp_path / "out"), "--dtype", dtype, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "unshard", *command], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["bytes_read"] == ROWS * COLUMNS * COUNT * 4 > 1_000_000_000
    assert report["peak_memory_bytes"] < LIMIT


def test_five_checkpoints_of_a_gigabyte_are_averaged_in_128_mb(
    checkpoint: Path, tmp_path: Path
) -> None:
    """However many there are: the files are those of one checkpoint, under five names."""
    copies = [tmp_path / f"copy_{number}" for number in range(5)]
    for copy in copies:
        copy.mkdir()
        for file in checkpoint.iterdir():
            (copy / file.name).hardlink_to(file)
    command = ["average", *map(str, copies), "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "unshard", *command], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert report["bytes_read"] == 5 * ROWS * COLUMNS * COUNT * 4
    assert report["peak_memory_bytes"] < LIMIT
