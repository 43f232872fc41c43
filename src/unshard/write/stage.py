"""A stage: where an output is made, on a disk or in a store, until it is complete.

Both kinds have one contract, `Stage`, and are used by one flow. `Engine` is what moves the bytes.
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
from unshard.progress import Chosen, Listener, Warned
from unshard.stores.remote_path import RemotePath

if TYPE_CHECKING:
    from unshard.stores.copying import Composition
    from unshard.stores.objects import Stored

Overflows = Counter[tuple[int, int]]
"""How many finite values became infinite, by output file and the byte where a tensor begins."""

Counts = Counter[int]
"""The same of one file, by the byte of the file where a tensor begins."""

Finished = Callable[[int, Overflows], None]
"""Called by a worker when an output file has all its bytes: its number, its `Overflows`."""


class BusyError(OutputError):
    """Another process is making this output now."""


SUSPECT = OutputError | ChangedError
"""Errors after which nothing is kept for `--resume`: what is finished may be wrong."""


class Work(NamedTuple):
    """What a merge does: two with equal work write the same bytes.

    Attributes:
        sources: digest of the source files: paths, inodes, sizes, times.
        plan: digest of the operations and of the headers.
    """

    sources: str
    plan: str


@dataclass(slots=True)
class Written:
    """How files of weights were written.

    Attributes:
        overflows: how many finite values became infinite.
        copied: how many bytes the store copied itself.
        refused: why the store did not copy, where it failed to.
    """

    overflows: Overflows = field(default_factory=Overflows)
    copied: int = 0
    refused: str = ""

    def add(self, other: "Written") -> None:
        """Add other files."""
        self.overflows.update(other.overflows)
        self.copied += other.copied
        self.refused = self.refused or other.refused


class Uploads(Protocol):
    """The stage of a store, as engines use it."""

    @property
    def target(self) -> RemotePath:
        """Where the output goes."""

    @property
    def written(self) -> "Mapping[str, Stored | None]":
        """What was written, by name; None is what may be there."""

    def upload(
        self, name: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
    ) -> None:
        """Write a file from its blocks; what they raise is raised."""

    def can_copy(self, source: Path, /) -> bool:
        """Return whether `compose` can copy from a source file."""

    def compose(self, name: str, size: int, send: "Callable[[Composition], None]", /) -> None:
        """Write a file from the parts that `send` adds; what it raises is raised."""

    def wrote(self, name: str, stored: "Stored | None") -> None:
        """Take note of a file that another process has written, or None: that it may write."""

    def abort_uploads(self, names: list[str], /) -> bool:
        """Abort what lost processes have begun to upload; return whether nothing is left of it."""


class Engine(Protocol):
    """Makes files of weights."""

    @property
    def listener(self) -> Listener:
        """Is told of the progress."""

    def make(self, plan: Plan, directory: Path, finished: Finished) -> Overflows:
        """Make the files of a plan in a directory."""

    def upload(self, plan: Plan, stage: Uploads, finished: Finished) -> Written:
        """Make the files of a plan in memory, and upload them."""


class Stage(Protocol):
    """A place in which an output is made. Left without a commit, nothing of it remains."""

    def check(self) -> object:
        """Check, and change nothing, that the output may be made there.

        Raises:
            OutputError: it may not.
        """

    def turn(
        self, is_made: Callable[[], bool], listener: Listener, /
    ) -> AbstractContextManager[None]:
        """Wait until this process may enter the stage, or the output is made.

        As long as the context lasts, no other process that asked for its turn enters a stage of
        this target. A place that cannot promise that raises a `BusyError` when it is entered.

        Args:
            is_made: whether the output is there; it is asked again and again.
            listener: is told, once, which process is waited for.

        Raises:
            OutputError: nothing can be made there.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None: ...

    @property
    def scratch(self) -> Path:
        """A directory on this machine for temporary files; it is removed with the stage."""

    def write(self, plan: Plan, engine: Engine, work: Work) -> Written:
        """Make the files of weights that no earlier process has finished, and record each."""

    def add(self, files: Mapping[str, bytes | Path]) -> None:
        """Add small files, by their paths in the output: their bytes, or a file to copy.

        Raises:
            OutputError: there is a file of such a name.
        """

    def readable(self) -> Path:
        """Return where the output can be read before the commit."""

    def commit(self, record: bytes, *, replaced: Sequence[str] = ()) -> list[str]:
        """Complete the output, with its record as the last file; return notes.

        Raises:
            OutputError: others have written there.
        """


class FinishedFiles(Protocol):
    """The record of what is finished of an output."""

    @property
    def known(self) -> Mapping[str, Counts]:
        """What became infinite in each file that an earlier process has finished, by name."""

    @property
    def notes(self) -> Sequence[str]:
        """Why files that were finished are made again; empty if none is."""


def unfinished(plan: Plan, record: FinishedFiles, listener: Listener) -> Plan:
    """Return what is left of a plan to be made, and tell the listener what is not."""
    for note in record.notes:
        listener(Warned(note))
    if not record.known:
        return plan
    files = plan.layout.files
    count = f"{len(record.known)} of {len(files)} files were finished by an earlier merge"
    listener(Chosen(f"resuming: {count}"))
    numbers = [number for number in plan.numbers if files[number].filename not in record.known]
    return plan.only(numbers)


def earlier_overflows(plan: Plan, record: FinishedFiles) -> Overflows:
    """Return what became infinite in the files that were finished before."""
    return Overflows(
        {
            (number, start): count
            for number, file in enumerate(plan.layout.files)
            for start, count in record.known.get(file.filename, Counts()).items()
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
    """Make a temporary directory, which the stack removes."""
    import tempfile

    scratch, owner = Path(tempfile.mkdtemp(prefix="_unshard-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a fork of this process must not remove what this one reads
            shutil.rmtree(scratch, ignore_errors=True)

    stack.callback(remove)
    return scratch
