"""Open files of `torch.save`: the zip, or the legacy format before it.

Reads the inert value and the places of storages, but no weights. Older and other files of torch
(tar archives, TorchScript) are recognised and refused.
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
    """A torch.save file: `value` is the saved object, `storages` are byte ranges by key.

    `root` is the stem of the name under which torch saved it, if the file has it.
    """

    path: Path
    value: Value
    storages: Mapping[str, StorageRecord]
    root: str = ""


def read_torch_file(path: Path, *, offset: int = 0, length: int | None = None) -> TorchFile:
    """Open a torch.save file, or a window of a file; a `length` of None reaches to the end.

    Raises:
        IncompleteError: the file is empty or truncated.
        CorruptError: it is not a file of torch.save, or contradicts itself.
        UnsafeError: its pickle refers to code that runs commands.
        NotMergeableError: it is in a known but unsupported format of torch.
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
    if head[:1] == b"\x80" and LEGACY_MAGIC[4:14] in head[:32]:  # in any pickle protocol
        from unshard.containers.torch_files.legacy import read_torch_legacy

        with _naming(path):
            value, storages = read_torch_legacy(path, offset=offset, length=length)
        return TorchFile(path, value, storages)
    # Source: `torch.serialization.legacy_load`.
    member = head[:100].rstrip(b"\0")
    if head[_TAR_AT : _TAR_AT + 5] == b"ustar" or member in _TAR_MEMBERS:
        raise NotMergeableError(
            f"{path}: a tar archive of torch before 0.4 (2018)",
            expected="a zip, or the legacy format of torch 0.4 to 1.5",
            hint="load it with torch.load(…, weights_only=False) in a torch that reads it, and "
            "save its tensors again, not a pickled model",
        )
    return read_torch_zip(path, offset=offset, length=length)


def unpickled(path: Path, data: bytes) -> Value:
    """Return the value of a pickle in this file.

    Raises:
        CorruptError: it is not valid.
        UnsafeError: it refers to code that runs commands.
    """
    with _naming(path):
        return unpickle(data)


def unpickled_metadata(path: Path) -> Value:
    """Return the value of a file of DCP's metadata, with rows as columns: `unpickle_metadata`.

    Raises:
        IncompleteError: it is empty.
        CorruptError: it is not valid.
        UnsafeError: it refers to code that runs commands.
    """
    from unshard.containers.torch_files.metadata_rows import unpickle_metadata

    data = read_metadata_file(path)
    with _naming(path):
        return unpickle_metadata(data)


def read_metadata_file(path: Path) -> bytes:
    """Return the bytes of a file of metadata.

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
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of a pickle into errors with the name of its file."""
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
    if LEGACY_MAGIC.startswith(head):  # also true of an empty file
        raise IncompleteError(
            f"{path}: {'truncated in its first bytes' if head else 'the file is empty'}",
            hint="the save was interrupted, or is still under way; take another checkpoint",
        )
    return head
