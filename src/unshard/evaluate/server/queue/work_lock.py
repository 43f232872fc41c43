"""The lock on a work directory: one server at a time uses it."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.process import Process
from unshard.evaluate.run_folder import lock_file, unlock
from unshard.evaluate.server.processes.table import identify, is_alive

_LOCK_NAME = "server.lock"
_INHERITED_S, _PAUSE_S = 30.0, 0.05


def lock(work_dir: Path) -> int:
    """Lock a directory against other servers; return the descriptor of the lock.

    A child that a killed server had forked holds the inherited lock, and the port, until it calls
    exec. So a lock whose owner is dead is waited for.

    Raises:
        UsageError: another server uses it.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / _LOCK_NAME
    deadline = time.monotonic() + _INHERITED_S
    while (fd := lock_file(path)) is None:
        if _has_living_owner(path) or time.monotonic() > deadline:
            raise UsageError(
                f"{work_dir}: another server is using it", hint="choose another directory"
            )
        time.sleep(_PAUSE_S)
    owner = identify(os.getpid(), gpus=(), directory="")
    with suppress(OSError):  # a full disk
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(owner)).encode(), 0)
    return fd


@contextmanager
def locked(work_dir: Path) -> Iterator[None]:
    """Lock a directory in a `with` block, as `lock` does."""
    fd = lock(work_dir)
    try:
        yield
    finally:
        unlock(fd)


def _has_living_owner(path: Path) -> bool:
    """Return whether the server that wrote a lock file is alive; True if it cannot be read."""
    try:
        return is_alive(Process(**json.loads(path.read_bytes())))
    except (OSError, ValueError, TypeError):
        return True
