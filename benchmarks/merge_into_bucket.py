"""Compare a merge within a bucket with obstore's own get and put of the same files.

The bucket is on moto's S3 server, in a process of its own on this machine. obstore gets the rank
files one after another, and puts what arrives under another name, in parts, as it does by default.
Every round runs both, in another order, and the report has ratios of medians.

    python benchmarks/merge_into_bucket.py --gigabytes 0.4 --rounds 5

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from merge_against_cat import write_checkpoint
from merge_from_bucket import _BUCKET, serving, upload

_SCRIPT = "import sys, unshard; unshard.merge(*sys.argv[1:], listener=lambda event: None)"


def copy(names: list[str]) -> None:
    """Get objects by obstore, and put them under another name."""
    from obstore.store import from_url

    async def copy_all() -> None:
        store = from_url(f"s3://{_BUCKET}")
        for name in names:
            await store.put_async(f"output/{name}", await store.get_async(f"ckpt/{name}"))

    asyncio.run(copy_all())


def merge() -> None:
    """Merge as a user would, the interpreter's start included."""
    places = (f"s3://{_BUCKET}/ckpt", f"s3://{_BUCKET}/output")
    subprocess.run([sys.executable, "-c", _SCRIPT, *places], check=True)


def clear() -> None:
    """Remove what was written."""
    from obstore.store import from_url

    store = from_url(f"s3://{_BUCKET}")
    for page in store.list("output"):
        for one in page:
            store.delete(one["path"])


def measure(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            started = time.perf_counter()
            contenders[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
            clear()
    return {name: median(found) for name, found in seconds.items()}


def main() -> None:
    """Write a checkpoint, put it into the bucket, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, serving() as address:
        place = Path(scratch) / "ckpt"
        place.mkdir()
        write_checkpoint(place, ranks=given.ranks, gigabytes=given.gigabytes, dim=0, run=0)
        files = sorted(place.iterdir())
        size = sum(path.stat().st_size for path in files)
        upload(files, address)
        shutil.rmtree(place)
        names = [path.name for path in files]
        found = measure({"obstore": lambda: copy(names), "merge": merge}, given.rounds)
    for name, seconds in found.items():
        print(f"{name:8} {seconds:6.2f} s  {size / seconds / 1e6:6.0f} MB/s")
    print(f"throughput of a merge: {found['obstore'] / found['merge']:.2f} x obstore's")


if __name__ == "__main__":
    main()
