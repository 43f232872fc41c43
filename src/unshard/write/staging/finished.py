"""The files of an output that are finished, as a record next to them: where `--resume` goes on.

A line is added for each file when all its bytes are on disk. A line counts only if this user sealed
it for this very staging directory, if the merge is the same (`Work`), and if the file is as it was:
of its size, and neither replaced nor written to since, by its inode and its times of modification
and of change. A file without a line may have any bytes, and is made again.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unshard.write.dirfd import (
    check_path,
    closing,
    folder_of,
    names_in,
    open_regular,
    opened,
    read_file,
    remove,
    status_of,
    walk,
    whole_file,
)
from unshard.write.stage import Counts, Work
from unshard.write.staging.journal import OUTPUT
from unshard.write.staging.owners import StagingDirectory, is_sealed, seal

FINISHED_NAME = "finished.jsonl"


class _Line(NamedTuple):
    """A finished file: of which work, its name, what its status was, and its `Counts`."""

    work: Work
    name: str
    status: tuple[int, ...]
    counts: Mapping[str, int]


class Ledger:
    """The record of the finished files of an output, to which threads add.

    Attributes:
        known: the files that an earlier process finished.
        notes: why files that were finished are made again; empty if none is.
    """

    def __init__(
        self, place: StagingDirectory, work: Work, known: Mapping[str, Counts], notes: list[str]
    ) -> None:
        self.known = known
        self.notes = notes
        self._place = place
        self._work = work
        self._lock = threading.Lock()

    def add(self, name: str, counts: Counts) -> None:
        """Flush a file that has all its bytes to disk, and record it.

        Raises:
            OSError: it cannot be flushed, or the record cannot be written.
        """
        with (
            opened(OUTPUT, within=self._place.fd) as output,
            folder_of(name, within=output) as (folder, file),
            closing(open_regular(file, os.O_RDONLY, within=folder)) as fd,
        ):
            os.fsync(fd)
            status = _status(os.fstat(fd))
        texts = {str(start): count for start, count in counts.items()}
        text = _sealed(self._place, _Line(self._work, name, status, texts))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._lock, closing(open_regular(FINISHED_NAME, flags, within=self._place.fd)) as fd:
            os.write(fd, text)


def open_ledger(place: StagingDirectory, work: Work) -> Ledger:
    """Open the record in a staging directory; of its output, remove all but what is finished."""
    lines = _read(place)
    same = {line.name: line for line in lines if line.work == work}
    with opened(OUTPUT, within=place.fd) as output:
        kept = {
            name: line
            for name, line in same.items()
            if (found := status_of(name, within=output)) is not None
            and _status(found) == line.status
        }
        folders = {name.partition("/")[0] for name in kept}
        for name in names_in(output):
            if name not in folders:
                remove(name, within=output)
        for path, is_folder in list(walk(output)):
            if not is_folder and path not in kept:
                with folder_of(path, within=output) as (folder, name):
                    remove(name, within=folder)
    if lines:
        with whole_file(FINISHED_NAME, within=place.fd, durable=False) as stream:
            stream.writelines(_sealed(place, line) for line in kept.values())
    known = {
        name: Counts({int(start): count for start, count in line.counts.items()})
        for name, line in kept.items()
    }
    others = [line.work for line in lines if line.work != work]
    return Ledger(place, work, known, notes_of(others, work, len(same) - len(kept)))


def notes_of(others: Sequence[Work], work: Work, changed: int) -> list[str]:
    """Return why files that were finished are made again.

    Args:
        others: what interrupted merges did that left finished files, unless it was the same.
        work: what this one does.
        changed: how many files were finished by the same merge, and are not as they were.
    """
    notes = []
    if others:
        why = "the files of the checkpoint have changed since it was interrupted"
        if any(one.sources == work.sources for one in others):
            why = "the interrupted merge had other options, or was of another version of unshard"
        notes.append(f"the merge begins anew: {why}")
    if changed:
        notes.append(
            "1 finished file was changed since, and is made again"
            if changed == 1
            else f"{changed} finished files were changed since, and are made again"
        )
    return notes


def _status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sealed(place: StagingDirectory, line: _Line) -> bytes:
    fields = {**line._asdict(), "work": line.work._asdict()}
    code = seal("finished", fields, os.fstat(place.fd).st_ino)
    return (json.dumps({"finished": fields, "seal": code}) + "\n").encode()


def _read(place: StagingDirectory) -> list[_Line]:
    """Return the lines that this user sealed for this staging directory; others prove nothing."""
    try:
        texts = read_file(FINISHED_NAME, within=place.fd).splitlines()
    except OSError:
        return []
    return [line for text in texts if (line := _parsed(place, text)) is not None]


def _parsed(place: StagingDirectory, text: bytes) -> _Line | None:
    """Return what a line says; None for one that is torn, or not this user's for this place."""
    try:
        whole = json.loads(text)
        fields, code = whole["finished"], whole["seal"]
        if not is_sealed(code, "finished", fields, os.fstat(place.fd).st_ino):
            return None
        name = "/".join(check_path(fields["name"]))
        status = tuple(map(int, fields["status"]))
        return _Line(Work(**fields["work"]), name, status, dict(fields["counts"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
