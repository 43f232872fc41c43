"""The pins that the server makes for clients that make none, and what it knows of all pins.

A pin of a client is the client's to remove: it may need it for jobs that are not submitted yet.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import Job
from unshard.evaluate.pins.files import ExpiredError, PinError, read_stamps
from unshard.evaluate.pins.pin import Pin, Quota, list_pins, pin_checkpoint, read_pin, sweep, unpin
from unshard.evaluate.run_folder import PINS, RunFolder
from unshard.evaluate.server.roots import is_inside, resolve_checkpoint
from unshard.evaluate.server.store.store import Store
from unshard.read.step_names import STATE_FOLDER
from unshard.stores.remote_path import RemotePath, path_of

_DEPTHS = ("", "*/", "*/*/")  # of runs below a root
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """The pins below the roots.

    Attributes:
        store: the jobs that need them.
        roots: no pin elsewhere is made, used or removed.
        quota: of the pins that servers make of one run.
        lock: held while a job gets its pin, and while a pin that no job has is removed.
    """

    store: Store
    roots: Sequence[Path]
    quota: Quota
    lock: threading.RLock = field(default_factory=threading.RLock)

    def find_client_pin(self, pin: str) -> str | None:
        """Return the linked checkpoint of a client's pin; None if it is gone.

        Raises:
            UsageError: it is not one, or outside the roots.
        """
        path = resolve_checkpoint(pin, self.roots)
        if isinstance(path, RemotePath) or RunFolder.of_pin(path.parent) is None:
            raise UsageError(
                "pin cannot be accepted",
                expected=f"RUN/{STATE_FOLDER}/{PINS}/NAME/CHECKPOINT",
                found=pin,
            )
        try:
            found = read_pin(path)
        except ExpiredError:
            return None
        return str(path) if found.path == path and path.exists() else None

    def ensure_pin(self, checkpoint: Path, step: int | None, run: Path) -> str | None:
        """Pin a checkpoint, or find our pin that another job has of it; None: not possible.

        Raises:
            ExpiredError: the checkpoint is gone.
        """
        if known := self._known(checkpoint, run):
            return known
        if not is_inside(run, self.roots):
            _log.warning("%s: not pinned, its run's directory is outside the roots", checkpoint)
            return None
        self.store.pins.will_pin(run)
        try:
            running = {Path(job.pin).parent.name for job in self.store.running() if job.pin}
            # Other servers may share the run, so the pin has this one's name.
            own = str(self.store.identity)
            pin = pin_checkpoint(
                checkpoint, quota=self.quota, owner=own, step=step, run=run, spare=running
            )
        except PinError as error:
            _log.warning("not pinned, it may be rotated away: %s", error)
            return None
        return str(pin.path)

    def _known(self, checkpoint: Path, run: Path) -> str | None:
        """Return the pin of this server that another job has of a checkpoint.

        It is looked for on the disk: jobs that wait may be many, their pins are few. A client's
        pin is not meant: the client removes it when its own job has ended.
        """
        place, owner = RunFolder(run).pins, str(self.store.identity)
        with suppress(OSError):
            for pin in (directory / checkpoint.name for directory in place.iterdir()):
                if self.store.pins.is_needed(str(pin)) and _is_of(pin, checkpoint, owner):
                    return str(pin)
        return None

    def list_all(self) -> list[tuple[Pin, list[str]]]:
        """Return the pins below the roots, each with the jobs that need it, the oldest first."""
        needed = dict[str, list[str]]()
        for job_id, path in self.store.pins.list_needed():
            needed.setdefault(path, []).append(job_id)
        found = [pin for run in self._runs_inside() for pin in list_pins(run)]
        found.sort(key=lambda pin: (pin.created, pin.name))
        return [(pin, needed.get(str(pin.path), [])) for pin in found]

    def remove_unneeded(self, pin: str | None = None) -> None:
        """Remove the pins of this server that no job needs: those of a pin's run, or of all."""
        with self.lock:
            owner = str(self.store.identity)
            for run in self._runs_inside() if pin is None else _runs_of([pin]):
                for found in list_pins(run):
                    is_own = found.is_ours and found.owner == owner
                    if is_own and not self.store.pins.is_needed(str(found.path)):
                        _remove(found)
                sweep(run, owner)

    def release(self, job: Job) -> None:
        """Remove the pin of a job that has ended, if it is this server's and no job needs it."""
        if job.pin is not None:
            self.remove_unneeded(job.pin)

    def list_changed(self, job: Job) -> Sequence[str]:
        """Return the files of a job's checkpoint that were rewritten since it was submitted.

        Without a pin they may be gone, or there may be more; if no name is left, a training began
        anew there, with another number of ranks.
        """
        with suppress(ExpiredError):
            if job.pin is not None:
                return read_pin(Path(job.pin)).changed()
        was, now = job.request.stamps, read_stamps(path_of(job.request.checkpoint))
        if was and now and was.keys().isdisjoint(now):
            return [job.request.checkpoint]
        return [name for name, stamp in was.items() if now.get(name, stamp) != stamp]

    def _runs_inside(self) -> list[Path]:
        """Return the runs below the roots that may have pins: far fewer than jobs that wait."""
        found = set(map(Path, self.store.pins.list_runs()))
        for root in self._roots_on_disk():
            for depth in _DEPTHS:
                places = root.glob(f"{depth}{STATE_FOLDER}/{PINS}")
                found.update(place.parents[1] for place in places)
        found.update(_runs_of({pin for _, pin in self.store.pins.list_needed()}))
        return sorted({run.resolve() for run in found if is_inside(run, self.roots)})

    def find_empty_root(self, job: Job) -> Path | None:
        """Return the root of a job's checkpoint if it has nothing: its disk may not be mounted."""
        for root in self._roots_on_disk():
            if Path(job.request.checkpoint).is_relative_to(root.resolve()):
                with suppress(OSError):
                    return None if any(root.iterdir()) else root
                return root
        return None

    def _roots_on_disk(self) -> list[Path]:
        return [root for root in self.roots if not isinstance(root, RemotePath)]


def _runs_of(pins: Iterable[str]) -> Iterator[Path]:
    """Yield the runs of linked checkpoints."""
    for found in (RunFolder.of_pin(Path(pin).parent) for pin in pins):
        if found is not None:
            yield found.path


def _remove(pin: Pin) -> None:
    try:
        unpin(pin)
    except OSError as error:
        _log.warning("pin %s: cannot be removed: %s", pin.directory, error)


def _is_of(pin: Path, checkpoint: Path, owner: str) -> bool:
    """Return whether a pin of this owner keeps the current files of a checkpoint."""
    try:
        found = read_pin(pin)
    except (UnshardError, OSError):
        return False
    if (found.checkpoint, found.owner) != (checkpoint, owner) or found.changed():
        return False
    place = checkpoint if checkpoint.is_dir() else checkpoint.parent
    try:
        return all((place / name).stat().st_ino == was[0] for name, was in found.files.items())
    except OSError:
        return False
