"""Submissions that have no result yet, as files of the run that survive trainer and server.

`<run>/_unshard/spool/` has `queue/` (not sent yet, in order), `jobs/` (accepted by the server),
`results/` (received, but not in every tracker) and `refused/` (with the server's answer; sent again
from time to time, because the server's configuration may be corrected). Every file is written under
another name and renamed. Nothing is synced to the disk, because a trainer must not wait for its own
checkpoint to be flushed: files survive a killed process, not a crash of the machine. Files that
this user did not write in that place (in a copied or unpacked run, or another user's) are logged
and left alone.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from unshard.errors import CorruptError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.run_folder import SPOOL, RunFolder, leave_alone, read_record, write_record
from unshard.write.dirfd import names_in

_JOB_ID = re.compile(r"[\w-][\w.-]{0,127}")  # it becomes the name of a file
_SUFFIX = ".json"

EntryFields = dict[str, object]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the spool and its fields; fields may be missing if another version wrote it."""

    path: Path
    fields: EntryFields

    @property
    def name(self) -> str:
        """The stem of the file; a job's id in `jobs/` and `results/`."""
        return self.path.stem

    @property
    def step(self) -> int:
        """The training step of the checkpoint."""
        return int(str(self.fields["step"]))

    @property
    def request(self) -> dict[str, object]:
        """The request that was submitted, with the paths of this machine."""
        request = self.fields.get("request")
        return request if isinstance(request, dict) else {}

    @property
    def key(self) -> str:
        """A text that is equal for equal requests."""
        return request_key(self.request)

    @property
    def pins(self) -> list[str]:
        """The pins that the submission or job needs, the newest last."""
        pins = self.fields.get("pins")
        return [str(pin) for pin in pins] if isinstance(pins, list) else []


def request_key(request: Mapping[str, object]) -> str:
    """Return a request as canonical JSON."""
    return json.dumps(request, sort_keys=True)


def _new_name() -> str:
    """Return a name that sorts after those of all other entries."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


def _check_job_id(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise EvaluationError("the server's answer has no job's id", found=f"{job_id!r:.200}")
    return job_id


class Spool:
    """The spool of a run; nothing is written there before the first submission."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._folder = RunFolder(run)
        self._written: set[Path] = set()  # by this process, so no record has to prove it

    def add(self, fields: EntryFields) -> Entry:
        """Add a submission, with its step, at the end of the queue."""
        return self._write("queue", _new_name(), fields)

    def supersede(self, newer: Entry) -> list[str]:
        """Remove older submissions of the same request that are not sent yet; return their pins."""
        pins = []
        for older in (*self.waiting(), *self.refused()):
            if older.key == newer.key and older.name < newer.name:
                pins += older.pins
                self.remove(older)
        return pins

    def waiting(self) -> list[Entry]:
        """Return the submissions that were not sent yet, in order."""
        return self._entries("queue")

    def pending(self) -> list[Entry]:
        """Return the jobs that the server has not finished."""
        return self._entries("jobs")

    def arrived(self) -> list[Entry]:
        """Return the results that some tracker does not have yet."""
        return self._entries("results")

    def refused(self) -> list[Entry]:
        """Return the submissions that the server refused."""
        return self._entries("refused")

    def follow(self, job_id: str, fields: EntryFields) -> Entry:
        """Add a job that another client submitted.

        Raises:
            EvaluationError: `job_id` is not a job's id.
        """
        return self._write("jobs", _check_job_id(job_id), fields)

    def accept(self, entry: Entry, job_id: str) -> Entry:
        """Record that the server accepted a submission; the job may be pending already.

        Raises:
            EvaluationError: `job_id` is not a job's id.
        """
        job_id = _check_job_id(job_id)
        same_job = [pending for pending in self.pending() if pending.name == job_id]
        pins = dict.fromkeys(pin for one in (*same_job, entry) for pin in one.pins)
        return self._move(entry, "jobs", job_id, {**entry.fields, "pins": list(pins)})

    def requeue(self, entry: Entry) -> Entry:
        """Put a job that the server has lost, or a refused submission, back into the queue."""
        return self._move(entry, "queue", _new_name(), entry.fields)

    def refuse(self, entry: Entry, why: str) -> Entry:
        """Record that the server refused a submission."""
        return self._move(entry, "refused", entry.name, {**entry.fields, "error": why})

    def arrive(self, entry: Entry, fields: EntryFields) -> Entry:
        """Record the result of a job; the job's own entry stays until it is removed."""
        return self._write("results", entry.name, {**entry.fields, **fields})

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        with suppress(FileNotFoundError), self._opened(entry.path.parent.name) as folder:
            os.unlink(entry.path.name, dir_fd=folder)

    def is_pin_needed(self, pin: str) -> bool:
        """Return whether a submission or a job still needs a pin."""
        entries = (*self.waiting(), *self.pending(), *self.refused())
        return any(pin in entry.pins for entry in entries)

    def _opened(self, folder: str, *, make: bool = False) -> AbstractContextManager[int]:
        return self._folder.opened(SPOOL, folder, make=make)

    def _entries(self, folder: str) -> list[Entry]:
        """Return a folder's entries by name; other files are left alone."""
        paths = self._folder.state / SPOOL / folder
        entries = []
        try:
            with self._opened(folder) as fd:
                names = [name for name in names_in(fd) if name.endswith(_SUFFIX)]
                entries = [self._read(fd, paths / name) for name in names]
        except FileNotFoundError:
            pass
        except OSError as error:
            leave_alone(str(error))
        return [entry for entry in entries if entry is not None]

    def _read(self, folder: int, path: Path) -> Entry | None:
        """Return the entry in a file; None if it is not one of ours."""
        try:
            record = read_record(folder, path.name)
        except FileNotFoundError:
            return None
        except (OSError, CorruptError) as error:
            leave_alone(f"{path}: not readable: {error}")
            return None
        if type(record.fields.get("step")) is not int:
            leave_alone(f"{path}: not readable: it has no step")
        elif record.is_ours or path in self._written:
            return Entry(path, record.fields)
        else:
            leave_alone(
                f"{path}: not written here by this user (a copy?); submit it again if needed"
            )
        return None

    def _move(self, entry: Entry, folder: str, name: str, fields: EntryFields) -> Entry:
        """Write the new entry first: after a crash an entry may be sent twice, but is not lost."""
        moved = self._write(folder, name, fields)
        self.remove(entry)
        return moved

    def _write(self, folder: str, name: str, fields: EntryFields) -> Entry:
        path = self._folder.state / SPOOL / folder / f"{name}{_SUFFIX}"
        self.run.mkdir(parents=True, exist_ok=True)
        with self._opened(folder, make=True) as opened_folder:
            write_record(opened_folder, path.name, fields)
        self._written.add(path)
        return Entry(path, fields)
