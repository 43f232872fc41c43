"""Write pickles of protocol 2 or 4 like Python's own pickler, opcode for opcode.

Values are plain, with a `PickledCall` in place of each object, so that no class needs to be
imported. A repeated object is written once, as Python does: objects are identified by `id`, globals
by name. The elements of a set are written in the order of their bytes, so the same value always
gives the same pickle. In protocol 4 the names of modules are ordinary strings.

Sources: `pickletools`, CPython's `_pickle.c`, PEP 3154.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Literal, TypeVar

from unshard.containers.pickles.records import Global, Persistent, Value

MAX_DEPTH = 100
"""The most levels of nested values."""
MAX_INT_BYTES = 255
"""The longest integer, in two's complement."""

_T = TypeVar("_T")
_FRAME = 64 * 1024  # a frame of this size ends before the next value
_SMALLEST_FRAME = 4
_BATCH = 1000  # entries that Python adds to a list or dict by one opcode


@dataclass(frozen=True, slots=True, eq=False)
class PickledCall:
    """An object: the call that makes it, then its state and items.

    Attributes:
        callee: a class or function.
        args: its positional arguments.
        state: the value for BUILD; None for no BUILD.
        items: keys and values for SETITEMS.
        is_new: whether the call is `callee.__new__` (NEWOBJ) instead of `callee` (REDUCE).
    """

    callee: Global
    args: tuple[Value, ...] = ()
    state: Value = None
    items: Sequence[tuple[Value, Value]] = ()
    is_new: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class UniqueText:
    """A string that is an object of its own, even if an equal string has been written."""

    value: str


def _refuse(value: Value) -> PickledCall:
    raise TypeError(f"a value of type {type(value).__name__} cannot be written")


def pickled(
    value: Value, reduce: Callable[[Value], PickledCall] = _refuse, *, protocol: Literal[2, 4] = 2
) -> bytes:
    """Return the pickle of a value.

    Its parts may be: None, bool, int, float, str, bytes; lists, tuples, dicts, sets, OrderedDicts
    and Counters; `UniqueText`, `PickledCall`, `Global` and `Persistent`. An instance of a subclass
    is written as its base class in this list: a defaultdict as a dict.

    Args:
        value: the value.
        reduce: returns the call to write for any other part, or raises a TypeError.
        protocol: the pickle's protocol; protocol 4 is written without bytes and sets.

    Raises:
        TypeError: a part cannot be written.
        ValueError: the value is nested too deep, or has an integer that is too long.
    """
    pickler = _Pickler(reduce, protocol)
    pickler.save(value, 0)
    pickler.out += b"."
    return pack("<cB", b"\x80", protocol) + pickler.ended()


_ORDERED = Global("collections", "OrderedDict")
_COUNTER = Global("collections", "Counter")
_SET = Global("__builtin__", "set")
_ENCODE = Global("_codecs", "encode")
_TUPLE_ENDS = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


class _Pickler:
    """The opcodes written so far, and the memo.

    Attributes:
        out: the opcodes; in protocol 4 those after the last full frame.
        refers: whether they refer to anything outside the pickle.
    """

    def __init__(self, reduce: Callable[[Value], PickledCall], protocol: int) -> None:
        self.out = bytearray()
        self.refers = False
        self._reduce = reduce
        self._protocol = protocol
        self._frames = bytearray()
        self._memo: dict[object, int] = {}
        self._alive: list[Value] = []  # the `id` of a freed object may be reused

    def save(self, value: Value, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        if self._protocol > 2 and len(self.out) >= _FRAME:
            self._end_frame()
        match value:
            case None | bool() | int() | float():
                self.out += _scalar(value)
            case tuple() if not value:
                self.out += b")"
            case Persistent(pid=pid):
                self.refers = True
                self.save(pid, depth + 1)
                self.out += b"Q"
            case Global():
                if not self._is_known(value):
                    self._global(value, depth + 1)
                    self._remember(value)
            case _:
                if not self._is_known(id(value)):
                    self._object(value, depth + 1)

    def ended(self) -> bytes:
        """Return all opcodes, in frames in protocol 4."""
        if self._protocol > 2 and len(self.out) >= _SMALLEST_FRAME:
            self._end_frame()
        return bytes(self._frames + self.out)

    def _end_frame(self) -> None:
        self._frames += pack("<cQ", b"\x95", len(self.out)) + self.out
        self.out.clear()

    def _object(self, value: Value, depth: int) -> None:
        """Write an object for the first time."""
        match value:
            case str() | UniqueText():
                text = value if isinstance(value, str) else value.value
                self._text(text.encode("utf-8", "surrogatepass"))
                self._remember_object(value)
            case tuple():
                self._tuple(value, depth)
            case list():
                self._list(value, depth)
            case OrderedDict():
                self._call(PickledCall(_ORDERED, (), None, list(value.items())), depth, of=value)
            case Counter():
                self._call(PickledCall(_COUNTER, (dict(value),)), depth, of=value)
            case dict():
                self._dict(value, depth)
            case bytes() | set():
                self._call(self._of_protocol_2(value, depth), depth, of=value)
            case PickledCall():
                self._call(value, depth, of=value)
            case _:
                self._call(self._reduce(value), depth, of=value)

    def _global(self, value: Global, depth: int) -> None:
        if self._protocol == 2:
            self.out += f"c{value.module}\n{value.name}\n".encode()
        else:
            self.save(value.module, depth)
            self.save(value.name, depth)
            self.out += b"\x93"

    def _text(self, data: bytes) -> None:
        is_short = self._protocol > 2 and len(data) < 256
        header = (b"\x8c", "B") if is_short else (b"X", "I")
        self.out += pack(f"<c{header[1]}", header[0], len(data)) + data

    def _tuple(self, value: tuple[Value, ...], depth: int) -> None:
        end = _TUPLE_ENDS.get(len(value))
        self.out += b"" if end else b"("
        for part in value:
            self.save(part, depth)
        self.out += end or b"t"
        self._remember_object(value)

    def _call(self, call: PickledCall, depth: int, *, of: Value) -> None:
        self.save(call.callee, depth)
        self.save(call.args, depth)
        self.out += b"\x81" if call.is_new else b"R"
        self._remember_object(of)
        for batch in _batches(call.items):
            mark, end = (b"(", b"u") if len(batch) > 1 else (b"", b"s")
            self._entries(batch, depth, mark, end)
        if call.state is not None:
            self.save(call.state, depth)
            self.out += b"b"

    def _list(self, value: list[Value], depth: int) -> None:
        self.out += b"]"
        self._remember_object(value)
        entries = [(part,) for part in value]
        if len(entries) == 1:
            self._entries(entries, depth, b"", b"a")
        else:
            for batch in _batches(entries):
                self._entries(batch, depth, b"(", b"e")

    def _dict(self, value: dict[Value, Value], depth: int) -> None:
        self.out += b"}"
        self._remember_object(value)
        entries = list(value.items())
        if len(entries) == 1:
            self._entries(entries, depth, b"", b"s")
            return
        for batch in _batches(entries):
            self._entries(batch, depth, b"(", b"u")
        if entries and len(entries) % _BATCH == 0:  # Python ends with an empty batch, too
            self._entries([], depth, b"(", b"u")

    def _entries(
        self, entries: Sequence[tuple[Value, ...]], depth: int, mark: bytes, end: bytes
    ) -> None:
        self.out += mark
        for entry in entries:
            for part in entry:
                self.save(part, depth)
        self.out += end

    def _of_protocol_2(self, value: bytes | set[Value], depth: int) -> PickledCall:
        """Return the call for a value that has no opcode in protocol 2."""
        if self._protocol > 2:
            _refuse(value)
        if isinstance(value, bytes):
            # Python writes empty bytes as a call of `bytes`, which torch's restricted unpickler
            # does not know.
            return PickledCall(_ENCODE, (value.decode("latin1"), "latin1"))
        # A pickle for each element, without references to other elements, so they can be sorted.
        parts = []
        for element in value:
            single = _Pickler(self._reduce, self._protocol)
            single.save(element, depth + 1)
            if single.refers:
                raise TypeError("a tensor in a set cannot be written")
            parts.append((bytes(single.out), element))
        ordered = [element for _, element in sorted(parts, key=lambda part: part[0])]
        return PickledCall(_SET, (ordered,))

    def _is_known(self, key: object) -> bool:
        """Write a reference to an earlier object; return whether there is one."""
        number = self._memo.get(key)
        if number is None:
            return False
        self.out += pack("<cB", b"h", number) if number < 256 else pack("<cI", b"j", number)
        return True

    def _remember_object(self, value: Value) -> None:
        self._alive.append(value)
        self._remember(id(value))

    def _remember(self, key: object) -> None:
        number = self._memo[key] = len(self._memo)
        if self._protocol > 2:
            self.out += b"\x94"
        else:
            self.out += pack("<cB", b"q", number) if number < 256 else pack("<cI", b"r", number)


def _batches(entries: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the entries that one opcode adds."""
    return (entries[start : start + _BATCH] for start in range(0, len(entries), _BATCH))


def _scalar(value: float | None) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return _integer(value)
        case float():
            return pack(">cd", b"G", value)


_INTEGERS = ((b"K", "B", 0, 1 << 8), (b"M", "H", 0, 1 << 16), (b"J", "i", -(1 << 31), 1 << 31))


def _integer(value: int) -> bytes:
    for code, layout, low, high in _INTEGERS:
        if low <= value < high:
            return pack(f"<c{layout}", code, value)
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise ValueError(f"an integer of {size} bytes; torch reads up to {MAX_INT_BYTES}")
    return pack("<cB", b"\x8a", size) + value.to_bytes(size, "little", signed=True)
