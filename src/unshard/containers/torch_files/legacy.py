"""The legacy format of `torch.save` (torch before 1.6, or `_use_new_zipfile_serialization=False`).

Five pickles follow one another: a magic number, the protocol, facts about the machine, the
object, and the keys of its storages. Then, per key, a little-endian 64-bit number of elements and
the bytes themselves, unaligned and without a directory: the place of a storage follows only from
the sizes of all before it. Only the pickles and those numbers are read here, never the weights.

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
_MAX_CONTAINERS = 2_000_000  # of the object; 100,000 tensors make some 800,000
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
"""Storages by key, as the object's pickle states them: number of elements, and bytes in all."""


def read_torch_legacy(
    path: Path, *, offset: int = 0, length: int | None = None
) -> tuple[Value, Mapping[str, StorageRecord]]:
    """Return the object in a legacy file, or in a window of it, and its storages by key.

    Raises:
        IncompleteError: the file is truncated.
        CorruptError: it contradicts the format, or itself.
        NotMergeableError: big-endian, or of a form that torch no longer writes.
        MalformedPickleError: a pickle is broken, or beyond the bounds.
        DangerousPickleError: a pickle names something that runs commands.
    """
    with opened(path) as file:
        size = size_of(file)
        end = size if length is None else min(size, offset + length)
        stream = _Stream(path, file, offset, end)
        _check_header(stream)
        value = stream.next_pickle()
        keys = stream.next_pickle()
        return value, dict(_storages(stream, keys, _stated_storages(path, value)))


class _Stream:
    """A file read from the front; `at` is the byte that comes next, `end` the first beyond it."""

    def __init__(self, path: Path, file: Opened, at: int, end: int) -> None:
        self.path = path
        self.at = at
        self.end = end
        self._file = file

    def next_pickle(self) -> Value:
        """Return what the next pickle describes; read no more than about four times its size."""
        count = _FIRST_READ
        while True:
            data = pread(self._file, min(count, self.end - self.at), self.at)
            try:
                value, _, used = unpickle_first(data)
            except TruncatedPickleError as error:
                if self.at + count >= self.end:
                    raise self.truncated() from error
                if count >= MAX_PICKLE:
                    what = f"the pickle at byte {self.at} takes more than {MAX_PICKLE} bytes"
                    raise MalformedPickleError(what) from error
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
        """Return the error that the file ends too early."""
        return IncompleteError(
            f"{self.path}: truncated (legacy format of torch.save)",
            expected=expected,
            found=found or f"{self.end} bytes, in the middle of the file's own description",
            hint="the save or the copy was interrupted; take another checkpoint or copy it again",
        )


def _check_header(stream: _Stream) -> None:
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
        raise CorruptError(f"{path}: its byte order is not stated (legacy format of torch.save)")
    if not machine["little_endian"]:
        raise NotMergeableError(
            f"{path}: written on a machine with another byte order",
            expected="little endian",
            found="big endian",
            hint="load and save it again on such a machine",
        )


def _storages(
    stream: _Stream, listed: Value, stated: _Sizes
) -> Iterator[tuple[str, StorageRecord]]:
    """Yield where each of the listed storages is; compare with what the object says of it."""
    path = stream.path
    if not isinstance(listed, list):
        raise CorruptError(f"{path}: corrupt: its list of storages is not a list")
    keys = [key for key in listed if isinstance(key, str)]
    if len(keys) != len(listed) or len(set(keys)) != len(keys):
        raise CorruptError(
            f"{path}: corrupt: its list of storages has keys that are not distinct strings"
        )
    odd = sorted(set(keys) ^ set(stated))
    if odd:
        where = "object" if odd[0] in stated else "list of storages"
        raise CorruptError(f"{path}: corrupt: storage {odd[0]} occurs only in its {where}")
    for key in keys:
        expected, size = stated[key]
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


def _stated_storages(path: Path, value: Value) -> _Sizes:
    """Return what the object says of its storages; all references to one must agree."""
    stated: _Sizes = {}
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
                f"{path}: storage {key} is a view of another one, as torch before 1.0 wrote them",
                hint=_HINT,
            )
        sizes = elements, elements * _ELEMENT_SIZES[kind]
        if stated.setdefault(key, sizes) != sizes:
            raise CorruptError(f"{path}: corrupt: two sizes of storage {key} in its pickle")
    return stated


def _references(path: Path, value: Value) -> Iterator[Persistent]:
    """Yield every reference to a storage inside a value, however it is nested, cycles included."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
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
        left.extend(part for part in parts if isinstance(part, _NESTED))


_NESTED = (Persistent, Record, tuple, list, dict, set, frozenset)
