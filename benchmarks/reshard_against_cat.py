"""Compare `unshard reshard` with `cat` of the same bytes, and with torch itself: time, and memory.

The checkpoint is a model of float32 with Adam's two moments, written by real torch: DTensors on a
fake process group, in one process. Every contender ends when its files are flushed to disk. torch
loads the files of all ranks with `mmap`, joins the parts of every tensor, and saves those of the
new ranks. Every round runs all contenders in an order of its own; the report has ratios of medians,
and the largest resident set of each program.

    python benchmarks/reshard_against_cat.py --gigabytes 3 --rounds 5 --directory /another/disk
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from merge_against_cat import cat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SIDE = 4096
_MOMENTS = ("exp_avg", "exp_avg_sq")


@contextmanager
def one_of(world: int, rank: int) -> Iterator["DeviceMesh"]:
    """Be one rank of so many, and have their mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def part_of(local: Any, mesh: "DeviceMesh") -> Any:
    """Return a rank's part of a matrix of `_SIDE` x `_SIDE`."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    shape, stride = torch.Size((_SIDE, _SIDE)), (_SIDE, 1)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def save(directory: Path, world: int, rank: int, model: Any, state: Any) -> None:
    """Save the files of a rank."""
    import torch

    name = f"world_size_{world}_rank_{rank}.pt"
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(state)))}
    torch.save(model, directory / f"model_{name}")
    torch.save({"state": state, "param_groups": [group]}, directory / f"optim_{name}")


def write_checkpoint(directory: Path, *, ranks: int, gigabytes: float) -> None:
    """Write the files of `ranks` ranks, a third of `gigabytes` of weights."""
    import torch

    count = max(1, round(gigabytes * 1e9 / (3 * 4 * _SIDE * _SIDE)))
    for rank in range(ranks):
        with one_of(ranks, rank) as mesh:

            def made(mesh: "DeviceMesh" = mesh) -> Any:
                return part_of(torch.empty(_SIDE // ranks, _SIDE).uniform_(-1, 1), mesh)

            model = {f"model.layers.{index}.weight": made() for index in range(count)}
            state = {
                index: {"step": torch.tensor(1.0), **{key: made() for key in _MOMENTS}}
                for index in range(count)
            }
            save(directory, ranks, rank, model, state)


def torch_itself(source: Path, target: Path, ranks: int, world: int) -> None:
    """Load the files of all ranks, and save those of the new ones."""
    import torch

    loaded: dict[str, list[Any]] = {"model": [], "optim": []}
    for rank in range(ranks):
        with one_of(ranks, rank):
            for kind, found in loaded.items():
                path = source / f"{kind}_world_size_{ranks}_rank_{rank}.pt"
                found.append(torch.load(path, weights_only=False, mmap=True))
    for rank in range(world):
        with one_of(world, rank) as mesh:

            def joined(parts: list[Any], rank: int = rank, mesh: "DeviceMesh" = mesh) -> Any:
                if not hasattr(parts[0], "to_local"):
                    return parts[0]
                whole = torch.cat([part.to_local() for part in parts])
                return part_of(whole.chunk(world)[rank].clone(), mesh)

            model = {
                key: joined([one[key] for one in loaded["model"]]) for key in loaded["model"][0]
            }
            states = [one["state"] for one in loaded["optim"]]
            state = {
                number: {key: joined([one[number][key] for one in states]) for key in values}
                for number, values in states[0].items()
            }
            save(target, world, rank, model, state)


def flush(directory: Path) -> None:
    """Flush the files of a directory to disk."""
    subprocess.run(["sync", *map(str, directory.iterdir())], check=True)


def timed(command: list[str], target: Path, *, durable: bool) -> tuple[float, float]:
    """Return the seconds that a program takes, and its largest resident set, in MB."""
    # An installed program has its bytecode; without it every start would compile it again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)}: failed")
    if not durable:
        flush(target)
    return time.perf_counter() - started, used.ru_maxrss / 1e3


def contend(name: str, source: Path, target: Path, ranks: int, world: int) -> tuple[float, float]:
    """Run a contender; return seconds and MB."""
    if name == "cat":
        target.mkdir()
        started = time.perf_counter()
        cat(sorted(source.iterdir()), target / "all")
        return time.perf_counter() - started, 0.0
    if name == "torch":
        target.mkdir()
        again = [sys.executable, __file__, "--torch", str(source), str(target)]
        sizes = ["--ranks", str(ranks), "--world-size", str(world)]
        return timed([*again, *sizes], target, durable=False)
    command = [sys.executable, "-m", "unshard", "reshard", str(source), str(target), "--quiet"]
    return timed([*command, "--world-size", str(world)], target, durable=True)


def measure(source: Path, work: Path, options: argparse.Namespace) -> None:
    """Print the median seconds of every contender, as a ratio to `cat`, and its memory."""
    names = ["cat", "unshard", "torch"]
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(options.rounds + 1):
        random.shuffle(names)
        for name in names:
            target = work / "output"
            subprocess.run(["sync"], check=True)
            time.sleep(1)  # removing large files goes on for a while
            took = contend(name, source, target, options.ranks, options.world_size)
            if number:  # the first round warms the page cache
                seen[name].append(took)
            shutil.rmtree(target)
    base = median(seconds for seconds, _ in seen["cat"])
    for name, values in seen.items():
        each = " ".join(f"{seconds:.2f}" for seconds, _ in values)
        ratio = median(seconds for seconds, _ in values) / base
        print(f"  {name:<8}{ratio:5.2f} x cat, {max(mb for _, mb in values):6.0f} MB  ({each} s)")


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="weights and moments together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--torch", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_checkpoint(options.write, ranks=options.ranks, gigabytes=options.gigabytes)
        return
    if options.torch:
        torch_itself(options.torch[0], options.torch[1], options.ranks, options.world_size)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        source = Path(folder) / "checkpoint"
        source.mkdir()
        # Not in this process: the memory that a program begins with would be that of its parent.
        subprocess.run([sys.executable, *sys.argv, "--write", str(source)], check=True)
        print(f"{options.gigabytes} GB on {options.ranks} ranks, to {options.world_size}:")
        measure(source, Path(folder), options)


if __name__ == "__main__":
    main()
