"""A Ray cluster on this machine, with pretended GPUs, in a process that has Ray.

`python -m evaluation.ray_nodes DIRECTORY GPUS...` starts a node with so many GPUs for each number,
the first of which is the head, and prints the cluster's address. A node GPUS:DISK:PLACE has a disk
of its own: there, and nowhere else, PLACE is the directory DISK, by a mount namespace. "kill N" on
stdin kills node N (0: the newest) as if its machine were lost, and "add GPUS" adds another; "done"
answers both. The end of stdin ends the cluster. Nothing is written outside of the directory, and
nothing is reported to anyone.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from evaluation.running import child_environment

__all__ = ["PYTHON", "Nodes", "needs_ray", "nodes", "with_mounts"]

Started = TypeVar("Started")

PYTHON = os.environ.get("UNSHARD_RAY_PYTHON", "")

# On a machine that does other things, too, a node takes long to start, and to answer.
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",
}

needs_ray = pytest.mark.skipif(
    not PYTHON, reason="UNSHARD_RAY_PYTHON names no interpreter with ray 2.60.0"
)


@dataclass
class Nodes:
    """A cluster: the process that has it, the directory of its files, and its address."""

    process: "subprocess.Popen[str]"
    directory: Path
    address: str = ""

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Return the next line that begins with our mark; Ray prints others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("nodes: "):
                return line.removeprefix("nodes: ").strip()
        raise AssertionError("the cluster has ended")

    def kill(self, number: int) -> None:
        assert self.ask(f"kill {number}") == "done"

    def add(self, gpus: int, *mount: Path) -> None:
        assert self.ask(f"add {':'.join(map(str, (gpus, *mount)))}") == "done"


_CLONE_NEWNS = 0x00020000


@cache
def with_mounts() -> list[str] | None:
    """Return what begins a command that may mount; None if this machine does not allow it."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") is None:
        return None
    done = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    return None if done.returncode else unshare


@contextmanager
def nodes(*gpus: int, disks: Sequence[Path] = (), place: Path | None = None) -> Iterator[Nodes]:
    """Run a cluster whose nodes have so many pretended GPUs each.

    With `disks` each node sees another directory at `place`.
    """
    given = [str(count) for count in gpus]
    if disks:
        given = [f"{count}:{disk}:{place}" for count, disk in zip(gpus, disks, strict=True)]
    # The paths of Ray's sockets may have 107 bytes, which pytest's directories use up.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        begin = with_mounts() or [] if disks else []
        command = [*begin, PYTHON, "-m", "evaluation.ray_nodes", directory, *given]
        process = subprocess.Popen(
            command,
            env=child_environment() | VARIABLES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            made = Nodes(process, Path(directory))
            made.address = made.answer()
            yield made


def main() -> None:
    """Run a cluster until the end of stdin."""
    import ray._private.utils as rays
    from ray.cluster_utils import Cluster

    # It would write into /tmp/ray, whatever its directory.
    rays.write_ray_address = lambda *_: None
    directory, head, *others = sys.argv[1:]
    size = {"num_cpus": 8, "include_dashboard": False, "temp_dir": directory}
    count = with_disk(head)
    cluster = start(
        lambda: Cluster(initialize_head=True, head_node_args=size | {"num_gpus": count})
    )

    def add(node: str) -> object:
        count = with_disk(node)
        return start(lambda: cluster.add_node(num_cpus=8, num_gpus=count))

    workers = [add(node) for node in others]
    print(f"nodes: {cluster.address}", flush=True)  # noqa: T201
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                cluster.remove_node(workers[int(number) - 1], allow_graceful=False)
            case ["add", node]:
                workers.append(add(node))
        print("nodes: done", flush=True)  # noqa: T201
    cluster.shutdown()


def with_disk(node: str) -> int:
    """Let what is started from now on see a node's disk, and return its number of GPUs."""
    count, *mount = node.split(":")
    if mount:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", *mount], check=True)
    return int(count)


def start(begin: Callable[[], Started]) -> Started:
    """Start a node; Ray gives up after 30 s, which a busy machine may need."""
    for _ in range(5):
        try:
            return begin()
        except Exception as error:
            if "timed out" not in str(error):
                raise
    return begin()


if __name__ == "__main__":
    main()
