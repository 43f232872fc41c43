"""Paths, reading and writing of our files in a run's `_unshard/`.

A run may have been copied or unpacked from elsewhere, and other users may write to it. Directories
are therefore opened from the run downwards, one name at a time, without following links, and are
used through their descriptors: see `write.dirfd`. Only regular files are read, up to a bound.

Our records contain their own inode, which a copy does not share; all others are left alone. They
need no keyed hash: see docs/decisions.md. Devices are not compared, because their numbers change
when a disk is mounted again.
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

# Names in `STATE_FOLDER`.
PINS = "pins"
SPOOL = "spool"  # submissions and results on their way
SPOOL_LOCK = "spool.lock"  # locked by the process that sends the spool
RUN = "run.json"  # see `RunIdentity`
WATCH_LOCK = "watch.lock"  # locked by the process that watches the run
WATCHED = "watched"  # `Marks` of submissions by watching

_INODE = "inode"
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_LONGEST_NAME = 100  # characters of a run's name; the server accepts twice as many bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The directory of a training run, which holds its checkpoints; its path may contain links."""

    path: Path

    @classmethod
    def of_pin(cls, directory: Path) -> "RunFolder | None":
        """Return the run of a pin's directory; None if it is not a `RUN/_unshard/pins/NAME`."""
        is_pin = directory.parts[-3:-1] == (STATE_FOLDER, PINS)
        return cls(directory.parents[2]) if is_pin else None

    @classmethod
    def around(cls, step_dir: Path) -> "RunFolder":
        """Return the run of a step's directory, which may be a pin."""
        return cls.of_pin(step_dir.parent) or cls(step_dir.parent)

    def read_identity(self) -> "RunIdentity | None":
        """Return the identity in `run.json`; None if it is missing or cannot be read."""
        try:
            with self.opened() as state:
                record = read_record(state, RUN)
        except (OSError, CorruptError):
            return None
        fields = record.fields
        texts = {key: text for key in _TEXTS if isinstance(text := fields.get(key), str)}
        if not _ID.fullmatch(texts.get("id", "")):
            return None
        is_here = record.is_in_place and fields.get("folder") == self._inode()
        return RunIdentity(**texts, is_copy=not is_here)

    def write_identity(
        self, run_id: str, *, copied: "RunIdentity | None" = None, joins: str = ""
    ) -> None:
        """Write the run's id, and the run from which its directory was `copied`; see `RunIdentity`.

        Raises:
            OSError: the run cannot be written to.
        """
        texts = {"id": run_id, "path": str(self.path), "joins": joins}
        if copied is not None:
            texts |= {"copied_from": copied.id, "copied_path": copied.path}
        with self.opened(make=True) as state:
            write_record(state, RUN, {**texts, "folder": self._inode()})

    def adopt(self) -> str:
        """Take the id of the run from which this one was copied; return it.

        For a run that was moved to another disk, where it seems to be a copy.

        Raises:
            UsageError: it was not copied, or the original is still there.
            OSError: the run cannot be written to.
        """
        identity = self.read_identity()
        if identity is not None and identity.is_copy:
            own, wanted, path = "", identity.id, identity.path
        elif identity is not None and identity.copied_from:
            own, wanted, path = identity.id, identity.copied_from, identity.copied_path
        else:
            raise UsageError(
                f"{self.path}: is not a copy of a run that was evaluated",
                expected=f"a run that was moved to another disk with its {STATE_FOLDER}/{RUN}",
            )
        original = RunFolder(Path(path)).read_identity() if path else None
        if original is not None and original.id == wanted and not original.is_copy:
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
        """Return the default name of the run, in characters that the server accepts.

        A long name is cut, and ends in a hash of the whole name to stay unique.
        """
        pinned_in = RunFolder.of_pin(self.path)
        folder = self.path if pinned_in is None else pinned_in.path
        if folder.name == "checkpoints":  # Lightning's name in every run
            folder = folder.parent
        # Without a leading dash: it may become an argument of a command.
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

    @contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """Yield the descriptor of a directory in `_unshard/`; the mtime of the run stays.

        Args:
            names: the path below `_unshard/`, a name for each directory.
            make: whether to make missing directories.

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
    """The identity in a run's directory.

    Attributes:
        id: of the run.
        path: the run's path when it got the id.
        copied_from: if a copy got an id of its own, the id of the original; `copied_path` is the
            original's path.
        joins: the run's id before it was adopted; jobs with this id belong to the run too.
        is_copy: whether the directory is a copy of the run's. The inodes of the directory and of
            the record tell: moving and renaming keep both.
    """

    id: str
    path: str = ""
    copied_from: str = ""
    copied_path: str = ""
    joins: str = ""
    is_copy: bool = False


_TEXTS = ("id", "path", "copied_from", "copied_path", "joins")


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
    """The fields of a JSON file; whether this directory is its original place, and it is ours."""

    fields: dict[str, object]
    is_ours: bool
    is_in_place: bool


def read_record(folder: int, name: str) -> RunRecord:
    """Read a JSON file in an open directory.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is too large.
        CorruptError: it is not a JSON object: see `parsed_object`.
    """
    data, status = read_with_status(name, within=folder)
    fields = parsed_object(data, name)
    is_in_place = fields.pop(_INODE, None) == status.st_ino
    is_ours = is_in_place and status.st_uid == os.geteuid()
    return RunRecord(fields, is_ours, is_in_place)


def write_record(folder: int, name: str, fields: Mapping[str, object]) -> None:
    """Write a record of ours in one step: it is whole or not there.

    Raises:
        OSError: it cannot be written, or has a path that is not UTF-8, which `read_record` refuses.
    """
    if not is_text(json.dumps(fields, ensure_ascii=False)):
        raise OSError(errno.EILSEQ, "it would name a path that is not UTF-8", name)
    with whole_file(name, within=folder, durable=False) as stream:
        inode = os.fstat(stream.fileno()).st_ino
        stream.write(json.dumps({**fields, _INODE: inode}).encode())


def lock_file(path: Path | str, *, within: int | None = None) -> int | None:
    """Lock a file, made if need be; return its descriptor, None if another process has the lock.

    On a file system without locks every process gets it. `within` is the directory of the file, or
    None if `path` is whole.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, within=within)
    with suppress(OSError):  # the file system has no locks
        if not try_lock(fd):
            os.close(fd)
            return None
    return fd


def unlock(fd: int) -> None:
    """Release a lock, also in processes that were forked since (data loaders)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@lru_cache(maxsize=1000)
def leave_alone(what: str) -> None:
    """Warn once that a file is left alone."""
    log.warning("%s; left alone", what)
