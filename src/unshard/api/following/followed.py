"""The progress of following a run, in a file of its output that outlives the process.

The name of its output and a stamp of the checkpoint's files identify a step: a trainer that resumes
from an earlier step saves the same step again.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

from unshard import __version__
from unshard.containers.json_file import json_object
from unshard.errors import CorruptError, OutputError, UsageError
from unshard.read.finding.versions import stamps_of
from unshard.read.format import Location
from unshard.read.hub_files import RECORD_NAME
from unshard.read.step_names import STATE_FOLDER
from unshard.stores.objects import create, etag_now
from unshard.stores.remote_path import RemotePath, look_again
from unshard.write.dirfd import hold, open_regular, try_lock, write_whole

_NAME = "followed.json"
_LOCK = "follow.lock"

State = Literal["begun", "made", "done", "removed"]
"""The merge has begun, the output exists, upload and command are done, the output was removed."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The progress of a step.

    Attributes:
        step: its number.
        saved_ns: time of the trainer's last write, in ns; 0 if unknown.
        stamp: fingerprint of the checkpoint's files.
        options: the options of `follow`, as JSON.
        run: the run and its model.
        state: state of the output.
    """

    step: int
    saved_ns: int
    stamp: str
    options: str
    run: str
    state: State = "begun"

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: the time of the save, then the step."""
        return self.saved_ns, self.step

    @property
    def is_done(self) -> bool:
        """Whether the step needs no more work."""
        return self.state in {"done", "removed"}


class FollowState:
    """The progress of all steps in an output directory; one process at a time may hold it.

    On a disk a lock excludes other processes. In an object store every write is conditional on the
    ETag of the last one, so a second process fails.

    Args:
        output: the directory of the outputs, or its address in an object store.

    Attributes:
        steps: records by the names of their outputs.
        is_lost: whether another process holds it now, or the directory was removed.

    Raises:
        UsageError: another process follows a run into the directory.
        OutputError: the file cannot be written.
        CorruptError: the file cannot be read.
    """

    def __init__(self, output: Path) -> None:
        self._file = output / STATE_FOLDER / _NAME
        self._id = secrets.token_hex(8)  # so that equal states of two processes differ in ETag
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
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def is_made(self, name: str) -> bool:
        """Return whether there is an output of this name."""
        output = self._file.parent.parent / name
        look_again(output)
        return (output / RECORD_NAME).is_file()

    def put(self, name: str, entry: StepRecord | None) -> None:
        """Set or remove the record of a step, and write the file.

        Raises:
            OutputError, StoreError: it cannot be written.
            UsageError: another process has written it.
        """
        if entry is None:
            self.steps.pop(name, None)
        else:
            self.steps[name] = entry
        steps = {name: asdict(record) for name, record in self.steps.items()}
        fields = {"unshard": __version__, "follower": self._id, "steps": steps}
        data = (json.dumps(fields, indent=1) + "\n").encode()
        if not isinstance(self._file, RemotePath):
            with self._writing():
                write_whole(self._file, data)
            return
        written = create(self._file.bucket, self._file.key, data, instead_of=self._etag)
        if written is None:
            raise self._taken()
        self._etag = written.etag

    def _read(self) -> dict[str, StepRecord]:
        look_again(self._file)
        if not self._file.exists():
            return {}
        if isinstance(self._file, RemotePath):
            self._etag = etag_now(self._file.bucket, self._file.key)
        try:
            return _parsed(json_object(self._file).get("steps"))
        except (CorruptError, TypeError) as error:
            raise CorruptError(
                f"{self._file}: is damaged",
                found=str(error),
                hint="remove it: existing outputs are reused",
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.is_lost = isinstance(error, FileNotFoundError)
            raise OutputError(
                f"{self._file}: cannot be written: {error.strerror or error}",
                hint="check write permission and free space",
            ) from error

    def _taken(self) -> UsageError:
        self.is_lost = True
        return UsageError(
            f"{self._file.parent.parent}: another process follows a run into this directory",
            hint="give another output, or end that process",
        )


def _parsed(steps: object) -> dict[str, StepRecord]:
    if not isinstance(steps, dict):
        raise TypeError("no steps")
    return {name: _record(fields) for name, fields in steps.items()}


def _record(fields: object) -> StepRecord:
    match fields:
        case {
            "step": int(step),
            "saved_ns": int(saved_ns),
            "stamp": str(stamp),
            "options": str(options),
            "run": str(run),
            "state": state,
        } if state in get_args(State):
            return StepRecord(step, saved_ns, stamp, options, run, state)
    raise TypeError(f"{fields!r} is not a step")


@dataclass(slots=True)
class PendingStep:
    """A step to merge, upload and run the command for.

    Attributes:
        name: name of its output.
        entry: its record.
        location: the checkpoint; None if it is gone, and its output exists.
        tries: number of failed attempts.
        not_before: time of the next attempt, by `time.monotonic`.
        finished: the finished steps after the merge: "upload", "command".
    """

    name: str
    entry: StepRecord
    location: Location | None
    tries: int = 0
    not_before: float = 0.0
    finished: set[str] = field(default_factory=set)


def time_saved(at: Location) -> int:
    """Return the time of the last write to a checkpoint's weights, in ns; 0 in a store."""
    if isinstance(at.path, RemotePath):
        return 0
    with suppress(OSError):  # the trainer is removing it
        return max((mtime for _, mtime in stamps_of(at).values()), default=0)
    return 0
