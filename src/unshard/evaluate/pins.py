"""Keep the bytes of a checkpoint while it waits for its evaluation: hard links beside the run.

`<run>/_unshard/pins/<random>/` holds `pin.json` and a directory of links named like the checkpoint;
companions of the run's own directory lie beside it, where a reader looks for them. A pin is made
under another name and renamed, so that it is whole or not there. Nothing is copied, and the mtimes
of the run's and the checkpoint's directories stay what they were, because trainers remove the
"oldest" by them. A link does not protect against writing in place: `Pin.changed` tells.
Trainers and servers make pins of the same run, and neither removes the other's.
"""

import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.pin_files import Identity, changed_files
from unshard.evaluate.pin_links import (
    ExpiredError,
    GoneError,
    PinError,
    link_all,
    link_companions,
    refusal,
)

__all__ = [
    "DEFAULT_QUOTA",
    "ExpiredError",
    "GoneError",
    "Pin",
    "PinError",
    "Quota",
    "enforce_quota",
    "pin_checkpoint",
    "pins_of",
    "read_pin",
    "unpin",
]

_PLACE = Path("_unshard") / "pins"
_RECORD = "pin.json"
_PARTIAL = ".partial"
_ABANDONED = 3600.0  # seconds after which a pin that was not finished is nobody's
_STEP = re.compile(r"(\d+)(?:\.\w+)?$")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much the pins of a run may keep, clients' or servers'; None for no limit.

    Attributes:
        count: pins.
        bytes: of all files that these pins hold, each counted once.
        owner: the server that makes them; empty: clients.
    """

    count: int | None
    bytes: int | None
    owner: str = ""


DEFAULT_QUOTA = Quota(count=8, bytes=500_000_000_000)


@dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint that is kept.

    Attributes:
        path: the linked checkpoint: what is merged and evaluated.
        directory: of the pin; its name is the pin's.
        checkpoint: the original, which may be gone by now.
        step: the training step, if it is known.
        created: seconds since the epoch.
        files: inode, size and mtime in ns of each file, by path relative to `path`.
        owner: the server that made it; empty: a client.
    """

    path: Path
    directory: Path
    checkpoint: Path
    step: int | None
    created: float
    files: Mapping[str, Identity]
    owner: str = ""

    @property
    def name(self) -> str:
        """Return the name that the pin has among those of its run."""
        return self.directory.name

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(size for _, size, _ in self.files.values())

    def changed(self) -> list[str]:
        """Return the files that are not what was pinned: see `pin_files.changed_files`."""
        return changed_files(self.path, self.files)

    def unpin(self) -> None:
        """Remove the links; see `unpin`."""
        unpin(self)


def pin_checkpoint(
    checkpoint: Path,
    *,
    quota: Quota,
    step: int | None = None,
    run: Path | None = None,
    spare: Collection[str] = (),
) -> Pin:
    """Keep a checkpoint by hard links.

    Args:
        checkpoint: the step directory, or a file that is a checkpoint.
        quota: what pins of such an owner may keep of the run; the oldest others make room.
        step: the training step; else the number at the end of the checkpoint's name.
        run: the run's directory; else the one that holds the checkpoint.
        spare: the names of pins that make no room.

    Raises:
        GoneError: the checkpoint is gone, or was being removed.
        PinError: it cannot be linked, or is larger than the quota.
    """
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent if run is None else run.resolve()
    directory = _pins_directory(run) / secrets.token_hex(8)
    partial = directory.with_name(directory.name + _PARTIAL)
    try:
        partial.mkdir()
        files = link_all(checkpoint, partial / checkpoint.name)
        _check_size(checkpoint, files, quota)
        link_companions(run, partial)
        path = directory / checkpoint.name
        step = _step_in(checkpoint.name) if step is None else step
        pin = Pin(path, directory, checkpoint, step, time.time(), files, quota.owner)
        _record(pin, partial)
        partial.rename(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise refusal(checkpoint, error) from error
        raise
    enforce_quota(run, quota, spare={*spare, pin.name})
    return pin


def _pins_directory(run: Path) -> Path:
    """Make the directory of pins; the run's own mtime stays."""
    pins = run / _PLACE
    if not pins.is_dir():
        try:
            before = run.stat()
            pins.mkdir(parents=True, exist_ok=True)
            os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as error:
            raise refusal(run, error) from error
    return pins


def _step_in(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else None


def _record(pin: Pin, partial: Path) -> None:
    fields = {
        "checkpoint": str(pin.checkpoint),
        "name": pin.checkpoint.name,
        "step": pin.step,
        "created": pin.created,
        "files": pin.files,
        "owner": pin.owner,
    }
    (partial / _RECORD).write_text(json.dumps(fields), encoding="utf-8")


def read_pin(path: Path) -> Pin:
    """Return the pin of a directory of pins, or of the linked checkpoint in it.

    Raises:
        ExpiredError: it is gone, or no pin.
    """
    directory = path if (path / _RECORD).is_file() else path.parent
    try:
        fields = json.loads((directory / _RECORD).read_bytes())
        checkpoint = Path(fields["checkpoint"])
        files = {name: tuple(found) for name, found in fields["files"].items()}
        return Pin(
            directory / fields["name"],
            directory,
            checkpoint,
            fields["step"],
            fields["created"],
            files,
            fields["owner"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExpiredError(f"{path}: no pin", found=str(error)) from error


def pins_of(run: Path) -> list[Pin]:
    """Return the pins of a run, the oldest first; what is not finished or not readable is none."""
    pins = []
    for directory in _children(run / _PLACE):
        if directory.suffix == _PARTIAL:
            continue
        try:
            pins.append(read_pin(directory))
        except ExpiredError as error:
            log.warning("%s", error)
    return sorted(pins, key=lambda pin: (pin.created, pin.name))


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def unpin(pin: Pin) -> None:
    """Remove a pin: first its name, so that nobody meets half of it. Gone already is fine."""
    doomed = pin.directory.with_name(f"{pin.name}-{secrets.token_hex(4)}{_PARTIAL}")
    try:
        pin.directory.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def enforce_quota(run: Path, quota: Quota, *, spare: Collection[str] = ()) -> list[Pin]:
    """Remove the oldest pins of a run until the quota is kept; return those removed.

    Args:
        run: the run's directory.
        quota: what clients' pins may keep, or those of all servers: one that is gone for good has
            left some, too.
        spare: the names of pins that stay whatever their age.
    """
    is_servers = bool(quota.owner)
    kept, removed = [pin for pin in pins_of(run) if bool(pin.owner) == is_servers], []
    for pin in [pin for pin in kept if pin.name not in spare]:
        if not _is_exceeded(kept, quota):
            break
        log.warning("%s: step %s is no longer kept: the quota of pins is used up", run, pin.step)
        unpin(pin)
        kept.remove(pin)
        removed.append(pin)
    for left in _children(run / _PLACE):
        if left.suffix == _PARTIAL and _age(left) > _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    return removed


def _is_exceeded(pins: list[Pin], quota: Quota) -> bool:
    if quota.count is not None and len(pins) > quota.count:
        return True
    sizes = {inode: size for pin in pins for inode, size, _ in pin.files.values()}
    return quota.bytes is not None and sum(sizes.values()) > quota.bytes


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _check_size(checkpoint: Path, files: Mapping[str, Identity], quota: Quota) -> None:
    size = sum(size for _, size, _ in files.values())
    if quota.count == 0 or (quota.bytes is not None and size > quota.bytes):
        raise PinError(
            f"{checkpoint}: not kept, because the quota of pins has no room for it",
            expected=f"at most {quota.bytes} bytes, {quota.count} pins",
            found=f"{size} bytes",
            hint="raise the quota, or merge at once",
        )
