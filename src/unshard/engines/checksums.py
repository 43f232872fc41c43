"""SHA-256 of tensors, as output files have them, by threads: hashing releases the interpreter."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from unshard.engines.files import PieceReader
from unshard.engines.threads import Resources, divide, one_by_one, work_off
from unshard.plan.pieces import Contents
from unshard.progress import Listener

_WORKER_BYTES = 8 * 1024 * 1024  # a block, and a slab of the largest size with what is read for it

Hashed = tuple[str, Sequence[Contents]]
"""The name of a tensor, and what it consists of, one after another."""


def digest_contents(
    tensors: Iterable[Hashed], path: Path, resources: Resources, listener: Listener
) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor, in hexadecimal, by name.

    Each is hashed by one thread. `path` is that of the model, for errors; a generator of tensors is
    asked for one after another.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    digests: dict[str, str] = {}
    most = max(1, resources.memory_bytes // _WORKER_BYTES)
    workers = min(divide(resources).workers, most)
    work_off(one_by_one(tensors), listener, workers, partial(_Hasher, path, digests))
    return digests


class _Hasher:
    """Hashes tensors for one thread."""

    def __init__(self, path: Path, digests: dict[str, str]) -> None:
        self._reader = PieceReader(path, cache_bytes=0, at_once=1)
        self._digests = digests

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def do(self, job: Hashed) -> int:
        """Hash a tensor; return its bytes."""
        name, parts = job
        found = hashlib.sha256()
        for part in parts:
            for block in self._reader.blocks(part):
                found.update(block)
        self._digests[name] = found.hexdigest()
        return sum(part.size for part in parts)
