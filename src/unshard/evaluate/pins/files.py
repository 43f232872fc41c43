"""The files of a pin: list them, link them, and find changes.

A pin has weights of every kind, config and tokenizer. It leaves out the state of optimizer,
dataloader and random generators, and files whose names are not text. `read.finding.discover` lists
the writers of these names. Listing opens no file.
"""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unshard.containers.json_file import is_text
from unshard.errors import UnshardError
from unshard.read.beside.companions import companions_in, find_companions
from unshard.read.finding.discover import find
from unshard.read.finding.versions import NO_WEIGHTS, Stamps, has_weights, number_of
from unshard.read.format import Choice
from unshard.read.step_names import STATE_FOLDER
from unshard.stores.objects import listed
from unshard.stores.remote_path import RemotePath
from unshard.write.dirfd import Identity, identity

_GRAINS_NS = (1, 100, 1_000, 1_000_000_000)  # of the times that file systems keep

_LEFT_OUT_FOLDERS = re.compile(
    r"optim(?:izer)?(?:_\d+)?"  # NeMo AutoModel, lmms-engine, accelerate
    r"|extra_state|dataloader(?:_state)?"  # lmms-engine, NeMo AutoModel
    r"|train|rng|eval"  # OLMo-core, NeMo AutoModel; results of lmms-engine
    r"|merged|" + STATE_FOLDER + r"|\.cache"
)
_FIRST_NS = 1 << 53  # greater than any number of an ETag, less than any time since 1970-04-15

_ATTEMPTS = 5
_SHOWN = 5
_CONFIG = "config.json"
_REFUSED = {
    errno.EXDEV: "the run's directory is on another file system than the checkpoint",
    errno.EPERM: "the file system has no hard links, or the file is another user's",
    errno.EACCES: "no permission to link the file",
    errno.EMLINK: "the file has as many links as the file system allows",
    errno.ENOTSUP: "the file system has no hard links",
    errno.ENOSYS: "the file system has no hard links",
    errno.EROFS: "the file system is mounted read-only",
    errno.ENOSPC: "no space left for directories",
    errno.EDQUOT: "the disk quota is used up",
}


class PinError(UnshardError):
    """A checkpoint cannot be pinned by hard links."""


class ExpiredError(UnshardError):
    """A checkpoint was removed before it was evaluated, or while it was pinned."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files and folders of a checkpoint at one moment.

    Attributes:
        files: the files of a pin, by path relative to the checkpoint.
        folders: mtime in ns of every directory that was read; new and removed entries change it.
        lost: weights that are broken links, by path relative to the checkpoint.
    """

    files: dict[str, Identity]
    folders: dict[str, int]
    lost: list[str]


def list_checkpoint(checkpoint: Path) -> Listing:
    """List a checkpoint: a directory, or a single file, whose path is its own name.

    Raises:
        FileNotFoundError: it is gone, or a file was removed while it was listed.
    """
    if not checkpoint.is_dir():
        return Listing({checkpoint.name: identity(checkpoint.stat())}, {}, [])
    listing = Listing({}, {}, [])
    folders, seen = [PurePosixPath()], set[int]()
    while folders:
        inside = folders.pop()
        status = (checkpoint / inside).stat()
        if status.st_ino not in seen:  # else a link to a parent
            seen.add(status.st_ino)
            listing.folders[str(inside)] = status.st_mtime_ns
            folders += _list_folder(checkpoint / inside, inside, listing)
    return listing


def _list_folder(folder: Path, inside: PurePosixPath, into: Listing) -> list[PurePosixPath]:
    """Add the files of a folder to a listing; return the folders in it."""
    with os.scandir(folder) as scan:
        entries = sorted((one for one in scan if is_text(one.name)), key=lambda one: one.name)
    folders = []
    for entry in entries:
        path = inside / entry.name
        is_lost = entry.is_symlink() and not Path(entry.path).exists()  # broken, or a loop
        is_folder = not is_lost and entry.is_dir()
        if (_LEFT_OUT_FOLDERS if is_folder else NO_WEIGHTS).fullmatch(entry.name):
            continue
        if is_folder:
            folders.append(path)
        elif not is_lost:
            into.files[str(path)] = identity((folder / entry.name).stat())
        elif has_weights(path.name):
            into.lost.append(str(path))
    return folders


def changed_files(checkpoint: Path, files: Mapping[str, Identity]) -> list[str]:
    """Return the files that were rewritten in place, replaced or removed.

    Some mounts give files other inode numbers, or coarser times. If no file has its old inode
    number, only sizes and times count; a time rounded down to a coarser grain is equal. `files` are
    the former identities, by path relative to the checkpoint.
    """
    is_folder = checkpoint.is_dir()
    now: dict[str, Identity] = {}
    for name in files:
        with suppress(OSError):  # it is gone
            now[name] = identity((checkpoint / name if is_folder else checkpoint).stat())
    has_inodes = any(inode == files[name][0] for name, (inode, _, _) in now.items())
    return [
        name
        for name, before in files.items()
        if name not in now or not _is_same(now[name], before, compare_inodes=has_inodes)
    ]


def _is_same(now: Identity, before: Identity, *, compare_inodes: bool) -> bool:
    (inode, size, mtime), (old_inode, old_size, old_mtime) = now, before
    earlier, later = sorted((mtime, old_mtime))
    is_time = any(earlier == later // grain * grain for grain in _GRAINS_NS)
    return (inode == old_inode or not compare_inodes) and size == old_size and is_time


def read_stamps(checkpoint: Path) -> dict[str, list[int]]:
    """Return size and mtime in ns of each file of weights, by path relative to the checkpoint.

    A pin has the stamps of its original. In an object store they are size, and a number made from
    the ETag. Empty if the checkpoint is gone.

    Raises:
        StoreError: the store cannot be reached, or refuses.
    """
    if isinstance(checkpoint, RemotePath):
        return _stamps_of_objects(checkpoint)
    try:
        files = list_checkpoint(checkpoint).files
    except OSError:
        return {}
    return {
        name: [size, mtime]
        for name, (_, size, mtime) in files.items()
        if has_weights(PurePosixPath(name).name)
    }


def time_written(stamped: Stamps) -> float | None:
    """Return the time in seconds at which the first file of the weights was written.

    Later files may have been made from it. None: the checkpoint is in an object store, or gone.
    """
    return min((mtime / 1e9 for _, mtime in stamped.values() if mtime >= _FIRST_NS), default=None)


def _stamps_of_objects(checkpoint: RemotePath) -> dict[str, list[int]]:
    single = checkpoint.bucket.entry(checkpoint.key)
    if single is not None:
        return {checkpoint.name: [single.size, number_of(single.etag)]}
    objects = listed(checkpoint.bucket, checkpoint.key)
    return {
        name: [entry.size, number_of(entry.etag)]
        for name, entry in objects.items()
        if has_weights(PurePosixPath(name).name)
        and not any(map(_LEFT_OUT_FOLDERS.fullmatch, PurePosixPath(name).parts[:-1]))
    }


def link_all(checkpoint: Path, target: Path) -> dict[str, Identity]:
    """Link the files of a pin, and return their identities.

    A trainer may be removing them, so the checkpoint is listed again afterwards. New files are
    linked too. If a file is missing then, the checkpoint is being removed, and may have lost other
    files before the first listing.
    """
    linked: dict[str, Identity] = {}
    before = list_checkpoint(checkpoint)
    if not before.files:
        raise ExpiredError(f"{checkpoint}: nothing to evaluate in it", found="no file")
    if before.lost:
        raise ExpiredError(f"{checkpoint}: broken links", found=", ".join(before.lost[:_SHOWN]))
    for _ in range(_ATTEMPTS):
        linked = _link_listed(checkpoint, target, before, linked)
        after = list_checkpoint(checkpoint)
        if not linked.keys() <= after.files.keys():
            raise ExpiredError(
                f"{checkpoint}: was removed while it was pinned",
                hint="keep more checkpoints, or submit before the trainer removes old ones",
            )
        # Only inodes are compared: a link has the new size of a file that has grown since.
        old, new = (
            {path: inode for path, (inode, _, _) in listing.files.items()}
            for listing in (before, after)
        )
        if old == new and before.folders == after.folders:
            break
        before = after
    else:
        linked = _link_listed(checkpoint, target, before, linked)
    _link_neighbours(checkpoint, target.parent)
    return linked


def _link_listed(
    checkpoint: Path, target: Path, listing: Listing, linked: Mapping[str, Identity]
) -> dict[str, Identity]:
    """Link the files of a listing that are not linked yet; return the links' identities."""
    is_folder = checkpoint.is_dir()
    identities = {}
    for name, (inode, _, _) in listing.files.items():
        source, link = (checkpoint / name, target / name) if is_folder else (checkpoint, target)
        if name not in linked or linked[name][0] != inode:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            os.link(source.resolve(strict=True), link)
        identities[name] = identity(link.stat())
    return identities


def _link_neighbours(checkpoint: Path, partial: Path) -> None:
    """Link the companions next to a checkpoint, to the same relative paths.

    verl has `global_step_N/huggingface/` next to the weights in `global_step_N/actor`.
    """
    try:
        location = next(find(checkpoint, Choice(None, None, None)))
    except (UnshardError, OSError):
        return
    step = checkpoint.parent
    if location.step_dir == step:
        for name, path in find_companions(location, None).paths.items():
            inside = path.relative_to(step) if path.is_relative_to(step) else Path(name)
            if not path.is_relative_to(checkpoint):
                _link_small(path, partial / inside)


def link_companions(run: Path, partial: Path) -> None:
    """Link config and tokenizer from the run's own directory."""
    if not (partial / _CONFIG).exists():  # the step's own config has priority
        for name, path in companions_in(run).paths.items():
            _link_small(path, partial / name)


def _link_small(path: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # `copyfile` would write into the file that it links
    try:
        os.link(path.resolve(strict=True), link)
    except OSError:
        shutil.copyfile(path, link)  # small, and often a link to another file system


def explain(path: Path, error: OSError) -> UnshardError:
    """Return the error for a checkpoint that cannot be pinned."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ExpiredError(
            f"checkpoint {path} does not exist", hint="submit it before the trainer removes it"
        )
    why = _REFUSED.get(error.errno or 0, "it cannot be linked")
    return PinError(
        f"{path}: cannot be pinned by hard links: {why}",
        found=str(error),
        hint="merge it at once, before the trainer removes it, or let the trainer keep more",
    )
