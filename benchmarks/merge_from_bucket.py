"""Compare a merge of a checkpoint in a bucket with obstore's own get of the same files, to disk.

The bucket is on moto's S3 server, in a process of its own on this machine. obstore gets the rank
files one after another, each by one request, and writes what arrives; both sides are made durable.
Every round runs both, in another order, and the report has ratios of medians.

    python benchmarks/merge_from_bucket.py --gigabytes 0.4 --rounds 5

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
from pathlib import Path
from statistics import median

from merge_against_cat import write_checkpoint

_BUCKET = "benchmark"


@contextmanager
def serving() -> Iterator[str]:
    """Run moto's server; yield its address, which the environment names, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("moto_server"))
    command = [program, "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            address = f"http://127.0.0.1:{port}"
            os.environ |= {
                "AWS_ENDPOINT_URL": address,
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "none",
                "AWS_SECRET_ACCESS_KEY": "none",
            }
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


def merge(output: Path) -> None:
    """Run the command as a user would, the interpreter's start included."""
    command = [sys.executable, "-m", "unshard", "merge", f"s3://{_BUCKET}/ckpt", str(output)]
    subprocess.run([*command, "--quiet"], check=True)


def measure(
    contenders: dict[str, Callable[[Path], None]], output: Path, rounds: int
) -> dict[str, float]:
    """Return the median seconds of each; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            os.sync()
            started = time.perf_counter()
            contenders[name](output)
            if number:
                seconds[name].append(time.perf_counter() - started)
            shutil.rmtree(output)
    return {name: median(found) for name, found in seconds.items()}


def main() -> None:
    """Write a checkpoint, put it into the bucket, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: TMPDIR")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch, serving() as address:
        place = Path(scratch) / "ckpt"
        place.mkdir()
        write_checkpoint(place, ranks=given.ranks, gigabytes=given.gigabytes, dim=0, run=0)
        files = sorted(place.iterdir())
        size = sum(path.stat().st_size for path in files)
        names = [path.name for path in files]
        upload(files, address)
        shutil.rmtree(place)
        found = measure(
            {"obstore": lambda to: get(names, to), "merge": merge},
            Path(scratch) / "output",
            given.rounds,
        )
    for name, seconds in found.items():
        print(f"{name:8} {seconds:6.2f} s  {size / seconds / 1e6:6.0f} MB/s")
    print(f"throughput of a merge: {found['obstore'] / found['merge']:.2f} x obstore's")


if __name__ == "__main__":
    main()
