"""What a plan makes, as one short text: plans with the same one write the same bytes.

Two processes compare by it what one of them planned and the other goes on with.
"""

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from unshard.plan.operations import Plan

_BYTES = 16


def digest_of(plan: Plan, *others: object, called: Callable[[Path], str] = str) -> str:
    """Return the digest of the files of a plan and of every operation, in hexadecimal.

    What the source files contain is not part of it, only their paths and the byte ranges in them.

    Args:
        plan: what is made.
        others: what else is part of it: values that `_Feeder.feed` takes.
        called: what to take for the path of a source file.
    """
    feeder = _Feeder(called)
    feeder.feed(others)
    for file in plan.layout.files:
        feeder.feed((file.filename, file.header))
    feeder.feed((plan.paths, plan.copies, plan.tiled))
    return feeder.found.hexdigest()


class _Feeder:
    """Feeds values to a digest, each with its type and size, so that no two look alike."""

    def __init__(self, called: Callable[[Path], str]) -> None:
        self._called = called
        self.found = hashlib.blake2b(digest_size=_BYTES)
        self._paths: dict[int, bytes] = {}

    def feed(self, value: object) -> None:
        """Add a value: arrays, texts, bytes, numbers, paths; tuples and dataclasses of those."""
        match value:
            case np.ndarray():
                self._add(f"{value.dtype.str}{value.shape}", value.tobytes())
            case bytes():
                self._add("bytes", value)
            case Path():
                self._add("path", self._called(value).encode(errors="surrogatepass"))
            case tuple() if type(value) is tuple and value and isinstance(value[0], Path):
                self._add("paths", self._digest_of_paths(value))
            case tuple():
                size = b"%d" % len(value) if type(value) is tuple else b""
                self._add(type(value).__name__, size)
                for one in value:
                    self.feed(one)
            case _ if is_dataclass(value):
                self._add(type(value).__name__, b"")
                for field in fields(value):
                    self.feed(getattr(value, field.name))
            case _:
                self._add(type(value).__name__, repr(value).encode(errors="surrogatepass"))

    def _add(self, kind: str, data: bytes) -> None:
        self.found.update(f"{kind} {len(data)}\n".encode())
        self.found.update(data)

    def _digest_of_paths(self, paths: tuple[Path, ...]) -> bytes:
        """Return the digest of the files of a checkpoint, which all its tensors share."""
        known = self._paths.get(id(paths))
        if known is None:
            text = "\0".join(map(self._called, paths)).encode(errors="surrogatepass")
            known = self._paths[id(paths)] = hashlib.blake2b(text, digest_size=_BYTES).digest()
        return known
