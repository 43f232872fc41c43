"""SHA-256 of tensors as in output files, by threads: hashing releases the interpreter lock."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from unshard.engines.files import PieceReader
from unshard.engines.threads import Resources, divide, one_by_one, work_off
from unshard.plan.pieces import Contents
from unshard.progress import Listener

_WORKER_BYTES = 8 * 1024 * 1024  # a block, and a slab of the largest size with its sources

Hashed = tuple[str, Sequence[Contents]]
"""The name of a tensor, and its contents in order."""


def digest_contents(
    tensors: Iterable[Hashed], path: Path, resources: Resources, listener: Listener
) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each tensor, in hexadecimal, by name.

    One thread hashes a whole tensor. `path` is the path of the model, for errors; a generator of
    tensors is consumed lazily.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    digests: dict[str, str] = {}

    class Hasher:
        def __init__(self) -> None:
            self.reader = PieceReader(path, cache_bytes=0, at_once=1)

        def close(self) -> None:
            self.reader.close()

        def do(self, job: Hashed) -> int:
            name, parts = job
            digest = hashlib.sha256()
            for part in parts:
                for block in self.reader.blocks(part):
                    digest.update(block)
            digests[name] = digest.hexdigest()
            return sum(part.size for part in parts)

    most = max(1, resources.memory_bytes // _WORKER_BYTES)
    workers = min(divide(resources).workers, most)
    work_off(one_by_one(tensors), listener, workers, Hasher)
    return digests
