"""What a follower has done of a run, in a file of its output that outlives the process.

A step is known by the name of its output, and by a stamp of the checkpoint's files: a trainer that
goes back saves a step of the same number again.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

from unshard import __version__
from unshard.containers.json_file import json_object
from unshard.errors import CorruptError, OutputError, UsageError
from unshard.read.hub_files import RECORD_NAME
from unshard.read.step_names import STATE_FOLDER
from unshard.stores.objects import create, etag_now
from unshard.stores.remote_path import RemotePath, look_again
from unshard.write.dirfd import hold, open_regular, try_lock, write_whole

_NAME = "followed.json"
_LOCK = "follow.lock"

State = Literal["begun", "made", "done", "removed"]
"""An output that is being made, that is there, that was handed on, or that was removed since."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was done of a step.

    Attributes:
        step: its number.
        saved_ns: when its trainer wrote it, where that is known.
        stamp: of the checkpoint's files.
        options: what was asked for, as JSON.
        run: which model of which run it is.
        state: of its output.
    """

    step: int
    saved_ns: int
    stamp: str
    options: str
    run: str
    state: State = "begun"

    @property
    def order(self) -> tuple[int, int]:
        """What is greater for a step that was saved later."""
        return self.saved_ns, self.step

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.state in {"done", "removed"}


class Followed:
    """What was done of the outputs in one directory; held by one process at a time.

    Args:
        output: the directory of the outputs, or its address in an object store.

    Attributes:
        steps: by the names of their outputs.
        is_lost: whether another process has it now, or the directory was removed.

    Raises:
        UsageError: another process follows a run into it.
        OutputError: it cannot be written.
        CorruptError: the file cannot be read.
    """

    def __init__(self, output: Path) -> None:
        self._file = output / STATE_FOLDER / _NAME
        self._id = secrets.token_hex(8)  # by which a store tells two processes apart
        self._etag: str | None = None
        self._lock: FileIO | None = None
        self.is_lost = False
        if not isinstance(output, RemotePath):
            with self._writing():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                fd = open_regular(self._file.with_name(_LOCK), os.O_RDWR | os.O_CREAT)
                self._lock = hold(FileIO(fd, "r+"))
                is_ours = try_lock(fd)
            if not is_ours:
                self.close()
                raise self._taken()
        try:
            self.steps = self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process follow into the same directory."""
        if self._lock is not None:
            self._lock.close()

    def is_made(self, name: str) -> bool:
        """Return whether there is an output of this name."""
        output = self._file.parent.parent / name
        look_again(output)
        return (output / RECORD_NAME).is_file()

    def put(self, name: str, entry: Entry | None) -> None:
        """Record what was done of a step; None: nothing.

        Raises:
            OutputError, StoreError: it cannot be written.
            UsageError: another process has written there.
        """
        if entry is None:
            self.steps.pop(name, None)
        else:
            self.steps[name] = entry
        done = {name: asdict(one) for name, one in self.steps.items()}
        fields = {"unshard": __version__, "follower": self._id, "steps": done}
        data = (json.dumps(fields, indent=1) + "\n").encode()
        if not isinstance(self._file, RemotePath):
            with self._writing():
                write_whole(self._file, data)
            return
        written = create(self._file.bucket, self._file.key, data, instead_of=self._etag)
        if written is None:
            raise self._taken()
        self._etag = written.etag

    def _read(self) -> dict[str, Entry]:
        look_again(self._file)
        if not self._file.exists():
            return {}
        if isinstance(self._file, RemotePath):
            self._etag = etag_now(self._file.bucket, self._file.key)
        try:
            return {name: _entry(one) for name, one in _items(json_object(self._file)["steps"])}
        except (CorruptError, TypeError, KeyError) as error:
            raise CorruptError(
                f"{self._file}: does not tell which steps were done",
                found=str(error),
                hint="remove it: outputs that are there are used, and not made again",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.is_lost = isinstance(error, FileNotFoundError)
            raise OutputError(
                f"{self._file}: cannot be written: {error.strerror or error}",
                hint="is it in a directory where you may write, and that has free space?",
            ) from error

    def _taken(self) -> UsageError:
        self.is_lost = True
        return UsageError(
            f"{self._file.parent.parent}: another process follows a run into this directory",
            hint="give another output, or end that process",
        )


def _items(found: object) -> Iterator[tuple[str, object]]:
    if not isinstance(found, dict):
        raise TypeError("no steps")
    yield from found.items()


def _entry(found: object) -> Entry:
    """Return an entry of the file; TypeError if it is not one."""
    match found:
        case {
            "step": int(step),
            "saved_ns": int(saved_ns),
            "stamp": str(stamp),
            "options": str(options),
            "run": str(run),
            "state": state,
        } if state in get_args(State):
            return Entry(step, saved_ns, stamp, options, run, state)
    raise TypeError(f"{found!r} is not a step")
