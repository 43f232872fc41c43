"""Compare `unshard delta` with `cat` of both checkpoints and what the compressor itself takes.

    python benchmarks/delta_against_cat.py --gigabytes 1 --rounds 5

As in merge_against_cat.py: real rank files, all contenders in turns, medians. Of the values, which
are bfloat16, 2 % differ in their last bit. "zstd" compresses the XOR, which is in memory, tensor by
tensor, with as many threads and at the same level.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import zstandard
from merge_against_cat import cat, timed

_SIDE = 4096


def write_checkpoints(places: list[Path], gigabytes: float) -> list[np.ndarray]:
    """Write two checkpoints of two ranks; return the XOR of each tensor."""
    import torch
    from reshard_against_cat import one_of, part_of

    count = max(1, round(gigabytes * 1e9 / (2 * _SIDE * _SIDE)))
    changes = []
    names = [f"model.layers.{number}.weight" for number in range(count)]
    states: list[list[dict[str, torch.Tensor]]] = [[{}, {}], [{}, {}]]
    for name in names:
        whole = torch.empty(_SIDE, _SIDE, dtype=torch.bfloat16).uniform_(-1, 1)
        change = (torch.rand(_SIDE, _SIDE) < 0.02).to(torch.int16)
        after = (whole.view(torch.int16) ^ change).view(torch.bfloat16)
        changes.append(change.numpy().copy())
        for rank in (0, 1):
            states[0][rank][name] = whole.chunk(2)[rank].clone()
            states[1][rank][name] = after.chunk(2)[rank].clone()
    for place, ranks in zip(places, states, strict=True):
        place.mkdir()
        for rank, state in enumerate(ranks):
            with one_of(2, rank) as mesh:
                sharded = {name: part_of(one, mesh) for name, one in state.items()}
                torch.save(sharded, place / f"model_world_size_2_rank_{rank}.pt")
    return changes


def delta(places: list[Path], target: Path) -> None:
    """Run the command as a user would, the interpreter's start included."""
    command = [sys.executable, "-m", "unshard", "delta", *map(str, places), str(target)]
    subprocess.run([*command, "--quiet", "--config", "none"], check=True)


def compress(changes: list[np.ndarray], target: Path) -> None:
    """Compress what changed, in memory, and write it."""
    from unshard.engines.threads import default_workers

    with ThreadPoolExecutor(default_workers()) as pool:
        frames = pool.map(lambda one: zstandard.compress(one.data, 1), changes)
        target.write_bytes(b"".join(frames))


def main() -> None:
    """Write the checkpoints, measure, print times and sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        places = [Path(folder) / name for name in ("before", "after")]
        changes = write_checkpoints(places, options.gigabytes)
        sources = [path for place in places for path in sorted(place.glob("*.pt"))]
        contenders: dict[str, Callable[[Path], None]] = {
            "cat of both": lambda target: cat(sources, target),
            "zstd": lambda target: compress(changes, target),
            "unshard delta": lambda target: delta(places, target),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        sizes: dict[str, int] = {}
        for number in range(options.rounds + 1):
            for name, run in contenders.items():
                target = Path(folder) / "output"
                subprocess.run(["sync"], check=True)
                took, user, system = timed(run, target)
                if number:  # the first round warms the page cache
                    seconds[name].append((took, user + system))
                files = [target] if target.is_file() else list(target.glob("*.safetensors"))
                sizes[name] = sum(one.stat().st_size for one in files)
                shutil.rmtree(target) if target.is_dir() else target.unlink()
    for name, values in seconds.items():
        took, used = (median(column) for column in zip(*values, strict=True))
        size = f"{sizes[name] / 1e6:9.2f} MB"
        print(f"{name:<14} {took:6.2f} s, {used:6.2f} s of the processors, {size}")
    for place, what in enumerate(("time", "processors' time")):
        cat_s, zstd_s, delta_s = (
            median(one[place] for one in values) for values in seconds.values()
        )
        ratio = delta_s / (cat_s + zstd_s)
        print(f"{what}: unshard delta takes {ratio:.2f} x cat of both and zstd together")
    print(f"and has {sizes['unshard delta'] / sizes['zstd']:.3f} x the bytes of zstd")


if __name__ == "__main__":
    main()
