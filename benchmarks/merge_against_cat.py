"""Compare `unshard merge` with `cat` of the same bytes, side by side; both sides are made durable.

The rounds interleave all contenders, so that a noisy machine slows all of them alike; the report
has ratios of medians. The figures to reach are in ARCHITECTURE.md.

    python benchmarks/merge_against_cat.py --gigabytes 3.2 --rounds 5

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

_SIDE = 4096


def write_checkpoint(directory: Path, *, ranks: int, gigabytes: float, dim: int, run: int) -> None:
    """Write rank files of float32 tensors, sharded along `dim` in runs of at least `run` bytes."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    columns = _SIDE if dim == 0 else run * ranks // 4
    rows = _SIDE * _SIDE // columns
    local = (rows // ranks, columns) if dim == 0 else (rows, columns // ranks)
    count = max(1, int(gigabytes * 1e9 / 4 / (rows * columns)))
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {
            f"model.layers.{index}.weight": DTensor.from_local(
                torch.empty(local).uniform_(-1, 1),
                mesh,
                [Shard(dim)],
                run_check=False,
                shape=torch.Size((rows, columns)),
                stride=(columns, 1),
            )
            for index in range(count)
        }
        torch.save(state, directory / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def cat(sources: list[Path], target: Path) -> None:
    """Concatenate the files and flush the result to disk."""
    with target.open("wb") as file:
        subprocess.run(["cat", *map(str, sources)], stdout=file, check=True)
    subprocess.run(["sync", str(target)], check=True)


def merge(checkpoint: Path, target: Path, dtype: str) -> None:
    """Run the command as a user would, the interpreter's start included."""
    command = [sys.executable, "-m", "unshard", "merge", str(checkpoint), str(target), "--quiet"]
    subprocess.run([*command, "--dtype", dtype], check=True)


def timed(action: Callable[[], None]) -> float:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(checkpoint: Path, work: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of every contender; each round runs all of them."""
    sources = sorted(checkpoint.glob("*.pt"))
    contenders: dict[str, Callable[[Path], None]] = {
        "cat": lambda target: cat(sources, target),
        "merge keep": lambda target: merge(checkpoint, target, "keep"),
        "merge bfloat16": lambda target: merge(checkpoint, target, "bfloat16"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            target = work / "output"
            subprocess.run(["sync"], check=True)
            took = timed(lambda run=run, target=target: run(target))  # type: ignore[misc]
            if number:  # the first round warms the page cache
                seconds[name].append(took)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    for name, values in seconds.items():
        print(f"  {name:<15} {' '.join(f'{value:.2f}' for value in values)} s")
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Write the checkpoints, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    for dim, run, name in ((0, 1 << 20, "dimension 0"), (1, 1024, "dimension 1, runs of 1 KiB")):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            checkpoint = Path(folder) / "checkpoint"
            checkpoint.mkdir()
            write_checkpoint(
                checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=dim, run=run
            )
            print(f"{options.gigabytes} GB on {options.ranks} ranks, sharded on {name}:")
            medians = measure(checkpoint, Path(folder), options.rounds)
            for contender in ("merge keep", "merge bfloat16"):
                print(f"  {contender:<15} {medians[contender] / medians['cat']:.2f} x cat")


if __name__ == "__main__":
    main()
