"""Submissions that have no result yet, as files of the run that survive trainer and server.

`<run>/_unshard/spool/` has `queue/` (not sent yet, in order), `jobs/` (the server has them),
`results/` (received, but not in every tracker) and `refused/` (with the server's answer; sent again
from time to time, because the server's configuration may be corrected). Every file is written under
another name and renamed. Nothing is synced to the disk, because a trainer must not wait for its own
checkpoint to be flushed: files survive the death of a process, not of a machine. Files that this
user did not write in that place (in a copied or unpacked run, or another user's) are logged and
left alone.
"""

import json
import os
import re
import secrets
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from unshard.errors import CorruptError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.run_folder import SPOOL, RunFolder, leave_alone, read_record, write_record
from unshard.write.staging.beneath import names_in

__all__ = ["Entry", "Fields", "Spool", "pins_in"]

_JOB_ID = re.compile(r"[\w-][\w.-]{0,127}")  # it becomes the name of a file

Fields = dict[str, object]

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the spool and its fields."""

    path: Path
    fields: Fields

    @property
    def name(self) -> str:
        """Return the name of the file; a job's is its id."""
        return self.path.stem

    @property
    def step(self) -> int:
        """Return the training step of the checkpoint."""
        return int(str(self.fields["step"]))

    @property
    def request(self) -> str:
        """Return the request that was submitted, as canonical JSON."""
        return json.dumps(self.fields.get("request"), sort_keys=True)


def pins_in(fields: Fields) -> list[str]:
    """Return the pins that a submission or a job needs."""
    pins = fields.get("pins")
    return [str(pin) for pin in pins] if isinstance(pins, list) else []


def _job_name(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise EvaluationError("the server's answer names no job", found=f"{job_id!r:.200}")
    return job_id


class Spool:
    """The spool of a run.

    Args:
        run: the run's directory; nothing is made there before the first submission.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._folder = RunFolder(run)
        self._written: set[Path] = set()  # by this process: these are ours in any case

    def add(self, fields: Fields) -> Entry:
        """Add a submission, with its step, behind all others."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        return self._write("queue", name, fields)

    def supersede(self, newer: Entry) -> list[str]:
        """Remove older submissions of the same request that are not sent yet; return their pins."""
        pins = []
        for older in (*self.waiting(), *self.refused()):
            if older.request == newer.request and older.name < newer.name:
                pins += pins_in(older.fields)
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

    def follow(self, job_id: str, fields: Fields) -> Entry:
        """Add a job that another client submitted.

        Raises:
            EvaluationError: `job_id` is not a job's id.
        """
        return self._write("jobs", _job_name(job_id), fields)

    def accept(self, entry: Entry, job_id: str) -> Entry:
        """Record that the server took a submission; it may have had the same job before.

        Raises:
            EvaluationError: `job_id` is not a job's id.
        """
        job_id = _job_name(job_id)
        known = [one for one in self.pending() if one.name == job_id]
        named = [pin for one in (*known, entry) for pin in pins_in(one.fields)]
        pins = list(dict.fromkeys(named))  # the newest last
        return self._move(entry, "jobs", job_id, {**entry.fields, "pins": pins})

    def requeue(self, entry: Entry) -> Entry:
        """Put a job that the server forgot, or a refused submission, back into the queue."""
        return self._move(entry, "queue", f"{time.time_ns():020d}-{secrets.token_hex(4)}")

    def refuse(self, entry: Entry, why: str) -> Entry:
        """Record that the server refused a submission."""
        return self._move(entry, "refused", entry.name, {**entry.fields, "error": why})

    def arrive(self, entry: Entry, fields: Fields) -> Entry:
        """Record the result of a job; the job's own entry stays until it is removed."""
        return self._write("results", entry.name, {**entry.fields, **fields})

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        try:
            with self._opened(entry.path.parent.name) as folder:
                os.unlink(entry.path.name, dir_fd=folder)
        except FileNotFoundError:
            return

    def is_pin_needed(self, pin: str) -> bool:
        """Return whether a submission or a job still needs a pin."""
        entries = (*self.waiting(), *self.pending(), *self.refused())
        return any(pin in pins_in(entry.fields) for entry in entries)

    def _opened(self, folder: str, *, make: bool = False) -> AbstractContextManager[int]:
        return self._folder.opened(SPOOL, folder, make=make)

    def _entries(self, folder: str) -> list[Entry]:
        """Return a folder's entries by name; other files are left alone."""
        entries = []
        try:
            with self._opened(folder) as opened_folder:
                for name in names_in(opened_folder):
                    if name.endswith(_SUFFIX):
                        entries += self._read(opened_folder, self._folder.spool / folder / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            leave_alone(str(error))
        return entries

    def _read(self, folder: int, path: Path) -> list[Entry]:
        """Return a list with the entry in a file, or an empty list if it is not one of ours."""
        try:
            record = read_record(folder, path.name)
        except FileNotFoundError:
            return []
        except (OSError, CorruptError) as error:
            leave_alone(f"{path}: not readable: {error}")
            return []
        if type(record.fields.get("step")) is not int:
            leave_alone(f"{path}: not readable: it names no step")
        elif not record.is_ours and path not in self._written:
            leave_alone(
                f"{path}: not written here by this user (a copy?); submit it again if needed"
            )
        else:
            return [Entry(path, record.fields)]
        return []

    def _move(self, entry: Entry, folder: str, name: str, fields: Fields | None = None) -> Entry:
        """Write the new entry first: after a crash an entry may be done twice, but is not lost."""
        moved = self._write(folder, name, entry.fields if fields is None else fields)
        self.remove(entry)
        return moved

    def _write(self, folder: str, name: str, fields: Fields) -> Entry:
        path = self._folder.spool / folder / f"{name}{_SUFFIX}"
        self.run.mkdir(parents=True, exist_ok=True)
        with self._opened(folder, make=True) as opened_folder:
            write_record(opened_folder, path.name, fields)
        self._written.add(path)
        return Entry(path, fields)
