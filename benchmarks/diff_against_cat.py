"""Compare `unshard diff` with `cat` of both models, side by side: time, and memory.

Two models of bfloat16 weights: rank files of real torch, and the merge of the next step, in which
`--percent` of the values have another last bit; and the first one compared with its own merge.
`cat` reads all files of both into /dev/null. Every round runs all contenders in an order of its
own; the report has ratios of medians, of the time on the clock and of that of processors, and the
largest resident set.

    python benchmarks/diff_against_cat.py --gigabytes 3 --rounds 5 --directory /dev/shm
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median

_SIDE = 4096
_DIFFERENT = 1


def write_models(directory: Path, *, ranks: int, gigabytes: float, percent: float) -> None:
    """Write a model as rank files, and the same, and a later one, as whole models."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.manual_seed(0)
    count = max(1, round(gigabytes * 1e9 / (2 * _SIDE * _SIDE)))
    names = [f"model.layers.{index}.weight" for index in range(count)]
    before = {name: torch.randn(_SIDE, _SIDE).mul_(0.02).bfloat16() for name in names}
    save_file(before, directory / "merged.safetensors")
    (directory / "ranks").mkdir()
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {
            name: DTensor.from_local(
                one.chunk(ranks)[rank].clone(), mesh, [Shard(0)], run_check=False
            )
            for name, one in before.items()
        }
        path = directory / "ranks" / f"model_world_size_{ranks}_rank_{rank}.pt"
        torch.save(state, path)
        dist.destroy_process_group()
    for one in before.values():
        places = torch.randint(0, one.numel(), (int(one.numel() * percent / 100),))
        one.view(torch.int16).view(-1)[places] ^= 1
    save_file(before, directory / "later.safetensors")


def timed(command: list[str], *, code: int = 0) -> tuple[float, float, float]:
    """Return the seconds that a program takes, those of processors, and its resident set, in MB."""
    # An installed program has its bytecode; without it every start would compile it again.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != code:
        raise RuntimeError(f"{' '.join(command)}: ended with {child.returncode}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def main() -> None:
    """Run the rounds, and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--percent", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        place = Path(folder)
        sizes = {"gigabytes": given.gigabytes, "percent": given.percent}
        writer = get_context("spawn").Process(  # whose memory would count as that of its children
            target=write_models, args=(place,), kwargs={"ranks": given.ranks, **sizes}
        )
        writer.start()
        writer.join()
        shards = sorted(map(str, (place / "ranks").iterdir()))
        ours = [sys.executable, "-m", "unshard", "diff", str(place / "ranks"), "--quiet"]
        contenders = {
            "cat of both": ["cat", *shards, str(place / "later.safetensors")],
            "equal": [*ours, str(place / "merged.safetensors")],
            f"{given.percent:g} % changed": [*ours, str(place / "later.safetensors")],
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contenders}
        for _ in range(given.rounds):
            for name in random.sample(sorted(contenders), len(contenders)):
                code = _DIFFERENT if name.endswith("changed") else 0
                found[name].append(timed(contenders[name], code=code))
    floor = [median(column) for column in zip(*found["cat of both"], strict=True)]
    for name, rows in found.items():
        seconds, of_processors, megabytes = (median(column) for column in zip(*rows, strict=True))
        print(
            f"{name:<16} {seconds:6.2f} s, {seconds / floor[0]:5.2f} x; processors "
            f"{of_processors:5.2f} s, {of_processors / floor[1]:5.2f} x; {megabytes:.0f} MB"
        )


if __name__ == "__main__":
    main()
