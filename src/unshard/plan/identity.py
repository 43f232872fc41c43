"""The digest of a plan: plans with equal digests write the same bytes.

A process that resumes or reuses an output compares digests with the process that planned it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np

from unshard.plan.operations import Plan

_BYTES = 16


def digest_of(plan: Plan, *others: object, label: Callable[[Path], str] = str) -> str:
    """Return the hexadecimal digest of the files and operations of a plan.

    It covers the paths of source files and the byte ranges in them, but not their contents.

    Args:
        plan: the plan.
        others: more values to cover, of the types that `_Hasher.feed` takes.
        label: returns the text to hash in place of the path of a source file.
    """
    hasher = _Hasher(label)
    hasher.feed(others)
    for file in plan.layout.files:
        hasher.feed((file.filename, file.header))
    hasher.feed((plan.paths, plan.copies, plan.tiled))
    return hasher.digest.hexdigest()


class _Hasher:
    """Feeds values to a digest, each with its type and size, so that no two look alike.

    Class names are part of the digest: renaming an operation changes the fingerprints in records.
    """

    def __init__(self, label: Callable[[Path], str]) -> None:
        self._label = label
        self.digest = hashlib.blake2b(digest_size=_BYTES)
        self._paths: dict[int, bytes] = {}

    def feed(self, value: object) -> None:
        """Add a value: arrays, texts, bytes, numbers, paths; tuples and dataclasses of those."""
        match value:
            case np.ndarray():
                self._add(f"{value.dtype.str}{value.shape}", value.tobytes())
            case bytes():
                self._add("bytes", value)
            case Path():
                self._add("path", self._label(value).encode(errors="surrogatepass"))
            case tuple() if type(value) is tuple and value and isinstance(value[0], Path):
                self._add("paths", self._digest_of_paths(value))
            case tuple():
                size = b"%d" % len(value) if type(value) is tuple else b""
                self._add(type(value).__name__, size)
                for item in value:
                    self.feed(item)
            case _ if is_dataclass(value):
                self._add(type(value).__name__, b"")
                for field in fields(value):
                    self.feed(getattr(value, field.name))
            case _:
                self._add(type(value).__name__, repr(value).encode(errors="surrogatepass"))

    def _add(self, kind: str, data: bytes) -> None:
        self.digest.update(f"{kind} {len(data)}\n".encode())
        self.digest.update(data)

    def _digest_of_paths(self, paths: tuple[Path, ...]) -> bytes:
        """Return the digest of a tuple of paths, cached because all tensors share the tuple."""
        if id(paths) not in self._paths:
            text = "\0".join(map(self._label, paths)).encode(errors="surrogatepass")
            self._paths[id(paths)] = hashlib.blake2b(text, digest_size=_BYTES).digest()
        return self._paths[id(paths)]
