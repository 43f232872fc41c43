"""Compare a merge of a checkpoint in a bucket with obstore's own get (and put) of the same files.

The bucket is on moto's S3 server, in a process of its own on this machine, or on a server that runs
already (`--endpoint`; then the environment has the keys). obstore gets the rank files one after
another, each by one request, and writes what arrives to disk, both sides durable; or puts it under
another name, in parts, as it does by default (`--into bucket`). Within a bucket the merge is made
twice: one lets the store copy weights itself, the other sends all of them. Every round runs all, in
another order, and the report has ratios of medians.

    python benchmarks/merge_from_bucket.py --gigabytes 0.4 --rounds 5
    python benchmarks/merge_from_bucket.py --into bucket

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
import asyncio
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from merge_against_cat import write_checkpoint

_BUCKET = "benchmark"
_SCRIPT = "import sys, unshard; unshard.merge(*sys.argv[1:], listener=lambda event: None)"
_WITHOUT_BOTO3 = f"import sys; sys.modules['boto3'] = None; {_SCRIPT}"


@contextmanager
def serving(endpoint: str | None) -> Iterator[str]:
    """Yield the address of a server, which the environment names, too; of moto's by default."""
    os.environ |= {"AWS_ALLOW_HTTP": "true"}
    if endpoint is not None:
        os.environ |= {"AWS_ENDPOINT_URL": endpoint}
        yield endpoint
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("moto_server"))
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            address = f"http://127.0.0.1:{port}"
            os.environ |= dict.fromkeys(keys, "none")
            os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}
            yield address
        finally:
            server.terminate()


def upload(files: list[Path], address: str) -> None:
    """Make the bucket, and put files into it, under their names."""
    import boto3

    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket=_BUCKET)
    for path in files:
        with path.open("rb") as body:
            client.put_object(Bucket=_BUCKET, Key=f"ckpt/{path.name}", Body=body)


def get(names: list[str], output: Path) -> None:
    """Get objects by obstore, and write them to disk."""
    from obstore.store import from_url

    store = from_url(f"s3://{_BUCKET}")
    output.mkdir()
    for name in names:
        with (output / name).open("wb") as file:
            for block in store.get(f"ckpt/{name}").stream():
                file.write(block)
            os.fsync(file.fileno())


def copy(names: list[str]) -> None:
    """Get objects by obstore, and put them under another name."""
    from obstore.store import from_url

    async def copy_all() -> None:
        store = from_url(f"s3://{_BUCKET}")
        for name in names:
            await store.put_async(f"output/{name}", await store.get_async(f"ckpt/{name}"))

    asyncio.run(copy_all())


def merge(script: str, output: str) -> None:
    """Merge as a user would, the interpreter's start included."""
    subprocess.run([sys.executable, "-c", script, f"s3://{_BUCKET}/ckpt", output], check=True)


def clear() -> None:
    """Remove what was written into the bucket."""
    from obstore.store import from_url

    store = from_url(f"s3://{_BUCKET}")
    for page in store.list("output"):
        for one in page:
            store.delete(one["path"])


def contenders(names: list[str], output: Path | None) -> dict[str, Callable[[], None]]:
    """Return what writes to disk, or within the bucket if there is no `output`."""
    if output is not None:
        return {
            "obstore": partial(get, names, output),
            "merge": partial(merge, _SCRIPT, str(output)),
        }
    address = f"s3://{_BUCKET}/output"
    return {
        "obstore": partial(copy, names),
        "merge": partial(merge, _WITHOUT_BOTO3, address),
        "merge, copied": partial(merge, _SCRIPT, address),
    }


def measure(names: list[str], output: Path | None, rounds: int) -> dict[str, float]:
    """Return the median seconds of each; the first round is not counted."""
    run = contenders(names, output)
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for number in range(rounds + 1):
        for name in random.sample(list(run), len(run)):
            os.sync()
            started = time.perf_counter()
            run[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
            clear() if output is None else shutil.rmtree(output)
    return {name: median(found) for name, found in seconds.items()}


def main() -> None:
    """Write a checkpoint, put it into the bucket, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--into", choices=["disk", "bucket"], default="disk")
    parser.add_argument("--endpoint", help="address of an S3 server; default: one of moto's")
    parser.add_argument("--directory", type=Path, help="where to write; default: TMPDIR")
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory(dir=given.directory)
    with folder as scratch, serving(given.endpoint) as address:
        place = Path(scratch) / "ckpt"
        place.mkdir()
        write_checkpoint(place, ranks=given.ranks, gigabytes=given.gigabytes, dim=0, run=0)
        files = sorted(place.iterdir())
        size = sum(path.stat().st_size for path in files)
        upload(files, address)
        shutil.rmtree(place)
        output = Path(scratch) / "output" if given.into == "disk" else None
        found = measure([path.name for path in files], output, given.rounds)
    for name, seconds in found.items():
        ratio = found["obstore"] / seconds
        print(f"{name:14} {seconds:6.2f} s  {size / seconds / 1e6:6.0f} MB/s  {ratio:5.2f} x")


if __name__ == "__main__":
    main()
