"""Compare `unshard merge` with two floors, side by side; all sides are made durable.

The floors are `cat` of the input, and a loop that lets the kernel copy the pieces one by one, in
one thread, without any start. Every round runs all contenders in an order of its own, with a pause
before each, so that a noisy machine slows all of them alike and none always follows the same other;
the report has ratios of medians.

    python benchmarks/merge_against_cat.py --gigabytes 3.2 --rounds 5 --directory /another/disk

`--before SRC` also runs the package in another directory: the `src` of an earlier commit.

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from unshard.api.making import PlannedMerge
from unshard.api.merging import merge_checkpoint
from unshard.api.options import MergeOptions
from unshard.plan.operations import CopyRange, Plan
from unshard.progress import ignore

_SIDE = 4096
_SEVERAL = "500MB"


def write_checkpoint(  # noqa: PLR0913 (what is written)
    directory: Path,
    *,
    ranks: int,
    gigabytes: float,
    dim: int,
    run: int,
    dtype: str = "float32",
) -> None:
    """Write rank files, sharded along `dim` in runs of at least `run` bytes of float32."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    columns = _SIDE if dim == 0 else run * ranks // 4
    rows = _SIDE * _SIDE // columns
    local = (rows // ranks, columns) if dim == 0 else (rows, columns // ranks)
    to = getattr(torch, dtype)
    count = max(1, int(gigabytes * 1e9 / to.itemsize / (rows * columns)))
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {
            f"model.layers.{index}.weight": DTensor.from_local(
                torch.empty(local).uniform_(-1, 1).to(to),
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


def loop(plan: Plan, target: Path) -> None:
    """Copy the pieces of a plan, one after another, by the kernel, and flush the files to disk."""
    target.mkdir()
    for number, file in enumerate(plan.layout.files):
        with (target / file.filename).open("wb") as output:
            output.write(file.header)
            output.truncate(file.size)
            output.flush()
            for copy in plan.copies_into(number, number + 1):
                copy_runs(copy, output.fileno())
            os.fsync(output.fileno())


def copy_runs(copy: CopyRange, output: int) -> None:
    """Copy the runs of one piece."""
    source = os.open(copy.source, os.O_RDONLY)
    for run in range(copy.count):
        start, at = copy.start + run * copy.length, copy.target + run * copy.target_stride
        left = copy.length
        while left:
            left -= os.copy_file_range(
                source, output, left, start + copy.length - left, at + copy.length - left
            )
    os.close(source)


def merge(checkpoint: Path, options: list[str], source: Path | None, target: Path) -> None:
    """Run the command as a user would, the interpreter's start included."""
    run_unshard(["merge", str(checkpoint), *options], source, target)


def run_unshard(arguments: list[str], source: Path | None, target: Path) -> None:
    """Run a command of unshard (of another `src`: `source`) that makes `target`."""
    command = [sys.executable, "-m", "unshard", *arguments, "--output", str(target)]
    command += ["--quiet", "--config", "none"]
    # An installed program has its bytecode; without it every start would compile it again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source)} if source else {}
    subprocess.run(command, check=True, env=environment)


def plan_of(checkpoint: Path, shard_size: str) -> Plan:
    """Return the plan of a merge."""
    plans: list[Plan] = []

    def keep(prepared: PlannedMerge) -> PlannedMerge:
        plans.append(prepared.plan)
        return prepared

    options = MergeOptions(dry_run=True, max_shard_size=shard_size, config="none")
    merge_checkpoint(checkpoint, checkpoint.parent / "output", options, ignore, before=keep)
    return plans[0]


Contender = Callable[[Path], None]


def contenders_of(checkpoint: Path, before: Path | None) -> dict[str, Contender]:
    """Return what is compared, by name: the floors first."""
    sources = sorted(checkpoint.glob("*.pt"))
    contenders: dict[str, Contender] = {"cat": partial(cat, sources)}
    for files, size in (("one file", "1TB"), ("several files", _SEVERAL)):
        plan, sized = plan_of(checkpoint, size), ["--max-shard-size", size]
        if not plan.tiled:
            contenders[f"loop, {files}"] = partial(loop, plan)
        for dtype in ("keep", "bfloat16"):
            run = partial(merge, checkpoint, ["--dtype", dtype, *sized])
            contenders[f"{dtype}, {files}"] = partial(run, None)
            if before is not None:
                contenders[f"{dtype}, {files}, before"] = partial(run, before)
    full = ["--max-shard-size", "1TB", "--verify", "full"]
    contenders["keep, one file, verify full"] = partial(merge, checkpoint, full, None)
    return contenders


def timed(action: Contender, target: Path) -> tuple[float, float, float]:
    """Return the seconds that an action takes: on the clock, in programs, and in the kernel."""
    before, started = os.times(), time.perf_counter()
    action(target)
    took, after = time.perf_counter() - started, os.times()
    user = after.user + after.children_user - before.user - before.children_user
    system = after.system + after.children_system - before.system - before.children_system
    return took, user, system


def measure(contenders: dict[str, Contender], work: Path, rounds: int) -> None:
    """Print the median seconds of every contender, as a ratio to `cat`; each round runs all."""
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
    order = list(contenders.items())
    for number in range(rounds + 1):
        random.shuffle(order)
        for name, run in order:
            target = work / "output"
            subprocess.run(["sync"], check=True)
            time.sleep(1)  # removing a large file goes on for a while
            took = timed(run, target)
            if number:  # the first round warms the page cache
                seconds[name].append(took)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    base = median(took for took, _, _ in seconds["cat"])
    for name, values in seconds.items():
        wall, user, system = (median(column) for column in zip(*values, strict=True))
        rounds_seen = " ".join(f"{took:.2f}" for took, _, _ in values)
        print(
            f"  {name:<32}{wall / base:5.2f} x cat, user {user:.2f}, system {system:.2f} s"
            f"  ({rounds_seen} s)"
        )


def main() -> None:
    """Write the checkpoints, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    parser.add_argument("--before", type=Path, default=None, help="the src of an earlier commit")
    parser.add_argument("--dimension", type=int, choices=(0, 1), help="default: both")
    options = parser.parse_args()
    for dim, run, name in ((0, 1 << 20, "dimension 0"), (1, 1024, "dimension 1, runs of 1 KiB")):
        if options.dimension not in (None, dim):
            continue
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            checkpoint = Path(folder) / "checkpoint"
            checkpoint.mkdir()
            write_checkpoint(
                checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=dim, run=run
            )
            print(f"{options.gigabytes} GB on {options.ranks} ranks, sharded on {name}:")
            measure(contenders_of(checkpoint, options.before), Path(folder), options.rounds)


if __name__ == "__main__":
    main()
