"""Memory, open files and ranks: a merge keeps to what it was given, and its bytes do too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import unshard
from ranks import assert_same, merged, save_ranks

# The checkpoints take long to write: once, not once per worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("limits")]

LIMIT = 128_000_000
SLACK = 4_000_000  # what the allocator and the reading of larger pickles need


def run(*arguments: str | Path, shell_limits: str = "") -> dict[str, object]:
    """Run the command as a child under limits of the shell's; return its report."""
    command = f'{shell_limits} "$0" -m unshard "$@" --json'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def merge(*arguments: str | Path, shell_limits: str = "") -> dict[str, object]:
    return run("merge", *arguments, "--config", "none", shell_limits=shell_limits)


def peak_of(report: dict[str, object]) -> int:
    peak = report["peak_memory_bytes"]
    assert isinstance(peak, int)
    return peak


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How much memory a merge of next to nothing takes, in this environment, by dtype."""
    directory = tmp_path_factory.mktemp("idle")
    save_ranks(directory / "ckpt", {"w": torch.rand(8, 8)}, 4, placements=[Shard(1)])
    return {
        dtype: peak_of(merge(directory / "ckpt", directory / dtype, "--dtype", dtype))
        for dtype in ("keep", "bfloat16")
    }


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """160 MB cut along later dimensions, in runs of 1 KiB and less, on four ranks."""
    tensors = {
        "rows of 1 KiB": torch.arange(20_000 * 1024, dtype=torch.float32).reshape(20_000, 1024),
        "middle": torch.rand(300, 64, 1000),
        "last": torch.rand(50, 40, 36),
    }
    directory = tmp_path_factory.mktemp("wide") / "ckpt"
    save_ranks(directory, tensors, 4, placements=[Shard(1)])
    return directory, tensors


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("memory", [4_000_000, 64_000_000])
def test_shards_of_later_dimensions_are_merged_in_bounded_memory(
    wide: tuple[Path, dict[str, torch.Tensor]],
    idle: dict[str, int],
    tmp_path: Path,
    dtype: str,
    memory: int,
) -> None:
    checkpoint, tensors = wide
    report = merge(checkpoint, tmp_path / "out", "--memory", str(memory), "--dtype", dtype)
    assert peak_of(report) < min(LIMIT, idle[dtype] + memory + SLACK)
    expected = {n: t.bfloat16() if dtype == "bfloat16" else t for n, t in tensors.items()}
    assert_same(merged(tmp_path / "out"), expected)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of 1,500 ranks, most of which hold nothing of the smaller tensors."""
    tensors = {
        "embed": torch.rand(3001, 5),
        "norm": torch.rand(40),
        "long": torch.rand(1500, 20_000),
        "columns": torch.rand(2, 3000),
    }
    directory = tmp_path_factory.mktemp("many") / "ckpt"
    save_ranks(directory, tensors, 1500)
    return directory, tensors


@pytest.mark.parametrize(("workers", "verify"), [("1", "light"), ("8", "full")])
def test_thousands_of_ranks_are_merged_with_64_open_files(
    many: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, workers: str, verify: str
) -> None:
    checkpoint, tensors = many
    options = ("--workers", workers, "--verify", verify, "--max-shard-size", "50MB")
    report = merge(checkpoint, tmp_path / "out", *options, shell_limits="ulimit -n 64;")
    assert report["world_size"] == 1500
    assert_same(merged(tmp_path / "out"), tensors)
    assert peak_of(report) < LIMIT


def test_a_missing_rank_among_thousands_is_named(
    many: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    checkpoint, _ = many
    lost = checkpoint / "model_world_size_1500_rank_777.pt"
    lost.rename(tmp_path / "lost")
    try:
        with pytest.raises(unshard.IncompleteError, match="rank 777 of world size 1500"):
            unshard.merge(checkpoint, tmp_path / "out", config="none")
    finally:
        (tmp_path / "lost").rename(lost)


def test_transposed_locals_are_merged_in_bounded_memory(
    idle: dict[str, int], tmp_path: Path
) -> None:
    """Elements that are a row apart are read in runs, not one by one and not all at once."""
    tensor = torch.rand(3000, 4000)
    save_ranks(tmp_path / "ckpt", {}, 1, plain=[{"w": tensor.t().contiguous().t()}])
    report = merge(tmp_path / "ckpt", tmp_path / "out", "--memory", "4MB")
    assert_same(merged(tmp_path / "out"), {"w": tensor})
    assert peak_of(report) < idle["keep"] + 4_000_000 + SLACK
