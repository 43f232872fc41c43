"""A stage: the place on a disk or in a store where an output is written until it is complete.

Both kinds implement `OutputStage`. A `MergeEngine` moves the bytes.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from unshard.errors import ChangedError, OutputError
from unshard.plan.operations import Plan
from unshard.progress import Chosen, Listener, warn
from unshard.stores.remote_path import RemotePath

if TYPE_CHECKING:
    from unshard.stores.copying import Composition
    from unshard.stores.objects import Stored

Overflows = Counter[tuple[int, int]]
"""Number of finite values that became infinite, by output file and first byte of the tensor."""

Counts = Counter[int]
"""The overflows of one file, by the first byte of the tensor."""

Finished = Callable[[int, Overflows], None]
"""Called by a worker when an output file has all its bytes, with its number and `Overflows`."""


class BusyError(OutputError):
    """Another process is writing this output."""


SUSPECT = OutputError | ChangedError
"""Errors after which nothing is kept for `--resume`, because finished files may be wrong."""


class WorkDigests(NamedTuple):
    """Identity of a merge: merges with equal digests write the same bytes.

    Attributes:
        sources: digest of the source files: paths, inodes, sizes, times.
        plan: digest of the operations and the headers.
    """

    sources: str
    plan: str


@dataclass(slots=True)
class Written:
    """Statistics of written weight files.

    Attributes:
        overflows: the finite values that became infinite.
        copied: bytes that the store copied itself.
        refused: why the store failed to copy; "" if it did not.
    """

    overflows: Overflows = field(default_factory=Overflows)
    copied: int = 0
    refused: str = ""

    def add(self, other: "Written") -> None:
        """Add the statistics of other files."""
        self.overflows.update(other.overflows)
        self.copied += other.copied
        self.refused = self.refused or other.refused


class Uploads(Protocol):
    """The stage in a store, for engines."""

    @property
    def target(self) -> RemotePath:
        """The address of the output."""

    @property
    def written(self) -> "Mapping[str, Stored | None]":
        """The objects written so far, by name; None: the object may exist."""

    def upload(
        self, name: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
    ) -> None:
        """Write a file from its blocks; their errors propagate."""

    def can_copy(self, source: Path, /) -> bool:
        """Return whether `compose` can copy from a source file."""

    def compose(self, name: str, size: int, send: "Callable[[Composition], None]", /) -> None:
        """Write a file from the parts that `send` adds; its errors propagate."""

    def wrote(self, name: str, stored: "Stored | None") -> None:
        """Record a file that another process has written; None: it may have written it."""

    def abort_uploads(self, names: list[str], /) -> bool:
        """Abort the unfinished uploads of lost processes; return whether none is left."""


class MergeEngine(Protocol):
    """Writes weight files."""

    @property
    def listener(self) -> Listener:
        """Receives the progress."""

    def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
        """Write the files of a plan into a directory."""

    def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
        """Make the files of a plan in memory, and upload them."""


class OutputStage(Protocol):
    """The place of an unfinished output. If it is left without a commit, nothing remains."""

    def check(self) -> object:
        """Check that the output may be written; change nothing.

        Raises:
            OutputError: it may not.
        """

    def turn(
        self, is_made: Callable[[], bool], listener: Listener, /
    ) -> AbstractContextManager[None]:
        """Wait until this process may enter the stage, or the output exists.

        During the context, no other process that waits for its turn enters a stage of this target.
        A place that cannot guarantee this raises a `BusyError` when it is entered.

        Args:
            is_made: whether the output exists; called repeatedly.
            listener: receives, once, which process is waited for.

        Raises:
            OutputError: nothing can be written there.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None: ...

    @property
    def scratch(self) -> Path:
        """A local directory for temporary files; it is removed with the stage."""

    def write(self, plan: Plan, engine: MergeEngine, work: WorkDigests) -> Written:
        """Write the weight files that no earlier process has finished, and record each."""

    def add(self, files: Mapping[str, bytes | Path]) -> None:
        """Add small files, by their paths in the output: their bytes, or a file to copy.

        Raises:
            OutputError: a file of that name exists.
        """

    def readable(self) -> Path:
        """Return the path from which the output can be read before the commit."""

    def commit(self, record: bytes, *, replaced: Sequence[str] = ()) -> list[str]:
        """Complete the output, with its record as the last file; return notes.

        Raises:
            OutputError: another process has written there.
        """


def unfinished(
    plan: Plan, finished: Mapping[str, Counts], notes: Sequence[str], listener: Listener
) -> Plan:
    """Return the plan of the files that are not finished, and report both to the listener."""
    warn(listener, notes)
    if not finished:
        return plan
    files = plan.layout.files
    count = f"{len(finished)} of {len(files)} files were finished by an earlier merge"
    listener(Chosen(f"resuming: {count}"))
    return plan.only([at for at in plan.numbers if files[at].filename not in finished])


def earlier_overflows(plan: Plan, finished: Mapping[str, Counts]) -> Overflows:
    """Return the overflows of the files that were finished before."""
    return Overflows(
        {
            (number, start): count
            for number, file in enumerate(plan.layout.files)
            for start, count in finished.get(file.filename, Counts()).items()
        }
    )


def named_overflows(overflows: Overflows, plan: Plan) -> dict[str, int]:
    """Return the counts by the names of the tensors, in the order of the files."""
    return {
        tensor.name: count
        for number, file in enumerate(plan.layout.files)
        for tensor in file.tensors
        if (count := overflows[number, len(file.header) + tensor.data_offsets[0]])
    }


def counts_in(overflows: Overflows) -> Counts:
    """Return the overflows of one file."""
    return Counts({start: count for (_, start), count in overflows.items()})


def scratch_directory(stack: ExitStack) -> Path:
    """Create a temporary directory, which the stack removes."""
    import tempfile

    scratch, owner = Path(tempfile.mkdtemp(prefix="_unshard-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork must not remove the files of its parent
            shutil.rmtree(scratch, ignore_errors=True)

    stack.callback(remove)
    return scratch
