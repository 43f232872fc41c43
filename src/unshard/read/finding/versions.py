"""Which version of a checkpoint is there: a step may be saved again.

Hard links, permissions, and files that are added next to the weights make no other version.
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
"""Size of each file, and mtime in ns or, in an object store, a number made of its ETag, by name."""


def has_weights(name: str) -> bool:
    """Return whether a file of this name may have weights."""
    return PurePosixPath(name).suffix in _WEIGHTS and not NO_WEIGHTS.fullmatch(name)


def number_of(etag: str | None) -> int:
    """Return a number that JSON keeps as it is."""
    return int(hashlib.sha256((etag or "").encode()).hexdigest()[:13], 16)


def stamps_of(location: Location) -> Stamps:
    """Return the stamps of the files directly in the directories of the weights, or of its one.

    Raises:
        OSError: it has vanished.
        StoreError: the store cannot be reached, or does not allow it.
    """
    if location.place != location.weights_dir:
        return {location.place.name: _stamp_of(location.place)}
    inside = [path for root in location.roots for path in root.iterdir()]
    return {one.name: _stamp_of(one) for one in inside if has_weights(one.name) and one.is_file()}


def _stamp_of(path: Path) -> list[int]:
    status = path.stat()
    entry = path.bucket.entry(path.key) if isinstance(path, RemotePath) else None
    return [status.st_size, status.st_mtime_ns if entry is None else number_of(entry.etag)]


def fingerprint(stamps: Stamps) -> str:
    """Return what distinguishes a checkpoint from another of the same step and name; "" of none."""
    named = sorted((PurePosixPath(name).name, *of) for name, of in stamps.items())
    return hashlib.sha256(repr(named).encode()).hexdigest()[:16] if named else ""
