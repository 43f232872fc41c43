"""What a follower has done of a run, in a file of its output that outlives the process.

A step is known by the name of its output, and by a stamp of the checkpoint's files: a trainer that
goes back saves a step of the same number again.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from unshard._version import __version__
from unshard.containers.json_file import json_object
from unshard.errors import CorruptError, OutputError, UsageError
from unshard.read.hub_files import RECORD_NAME
from unshard.read.step_names import STATE_FOLDER
from unshard.stores.objects import create, etag_now
from unshard.stores.remote_path import RemotePath, look_again
from unshard.write.dirfd import try_lock, write_whole

_NAME = "followed.json"
_LOCK = "follow.lock"


class Done(NamedTuple):
    """A step that was done.

    Attributes:
        step: its number.
        saved_ns: when its trainer wrote it, where that is known.
        stamp: of the checkpoint's files.
        options: those that shaped the output, as JSON.
    """

    step: int
    saved_ns: int
    stamp: str
    options: str

    @property
    def order(self) -> tuple[int, int]:
        """What is greater for a step that was saved later."""
        return self.saved_ns, self.step


class Followed:
    """The steps that were done, of the outputs in one directory; held by one process at a time.

    Args:
        output: the directory of the outputs, or its address in an object store.

    Attributes:
        steps: by the names of their outputs.
        begun: the name of an output that is being made, and its step; None if it was there before.

    Raises:
        UsageError: another process follows a run into it.
        CorruptError: the file cannot be read.
    """

    def __init__(self, output: Path) -> None:
        self._file = output / STATE_FOLDER / _NAME
        self._etag: str | None = None
        self._lock = -1
        if not isinstance(output, RemotePath):
            with self._writing():
                self._file.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._lock = os.open(self._file.with_name(_LOCK), flags, 0o666)
                is_ours = try_lock(self._lock)
            if not is_ours:
                self.close()
                raise self._taken()
        try:
            self.begun: tuple[str, Done] | None = None
            self.steps = self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process follow into the same directory."""
        if self._lock >= 0:
            os.close(self._lock)

    def is_made(self, name: str) -> bool:
        """Return whether there is an output of this name."""
        output = self._file.parent.parent / name
        look_again(output)
        return (output / RECORD_NAME).is_file()

    def begin(self, name: str, done: Done) -> None:
        """Record that an output is about to be made, for a process that goes on after a kill.

        Raises:
            OutputError, StoreError, UsageError: as `add`.
        """
        if self.begun != (name, done):
            self.begun = None if self.is_made(name) else (name, done)
            self._write()

    def add(self, name: str, done: Done) -> None:
        """Record that a step is done.

        Raises:
            OutputError, StoreError: it cannot be written.
            UsageError: another process has written there.
        """
        self.steps[name] = done
        self.begun = None
        self._write()

    def _write(self) -> None:
        fields = {"unshard": __version__, "done": self.steps, "begun": self.begun}
        data = (json.dumps(fields, indent=1) + "\n").encode()
        if not isinstance(self._file, RemotePath):
            with self._writing():
                write_whole(self._file, data)
            return
        written = create(self._file.bucket, self._file.key, data, instead_of=self._etag)
        if written is None:
            raise self._taken()
        self._etag = written.etag

    def _read(self) -> dict[str, Done]:
        look_again(self._file)
        if not self._file.exists():
            return {}
        if isinstance(self._file, RemotePath):
            self._etag = etag_now(self._file.bucket, self._file.key)
        whole = json_object(self._file)
        done = whole.get("done")
        try:
            match whole.get("begun"):
                case [name, [step, saved_ns, stamp, options]]:
                    self.begun = (
                        str(name),
                        Done(int(str(step)), int(str(saved_ns)), str(stamp), str(options)),
                    )
            fields = done if isinstance(done, Mapping) else {}
            return {
                name: Done(int(step), int(saved_ns), str(stamp), str(options))
                for name, (step, saved_ns, stamp, options) in fields.items()
            }
        except (TypeError, ValueError) as error:
            raise CorruptError(
                f"{self._file}: does not say which steps were done",
                hint="remove it: outputs that are there are not made again",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"{self._file}: cannot be written: {error.strerror or error}"
            raise OutputError(what, hint="free some space, or check permissions") from error

    def _taken(self) -> UsageError:
        where = self._file.parent.parent
        return UsageError(
            f"{where}: another process follows a run into this directory",
            hint="give another output, or end that process",
        )
