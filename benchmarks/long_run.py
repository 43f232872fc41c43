"""Compare `unshard inspect` of a run with 1,000 steps of 64 ranks with `ls -R` of it.

Every step has real rank files: those of one step, which hard links put into all others. Both are
run in turns on a warm cache. The time that Python and the imports take is part of `inspect`'s.

    python benchmarks/long_run.py --steps 1000 --ranks 64 --rounds 5
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from ranks import save_ranks, some_tensors


def make_run(run: Path, steps: int, ranks: int) -> None:
    """Write one step and link its files into the others."""
    first = save_ranks(run / "global_step_1" / "actor", some_tensors(), ranks)
    for step in range(2, steps + 1):
        place = run / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        for file in first.iterdir():
            os.link(file, place / file.name)


def seconds(command: Sequence[str]) -> float:
    """Return how long a command takes."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print both medians, their difference and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, chosen.steps, chosen.ranks)
        commands = {
            "ls -R": ["ls", "-R", str(run)],
            "inspect": [sys.executable, "-m", "unshard", "inspect", str(run)],
            "inspect of one step": [
                *(sys.executable, "-m", "unshard", "inspect"),
                str(run / f"global_step_{chosen.steps}"),
            ],
        }
        for command in commands.values():  # warm
            seconds(command)
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(chosen.rounds):
            for name, command in commands.items():
                taken[name].append(seconds(command))
    middle = {name: median(times) for name, times in taken.items()}
    for name, value in middle.items():
        print(f"{name}: {value:.2f} s")
    print(f"inspect - ls: {middle['inspect'] - middle['ls -R']:.2f} s")
    print(f"inspect / inspect of one step: {middle['inspect'] / middle['inspect of one step']:.2f}")


if __name__ == "__main__":
    main()
