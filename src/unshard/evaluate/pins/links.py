"""Link the files of a checkpoint while its trainer may be removing it."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from unshard.errors import UnshardError
from unshard.evaluate.pins.files import Identity, Listing, identity, list_checkpoint
from unshard.read.beside.companions import companions_in, find_companions
from unshard.read.finding.discover import discover
from unshard.read.format import Choice

__all__ = ["ExpiredError", "PinError", "explain", "link_all", "link_companions"]

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
    """A checkpoint cannot be kept by hard links."""


class ExpiredError(UnshardError):
    """A checkpoint was removed before it was evaluated, or while it was pinned."""


def link_all(checkpoint: Path, target: Path) -> dict[str, Identity]:
    """Link the files that a pin keeps, and return their identities.

    The checkpoint is listed again afterwards. New files are linked, too. If a file has gone, the
    checkpoint is being removed, and may have lost others before the first listing.
    """
    linked: dict[str, Identity] = {}
    before = list_checkpoint(checkpoint)
    if not before.files:
        raise ExpiredError(f"{checkpoint}: nothing to evaluate in it", found="no file")
    if before.lost:
        raise ExpiredError(f"{checkpoint}: links to nothing", found=", ".join(before.lost[:_SHOWN]))
    for _ in range(_ATTEMPTS):
        linked = _link_listed(checkpoint, target, before, linked)
        after = list_checkpoint(checkpoint)
        if not linked.keys() <= after.files.keys():
            raise ExpiredError(
                f"{checkpoint}: was removed while it was pinned",
                hint="keep more checkpoints, or submit before the trainer removes old ones",
            )
        if _same_files(before, after) and before.folders == after.folders:
            break
        before = after
    else:
        linked = _link_listed(checkpoint, target, before, linked)
    _link_neighbours(checkpoint, target.parent)
    return linked


def _same_files(one: Listing, other: Listing) -> bool:
    """Return whether two listings name the same files, which may have grown."""
    inodes = ({name: found[0] for name, found in each.files.items()} for each in (one, other))
    return next(inodes) == next(inodes)


def _link_listed(
    checkpoint: Path, target: Path, listing: Listing, linked: Mapping[str, Identity]
) -> dict[str, Identity]:
    """Link the files of a listing that are not linked yet; return the links' identities."""
    is_folder = checkpoint.is_dir()
    found = {}
    for name, (inode, _, _) in listing.files.items():
        source, link = (checkpoint / name, target / name) if is_folder else (checkpoint, target)
        if name not in linked or linked[name][0] != inode:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            os.link(source.resolve(strict=True), link)
        found[name] = identity(link)
    return found


def _link_neighbours(checkpoint: Path, partial: Path) -> None:
    """Link the companions next to a checkpoint, where readers look for them.

    verl has `global_step_N/huggingface/` next to the weights in `global_step_N/actor`.
    """
    try:
        location = discover(checkpoint, Choice(None, None, None))[0]
    except (UnshardError, OSError):
        return
    step = checkpoint.parent
    if location.step_dir == step:
        found = find_companions(location, None)
        own = found.files if found.config is None else {**found.files, _CONFIG: found.config}
        for name, path in own.items():
            inside = path.relative_to(step) if path.is_relative_to(step) else Path(name)
            if not path.is_relative_to(checkpoint):
                _link_small(path, partial / inside)


def link_companions(run: Path, partial: Path) -> None:
    """Link config and tokenizer from the run's own directory."""
    own = companions_in(run)
    files = dict(own.files) if own.config is None else {**own.files, own.config.name: own.config}
    if not (partial / _CONFIG).exists():  # the step has its own, which wins
        for name, path in files.items():
            _link_small(path, partial / name)


def _link_small(path: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # never write into what is a link already
    try:
        os.link(path.resolve(strict=True), link)
    except OSError:
        shutil.copyfile(path, link)  # small, and often a link to another file system


def explain(path: Path, error: OSError) -> UnshardError:
    """Return the error for a checkpoint that cannot be pinned."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ExpiredError(f"{path}: is gone", hint="submit it before the trainer removes it")
    why = _REFUSED.get(error.errno or 0, "it cannot be linked")
    return PinError(
        f"{path}: cannot be kept by hard links: {why}",
        found=str(error),
        hint="merge it at once, before the trainer removes it, or let the trainer keep more",
    )
