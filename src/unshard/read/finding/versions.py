"""Tells versions of a checkpoint apart: a step may be saved again.

Hard links, permissions, and files that are added next to the weights do not make a new version.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from unshard.read.format import Location
from unshard.stores.remote_path import RemotePath

_WEIGHTS = frozenset({".bin", ".ckpt", ".distcp", ".pt", ".pth", ".safetensors"})
NO_WEIGHTS = re.compile(
    r"optim(?:izer)?(?:_.*)?\.(?:pt|pth|bin|safetensors)"
    r"|extra_state_.*\.pt|data(?:loader(?:_state)?)?(?:_.*)?\.pt"  # verl, lmms-engine
    r"|(?:rng_state|random_states|scheduler|scaler|sampler)(?:_.*)?\.(?:pt|pth|pkl|bin)"
    r"|training_args\.bin"
)
"""The names of files of training state next to the weights."""

Stamps = Mapping[str, Sequence[int]]
"""Per file name: size, and mtime in ns or, in an object store, a number made of its ETag."""


def has_weights(name: str) -> bool:
    """Return whether a file of this name may have weights."""
    return PurePosixPath(name).suffix in _WEIGHTS and not NO_WEIGHTS.fullmatch(name)


def number_of(etag: str | None) -> int:
    """Return a number for an ETag, small enough that JSON keeps it exactly."""
    return int(hashlib.sha256((etag or "").encode()).hexdigest()[:13], 16)


def stamps_of(location: Location) -> Stamps:
    """Return the stamps of the files directly in the directories of the weights, or of its file.

    Raises:
        OSError: it has vanished.
        StoreError: the store cannot be reached, or does not allow it.
    """
    if location.place != location.weights_dir:
        return {location.place.name: _stamp_of(location.place)}
    paths = [path for root in location.roots for path in root.iterdir()]
    return {p.name: _stamp_of(p) for p in paths if has_weights(p.name) and p.is_file()}


def _stamp_of(path: Path) -> list[int]:
    status = path.stat()
    entry = path.bucket.entry(path.key) if isinstance(path, RemotePath) else None
    return [status.st_size, status.st_mtime_ns if entry is None else number_of(entry.etag)]


def fingerprint(stamps: Stamps) -> str:
    """Return an id of a version of a step; "" without stamps."""
    named = sorted((PurePosixPath(name).name, *stamp) for name, stamp in stamps.items())
    return hashlib.sha256(repr(named).encode()).hexdigest()[:16] if named else ""
