"""What a trainer asked for and has not got yet, as files beside its run: survives both sides.

`<run>/_unshard/spool/` holds `queue/` (not sent yet, in order), `jobs/` (the server has them),
`results/` (came, and not handed over everywhere) and `refused/` (with the server's answer; sent
again now and then: a server's configuration may be mended). Every file is written under another
name and renamed. Nothing is synced to the disk, because a trainer must not wait for its own
checkpoint to be flushed: files survive the death of a process, not of a machine.
"""

import json
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.jobs import EvaluationError

__all__ = ["Entry", "Fields", "Spool", "pins_in"]

_JOB_ID = re.compile(r"[\w-][\w.-]{0,127}")  # it becomes the name of a file

Fields = dict[str, object]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the spool and what it says."""

    path: Path
    fields: Fields

    @property
    def name(self) -> str:
        """Return the entry's name: of a job, its id."""
        return self.path.stem

    @property
    def step(self) -> int:
        """Return the training step that it belongs to."""
        return int(str(self.fields["step"]))


def pins_in(fields: Fields) -> list[str]:
    """Return the pins that a submission, or the job it became, needs."""
    pins = fields.get("pins")
    return [str(pin) for pin in pins] if isinstance(pins, list) else []


def _job_name(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise EvaluationError("the server's answer names no job", found=f"{job_id!r:.200}")
    return job_id


class Spool:
    """The spool of a run.

    Args:
        run: the run's directory; nothing is made there before something is added.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._place = run / "_unshard" / "spool"

    def add(self, fields: Fields) -> Entry:
        """Add a submission, which names its step, behind all others."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        return self._write("queue", name, fields)

    def waiting(self) -> list[Entry]:
        """Return what was not sent yet, in order."""
        return self._entries("queue")

    def pending(self) -> list[Entry]:
        """Return what the server has and has not finished; an entry's name is the job's id."""
        return self._entries("jobs")

    def arrived(self) -> list[Entry]:
        """Return the results that were not handed over everywhere yet."""
        return self._entries("results")

    def refused(self) -> list[Entry]:
        """Return what the server refused: it is sent again now and then."""
        return self._entries("refused")

    def refusals(self) -> dict[str, str]:
        """Return what the server said to the submissions that it refused, by their names."""
        return {one.name: str(one.fields.get("error")) for one in self.refused()}

    def follow(self, job_id: str, fields: Fields) -> Entry:
        """Add a job that the server has, and that somebody else submitted.

        Raises:
            EvaluationError: the server's answer names no job.
        """
        return self._write("jobs", _job_name(job_id), fields)

    def accept(self, entry: Entry, job_id: str) -> Entry:
        """Record that the server took a submission; it may have had the same job before.

        Raises:
            EvaluationError: the server's answer names no job.
        """
        job_id = _job_name(job_id)
        known = [one for one in self.pending() if one.name == job_id]
        pins = sorted({pin for one in (entry, *known) for pin in pins_in(one.fields)})
        return self._move(entry, "jobs", job_id, {**entry.fields, "pins": pins})

    def requeue(self, entry: Entry) -> Entry:
        """Put back into the queue what the server forgot, or refused."""
        return self._move(entry, "queue", f"{time.time_ns():020d}-{secrets.token_hex(4)}")

    def refuse(self, entry: Entry, why: str) -> Entry:
        """Record that the server does not take a submission."""
        return self._move(entry, "refused", entry.name, {**entry.fields, "error": why})

    def arrive(self, entry: Entry, fields: Fields) -> Entry:
        """Record a result."""
        return self._move(entry, "results", entry.name, {**entry.fields, **fields})

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is of no use any more."""
        entry.path.unlink(missing_ok=True)

    def is_pin_needed(self, pin: str) -> bool:
        """Tell whether a submission or a job still needs a pin."""
        entries = (*self.waiting(), *self.pending(), *self.refused())
        return any(pin in pins_in(entry.fields) for entry in entries)

    def _entries(self, folder: str) -> list[Entry]:
        """Return a folder's entries by name; those that are broken are set aside."""
        entries = []
        for path in sorted((self._place / folder).glob("*.json")):
            try:
                fields = json.loads(path.read_bytes())
            except FileNotFoundError:
                continue
            except ValueError:
                fields = None
            if isinstance(fields, dict) and isinstance(fields.get("step"), int):
                entries.append(Entry(path, fields))
            else:
                log.warning("%s: not readable, left out", path)
                path.rename(path.with_suffix(".broken"))
        return entries

    def _move(self, entry: Entry, folder: str, name: str, fields: Fields | None = None) -> Entry:
        """Write the new entry first: what is there twice after a crash is done twice, not lost."""
        moved = self._write(folder, name, entry.fields if fields is None else fields)
        entry.path.unlink(missing_ok=True)
        return moved

    def _write(self, folder: str, name: str, fields: Fields) -> Entry:
        directory = self._folder(folder)
        path = directory / f"{name}.json"
        partial = directory / f".{name}-{secrets.token_hex(4)}.partial"
        partial.write_text(json.dumps(fields), encoding="utf-8")
        partial.replace(path)
        return Entry(path, fields)

    def _folder(self, name: str) -> Path:
        """Make a folder of the spool; the mtime of the run's directory stays."""
        directory = self._place / name
        if not directory.is_dir():
            before = self.run.stat() if self.run.is_dir() else None
            directory.mkdir(parents=True, exist_ok=True)
            if before is not None:
                os.utime(self.run, ns=(before.st_atime_ns, before.st_mtime_ns))
        return directory
