"""A run's `_unshard/`: where our files in it are, and how they are opened, read and written.

A run may have been copied or unpacked from elsewhere, and other users may write to it. Directories
are therefore opened from the run downwards, one name at a time, without following links, and are
used through their descriptors: see `write.dirfd`. Only regular files are read, up to a
bound.

A record of ours names its own inode, which a copy does not share; any other is left alone.
docs/decisions.md says why it needs no code made with a key. Devices are not compared: their numbers
change when a disk is mounted again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from unshard.containers.json_file import is_text, parsed_object
from unshard.errors import CorruptError, UsageError
from unshard.read.step_names import STATE_FOLDER
from unshard.write.dirfd import (
    closing,
    open_inside,
    open_regular,
    read_with_status,
    try_lock,
    whole_file,
)

PINS = "pins"
"""The directory of a run's pins, in `STATE_FOLDER`."""

SPOOL = "spool"
"""The directory of a run's submissions and results on their way, in `STATE_FOLDER`."""

SPOOL_LOCK = "spool.lock"
"""The file in `STATE_FOLDER` that the process locks which sends what is in the spool."""

RUN = "run.json"
"""The file in `STATE_FOLDER` that has the run's id: see `RunIdentity`."""

WATCH_LOCK = "watch.lock"
"""The file in `STATE_FOLDER` that the process locks which watches the run."""

WATCHED = "watched"
"""The name of the `Marks` in `STATE_FOLDER` of what was submitted by watching."""

_INODE = "inode"
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LONGEST_NAME = 100  # characters of a run's; half of the bytes that the server accepts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The directory of a training run, which holds its checkpoints.

    Attributes:
        path: of the directory; it may be reached by links.
    """

    path: Path

    @classmethod
    def of_pin(cls, directory: Path) -> "RunFolder | None":
        """Return the run of a pin's directory; None if it is not a `RUN/_unshard/pins/NAME`."""
        is_one = directory.parts[-3:-1] == (STATE_FOLDER, PINS)
        return cls(directory.parents[2]) if is_one else None

    @classmethod
    def around(cls, step_dir: Path) -> "RunFolder":
        """Return the run of a step's directory, which may be a pin."""
        return cls.of_pin(step_dir.parent) or cls(step_dir.parent)

    def read_identity(self) -> "RunIdentity | None":
        """Return what the run's `run.json` says; None if there is none, or it cannot be read."""
        try:
            with self.opened() as state:
                record = read_record(state, RUN)
        except (OSError, CorruptError):
            return None
        said = {key: one for key in _SAID if isinstance(one := record.fields.get(key), str)}
        if not _ID.fullmatch(said.get("id", "")):
            return None
        is_here = record.is_in_place and record.fields.get("folder") == self._inode()
        return RunIdentity(**said, is_copy=not is_here)

    def write_identity(
        self, run_id: str, *, copied: "RunIdentity | None" = None, joins: str = ""
    ) -> None:
        """Give the run an id, which may have been `copied` with another; see `RunIdentity`.

        Raises:
            OSError: the run cannot be written to.
        """
        said = {"id": run_id, "path": str(self.path), "joins": joins}
        if copied is not None:
            said |= {"copied_from": copied.id, "copied_path": copied.path}
        with self.opened(make=True) as state:
            write_record(state, RUN, {**said, "folder": self._inode()})

    def adopt(self) -> str:
        """Take the id of the run that this one was copied from; return it.

        For a run that was moved to another disk, where it seems to be a copy.

        Raises:
            UsageError: it was not copied, or what it was copied from is still there.
            OSError: the run cannot be written to.
        """
        said = self.read_identity()
        if said is not None and said.is_copy:
            own, wanted, path = "", said.id, said.path
        elif said is not None and said.copied_from:
            own, wanted, path = said.id, said.copied_from, said.copied_path
        else:
            raise UsageError(
                f"{self.path}: is not a copy of a run that was evaluated",
                expected=f"a run that was moved to another disk with its {STATE_FOLDER}/{RUN}",
            )
        other = RunFolder(Path(path)).read_identity() if path else None
        if other is not None and other.id == wanted and not other.is_copy:
            raise UsageError(
                f"{self.path}: was copied from {path}, which is still there",
                expected="a run that was moved",
                hint=f"two runs cannot be one: remove {path}, or keep this one as a run of its own",
            )
        self.write_identity(wanted, joins=own)
        return wanted

    def _inode(self) -> int:
        return self.path.stat().st_ino

    @property
    def name(self) -> str:
        """Return the run's name where the user gives none: one that the server accepts.

        A long name is cut, and ends in a hash of the whole name, which other runs do not share.
        """
        pinned_in = RunFolder.of_pin(self.path)
        folder = self.path if pinned_in is None else pinned_in.path
        if folder.name == "checkpoints":  # of every run, with Lightning and others
            folder = folder.parent
        # It may become an argument of a command.
        clean = re.sub(r"[^\w.+=@-]+|\.\.+", "_", folder.name).lstrip("-._+=@")
        if len(clean) > _LONGEST_NAME or len(clean.encode()) > 2 * _LONGEST_NAME:
            digest = hashlib.sha256(folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
            return f"{clean.encode()[: _LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"
        return clean.rstrip(".") or "run"

    @property
    def state(self) -> Path:
        """Return `_unshard/`, the directory of all our files."""
        return self.path / STATE_FOLDER

    @property
    def pins(self) -> Path:
        """Return the directory of pins: see `pins.pin`."""
        return self.state / PINS

    @property
    def spool(self) -> Path:
        """Return the directory of submissions and results on their way: see `trainer.spool`."""
        return self.state / SPOOL

    @property
    def merged(self) -> Path:
        """Return the directory of what lmms-eval's clients had the server merge."""
        return self.state / "merged"

    @property
    def results(self) -> Path:
        """Return the file that has every result as a line of JSON."""
        return self.state / "results.jsonl"

    @property
    def exports(self) -> Path:
        """Return the directory of `Marks` that say which tracker has which result."""
        return self.state / "exports"

    @contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a directory in `_unshard/`; the mtime of the run stays.

        Args:
            names: of the directories on the way, the last one included.
            make: whether to make those that are missing.

        Raises:
            OSError: it is missing, or one of the names is a link or a file.
        """
        if make:
            before = self.path.stat()
            with suppress(FileExistsError):
                self.state.mkdir()
                # Trainers remove the run or checkpoint that is "oldest" by its mtime.
                os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with opened(self.path, STATE_FOLDER, *names, make=make) as folder:
            yield folder

    def lock(self, name: str) -> int | None:
        """Lock `_unshard/<name>` as `lock_file` does; the run's directory is made if need be."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.opened(make=True) as state:
            return lock_file(name, within=state)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a run's directory says of itself.

    Attributes:
        id: of the run.
        path: where it was when it got the id.
        copied_from: the id of the run that it was copied from, if it got another one since, and
            `copied_path` where that was.
        joins: the id that it had until it was adopted; what has that is of this run, too.
        is_copy: whether the directory was copied from that run's: it is another one. A directory
            that was moved or renamed has the same inode, and so has the record in it. A device is
            not compared: its number changes when a disk is mounted again.
    """

    id: str
    path: str = ""
    copied_from: str = ""
    copied_path: str = ""
    joins: str = ""
    is_copy: bool = False


_SAID = ("id", "path", "copied_from", "copied_path", "joins")


@contextmanager
def opened(top: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a directory inside another; see `RunFolder.opened`."""
    with closing(os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        try:
            folder = open_inside(names, within=fd, make=make)
        except OSError as error:
            error.filename = str(top / str(error.filename))
            raise
    with closing(folder):
        yield folder


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The fields of a JSON file, and whether it was written in that place, and by this user."""

    fields: dict[str, object]
    is_ours: bool
    is_in_place: bool


def read_record(folder: int, name: str) -> RunRecord:
    """Read a JSON file in an open directory.

    Raises:
        OSError: it cannot be opened, is not a regular file, or too large.
        CorruptError: it is not what `parsed_object` takes.
    """
    data, status = read_with_status(name, within=folder)
    fields = parsed_object(data, name)
    is_in_place = fields.pop(_INODE, None) == status.st_ino
    is_ours = is_in_place and status.st_uid == os.geteuid()
    return RunRecord(fields, is_ours, is_in_place)


def write_record(folder: int, name: str, fields: Mapping[str, object]) -> None:
    """Write a record of ours in one step: it is whole or not there.

    Raises:
        OSError: it cannot be written, or a path in it is not UTF-8: `read_record` would refuse it.
    """
    if not is_text(json.dumps(fields, ensure_ascii=False)):
        raise OSError(errno.EILSEQ, "it would name a path that is not UTF-8", name)
    with whole_file(name, within=folder, durable=False) as stream:
        inode = os.fstat(stream.fileno()).st_ino
        stream.write(json.dumps({**fields, _INODE: inode}).encode())


def lock_file(path: Path | str, *, within: int | None = None) -> int | None:
    """Lock a file, made if need be; return the descriptor that holds it, None if another does.

    Without locks on the file system every process gets one.

    Args:
        path: of the file, or its name in `within`.
        within: the directory that holds it.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, within=within)
    try:
        is_ours = try_lock(fd)
    except OSError:
        is_ours = True  # there are no locks here
    if is_ours:
        return fd
    os.close(fd)
    return None


def unlock(fd: int) -> None:
    """Release a lock, also for processes that were forked since (data loaders)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@lru_cache(maxsize=1000)
def leave_alone(what: str) -> None:
    """Log once that something is not touched."""
    log.warning("%s; left alone", what)
