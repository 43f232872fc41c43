"""`virtual`: open the output files of a merge without writing them; `push`: upload them."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Self, Unpack

from unshard.api.completing import Outcome, make_report
from unshard.api.converting import convert
from unshard.api.making import (
    PlannedMerge,
    compare_with_base,
    decompressed,
    late_notes,
    make_record,
    plan_output,
    small_files,
)
from unshard.api.merging import open_given
from unshard.api.options import MergeOptions, accepting
from unshard.api.sources import refuse_unloadable
from unshard.console import counted, human_size, listener_or_default
from unshard.engines.files import PieceReader, PlannedFile
from unshard.errors import NoSuchFileError
from unshard.keywords import PushKeywords, VirtualKeywords
from unshard.plan.pieces import Contents, contents_of
from unshard.progress import Advanced, Event, Listener, warn
from unshard.read.hub_files import RECORD_NAME
from unshard.stores.nodes.connection import disconnecting
from unshard.write.hub import check_repo, push_files
from unshard.write.record import add_companions
from unshard.write.report import Report
from unshard.write.stage import named_overflows, scratch_directory


class VirtualFiles(Mapping[str, PlannedFile]):
    """The output files of a merge, by their names, without writing them.

    `unshard.virtual` returns it. It is a context manager, and a mapping of names to files; every
    lookup opens a new file object. It is equal only to itself. Several threads may read, from one
    file or from several.

    Args:
        prepared: the merge.
        contents: the contents of each file.
        reader: reads them.
        stack: resources to close.
    """

    def __init__(
        self,
        prepared: PlannedMerge,
        contents: Mapping[str, Contents],
        reader: PieceReader,
        stack: ExitStack,
    ) -> None:
        self._plan = prepared.plan
        self._sources = prepared.sources
        self._path = prepared.checkpoint.location.weights_dir
        self._contents = contents
        self._reader = reader
        self._close = weakref.finalize(self, stack.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint, and remove what was decompressed; no file can be read then."""
        self._close()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every file, bytes, by name."""
        return {name: contents.size for name, contents in self._contents.items()}

    def open(self, name: str) -> PlannedFile:
        """Open a file for reading, at its first byte.

        Raises:
            NoSuchFileError: a merge would write no file of this name; also a `KeyError`.
        """
        contents = self._contents.get(name)
        if contents is None:
            hint = f"there are {', '.join(self)}"
            raise NoSuchFileError(f"{self._path}: its merge has no file {name}", hint=hint)

        def read(at: int, out: memoryview) -> None:  # its reference to self keeps this open
            self._reader.read(contents, at, out)

        return PlannedFile(name, contents.size, read)

    def check_sources(self) -> None:
        """Check that the files of the checkpoint have not changed.

        Call it after reading, and before `close`: it shows that all reads saw the same checkpoint.

        Raises:
            CorruptError: a file is gone, was replaced, or was written to.
            UsageError: the files were closed.
        """
        self._reader.check()
        self._sources.unchanged()

    @property
    def overflows(self) -> dict[str, int]:
        """Number of finite values of each tensor that became infinite, in float16 or in a sum."""
        return named_overflows(self._reader.overflows, self._plan)

    def __getitem__(self, name: str) -> PlannedFile:
        """Open a file like `open`."""
        return self.open(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, name: object) -> bool:
        return name in self._contents

    def __eq__(self, other: object) -> bool:
        """Compare by identity: comparing contents would read all of them."""
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Return one line: path, number of files, bytes."""
        state = "" if self._close.alive else ", closed"
        size = human_size(sum(self.sizes.values()))
        return f"<VirtualFiles of {str(self._path)!r}: {counted(len(self), 'file')}, {size}{state}>"


@accepting(VirtualKeywords)
def virtual(
    checkpoint: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[VirtualKeywords],
) -> VirtualFiles:
    """Open the output files of `merge`, byte for byte the same, without writing them.

    Each is a binary file object, read-only and seekable. Reads copy weights straight from the files
    of the checkpoint, or cast, gather and fuse them in pieces; the last pieces (32 MiB) are cached.
    Nothing is written, except that compressed items and training state are written into a temporary
    directory until the files are closed.

    Args:
        checkpoint: as for `merge`.
        listener: as for `merge`.
        options: as for `merge`, without options about writing an output.

    Raises:
        UnshardError: as `merge` raises it before it writes.
    """
    with listener_or_default(listener) as heard, ExitStack() as stack:
        chosen = MergeOptions(**options)
        prepared = plan_files(checkpoint, chosen, heard, stack)
        return open_files(prepared, chosen, stack)


def plan_files(
    checkpoint: str | Path, options: MergeOptions, listener: Listener, stack: ExitStack
) -> PlannedMerge:
    """Plan a merge, and report its notes; the stack removes temporary files."""
    sources = open_given(checkpoint, options, listener)
    refuse_unloadable(sources, options)
    prepared = plan_output(sources, convert(sources, options), options)
    warn(listener, prepared.warnings)
    return decompressed(prepared, lambda: scratch_directory(stack), options, listener)


def open_files(prepared: PlannedMerge, options: MergeOptions, stack: ExitStack) -> VirtualFiles:
    """Return the files of a merge: weights first, the record last.

    The stack removes temporary files; closing the result closes the stack.
    """
    files, states = dict(contents_of(prepared.plan)), prepared.sources.states
    companions = small_files(prepared, lambda: scratch_directory(stack))
    for name, source in companions.items():
        if isinstance(source, bytes):
            files[name] = Contents.of_bytes(source)
        else:
            files[name] = Contents.of_file(source, states[source].size)
    sizes = {name: files[name].size for name in sorted(companions)}
    record = add_companions(make_record(prepared, options.recorded), sizes)
    files[RECORD_NAME] = Contents.of_bytes(record)
    reader = PieceReader(prepared.checkpoint.location.weights_dir, states)
    stack.callback(reader.close)
    return VirtualFiles(prepared, files, reader, stack.pop_all())


@accepting(PushKeywords)
@disconnecting()
def push(
    checkpoint: str | Path,
    repo: str,
    *,
    private: bool = False,
    listener: Listener | None = None,
    **options: Unpack[PushKeywords],
) -> Report:
    """Upload the output of `merge` to the hub, straight from the checkpoint.

    Nothing is written on this machine, except that compressed items are decompressed into a
    temporary directory. The repository gets the files of a merge without training state, and a
    model card if it has none, in one commit that removes its other weights. Every file is read
    twice, for its checksum and for the upload, in about 150 MB of memory. If a file of the
    checkpoint changes before the end of the upload, nothing is committed.

    Args:
        checkpoint: as for `merge`.
        repo: "NAME" or "OWNER/NAME"; created if it does not exist.
        private: create it as private; a public repository is refused.
        listener: as for `merge`.
        options: as for `merge`.

    Returns:
        The report of a merge with an empty `output`; `url` is that of the repository.

    Raises:
        OutputError: the hub was not reached, refused, or did not confirm every file.
        UnshardError: as `merge` raises it before it writes; or a file of the checkpoint changed.
    """
    chosen = MergeOptions(**options, extra_state=False)
    check_repo(repo, may_ask=True, is_option=False)
    with listener_or_default(listener) as heard, ExitStack() as stack:
        lock = Lock()

        def hear(event: Event) -> None:
            with lock:  # several threads upload files
                heard(event)

        prepared = plan_files(checkpoint, chosen, hear, stack)
        with open_files(prepared, chosen, stack) as files:
            changed = compare_with_base(prepared, hear)
            notes = warn(hear, late_notes(prepared, changed, {}))
            reported = {name: _reported(file, hear) for name, file in files.items()}
            check = files.check_sources
            url = push_files(reported, repo, private=private, check=check, listener=hear)
            overflows = files.overflows
        notes += warn(hear, late_notes(prepared, None, overflows))
    outcome = Outcome(prepared, tuple(notes), changed)
    return make_report(outcome, None, memory_bytes=chosen.resources.memory_bytes, url=url)


def _reported(file: PlannedFile, listener: Listener) -> PlannedFile:
    """Return the same file, whose reads are reported to the listener."""

    def read(at: int, out: memoryview) -> None:
        file.read_at(at, out)
        listener(Advanced(len(out)))

    return PlannedFile(file.name, file.size, read)
