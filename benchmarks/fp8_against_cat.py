"""Compare `unshard merge --quantize fp8-block`, and the way back, with `cat` of the same bytes.

    python benchmarks/fp8_against_cat.py --gigabytes 1 --rounds 5

As in merge_against_cat.py: real rank files of float32, all contenders in turns, medians of ratios.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from merge_against_cat import cat, timed, write_checkpoint


def merge(checkpoint: Path, target: Path, *options: str) -> None:
    """Run the command as a user would, the interpreter's start included."""
    command = [sys.executable, "-m", "unshard", "merge", str(checkpoint), str(target), "--quiet"]
    command += ["--config", "none"]
    subprocess.run([*command, *options], check=True)


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, quantised = Path(folder) / "checkpoint", Path(folder) / "fp8"
        checkpoint.mkdir()
        write_checkpoint(checkpoint, ranks=4, gigabytes=options.gigabytes, dim=0, run=1 << 20)
        merge(checkpoint, quantised, "--quantize", "fp8-block")
        sources = sorted(checkpoint.glob("*.pt"))
        contenders: dict[str, Callable[[Path], None]] = {
            "cat": lambda target: cat(sources, target),
            "float32 -> bfloat16": lambda target: merge(checkpoint, target, "--dtype", "bfloat16"),
            "float32 -> FP8": lambda target: merge(checkpoint, target, "--quantize", "fp8-block"),
            "FP8 -> bfloat16": lambda target: merge(quantised, target, "--dtype", "bfloat16"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(options.rounds + 1):
            for name, run in contenders.items():
                target = Path(folder) / "output"
                subprocess.run(["sync"], check=True)
                took, _, _ = timed(run, target)
                if number:  # the first round warms the page cache
                    seconds[name].append(took)
                shutil.rmtree(target) if target.is_dir() else target.unlink()
    unit = median(seconds["cat"])
    for name, values in seconds.items():
        print(f"{name:<20} {median(values) / unit:.2f} x cat of the float32")


if __name__ == "__main__":
    main()
