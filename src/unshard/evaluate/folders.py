"""Directories and small files that we keep in a run's `_unshard`, where others may have put theirs.

A run may have been copied or unpacked from elsewhere, and other users may write to it. Directories
are therefore opened from the run downwards, one name at a time, without following links, and are
used through their descriptors: see `write.staging.beneath`. Only regular files are read, up to a
bound.

A record of ours names its own inode, which a copy does not share; whatever does not is left alone.
Devices are not compared: their numbers change when a disk is mounted again. Records carry no code
of `write.staging.seals`: its key goes with a container, or stays on a node, while the run is on a
shared disk. The next trainer there has to send what waits, and to remove the pins that fill the
disk. Shipping a run and guessing an inode gains little: the directory of pins in that run is
removed, or a submission in it is sent, which the server checks like any other.
"""

import errno
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from unshard.containers.json_file import is_text, parsed_object
from unshard.write.staging.beneath import open_inside, open_regular, read_with_status

__all__ = [
    "STATE",
    "Record",
    "left_alone",
    "opened",
    "read_record",
    "write_record",
]

STATE = "_unshard"
"""The directory of a run that holds everything of ours."""

_INODE = "inode"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """What a file says; `is_ours`: this user wrote it, here."""

    fields: dict[str, object]
    is_ours: bool


@contextmanager
def opened(run: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a directory inside a run; the mtime of the run stays.

    Args:
        run: the run's directory, which may be reached by links.
        names: of the directories on the way, the last one included.
        make: whether to make those that are missing.

    Raises:
        OSError: it is missing, or one of the names is a link or a file.
    """
    top = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if make and names[:1] == (STATE,):
            _make_state(top)
        folder = open_inside(names, within=top, make=make)
    except OSError as error:
        error.filename = str(run / str(error.filename))
        raise
    finally:
        os.close(top)
    try:
        yield folder
    finally:
        os.close(folder)


def _make_state(run: int) -> None:
    before = os.fstat(run)
    with suppress(FileExistsError):
        os.mkdir(STATE, dir_fd=run)
        # Trainers remove the run or checkpoint that is "oldest" by its mtime.
        os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_record(folder: int, name: str) -> Record:
    """Return what a file of JSON says.

    Raises:
        OSError: it cannot be opened, is not a regular file, or too large.
        CorruptError: it is not what `parsed_object` takes.
    """
    data, status = read_with_status(name, within=folder)
    fields = parsed_object(data, name)
    is_written_here = fields.pop(_INODE, None) == status.st_ino
    return Record(fields, is_written_here and status.st_uid == os.geteuid())


def write_record(folder: int, name: str, fields: Mapping[str, object]) -> None:
    """Write a record of ours in one step: it is whole or not there.

    Raises:
        OSError: it cannot be written, or a path in it is not UTF-8: `read_record` would refuse it.
    """
    if not is_text(json.dumps(fields, ensure_ascii=False)):
        raise OSError(errno.EILSEQ, "it would name a path that is not UTF-8", name)
    draft = f".{name}-{secrets.token_hex(4)}.partial"
    file = open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within=folder)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({**fields, _INODE: os.fstat(file).st_ino}))
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


@lru_cache(maxsize=1000)
def left_alone(what: str) -> None:
    """Log once that something is not touched."""
    log.warning("%s; left alone", what)
