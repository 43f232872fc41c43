"""Compare merges from, into and within an object store with obstore's own get and put.

obstore gets the rank files one after another, each by one request, and writes what arrives to disk,
both sides durable (`--way from`); or puts those files, in parts, as it does by default (`into`); or
gets each and puts it under another name (`within`). Both sides are processes of their own. If the
merge can have the store copy weights itself, it is made once more without. Every round runs all, in
another order; the report has medians of the rounds' ratios, and the most memory that a process had.
All have their modules compiled, as installed packages do, whatever PYTHONDONTWRITEBYTECODE says.

    python benchmarks/merge_from_bucket.py --endpoint http://127.0.0.1:9000 --way within

The environment has the keys of the server. Without `--endpoint` the server is moto's, which reads
the whole object for every range: that shows whether this runs, but measures moto.

The checkpoint is written by real torch: DTensors on a fake process group, in one process.
"""

import argparse
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
from operator import truediv
from pathlib import Path
from statistics import median

from merge_against_cat import write_checkpoint

_BUCKET = "benchmark"
_MERGE = (
    "import sys, unshard; unshard.merge(*sys.argv[1:], config='none', listener=lambda event: None)"
)
_WITHOUT_BOTO3 = f"import sys; sys.modules['boto3'] = None; {_MERGE}"
_GET = """
import os, sys
from pathlib import Path
from obstore.store import from_url
store, output = from_url(sys.argv[1]), Path(sys.argv[2])
output.mkdir()
for one in store.list_with_delimiter()["objects"]:
    with (output / one["path"]).open("wb") as file:
        for block in store.get(one["path"]).stream():
            file.write(block)
        os.fsync(file.fileno())
"""
_PUT = """
import sys
from pathlib import Path
from obstore.store import from_url
store = from_url(sys.argv[2])
for path in sorted(Path(sys.argv[1]).iterdir()):
    store.put(path.name, path)
"""
_GET_AND_PUT = """
import asyncio, sys
from obstore.store import from_url
async def copy():
    source, output = from_url(sys.argv[1]), from_url(sys.argv[2])
    for one in source.list_with_delimiter()["objects"]:
        await output.put_async(one["path"], await source.get_async(one["path"]))
asyncio.run(copy())
"""
_SAY_MEMORY = """
import os, re
print(re.search("VmHWM.*", open("/proc/self/status").read())[0], flush=True)
os._exit(0)  # obstore's asynchronous puts sometimes abort at an interpreter's end
"""
_OBSTORE = {"from": _GET, "into": _PUT, "within": _GET_AND_PUT}


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
    if _BUCKET not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=_BUCKET)
    for path in files:
        with path.open("rb") as body:
            client.put_object(Bucket=_BUCKET, Key=f"ckpt/{path.name}", Body=body)


def run(script: str, *arguments: str) -> int:
    """Run a script in a process of its own; return the most memory that it had, bytes."""
    command = [sys.executable, "-c", script + _SAY_MEMORY, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-2]) * 1024


def clear(folder: str) -> None:
    """Remove a folder from the bucket."""
    from obstore.store import from_url

    store = from_url(f"s3://{_BUCKET}")
    for page in store.list(folder):
        for one in page:
            store.delete(one["path"])


def contenders(way: str, source: str, output: str) -> dict[str, Callable[[], int]]:
    """Return what writes the output, by name."""
    found: dict[str, Callable[[], int]] = {
        "obstore": partial(run, _OBSTORE[way], source, output),
        "merge": partial(run, _WITHOUT_BOTO3, source, output),
    }
    if way == "within":
        found["merge, copied"] = partial(run, _MERGE, source, output)
    return found


def measure(
    run: dict[str, Callable[[], int]], remove: Callable[[], None], rounds: int
) -> dict[str, tuple[list[float], int]]:
    """Return the seconds of each round and the most memory of each; the first does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in run}
    memory: dict[str, list[int]] = {name: [] for name in run}
    for number in range(rounds + 1):
        for name in random.sample(list(run), len(run)):
            os.sync()
            started = time.perf_counter()
            memory[name].append(run[name]())
            if number:
                seconds[name].append(time.perf_counter() - started)
            remove()
    return {name: (found, max(memory[name])) for name, found in seconds.items()}


def main() -> None:
    """Write a checkpoint, put it into the bucket, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=["from", "into", "within"], default="from")
    parser.add_argument("--endpoint", help="address of an S3 server; default: one of moto's")
    parser.add_argument("--directory", type=Path, help="where to write; default: TMPDIR")
    given = parser.parse_args()
    folder = tempfile.TemporaryDirectory(dir=given.directory)
    with folder as scratch, serving(given.endpoint) as address:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(scratch) / "compiled")
        place = Path(scratch) / "ckpt"
        place.mkdir()
        write_checkpoint(place, ranks=given.ranks, gigabytes=given.gigabytes, dim=0, run=0)
        size = sum(path.stat().st_size for path in place.iterdir())
        upload(sorted(place.iterdir()) if given.way != "into" else [], address)
        source = str(place) if given.way == "into" else f"s3://{_BUCKET}/ckpt"
        disk = Path(scratch) / "output"
        output = str(disk) if given.way == "from" else f"s3://{_BUCKET}/output"
        remove = partial(shutil.rmtree, disk) if given.way == "from" else partial(clear, "output")
        found = measure(contenders(given.way, source, output), remove, given.rounds)
        clear("ckpt")
    for name, (seconds, memory) in found.items():
        typical = median(seconds)
        ratio = median(map(truediv, found["obstore"][0], seconds))
        speed = f"{size / typical / 1e6:6.0f} MB/s  {ratio:5.2f} x"
        print(f"{name:14} {typical:6.2f} s  {speed}  {memory / 1e6:5.0f} MB of memory")


if __name__ == "__main__":
    main()
