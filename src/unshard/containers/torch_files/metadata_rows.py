"""Read the rows of DCP's `.metadata` as columns of numbers, without an object per row.

A checkpoint of many ranks has 10^6 chunks, `ChunkStorageMetadata` in lists, and as many items,
`MetadataIndex` and `_StorageInfo` in a dict. A pickler writes them in batches: a mark, up to 1,000
entries, APPENDS or SETITEMS. A batch that consists of such rows, opcode for opcode, is matched by a
regular expression and becomes one `ChunkBatch` or `ItemBatch`, at the charges of its records. The
machine runs any other batch, from its mark on.

The memo has `SKIPPED` for objects that were not made. torch's metadata never recall them; a pickle
that does is read again, by the machine alone.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unshard.containers.pickles.machine import (
    DICT_COST,
    ENTRY_COST,
    NUMBER_COST,
    RECORD_COST,
    SLOT_COST,
    TABLE_COST,
    TEXT_COST,
    TUPLE_COST,
    Machine,
    RecalledError,
)
from unshard.containers.pickles.opcodes import OPERATIONS, Operation
from unshard.containers.pickles.records import SKIPPED, Global, Value
from unshard.containers.pickles.template import numbers_at
from unshard.containers.pickles.unpickle import unpickle

Ints = NDArray[np.int64]

METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",
)
STORAGE_INFO = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.checkpoint.filesystem._StorageInfo",
)
_MOST = 1 << 58  # the machine reads rows with larger or negative numbers
_FIRST = 256  # memo entries in reach of BINGET, for which the machine does not test SKIPPED
_DEEPEST = 900  # marks; below the machine's own bound
_PAIRS = 10_000  # pairs that the machine adds to a dict at a time
_MARK, _LONG1 = b"(\x8a"

_INT = b"(?:K.|M..|J....|\x8a(?:" + b"|".join(b"\\x%02x.{%d}" % (n, n) for n in range(1, 9)) + b"))"
_FRAME = b"(?:\x95.{8})?"
_TOKEN = re.compile(b"\x95.{8}|(" + _INT + b")", re.DOTALL)
_GET = b"h.|j...."
_TEXT = b"(?:\x8c(.)([^\x94]{0,255})\x94|(" + _GET + b"))"
_NEW = [b"\\)", b"\x81", b"\x94", b"\\}", b"\x94", b"\\("]
_DONE = [b"u", b"b"]
_SIZE_END = [b"\x85", b"\x94", b"R", b"\x94"]
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_DIMENSIONS = {end: ndim for ndim, end in _TUPLES.items()}
_MOST_DIMENSIONS = 8
_Atoms = list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkBatch:
    """Chunks of a tensor: `values` is (count, 2, dimensions), offsets and sizes in elements."""

    values: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ItemBatch:
    """Items and their places, as columns.

    Attributes:
        names: flat names.
        ndim: number of offsets of each item.
        offsets: offsets of all items, concatenated, in elements.
        files: paths in the checkpoint.
        spans: (count, 2): offset and length, in bytes of the file.
    """

    names: list[str]
    ndim: Ints
    offsets: Ints
    files: list[str]
    spans: Ints


def unpickle_metadata(data: bytes) -> Value:
    """Return the value of a pickle of DCP's metadata, with `ChunkBatch` and `ItemBatch` for rows.

    `ChunkBatch` are elements of lists; `ItemBatch` are keys of dicts, with the value None.

    Raises:
        MalformedPickleError, DangerousPickleError: see `unpickle`.
    """
    try:
        return unpickle(data, row_operations())
    except RecalledError:
        return unpickle(data)


def row_operations() -> tuple[Operation, ...]:
    """Return the machine's steps, with a step for MARK that reads batches of rows."""
    step = _Rows().step
    return tuple(step if code == _MARK else own for code, own in enumerate(OPERATIONS))


@dataclass(slots=True)
class _Rows:
    """The step of MARK; equal strings become one object."""

    texts: dict[str, str] = field(default_factory=dict)

    def step(self, m: Machine) -> None:
        """Read a batch of rows, or else open a mark."""
        if len(m.memo) >= _FIRST and m.stack and len(m.marks) < _DEEPEST:
            count = len(m.memo)
            match m.stack[-1]:
                case list() as target if _chunks(m, target):
                    return
                case dict() as target if self._items(m, target):
                    return
            del m.memo[count:]
        m.mark()

    def _items(self, m: Machine, target: dict[Value, Value]) -> bool:
        """Read a batch of items into a dict; False (with a changed memo) for any other batch."""
        first = _probe("item", None).match(m.data, m.pos)
        if first is None or not _are(m, _constants(first), _ITEM):
            return False
        memo, numbers, cost = m.memo, list[bytes](), 0
        names, files, ndim = list[str](), list[str](), list[int]()
        pos = m.pos
        for match in _matches(m.data, pos, *_patterns("item", _constants(first), None)):
            length, fqn, get, index, sizes, length2, path, get2, start, end = match.groups()
            memo += _TWO
            name = self._text(memo, length, fqn, get)
            dimensions = _DIMENSIONS.get(sizes[-2:-1])
            if dimensions is None:
                dimensions = len(_numbers_of([sizes]))
            memo += _FIVE if dimensions else _FOUR
            file = self._text(memo, length2, path, get2)
            if name is None or file is None:
                return False
            numbers += sizes, start, end
            names.append(name)
            files.append(file)
            ndim.append(dimensions)
            cost += _item_cost(dimensions) + _number_cost([index])
            cost += 0 if fqn is None else TEXT_COST + 4 * len(fqn)
            cost += 0 if path is None else TEXT_COST + 4 * len(path)
            pos = match.end()
        tokens = _numbers_of(numbers)
        values = _values(tokens)
        if m.data[pos : pos + 1] != b"u" or values is None:
            return False
        target[_item_batch(names, files, np.array(ndim, np.int64), values)] = None
        m.pos = pos + 1
        m.charge(cost + _number_cost(tokens) + TABLE_COST * -(-len(names) // _PAIRS))
        return True

    def _text(
        self, memo: list[Value], length: bytes | None, stored: bytes | None, get: bytes
    ) -> str | None:
        """Return a stored string, and add it to the memo, or a recalled string; None if invalid."""
        if length is None or stored is None:
            index = int.from_bytes(get[1:], "little")
            recalled = memo[index] if index < len(memo) else None
            return recalled if type(recalled) is str else None
        if length[0] != len(stored):
            return None
        try:
            text = stored.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None
        text = self.texts.setdefault(text, text)
        memo.append(text)
        return text


_TWO, _FOUR, _FIVE = ([SKIPPED] * count for count in (2, 4, 5))


def _item_batch(names: list[str], files: list[str], ndim: Ints, values: Ints) -> ItemBatch:
    """Return the items of a batch; `values` are offsets, offset in the file and length of each."""
    ends = np.cumsum(ndim + 2)
    of_span = np.stack([ends - 2, ends - 1], axis=1)
    return ItemBatch(names, ndim, np.delete(values, of_span.ravel()), files, values[of_span])


def _chunks(m: Machine, target: list[Value]) -> bool:
    """Read a batch of chunks into a list; False, with nothing changed, for any other batch."""
    first = _probe("chunk", None).match(m.data, m.pos)
    if first is None or not _are(m, _constants(first), _CHUNK):
        return False
    ndim = len(_numbers_of([first["sizes"]]))
    numbers, pos = list[bytes](), m.pos
    for match in _matches(m.data, pos, *_patterns("chunk", _constants(first), ndim)):
        numbers += match.groups()
        pos = match.end()
    tokens = _numbers_of(numbers)
    values = _values(tokens)
    if m.data[pos : pos + 1] != b"e" or values is None:
        return False
    count = len(numbers) // 2
    target.append(ChunkBatch(values.reshape(count, 2, ndim)))
    m.pos = pos + 1
    m.memo += [SKIPPED] * (count * (8 if ndim else 6))
    m.charge(count * _chunk_cost(ndim) + _number_cost(tokens))
    return True


def _matches(
    data: bytes, pos: int, plain: "re.Pattern[bytes]", framed: "re.Pattern[bytes]"
) -> Iterator["re.Match[bytes]"]:
    """Yield the rows from a byte on; a new frame of the pickle begins inside a few rows."""
    while (match := plain.match(data, pos) or framed.match(data, pos)) is not None:
        yield match
        pos = match.end()


# --- patterns ------------------------------------------------------------------------------------


def _sizes(ndim: int) -> _Atoms:
    """Return the opcodes of a tuple of integers."""
    if ndim in _TUPLES:
        return [*[_INT] * ndim, _TUPLES[ndim], b"\x94"]
    return [b"\\(", *[_INT] * ndim, b"t", b"\x94"] if ndim else [b"\\)"]


def _pattern(
    kind: str, constants: Iterable[bytes], ndim: int | None, gap: bytes
) -> "re.Pattern[bytes]":
    """Return the pattern of a row.

    Args:
        kind: "chunk" or "item".
        constants: patterns of the opcodes that recall classes and names of attributes.
        ndim: the number of sizes; None for any number.
        gap: a pattern before every opcode.
    """
    get = iter(constants)
    any_of = [2, 1, 3, 0, *range(4, _MOST_DIMENSIONS + 1)] if ndim is None else [ndim]
    numbers = b"(?:" + b"|".join(gap.join(_sizes(count)) for count in any_of) + b")"

    def size(group: bytes) -> _Atoms:
        return [next(get), group + numbers + b")", *_SIZE_END]

    if kind == "chunk":
        atoms = [next(get), *_NEW, next(get), *size(b"(?P<sizes>"), next(get), *size(b"(")]
    else:
        atoms = [next(get), *_NEW, next(get), _TEXT, next(get), b"(N|" + _INT + b")", next(get)]
        atoms += [*size(b"("), *_DONE, next(get), *_NEW, next(get), _TEXT]
        atoms += [next(get), b"(" + _INT + b")", next(get), b"(" + _INT + b")"]
    return re.compile(b"".join(gap + atom for atom in (*atoms, *_DONE)) + gap, re.DOTALL)


@lru_cache
def _probe(kind: str, ndim: int | None) -> "re.Pattern[bytes]":
    """Return the pattern of a row with unknown constants, which are its groups `c0`, ...."""
    count = len(_CHUNK if kind == "chunk" else _ITEM)
    gets = (b"(?P<c%d>" % number + _GET + b")" for number in range(count))
    return _pattern(kind, gets, ndim, _FRAME)


@lru_cache(maxsize=256)
def _patterns(
    kind: str, constants: tuple[bytes, ...], ndim: int | None
) -> tuple["re.Pattern[bytes]", "re.Pattern[bytes]"]:
    """Return the patterns of a row without frames and with them."""
    literal = [re.escape(constant) for constant in constants]
    return _pattern(kind, literal, ndim, b""), _pattern(kind, literal, ndim, _FRAME)


def _constants(match: "re.Match[bytes]") -> tuple[bytes, ...]:
    groups = match.groupdict()
    return tuple(groups[name] for name in sorted(groups, key=lambda key: key[1:]) if name[0] == "c")


def _of(name: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module in METADATA_MODULES)


_SIZE = frozenset({"torch.Size"})
_CHUNK = (_of("ChunkStorageMetadata"), "offsets", _SIZE, "sizes", _SIZE)
_ITEM = (
    *(_of("MetadataIndex"), "fqn", "index", "offset", _SIZE),
    *(frozenset(STORAGE_INFO), "relative_path", "offset", "length"),
)


def _are(m: Machine, gets: Iterable[bytes], expected: Sequence[frozenset[str] | str]) -> bool:
    """Return whether the recalled values are these strings, and globals of these names."""
    for get, wanted in zip(gets, expected, strict=True):
        index = int.from_bytes(get[1:], "little")
        recalled = m.memo[index] if index < len(m.memo) else None
        if isinstance(wanted, str):
            if recalled != wanted or type(recalled) is not str:
                return False
        elif not isinstance(recalled, Global) or recalled.dotted not in wanted:
            return False
    return True


# --- numbers and charges -------------------------------------------------------------------------


def _numbers_of(stored: Iterable[bytes]) -> list[bytes]:
    """Return the opcodes of integers in parts of a pickle with integers, tuples and frames only."""
    return [number for number in _TOKEN.findall(b"".join(stored)) if number]


def _values(numbers: list[bytes]) -> Ints | None:
    """Return the integers of these opcodes; None if any is negative or too large."""
    ends = np.cumsum([len(number) for number in numbers], dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) if numbers else ends
    values = numbers_at(b"".join(numbers), starts)
    return values if not ((values < 0) | (values >= _MOST)).any() else None


def _number_cost(numbers: Iterable[bytes]) -> int:
    """Return the machine's charge for integers; None and integers of one byte cost nothing."""
    charged = [number for number in numbers if number[0] not in b"KN"]
    long = sum(number[1] for number in charged if number[0] == _LONG1)
    return NUMBER_COST * len(charged) + 2 * long


def _size_cost(ndim: int) -> int:
    """Return the machine's charge for a `torch.Size` without its integers."""
    own = TUPLE_COST * bool(ndim) + SLOT_COST * ndim * (ndim > len(_TUPLES))
    return own + TUPLE_COST + RECORD_COST


def _chunk_cost(ndim: int) -> int:
    return RECORD_COST + DICT_COST + 2 * _size_cost(ndim) + TABLE_COST + SLOT_COST


def _item_cost(ndim: int) -> int:
    return 2 * (RECORD_COST + DICT_COST + TABLE_COST) + _size_cost(ndim) + ENTRY_COST
