"""Compare `unshard average` of five bfloat16 checkpoints with `cat` of their files.

    python benchmarks/average_against_cat.py --gigabytes 1.33 --rounds 5 --before OTHER/src

As in merge_against_cat.py: real rank files, all contenders in turns, all sides durable. The report
has medians, in nanoseconds for each element that is read: on the clock, and of the processors. Next
to the average of equal weights there are one with coefficients and, of the first checkpoint, a cast
to float32. The start of Python, which does not depend on the size, is included.
"""

import argparse
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from merge_against_cat import cat, run_unshard, timed, write_checkpoint

_ITEMSIZE = 2


Contender = Callable[[Path], None]


def contenders_of(checkpoints: list[Path], before: Path | None) -> dict[str, Contender]:
    """Return what is compared, by name."""
    files = [sorted(checkpoint.glob("*.pt")) for checkpoint in checkpoints]
    several = list(map(str, checkpoints))
    weights = ",".join(str(number + 1) for number in range(len(checkpoints)))
    commands = {
        "average": ["average", *several],
        "average, coefficients": ["average", "--coefficients", weights, *several],
        "cast of the first": ["merge", str(checkpoints[0]), "--dtype", "float32"],
    }
    contenders: dict[str, Contender] = {"cat": partial(cat, list(chain.from_iterable(files)))}
    for name, command in commands.items():
        contenders[name] = partial(run_unshard, command, None)
        if before is not None:
            contenders[f"{name}, before"] = partial(run_unshard, command, before)
    return contenders


def main() -> None:
    """Write the checkpoints, measure, print nanoseconds for each element."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.33, help="of each checkpoint")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--dimension", type=int, choices=(0, 1), default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    parser.add_argument("--before", type=Path, default=None, help="the src of an earlier commit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        checkpoints = [Path(folder) / f"checkpoint-{n}" for n in range(options.count)]
        for checkpoint in checkpoints:
            checkpoint.mkdir()
            write_checkpoint(
                checkpoint,
                ranks=4,
                gigabytes=options.gigabytes,
                dim=options.dimension,
                run=1 << 12,
                dtype="bfloat16",
            )
        sizes = [sum(p.stat().st_size for p in one.glob("*.pt")) for one in checkpoints]
        contenders = list(contenders_of(checkpoints, options.before).items())
        costs: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in contenders}
        for number in range(options.rounds + 1):
            random.shuffle(contenders)
            for name, run in contenders:
                target = Path(folder) / "output"
                subprocess.run(["sync"], check=True)
                time.sleep(1)  # removing a large file goes on for a while
                wall, user, system = timed(run, target)
                if number:  # the first round warms the page cache
                    read = sizes[0] if name.startswith("cast") else sum(sizes)
                    elements = read / _ITEMSIZE / 1e9
                    costs[name].append((wall / elements, (user + system) / elements))
                shutil.rmtree(target) if target.is_dir() else target.unlink()
    for name, values in costs.items():
        wall, processors = (median(column) for column in zip(*values, strict=True))
        print(f"{name:<32}{wall:6.2f} ns on the clock, {processors:5.2f} ns of the processors")


if __name__ == "__main__":
    main()
