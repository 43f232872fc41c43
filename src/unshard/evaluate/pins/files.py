"""Which files of a checkpoint a pin keeps, and a listing of them that shows whether it changed.

A pin keeps weights of every kind, config and tokenizer. It leaves out the state of optimizer,
dataloader and random generators, and files whose names are not text. The names are those of the
writers that `read.finding.discover` lists. No file is opened.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unshard.containers.json_file import is_text
from unshard.evaluate.run_folder import STATE

__all__ = [
    "Identity",
    "Listing",
    "changed_files",
    "fingerprint",
    "identity",
    "list_checkpoint",
    "read_stamps",
]

_GRAINS_NS = (1, 100, 1_000, 1_000_000_000)  # of the times that file systems keep

_LEFT_OUT_FOLDERS = re.compile(
    r"optim(?:izer)?(?:_\d+)?"  # NeMo AutoModel, lmms-engine, accelerate
    r"|extra_state|dataloader(?:_state)?"  # lmms-engine, NeMo AutoModel
    r"|train|rng|eval"  # OLMo-core, NeMo AutoModel; results of lmms-engine
    r"|merged|" + STATE + r"|\.cache"
)
_LEFT_OUT_FILES = re.compile(
    r"optim(?:izer)?(?:_.*)?\.(?:pt|pth|bin|safetensors)"
    r"|extra_state_.*\.pt|data(?:loader(?:_state)?)?(?:_.*)?\.pt"  # verl, lmms-engine
    r"|(?:rng_state|random_states|scheduler|scaler|sampler)(?:_.*)?\.(?:pt|pth|pkl|bin)"
    r"|.*_optim_states\.pt"  # DeepSpeed
    r"|training_args\.bin"
)

_WEIGHTS = frozenset({".bin", ".ckpt", ".distcp", ".pt", ".pth", ".safetensors"})

Identity = tuple[int, int, int]  # inode, size in bytes, mtime in ns


@dataclass(frozen=True, slots=True)
class Listing:
    """The files and folders of a checkpoint at one moment.

    Attributes:
        files: what a pin keeps, by path relative to the checkpoint.
        folders: mtime in ns of every directory that was read; any entry that comes or goes
            changes it.
        lost: weights that are links to nothing, by path relative to the checkpoint.
    """

    files: dict[str, Identity]
    folders: dict[str, int]
    lost: list[str]


def identity(path: Path) -> Identity:
    """Return what distinguishes a file from one that replaced it or was rewritten in place."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def changed_files(checkpoint: Path, files: Mapping[str, Identity]) -> list[str]:
    """Return the files that were rewritten in place, replaced or removed.

    Some mounts give files other inode numbers, or coarser times. If no file has its inode number,
    sizes and times decide; a time that was rounded down to a coarser grain counts as equal.

    Args:
        checkpoint: a directory, or a file that is one.
        files: what they were, by path relative to the checkpoint.
    """
    is_folder = checkpoint.is_dir()
    now = {name: _identity_of(checkpoint / name if is_folder else checkpoint) for name in files}
    is_numbered = any(found and found[0] == files[name][0] for name, found in now.items())
    return [
        name
        for name, found in now.items()
        if found is None or not _is_same(found, files[name], is_numbered=is_numbered)
    ]


def _identity_of(path: Path) -> Identity | None:
    try:
        return identity(path)
    except OSError:
        return None


def _is_same(now: Identity, was: Identity, *, is_numbered: bool) -> bool:
    (inode, size, mtime), (old_inode, old_size, old_mtime) = now, was
    is_file = inode == old_inode or not is_numbered
    earlier, later = sorted((mtime, old_mtime))
    is_time = any(earlier == later // grain * grain for grain in _GRAINS_NS)
    return is_file and size == old_size and is_time


def list_checkpoint(checkpoint: Path) -> Listing:
    """List a checkpoint: a directory, or a file that is one (then named by its own name).

    Raises:
        FileNotFoundError: it is gone, or a file went while it was listed.
    """
    if not checkpoint.is_dir():
        return Listing({checkpoint.name: identity(checkpoint)}, {}, [])
    listing = Listing({}, {}, [])
    left, seen = [PurePosixPath()], set[int]()
    while left:
        inside = left.pop()
        left += _list_folder(checkpoint / inside, inside, listing, seen=seen)
    return listing


def read_stamps(checkpoint: Path) -> dict[str, list[int]]:
    """Return size, and mtime in ns, of the files of weights, by path relative to the checkpoint.

    A pin shares them with its original. Empty if the checkpoint is gone.
    """
    try:
        files = list_checkpoint(checkpoint).files
    except OSError:
        return {}
    paths = {name: [size, mtime] for name, (_, size, mtime) in files.items()}
    return {name: of for name, of in paths.items() if PurePosixPath(name).suffix in _WEIGHTS}


def fingerprint(stamped: Mapping[str, Sequence[int]]) -> str:
    """Return what distinguishes a checkpoint from another of the same step and name.

    Args:
        stamped: see `read_stamps`; if it is empty, so is the fingerprint.
    """
    stamps = sorted((PurePosixPath(name).name, *of) for name, of in stamped.items())
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16] if stamps else ""


def _list_folder(
    folder: Path, inside: PurePosixPath, into: Listing, *, seen: set[int]
) -> list[PurePosixPath]:
    """List a folder; return the folders in it."""
    status, folders = folder.stat(), []
    if status.st_ino in seen:
        return []  # a link back up
    seen.add(status.st_ino)
    into.folders[str(inside)] = status.st_mtime_ns
    for entry, is_folder in _entries(folder):
        if is_folder is None:
            if (inside / entry).suffix in _WEIGHTS:
                into.lost.append(str(inside / entry))
        elif is_folder:
            folders.append(inside / entry)
        else:
            into.files[str(inside / entry)] = identity(folder / entry)
    return folders


def _entries(folder: Path) -> Iterator[tuple[str, bool | None]]:
    """Yield names of a folder that a pin keeps, and whether they are folders: see `_is_folder`."""
    with os.scandir(folder) as entries:
        found = sorted((one.name, _is_folder(one)) for one in entries if is_text(one.name))
    for name, is_folder in found:
        left_out = _LEFT_OUT_FOLDERS if is_folder else _LEFT_OUT_FILES
        if not left_out.fullmatch(name):
            yield name, is_folder


def _is_folder(entry: "os.DirEntry[str]") -> bool | None:
    """Return whether an entry is a folder; None: a link to nothing, or to itself."""
    if entry.is_symlink() and not Path(entry.path).exists():
        return None
    return entry.is_dir()
