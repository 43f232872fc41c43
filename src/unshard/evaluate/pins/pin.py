"""Pin a checkpoint until it is evaluated, by hard links in its run.

`<run>/_unshard/pins/<random>/` has `pin.json` and a directory of links named like the checkpoint;
companions of the run's own directory are next to it, where readers search. A pin is made under
another name and renamed, so that it is whole or not there. Nothing is copied, and the mtimes of the
run's and the checkpoint's directories do not change, because trainers remove the "oldest" by them.
A link does not protect against writing in place: see `Pin.changed`.
Trainers and servers make pins of the same run, and remove only their own. Files that this user did
not make there are not removed: see `run_folder`.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, with_config

from unshard.errors import CorruptError
from unshard.evaluate.pins.files import (
    ExpiredError,
    PinError,
    changed_files,
    explain,
    link_all,
    link_companions,
)
from unshard.evaluate.run_folder import (
    PINS,
    RunFolder,
    RunRecord,
    leave_alone,
    read_record,
    write_record,
)
from unshard.evaluate.values import Whole
from unshard.read.step_names import STATE_FOLDER
from unshard.write.dirfd import Identity, check_path, names_in, remove
from unshard.write.dirfd import opened as opened_in

OF_SERVER = "server_"
"""The prefix of the names of servers' pins: it shows the owner after the pin is gone."""
_RECORD = "pin.json"
_PARTIAL = ".partial"
_ABANDONED = 3600.0  # seconds after which a pin that is not finished is abandoned
_STEP = re.compile(r"(\d+)(?:\.\w+)?$")
_LATEST = 2.0**40  # seconds since the epoch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned checkpoint.

    Attributes:
        path: the linked checkpoint, to merge and evaluate.
        run: the directory of its run.
        checkpoint: the original, which may have been removed.
        step: the training step, if it is known.
        created: seconds since the epoch.
        files: inode, size and mtime in ns of each file, by path relative to `path`.
        owner: the server that made it; empty: a client.
        is_ours: whether this user made it in that place; otherwise it is never removed.
    """

    path: Path
    run: Path
    checkpoint: Path
    step: int | None
    created: float
    files: Mapping[str, Identity]
    owner: str = ""
    is_ours: bool = True

    @property
    def directory(self) -> Path:
        """The directory of the pin, which has its record and the linked checkpoint."""
        return self.path.parent

    @property
    def name(self) -> str:
        """The name of the pin, unique in its run."""
        return self.directory.name

    def changed(self) -> list[str]:
        """Return the files that have changed since: see `files.changed_files`."""
        return changed_files(self.path, self.files)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a run's pins, separately for clients and servers.

    Attributes:
        count: the number of pins; null for no limit.
        bytes: of all files of these pins, each counted once; null for no limit.
    """

    count: Whole | None = 8
    bytes: Whole | None = 500_000_000_000

    def is_exceeded(self, pins: Sequence[Mapping[str, Identity]]) -> bool:
        """Return whether the files of these pins are more than the quota allows."""
        sizes = {inode: size for files in pins for inode, size, _ in files.values()}
        return (self.count is not None and len(pins) > self.count) or (
            self.bytes is not None and sum(sizes.values()) > self.bytes
        )


def pin_checkpoint(  # noqa: PLR0913 (checkpoint, owner, limits)
    checkpoint: Path,
    *,
    quota: Quota,
    owner: str = "",
    step: int | None = None,
    run: Path | None = None,
    spare: Collection[str] = (),
) -> Pin:
    """Pin a checkpoint by hard links.

    Args:
        checkpoint: the step directory, or a single file.
        quota: limits of the run's pins of this kind of owner; the oldest are removed for room.
        owner: the server that makes the pin; empty: a client.
        step: the training step; None: the number at the end of the checkpoint's name.
        run: the run's directory; None: the parent of the checkpoint.
        spare: the names of pins that are not removed for room.

    Raises:
        ExpiredError: the checkpoint is gone, or is being removed.
        PinError: it cannot be linked, or is larger than the quota.
    """
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent if run is None else run.resolve()
    name = f"{OF_SERVER if owner else ''}{secrets.token_hex(8)}"
    path = RunFolder(run).pins / name / checkpoint.name
    if step is None and (match := _STEP.search(checkpoint.name)) is not None:
        step = int(match[1])
    with _being_made(run, path.parent, owner) as (partial, folder):
        try:
            files = link_all(checkpoint, partial / checkpoint.name)
            if quota.is_exceeded([files]):
                raise PinError(
                    f"{checkpoint}: not pinned, because it exceeds the quota of pins",
                    expected=f"at most {quota.bytes} bytes, {quota.count} pins",
                    found=f"{sum(size for _, size, _ in files.values())} bytes",
                    hint="raise the quota, or merge at once",
                )
            link_companions(run, partial)
            pin = Pin(path, run, checkpoint, step, time.time(), files, owner)
            fields = {
                "checkpoint": str(checkpoint),
                "name": checkpoint.name,
                "step": step,
                "created": pin.created,
                "files": files,
                "owner": pin.owner,
            }
            write_record(folder, _RECORD, fields)
        except OSError as error:
            raise explain(checkpoint, error) from error
    enforce_quota(run, quota, are_servers=bool(owner), spare={*spare, pin.name})
    return pin


@contextmanager
def _being_made(run: Path, directory: Path, owner: str) -> Iterator[tuple[Path, int]]:
    """Yield the directory of an unfinished pin and its descriptor; finish it, or remove it."""
    partial = directory.with_name(directory.name + _PARTIAL)
    try:
        with RunFolder(run).opened(PINS, make=True) as pins:
            os.mkdir(partial.name, dir_fd=pins)
            with opened_in(partial.name, within=pins) as folder:
                try:
                    # Written first: after a crash the record shows that the directory is ours.
                    write_record(folder, _RECORD, {"owner": owner})
                    yield partial, folder
                    os.rename(partial.name, directory.name, src_dir_fd=pins, dst_dir_fd=pins)
                except BaseException:
                    _remove_opened(pins, partial.name, folder)
                    raise
    except OSError as error:
        raise explain(run, error) from error


def read_pin(path: Path) -> Pin:
    """Return the pin of a directory of pins, or of the linked checkpoint in it.

    Raises:
        ExpiredError: it is gone, or not a pin.
    """
    for directory in (path, path.parent):
        run = RunFolder.of_pin(directory)
        if run is not None:
            try:
                with run.opened(PINS) as pins:
                    return _read(pins, run.path, directory)
            except (OSError, CorruptError) as error:
                raise ExpiredError(f"{path}: not a pin", found=str(error)) from error
    raise ExpiredError(f"{path}: not a pin", expected=f"a path below RUN/{STATE_FOLDER}/{PINS}")


def _read(pins: int, run: Path, directory: Path) -> Pin:
    with opened_in(directory.name, within=pins) as folder:
        return _parse(read_record(folder, _RECORD), run, directory)


def _parse(record: RunRecord, run: Path, directory: Path) -> Pin:
    """Return the pin that a record describes; another user or an archive may have put it there."""
    match record.fields:
        case {
            "checkpoint": str(checkpoint),
            "name": str(name),
            "step": int() | None as step,
            "created": int() | float() as created,
            "files": dict(files),
            "owner": str(owner),
        } if _is_inside(name) and "/" not in name and 0 <= created < _LATEST and step is not True:
            linked = {inside: _parse_identity(inside, values) for inside, values in files.items()}
            path, original = directory / name, Path(checkpoint)
            return Pin(path, run, original, step, created, linked, owner, record.is_ours)
    raise CorruptError("not the record of a pin")


def _parse_identity(inside: str, values: object) -> Identity:
    match values:
        case [int(inode), int(size), int(mtime)] if _is_inside(inside):
            return inode, size, mtime
    raise CorruptError(f"not a file of a pin: {inside!r:.100}")


def _is_inside(path: str) -> bool:
    try:
        check_path(path)
    except ValueError:
        return False
    return True


def list_pins(run: Path) -> list[Pin]:
    """Return the whole and readable pins of a run, the oldest first."""
    readable = []
    for pins, directory in _directories(run, partial=False):
        try:
            readable.append(_read(pins, run, directory))
        except FileNotFoundError as error:
            if error.filename == _RECORD:  # else another process has just removed it
                leave_alone(f"{directory}: not a pin, it has no {_RECORD}")
        except (OSError, CorruptError) as error:
            leave_alone(f"{directory}: not a pin: {error}")
    return sorted(readable, key=lambda pin: (pin.created, pin.name))


def _directories(run: Path, *, partial: bool) -> Iterator[tuple[int, Path]]:
    """Yield the directories of whole or unfinished pins, each with the fd of its parent."""
    try:
        with RunFolder(run).opened(PINS) as pins:
            for name in names_in(pins):
                if name.endswith(_PARTIAL) == partial:
                    yield pins, RunFolder(run).pins / name
    except FileNotFoundError:
        return
    except OSError as error:
        leave_alone(str(error))


def unpin(pin: Pin) -> None:
    """Remove a pin if this user made it.

    It is renamed first, so no reader sees a partial one; a missing pin is ignored.
    """
    with suppress(FileNotFoundError), RunFolder(pin.run).opened(PINS) as pins:
        _remove(pins, pin.directory)


def _remove(pins: int, directory: Path) -> None:
    """Remove a pin, or the rest of one, if this user made it or it is empty."""
    with opened_in(directory.name, within=pins) as folder:
        try:
            is_ours = read_record(folder, _RECORD).is_ours
        except (OSError, CorruptError):
            is_ours = not names_in(folder)
        if not is_ours:
            leave_alone(f"{directory}: not a pin that this user made there")
            return
        name = directory.name
        if "-" not in name:  # a dash marks a removal that has begun: see `sweep`
            name = f"{name.removesuffix(_PARTIAL)}-{secrets.token_hex(4)}{_PARTIAL}"
            os.rename(directory.name, name, src_dir_fd=pins, dst_dir_fd=pins)
        _remove_opened(pins, name, folder)


def _remove_opened(pins: int, name: str, folder: int) -> None:
    """Remove an open directory, its record last, because it shows that the directory is ours."""
    for inside in names_in(folder):
        if inside != _RECORD:
            with suppress(OSError):  # the next sweep tries again
                remove(inside, within=folder)
    with suppress(OSError):
        if names_in(folder) == [_RECORD]:
            remove(_RECORD, within=folder)
        os.rmdir(name, dir_fd=pins)


def sweep(run: Path, owner: str = "") -> None:
    """Remove unfinished pins of killed processes, which were making or removing them.

    `owner` is a server that is not making a pin now: its unfinished pins are removed at any age.
    """
    for pins, directory in _directories(run, partial=True):
        try:
            if "-" in directory.name or _is_abandoned(pins, directory, owner):
                _remove(pins, directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            leave_alone(f"{directory}: {error.strerror}")


def _is_abandoned(pins: int, directory: Path, owner: str) -> bool:
    with opened_in(directory.name, within=pins) as folder:
        if time.time() - os.fstat(folder).st_mtime > _ABANDONED:
            return True
        try:
            return bool(owner) and read_record(folder, _RECORD).fields.get("owner") == owner
        except (OSError, CorruptError):
            return False


def enforce_quota(
    run: Path, quota: Quota, *, are_servers: bool = False, spare: Collection[str] = ()
) -> None:
    """Remove the oldest pins of a run that exceed the quota, and unfinished pins.

    `are_servers` counts the pins of all servers, even of servers that are gone for good, or else
    those of clients. Pins whose names are in `spare` are not removed.
    """
    pins = []
    if quota != Quota(None, None):  # else no pin needs to be read
        pins = [pin for pin in list_pins(run) if pin.is_ours and bool(pin.owner) == are_servers]
    for pin in [pin for pin in pins if pin.name not in spare]:
        if not quota.is_exceeded([one.files for one in pins]):
            break
        name = "pin_quota" if are_servers else "quota"
        log.warning("%s: step %s is no longer pinned: the %s is used up", run, pin.step, name)
        unpin(pin)
        pins.remove(pin)
    sweep(run)
