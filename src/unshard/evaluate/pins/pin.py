"""Keep the bytes of a checkpoint while it waits for its evaluation: hard links in its run.

`<run>/_unshard/pins/<random>/` holds `pin.json` and a directory of links named like the checkpoint;
companions of the run's own directory are next to it, where a reader looks for them. A pin is made
under another name and renamed, so that it is whole or not there. Nothing is copied, and the mtimes
of the run's and the checkpoint's directories stay what they were, because trainers remove the
"oldest" by them. A link does not protect against writing in place: see `Pin.changed`.
Trainers and servers make pins of the same run, and neither removes the other's. Nothing is removed
that this user did not make there: see `run_folder`.
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

from unshard.errors import CorruptError
from unshard.evaluate.pins.files import Identity
from unshard.evaluate.pins.links import (
    ExpiredError,
    PinError,
    explain,
    link_all,
    link_companions,
)
from unshard.evaluate.pins.records import Pin, fields_of, parse_pin
from unshard.evaluate.run_folder import PINS, RunFolder, leave_alone, read_record, write_record
from unshard.write.staging.beneath import names_in, remove
from unshard.write.staging.beneath import opened as opened_in

__all__ = [
    "DEFAULT_QUOTA",
    "ExpiredError",
    "Pin",
    "PinError",
    "Quota",
    "enforce_quota",
    "list_pins",
    "pin_checkpoint",
    "read_pin",
    "sweep",
    "unpin",
]

_RECORD = "pin.json"
_PARTIAL = ".partial"
_ABANDONED = 3600.0  # seconds after which a pin that is not finished is abandoned
_STEP = re.compile(r"(\d+)(?:\.\w+)?$")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """How much the pins of a run may keep, clients' or servers'; None for no limit.

    Attributes:
        count: pins.
        bytes: of all files of these pins, each counted once.
        owner: the server that makes them; empty: clients.
    """

    count: int | None
    bytes: int | None
    owner: str = ""

    def is_exceeded(self, pins: Sequence[Mapping[str, Identity]]) -> bool:
        """Return whether the files of these pins are more than the quota allows."""
        if self.count is not None and len(pins) > self.count:
            return True
        sizes = {inode: size for files in pins for inode, size, _ in files.values()}
        return self.bytes is not None and sum(sizes.values()) > self.bytes


DEFAULT_QUOTA = Quota(count=8, bytes=500_000_000_000)


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
        spare: the names of pins that are not removed to make room.

    Raises:
        ExpiredError: the checkpoint is gone, or was being removed.
        PinError: it cannot be linked, or is larger than the quota.
    """
    checkpoint = checkpoint.resolve()
    run = checkpoint.parent if run is None else run.resolve()
    path = RunFolder(run).pins / secrets.token_hex(8) / checkpoint.name
    step = _step_in(checkpoint.name) if step is None else step
    with _being_made(run, path.parent, quota.owner) as (partial, folder):
        try:
            files = link_all(checkpoint, partial / checkpoint.name)
            _check_size(checkpoint, files, quota)
            link_companions(run, partial)
            pin = Pin(path, run, checkpoint, step, time.time(), files, quota.owner)
            write_record(folder, _RECORD, fields_of(pin))
        except OSError as error:
            raise explain(checkpoint, error) from error
    enforce_quota(run, quota, spare={*spare, pin.name})
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
                    write_record(folder, _RECORD, {"owner": owner})  # known as ours if we die
                    yield partial, folder
                    os.rename(partial.name, directory.name, src_dir_fd=pins, dst_dir_fd=pins)
                except BaseException:
                    _remove_opened(pins, partial.name, folder)
                    raise
    except OSError as error:
        raise explain(run, error) from error


def _step_in(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else None


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
    raise ExpiredError(f"{path}: not a pin", expected="a path below RUN/_unshard/pins")


def _read(pins: int, run: Path, directory: Path) -> Pin:
    with opened_in(directory.name, within=pins) as folder:
        return parse_pin(read_record(folder, _RECORD), run, directory)


def list_pins(run: Path) -> list[Pin]:
    """Return the whole and readable pins of a run, the oldest first."""
    pins = []
    with _pins_in(run) as (folder, names):
        for name in names:
            directory = RunFolder(run).pins / name
            if directory.suffix != _PARTIAL:
                try:
                    pins.append(_read(folder, run, directory))
                except FileNotFoundError as error:
                    if error.filename == _RECORD:  # else another process has just removed it
                        leave_alone(f"{directory}: not a pin, it has no {_RECORD}")
                except (OSError, CorruptError) as error:
                    leave_alone(f"{directory}: not a pin: {error}")
    return sorted(pins, key=lambda pin: (pin.created, pin.name))


@contextmanager
def _pins_in(run: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the descriptor of a run's directory of pins, and the names in it; -1 if missing."""
    try:
        with RunFolder(run).opened(PINS) as folder:
            yield folder, names_in(folder)
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        leave_alone(str(error))
    yield -1, []


def unpin(pin: Pin) -> bool:
    """Remove a pin if this user made it; return whether it is gone.

    It is renamed first, so no reader sees a partial one; a missing pin is ignored.
    """
    with suppress(FileNotFoundError), RunFolder(pin.run).opened(PINS) as pins:
        return _remove(pins, pin.directory)
    return True


def _remove(pins: int, directory: Path) -> bool:
    """Remove a pin, or what is left of one, if this user made it; return whether it is gone."""
    with opened_in(directory.name, within=pins) as folder:
        if not _is_ours(folder):
            leave_alone(f"{directory}: not a pin that this user made there")
            return False
        doomed = directory.name
        if not _is_half_removed(doomed):
            doomed = f"{doomed.removesuffix(_PARTIAL)}-{secrets.token_hex(4)}{_PARTIAL}"
            os.rename(directory.name, doomed, src_dir_fd=pins, dst_dir_fd=pins)
        _remove_opened(pins, doomed, folder)
    return True


def _remove_opened(pins: int, name: str, folder: int) -> None:
    """Remove an open directory, its record last: until then it is known as ours."""
    for inside in names_in(folder):
        if inside != _RECORD:
            with suppress(OSError):  # the next sweep tries again
                remove(inside, within=folder)
    with suppress(OSError):
        if names_in(folder) == [_RECORD]:
            remove(_RECORD, within=folder)
        os.rmdir(name, dir_fd=pins)


def _is_ours(folder: int) -> bool:
    """Return whether a directory is empty, or has a record that this user wrote there."""
    try:
        return read_record(folder, _RECORD).is_ours
    except (OSError, CorruptError):
        return not names_in(folder)


def _is_half_removed(name: str) -> bool:
    return "-" in name


def sweep(run: Path, owner: str = "") -> None:
    """Remove what killed processes left of pins that they were making, or removing.

    Args:
        run: the run's directory.
        owner: a server that is not making a pin now: those that it had begun are removed whatever
            their age.
    """
    with _pins_in(run) as (pins, names):
        for directory in (RunFolder(run).pins / name for name in names):
            if directory.suffix == _PARTIAL:
                try:
                    if _is_half_removed(directory.name) or _is_abandoned(pins, directory, owner):
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


def enforce_quota(run: Path, quota: Quota, *, spare: Collection[str] = ()) -> list[Pin]:
    """Remove the oldest pins of a run until the quota is kept; return those removed.

    Args:
        run: the run's directory.
        quota: what clients' pins may keep, or those of all servers: a server that is gone for good
            has left some, too.
        spare: the names of pins that stay whatever their age.
    """
    is_servers = bool(quota.owner)
    ours = [pin for pin in list_pins(run) if pin.is_ours]
    kept, removed = [pin for pin in ours if bool(pin.owner) == is_servers], []
    for pin in [pin for pin in kept if pin.name not in spare]:
        if not quota.is_exceeded([one.files for one in kept]):
            break
        log.warning("%s: step %s is no longer kept: the quota of pins is used up", run, pin.step)
        unpin(pin)
        kept.remove(pin)
        removed.append(pin)
    sweep(run)
    return removed


def _check_size(checkpoint: Path, files: Mapping[str, Identity], quota: Quota) -> None:
    if quota.is_exceeded([files]):
        size = sum(size for _, size, _ in files.values())
        raise PinError(
            f"{checkpoint}: not kept, because the quota of pins has no room for it",
            expected=f"at most {quota.bytes} bytes, {quota.count} pins",
            found=f"{size} bytes",
            hint="raise the quota, or merge at once",
        )
