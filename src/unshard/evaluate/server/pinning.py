"""The pins that the server makes for clients that make none, and lookups of all pins.

Only the client removes its own pin: it may need the pin for jobs that are not submitted yet.
"""

import logging
import threading
from collections import defaultdict
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
        roots: no pin outside them is made, used or removed.
        quota: of the pins that servers make of one run.
        lock: held while a job gets its pin, and while a pin without a job is removed.
    """

    store: Store
    roots: Sequence[Path]
    quota: Quota
    lock: threading.RLock = field(default_factory=threading.RLock)

    def find_client_pin(self, pin: str) -> str | None:
        """Return the linked checkpoint of a client's pin; None if it is gone.

        Raises:
            UsageError: it is not a pin, or outside the roots.
        """
        path = resolve_checkpoint(pin, self.roots)
        if isinstance(path, RemotePath) or RunFolder.of_pin(path.parent) is None:
            raise UsageError(
                "pin cannot be accepted",
                expected=f"RUN/{STATE_FOLDER}/{PINS}/NAME/CHECKPOINT",
                found=pin,
            )
        try:
            is_same = read_pin(path).path == path
        except ExpiredError:
            return None
        return str(path) if is_same and path.exists() else None

    def ensure_pin(self, checkpoint: Path, step: int | None, run: Path) -> str | None:
        """Pin a checkpoint, or return our pin of another job; None if that is not possible.

        Raises:
            ExpiredError: the checkpoint is gone.
        """
        if existing := self._find_own_pin(checkpoint, run):
            return existing
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

    def _find_own_pin(self, checkpoint: Path, run: Path) -> str | None:
        """Return this server's pin of a checkpoint for another job.

        It is looked for on the disk, because pins are far fewer than waiting jobs.
        """
        owner = str(self.store.identity)
        with suppress(OSError):
            for pin in (folder / checkpoint.name for folder in RunFolder(run).pins.iterdir()):
                if self.store.pins.is_needed(str(pin)) and _is_of(pin, checkpoint, owner):
                    return str(pin)
        return None

    def list_all(self) -> list[tuple[Pin, list[str]]]:
        """Return the pins below the roots, each with the jobs that need it, the oldest first."""
        needed = defaultdict[str, list[str]](list)
        for job_id, path in self.store.pins.list_needed():
            needed[path].append(job_id)
        pins = [pin for run in self._runs_inside() for pin in list_pins(run)]
        pins.sort(key=lambda pin: (pin.created, pin.name))
        return [(pin, needed[str(pin.path)]) for pin in pins]

    def remove_unneeded(self, path: str | None = None) -> None:
        """Remove the pins of this server that no job needs, in all runs or in that of a pin."""
        with self.lock:
            owner = str(self.store.identity)
            for run in self._runs_inside() if path is None else _runs_of([path]):
                for pin in list_pins(run):
                    is_own = pin.is_ours and pin.owner == owner
                    if is_own and not self.store.pins.is_needed(str(pin.path)):
                        try:
                            unpin(pin)
                        except OSError as error:
                            _log.warning("pin %s: cannot be removed: %s", pin.directory, error)
                sweep(run, owner)

    def release(self, job: Job) -> None:
        """Remove the pin of an ended job, if it is this server's and no other job needs it."""
        if job.pin is not None:
            self.remove_unneeded(job.pin)

    def list_changed(self, job: Job) -> Sequence[str]:
        """Return the files of a job's checkpoint that were rewritten since it was submitted.

        Without a pin, files may be missing or new; if all names are new, another training with
        another number of ranks has begun there.
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
        runs = set(map(Path, self.store.pins.list_runs()))
        for root in self._roots_on_disk():
            for depth in _DEPTHS:
                folders = root.glob(f"{depth}{STATE_FOLDER}/{PINS}")
                runs.update(folder.parents[1] for folder in folders)
        runs.update(_runs_of({pin for _, pin in self.store.pins.list_needed()}))
        return sorted({run.resolve() for run in runs if is_inside(run, self.roots)})

    def find_empty_root(self, job: Job) -> Path | None:
        """Return the root of a job's checkpoint if it is empty: its disk may not be mounted."""
        for root in self._roots_on_disk():
            if Path(job.request.checkpoint).is_relative_to(root.resolve()):
                with suppress(OSError):
                    return None if any(root.iterdir()) else root
                return root
        return None

    def _roots_on_disk(self) -> list[Path]:
        return [root for root in self.roots if not isinstance(root, RemotePath)]


def _runs_of(pins: Iterable[str]) -> Iterator[Path]:
    for folder in (RunFolder.of_pin(Path(pin).parent) for pin in pins):
        if folder is not None:
            yield folder.path


def _is_of(path: Path, checkpoint: Path, owner: str) -> bool:
    """Return whether a pin of this owner keeps the current files of a checkpoint."""
    try:
        pin = read_pin(path)
        if (pin.checkpoint, pin.owner) != (checkpoint, owner) or pin.changed():
            return False
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        return all((folder / name).stat().st_ino == was[0] for name, was in pin.files.items())
    except (UnshardError, OSError):
        return False
