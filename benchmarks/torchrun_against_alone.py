"""Compare `torchrun … convert_fsdp_to_hf` with the same command alone: time, and memory.

The rounds interleave all contenders; the report has medians and their ratios. The time that
torchrun itself takes to start is measured with processes that do nothing, and subtracted. Memory is
the largest PSS of a process (what it shares with others is divided among them), torchrun's agent
left out.

    python benchmarks/torchrun_against_alone.py --gigabytes 1.26 --rounds 5

Needs Linux (`/proc/PID/smaps_rollup`).
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from merge_against_cat import write_checkpoint

_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
_LOOK_S = 0.02


def children(pid: int) -> list[int]:
    """Return the processes that torchrun has started; one is a copy of it at first."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [int(one) for one in pids if Path(f"/proc/{one}/cmdline").read_bytes() != own]
    except OSError:
        return []


def pss(pid: int) -> int:
    """Return the proportional set size of a process, bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def run(command: Sequence[str], *, launched: bool) -> tuple[float, int]:
    """Run a command; return its seconds, and the bytes of its largest process."""
    largest = 0
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            pids = children(child.pid) if launched else [child.pid]
            largest = max([largest, *map(pss, pids)])
            time.sleep(_LOOK_S)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {child.returncode}")
    return time.perf_counter() - started, largest


def measure(checkpoint: Path, work: Path, counts: Sequence[int], rounds: int) -> None:
    """Print medians and ratios."""
    target, nothing = work / "output", work / "nothing.py"
    nothing.touch()
    convert: tuple[str, ...]
    convert = ("-m", "unshard.compat.convert_fsdp_to_hf", "--checkpoint_path", str(checkpoint))
    convert = (*convert, "--actor_subdir", ".", "--output_path", str(target))
    contenders: dict[str, tuple[str, ...]] = {"alone": (sys.executable, *convert)}
    for count in counts:
        launcher = (*_TORCHRUN, f"--nproc_per_node={count}")
        contenders[f"nothing, {count}"] = (*launcher, str(nothing))
        contenders[f"torchrun, {count}"] = (*launcher, *convert)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, int] = dict.fromkeys(contenders, 0)
    for number in range(rounds + 1):
        for name, command in contenders.items():
            subprocess.run(["sync"], check=True)
            took, largest = run(command, launched=name != "alone")
            if number:  # the first round warms the page cache
                seconds[name].append(took)
                memory[name] = max(memory[name], largest)
            shutil.rmtree(target, ignore_errors=True)
    for name, values in seconds.items():
        shown = " ".join(f"{value:.2f}" for value in values)
        print(f"  {name:<12} {shown} s; largest process {memory[name] / 1e6:.0f} MB")
    alone = median(seconds["alone"])
    for count in counts:
        start, whole = (median(seconds[f"{what}, {count}"]) for what in ("nothing", "torchrun"))
        print(f"  {count} processes: {(whole - start) / alone:.2f} x alone, and torchrun's start")


def main() -> None:
    """Write a checkpoint, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.26)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        checkpoint = Path(folder) / "global_step_1"
        checkpoint.mkdir()
        write_checkpoint(
            checkpoint, ranks=options.ranks, gigabytes=options.gigabytes, dim=0, run=1 << 20
        )
        # Without a config.json the command would stop; of this family no names are known to check.
        (checkpoint / "config.json").write_text('{"model_type": "measured"}', encoding="utf-8")
        measure(checkpoint, Path(folder), options.processes, options.rounds)


if __name__ == "__main__":
    main()
