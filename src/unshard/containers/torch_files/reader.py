"""Whatever `torch.save` ever wrote, opened: the zip, or the legacy format before it.

What it contains and where its storages are, both inert; no weights are read. Older and other files
of torch (tar archives, TorchScript) are recognised and refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from unshard.containers.open_files import opened, pread, read_whole
from unshard.containers.pickles.machine import DangerousPickleError, MalformedPickleError
from unshard.containers.pickles.records import Value
from unshard.containers.pickles.unpickle import unpickle
from unshard.containers.torch_files.zip import (
    LEGACY_MAGIC,
    StorageRecord,
    TorchZip,
    read_torch_zip,
)
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, UnsafeError

_HEAD = 512
_TAR_AT = 257
_MOST_METADATA = 1 << 30
_TAR_MEMBERS = (b"sys_info", b"pickle", b"storages", b"tensors")


class TorchFile(NamedTuple):
    """A torch.save file: `value` is what was saved, `storages` are byte ranges by key.

    `root` is the stem of the name under which torch saved it, where the file says so.
    """

    path: Path
    value: Value
    storages: Mapping[str, StorageRecord]
    root: str = ""


def read_torch_file(path: Path, *, offset: int = 0, length: int | None = None) -> TorchFile:
    """Open a torch.save file, or a window inside one; a `length` of None is all that follows.

    Raises:
        IncompleteError: the file is empty or truncated.
        CorruptError: it is not a file of torch.save, or contradicts itself.
        UnsafeError: its pickle refers to code that runs commands.
        NotMergeableError: a format of torch that is recognised, but not read.
    """
    archive = open_torch_file(path, offset=offset, length=length)
    if isinstance(archive, TorchFile):
        return archive
    return TorchFile(path, unpickled(path, archive.pickle), archive.storages, archive.root)


def open_torch_file(
    path: Path, *, offset: int = 0, length: int | None = None
) -> TorchFile | TorchZip:
    """Open a torch.save file as `read_torch_file` does, but leave the pickle of a zip closed."""
    head = _head(path, offset, length)
    if head[:1] == b"\x80" and LEGACY_MAGIC[4:14] in head[:32]:  # whatever its pickle protocol
        from unshard.containers.torch_files.legacy import read_torch_legacy

        with _blaming(path):
            value, storages = read_torch_legacy(path, offset=offset, length=length)
        return TorchFile(path, value, storages)
    # Source: `torch.serialization.legacy_load`.
    member = head[:100].rstrip(b"\0")
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar" or member in _TAR_MEMBERS:
        raise NotMergeableError(
            f"{path}: a tar archive, as torch before 0.4 (2018) saved",
            expected="a zip, or the legacy format of torch 0.4 to 1.5",
            hint="load it with a torch that reads it (torch.load(…, weights_only=False)) and save "
            "it again; tensors alone, not a pickled model",
        )
    return read_torch_zip(path, offset=offset, length=length)


def unpickled(path: Path, data: bytes) -> Value:
    """Return what a pickle of this file describes.

    Raises:
        CorruptError: it is not valid.
        UnsafeError: it refers to code that runs commands.
    """
    with _blaming(path):
        return unpickle(data)[0]


def unpickled_metadata(path: Path) -> Value:
    """Return what a file of DCP's metadata describes, with rows as columns: `unpickle_metadata`.

    Raises:
        IncompleteError: it is empty.
        CorruptError: it is not valid.
        UnsafeError: it refers to code that runs commands.
    """
    from unshard.containers.torch_files.metadata_rows import unpickle_metadata

    data = read_metadata_file(path)
    with _blaming(path):
        return unpickle_metadata(data)


def read_metadata_file(path: Path) -> bytes:
    """Return what a file of metadata contains.

    Raises:
        IncompleteError: it is empty.
        CorruptError: it is too large for metadata.
    """
    size = path.stat().st_size
    if size == 0:
        raise IncompleteError(f"{path}: the file is empty", hint="the save was interrupted")
    if size > _MOST_METADATA:
        raise CorruptError(
            f"{path}: {size} bytes are too many for metadata", expected=f"up to {_MOST_METADATA}"
        )
    return read_whole(path)


@contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """Name the file of a bad pickle."""
    try:
        yield
    except MalformedPickleError as error:
        raise CorruptError(f"{path}: its pickle is not valid: {error}") from error
    except DangerousPickleError as error:
        raise UnsafeError(
            f"{path}: its pickle refers to {error}, which no checkpoint needs: it was made to run "
            "commands when it is loaded",
            hint="nothing was run. Do not load this file with torch; find out where it comes from",
        ) from error


def _head(path: Path, offset: int, length: int | None) -> bytes:
    """Return the first bytes of the window."""
    try:
        with opened(path) as file:
            head = pread(file, _HEAD if length is None else min(_HEAD, length), offset)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be opened: {error.strerror}") from error
    if LEGACY_MAGIC.startswith(head):  # also where there is nothing at all
        what = "truncated in its first bytes" if head else "the file is empty"
        hint = "the save was interrupted, or is still under way; take another checkpoint"
        raise IncompleteError(f"{path}: {what}", hint=hint)
    return head
