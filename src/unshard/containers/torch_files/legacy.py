"""Read the legacy format of torch before 1.6, or `_use_new_zipfile_serialization=False`.

A file has five pickles: a magic number, the protocol, facts about the machine, the object, and the
keys of its storages. Then, per key, it has a little-endian 64-bit number of elements and the bytes,
unaligned and without a directory: the sizes of all earlier storages give the place of a storage.
Only the pickles and those numbers are read here, never the weights.

Source: `torch.serialization._legacy_save` and `_legacy_load`.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from struct import unpack

from unshard.containers.open_files import Opened, opened, pread, size_of
from unshard.containers.pickles.machine import MalformedPickleError
from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.pickles.unpickle import TruncatedPickleError, unpickle_first
from unshard.containers.torch_files.writer import STORAGES
from unshard.containers.torch_files.zip import LEGACY_MAGIC, MAX_PICKLE, StorageRecord
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.tensors.dtypes import BY_NAME

_PROTOCOL = 1001
_FIRST_READ = 1 << 20
_MAX_CONTAINERS = 2_000_000  # in the object; 100,000 tensors have about 800,000
_ELEMENT_SIZES = {storage: BY_NAME[dtype].itemsize for dtype, storage in STORAGES.items()} | {
    "UntypedStorage": 1,
    "QInt32Storage": 4,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
_HINT = "load it with torch.load and save it again with torch.save"

_Sizes = dict[str, tuple[int, int]]
"""Number of elements and of bytes of each storage by key, from the object's pickle."""


def read_torch_legacy(
    path: Path, *, offset: int = 0, length: int | None = None
) -> tuple[Value, Mapping[str, StorageRecord]]:
    """Return the object in a legacy file, or in a window of it, and its storages by key.

    Raises:
        IncompleteError: the file is truncated.
        CorruptError: it contradicts the format, or itself.
        NotMergeableError: it is big-endian, or in a form that torch no longer writes.
        MalformedPickleError: a pickle is broken, or beyond the bounds.
        DangerousPickleError: a pickle names code that runs commands.
    """
    with opened(path) as file:
        size = size_of(file)
        end = size if length is None else min(size, offset + length)
        stream = _LegacyStream(path, file, offset, end)
        _check_header(stream)
        value = stream.next_pickle()
        keys = stream.next_pickle()
        return value, dict(_storages(stream, keys, _storage_sizes(path, value)))


class _LegacyStream:
    """A file that is read from its start; `at` is the next byte, `end` the byte after the last."""

    def __init__(self, path: Path, file: Opened, at: int, end: int) -> None:
        self.path = path
        self.at = at
        self.end = end
        self._file = file

    def next_pickle(self) -> Value:
        """Return the value of the next pickle; reads at most about four times its size."""
        count = _FIRST_READ
        while True:
            data = pread(self._file, min(count, self.end - self.at), self.at)
            try:
                value, used = unpickle_first(data)
            except TruncatedPickleError as error:
                if self.at + count >= self.end:
                    raise self.truncated() from error
                if count >= MAX_PICKLE:
                    raise MalformedPickleError(
                        f"the pickle at byte {self.at} takes more than {MAX_PICKLE} bytes"
                    ) from error
                count = min(4 * count, MAX_PICKLE)
            else:
                self.at += used
                return value

    def next_number(self) -> int:
        """Return the next 64-bit integer."""
        data = pread(self._file, 8, self.at)
        if self.at + 8 > self.end or len(data) != 8:
            raise self.truncated()
        self.at += 8
        return int(unpack("<q", data)[0])

    def truncated(self, expected: str = "", found: str = "") -> IncompleteError:
        """Return the error for a file that ends too early."""
        return IncompleteError(
            f"{self.path}: truncated (legacy format of torch.save)",
            expected=expected,
            found=found or f"{self.end} bytes, which end in the middle of a pickle or a size",
            hint="the save or the copy was interrupted; take another checkpoint or copy it again",
        )


def _check_header(stream: _LegacyStream) -> None:
    """Read the three pickles before the object: magic number, protocol, byte order."""
    path = stream.path
    magic, protocol = stream.next_pickle(), stream.next_pickle()
    if magic != int.from_bytes(LEGACY_MAGIC[4:14], "little"):
        raise CorruptError(f"{path}: not torch's legacy format: another magic number")
    if protocol != _PROTOCOL:
        raise CorruptError(
            f"{path}: unknown protocol of torch's legacy format",
            expected=str(_PROTOCOL),
            found="another number",
        )
    machine = stream.next_pickle()
    if not isinstance(machine, dict) or not isinstance(machine.get("little_endian"), bool):
        raise CorruptError(f"{path}: its byte order is missing (legacy format of torch.save)")
    if not machine["little_endian"]:
        raise NotMergeableError(
            f"{path}: written on a machine with another byte order",
            expected="little endian",
            found="big endian",
            hint="load and save it again on such a machine",
        )


def _storages(
    stream: _LegacyStream, listed: Value, sizes: _Sizes
) -> Iterator[tuple[str, StorageRecord]]:
    """Yield the places of the listed storages, whose sizes must equal those in the object."""
    path = stream.path
    keys = [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
    if not isinstance(listed, list) or len(set(keys)) != len(listed):
        raise CorruptError(
            f"{path}: corrupt: its list of storages is not a list of distinct strings"
        )
    odd = sorted(set(keys) ^ set(sizes))
    if odd:
        where = "object" if odd[0] in sizes else "list of storages"
        raise CorruptError(f"{path}: corrupt: storage {odd[0]} occurs only in its {where}")
    for key in keys:
        expected, size = sizes[key]
        elements = stream.next_number()
        if elements != expected:
            raise CorruptError(
                f"{path}: corrupt: storage {key} contradicts the pickle",
                expected=f"{expected} elements",
                found=f"{elements}",
            )
        yield key, StorageRecord(stream.at, size, 0)
        stream.at += size
        if stream.at > stream.end:
            raise stream.truncated(f"{stream.at} bytes", f"{stream.end}")
    if stream.at != stream.end:
        raise CorruptError(f"{path}: corrupt: {stream.end - stream.at} bytes follow its storages")


def _storage_sizes(path: Path, value: Value) -> _Sizes:
    """Return the sizes of storages in an object; all references to a storage must agree."""
    sizes: _Sizes = {}
    for reference in _references(path, value):
        match reference.pid:
            case ("module", *_):
                continue
            case ("storage", Global(_, kind), str(key), _, int(elements), *views) if elements >= 0:
                pass
            case _:
                raise CorruptError(f"{path}: corrupt: a storage reference of unknown form")
        if kind not in _ELEMENT_SIZES:
            raise NotMergeableError(f"{path}: a storage of unknown type {kind}", hint=_HINT)
        if any(view is not None for view in views):
            raise NotMergeableError(
                f"{path}: storage {key} is a view of another storage, as torch before 1.0 wrote it",
                hint=_HINT,
            )
        own = elements, elements * _ELEMENT_SIZES[kind]
        if sizes.setdefault(key, own) != own:
            raise CorruptError(f"{path}: corrupt: two sizes of storage {key} in its pickle")
    return sizes


def _references(path: Path, value: Value) -> Iterator[Persistent]:
    """Yield every reference to a storage inside a value, at any depth and with cycles."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Persistent):
            yield value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if len(seen) > _MAX_CONTAINERS:
            raise NotMergeableError(f"{path}: its pickle has more than {len(seen)} objects")
        parts: Iterable[Value] = ()
        match value:
            case Record(callee, args, state, items, elements):
                parts = (callee, args, state, items, elements)
            case dict():
                parts = chain(value.keys(), value.values())
            case tuple() | list() | set() | frozenset():
                parts = value
        pending.extend(part for part in parts if isinstance(part, _NESTED))


_NESTED = (Persistent, Record, tuple, list, dict, set, frozenset)
