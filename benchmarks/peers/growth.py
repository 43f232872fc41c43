"""Measure unshard alone on more bytes, more ranks and more tensors, one at a time."""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from peers.measure import probe, read_once

__all__ = ["POINTS", "grow"]

_GB = 10**9
_COLUMNS = 1024
_SAME = {"bytes": _GB, "ranks": 8, "tensors": 512}
POINTS: dict[str, tuple[int, ...]] = {
    "bytes": (_GB // 2, _GB, 2 * _GB, 4 * _GB),
    "ranks": (2, 8, 32, 128),
    "tensors": (64, 512, 4096, 16384),
}
"""By what grows, its values; the other two stay as they are in `_SAME`."""


def grow(what: str, directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Return one row for each point: its three numbers, and the rounds at it."""
    rows: list[dict[str, Any]] = []
    places: list[tuple[Path, list[Path]]] = []
    for value in POINTS[what]:
        numbers = _SAME | {what: value}
        checkpoint = directory / f"growth-{value}"
        shutil.rmtree(checkpoint, ignore_errors=True)
        checkpoint.mkdir(parents=True)
        _write(checkpoint, numbers)
        rows.append(numbers | {"rounds": []})
        places.append((checkpoint, list(checkpoint.iterdir())))
    output = directory / "output"
    for _ in range(rounds):
        for row, (checkpoint, files) in zip(rows, places, strict=True):
            read_once(files)
            merge = [sys.executable, "-m", "unshard", "merge", str(checkpoint), str(output)]
            taken = probe([*merge, "--config", "none", "--quiet"], output)
            if taken.pop("exit_code"):
                raise RuntimeError(output.with_suffix(".log").read_text(encoding="utf-8"))
            row["rounds"].append(taken)
            shutil.rmtree(output)
    for checkpoint, _ in places:
        shutil.rmtree(checkpoint)
    return rows


def _write(directory: Path, numbers: dict[str, int]) -> None:
    """Write rank files of bfloat16 tensors, in one process: DTensors on a fake process group."""
    ranks, count = numbers["ranks"], numbers["tensors"]
    rows = max(1, numbers["bytes"] // (2 * _COLUMNS * count * ranks))
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {
            f"model.layers.{index}.weight": DTensor.from_local(
                torch.zeros(rows, _COLUMNS, dtype=torch.bfloat16),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((rows * ranks, _COLUMNS)),
                stride=(_COLUMNS, 1),
            )
            for index in range(count)
        }
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()
