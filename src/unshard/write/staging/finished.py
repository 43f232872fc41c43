"""The record of an output's finished files in a staging directory, for `--resume`.

A line is added for each file after all its bytes are on disk. A line is valid only if this user
sealed it for this staging directory, if the merge is the same (`WorkDigests`), and if the file has
not been replaced or written to since, by its size, inode, mtime and ctime. A file without a valid
line may have any bytes, and is written again.
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
from unshard.write.stage import Counts, WorkDigests
from unshard.write.staging.journal import OUTPUT
from unshard.write.staging.owners import StagingDirectory, is_sealed, seal

FINISHED_NAME = "finished.jsonl"


class _Line(NamedTuple):
    """A finished file: the identity of its merge, its name, status and `Counts`."""

    work: WorkDigests
    name: str
    status: tuple[int, ...]
    counts: Mapping[str, int]


class Ledger:
    """The record of the finished files of an output, to which threads add.

    Attributes:
        known: the files that an earlier process finished.
        notes: why finished files are written again; empty if none is.
    """

    def __init__(
        self,
        staging: StagingDirectory,
        work: WorkDigests,
        known: Mapping[str, Counts],
        notes: list[str],
    ) -> None:
        self.known = known
        self.notes = notes
        self._staging = staging
        self._work = work
        self._lock = threading.Lock()

    def add(self, name: str, counts: Counts) -> None:
        """Flush a complete file to disk, and record it.

        Raises:
            OSError: it cannot be flushed, or the record cannot be written.
        """
        with (
            opened(OUTPUT, within=self._staging.fd) as output,
            folder_of(name, within=output) as (folder, file),
            closing(open_regular(file, os.O_RDONLY, within=folder)) as fd,
        ):
            os.fsync(fd)
            status = _status(os.fstat(fd))
        texts = {str(start): count for start, count in counts.items()}
        text = _sealed(self._staging, _Line(self._work, name, status, texts))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._lock, closing(open_regular(FINISHED_NAME, flags, within=self._staging.fd)) as fd:
            os.write(fd, text)


def open_ledger(staging: StagingDirectory, work: WorkDigests) -> Ledger:
    """Open the record in a staging directory, and remove all unfinished files of its output."""
    lines = _read(staging)
    same = {line.name: line for line in lines if line.work == work}
    with opened(OUTPUT, within=staging.fd) as output:
        finished = {
            name: line
            for name, line in same.items()
            if (status := status_of(name, within=output)) is not None
            and _status(status) == line.status
        }
        folders = {name.partition("/")[0] for name in finished}
        for name in names_in(output):
            if name not in folders:
                remove(name, within=output)
        for path, is_folder in list(walk(output)):
            if not is_folder and path not in finished:
                with folder_of(path, within=output) as (folder, name):
                    remove(name, within=folder)
    if lines:
        with whole_file(FINISHED_NAME, within=staging.fd, durable=False) as stream:
            stream.writelines(_sealed(staging, line) for line in finished.values())
    known = {
        name: Counts({int(start): count for start, count in line.counts.items()})
        for name, line in finished.items()
    }
    others = [line.work for line in lines if line.work != work]
    return Ledger(staging, work, known, notes_of(others, work, len(same) - len(finished)))


def notes_of(others: Sequence[WorkDigests], work: WorkDigests, changed: int) -> list[str]:
    """Return why finished files are written again.

    Args:
        others: the identities of other merges that left finished files.
        work: the identity of this merge.
        changed: how many files of the same merge were changed since.
    """
    notes = []
    if others:
        reason = "the files of the checkpoint have changed since it was interrupted"
        if any(other.sources == work.sources for other in others):
            reason = "the interrupted merge had other options, or another version of unshard"
        notes.append(f"the merge starts over: {reason}")
    if changed == 1:
        notes.append("1 finished file was changed since, and is written again")
    elif changed:
        notes.append(f"{changed} finished files were changed since, and are written again")
    return notes


def _status(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sealed(staging: StagingDirectory, line: _Line) -> bytes:
    fields = {**line._asdict(), "work": line.work._asdict()}
    code = seal("finished", fields, os.fstat(staging.fd).st_ino)
    return (json.dumps({"finished": fields, "seal": code}) + "\n").encode()


def _read(staging: StagingDirectory) -> list[_Line]:
    """Return the lines that this user sealed for this staging directory."""
    try:
        texts = read_file(FINISHED_NAME, within=staging.fd).splitlines()
    except OSError:
        return []
    return [line for text in texts if (line := _parsed(staging, text)) is not None]


def _parsed(staging: StagingDirectory, text: bytes) -> _Line | None:
    """Return the parsed line; None if it is torn, or not sealed for this directory."""
    try:
        record = json.loads(text)
        fields, code = record["finished"], record["seal"]
        if not is_sealed(code, "finished", fields, os.fstat(staging.fd).st_ino):
            return None
        name = "/".join(check_path(fields["name"]))
        status = tuple(map(int, fields["status"]))
        return _Line(WorkDigests(**fields["work"]), name, status, dict(fields["counts"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
