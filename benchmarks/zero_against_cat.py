"""Compare `unshard merge` of a ZeRO-3 checkpoint with `cat`, and with DeepSpeed's zero_to_fp32.

    python benchmarks/zero_against_cat.py --gigabytes 3 --rounds 3 --zero-to-fp32

The last needs DeepSpeed in this environment. All contenders run in turns, in an order of their own,
and are made durable; the report has medians as ratios to `cat`, and the peak memory of a process.
The files have the float32 weights and no moments, so that `cat` copies what a merge reads.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

from merge_against_cat import cat

_SHAPES = ((4096, 4096), (11008, 4096), (4096,))
_TAG = "global_step7"
_MERGE = ("-m", "unshard", "merge", "--quiet", "--names", "training")
_DEEPSPEED = ("-m", "deepspeed.utils.zero_to_fp32", "--safe_serialization")


def write_checkpoint(checkpoint: Path, *, ranks: int, gigabytes: float) -> list[Path]:
    """Write what a save of stage 3 leaves; return the files with the float32 weights."""
    import torch

    layer = {f"weight_{n}": torch.Size(shape) for n, shape in enumerate(_SHAPES)}
    size = 4 * sum(shape.numel() for shape in layer.values())
    shapes = {
        f"layers.{index}.{name}": shape
        for index in range(max(1, int(gigabytes * 1e9 / size)))
        for name, shape in layer.items()
    }
    folder = checkpoint / _TAG
    folder.mkdir(parents=True)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
    module = {"module": empty, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}}
    state = module | {"dp_world_size": ranks, "ds_config": config, "ds_version": "0.19.8"}
    count = sum(-(-shape.numel() // ranks) for shape in shapes.values())
    optim = []
    for rank in range(ranks):
        torch.save(state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        optim.append(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        flat = [torch.empty(count).uniform_(-1, 1)]
        inner = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": flat}
        torch.save({"optimizer_state_dict": inner}, optim[-1])
    (checkpoint / "latest").write_text(_TAG)
    return optim


def concatenated(sources: list[Path], target: Path) -> int:
    """Run `cat`; return 0, because its memory is not of interest."""
    cat(sources, target)
    return 0


def in_another_process(checkpoint: Path, ranks: int, gigabytes: float) -> list[Path]:
    """Let another process write the checkpoint: children would inherit the peak of this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(write_checkpoint, checkpoint, ranks=ranks, gigabytes=gigabytes).result()


def program(*arguments: str | Path) -> int:
    """Run Python with arguments; return the peak of its memory, bytes."""
    child = subprocess.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(map(str, arguments))}")
    return used.ru_maxrss * 1024


def main() -> None:
    """Write the checkpoint, measure, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zero-to-fp32", action="store_true", help="run DeepSpeed's script, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        sources = in_another_process(checkpoint, options.ranks, options.gigabytes)
        contenders: dict[str, Callable[[Path], int]] = {
            "cat": lambda target: concatenated(sources, target),
            "unshard merge": lambda target: program(*_MERGE, checkpoint, target),
            "unshard merge, bfloat16": lambda target: program(
                *_MERGE, checkpoint, target, "--dtype", "bfloat16"
            ),
        }
        if options.zero_to_fp32:
            contenders["zero_to_fp32"] = lambda target: program(*_DEEPSPEED, checkpoint, target)
        measure(contenders, Path(folder) / "output", options.rounds)


def measure(contenders: dict[str, Callable[[Path], int]], target: Path, rounds: int) -> None:
    """Run all contenders in turns, and print medians and peaks."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    peaks = dict.fromkeys(contenders, 0)
    order = list(contenders.items())
    for number in range(rounds + 1):
        random.shuffle(order)
        for name, run in order:
            subprocess.run(["sync"], check=True)
            before, started = os.times(), time.perf_counter()
            peaks[name] = max(peaks[name], run(target))
            subprocess.run(["sync"], check=True)
            took, after = time.perf_counter() - started, os.times()
            used = after.children_user - before.children_user
            used += after.children_system - before.children_system
            if number:  # the first round warms the page cache
                seconds[name].append((took, used))
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    base = [median(column) for column in zip(*seconds["cat"], strict=True)]
    for name, values in seconds.items():
        wall, used = (median(column) for column in zip(*values, strict=True))
        print(
            f"{name:<24} {wall / base[0]:.2f} x cat, {used / base[1]:.2f} x its CPU time "
            f"({used:.2f} s), peak {peaks[name] / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
