"""The state of the pickle machine: stack, marks, memo, budget; and the steps that opcodes share.

`opcodes` maps every opcode to a step; `unpickle` runs them. See there for the bounds.
"""

from struct import unpack_from
from typing import cast

from unshard.containers.globals import is_dangerous
from unshard.containers.records import Global, Persistent, Record, Value

__all__ = ["DangerousPickleError", "Machine", "MalformedPickleError", "check_key"]

_MAX_DEPTH = 1000
_MAX_KEY = 1 << 61
_MAX_KEY_ITEMS = 8
_MIN_BUDGET = 150_000_000
_BUDGET_PER_BYTE = 14
# About what CPython allocates for one of each, in bytes.
TUPLE_COST, LIST_COST, DICT_COST, SET_COST, RECORD_COST, ENTRY_COST = 56, 72, 80, 232, 232, 110


class MalformedPickleError(ValueError):
    """The bytes are not a pickle that can be read, or exceed the bounds. The message says which."""


class DangerousPickleError(ValueError):
    """The pickle names code that runs commands. The message is the name."""


class Machine:
    """The pickle virtual machine: one stack, one memo, and a table of operations."""

    __slots__ = ("budget", "data", "globals", "marks", "memo", "pos", "sparse", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[Value] = []
        self.marks: list[list[Value]] = []
        self.memo: list[Value] = []
        self.sparse: dict[int, Value] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.budget = max(_MIN_BUDGET, _BUDGET_PER_BYTE * len(data))

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.pos
        self.pos = end = start + count
        if count < 0 or end > len(self.data):
            raise MalformedPickleError(f"truncated: byte {start} promises {count} bytes more")
        return self.data[start:end]

    def line(self) -> str:
        """Return the text up to the next newline (protocol 0 and GLOBAL)."""
        end = self.data.index(b"\n", self.pos)
        text = self.data[self.pos : end].decode("utf-8")
        self.pos = end + 1
        return text

    def number(self, layout: str, width: int) -> int:
        """Return the next little-endian integer."""
        (value,) = unpack_from(layout, self.data, self.pos)
        self.pos += width
        return cast(int, value)

    def charge(self, cost: int) -> None:
        """Account for an allocation of about `cost` bytes."""
        self.budget -= cost
        if self.budget < 0:
            raise MalformedPickleError(
                f"beyond the memory bound at byte {self.pos}: more objects than a checkpoint of "
                f"{len(self.data)} bytes of pickle can need"
            )

    def mark(self) -> None:
        """Open a mark: what is pushed from here on belongs to it."""
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > _MAX_DEPTH:
            raise MalformedPickleError(f"nested deeper than {_MAX_DEPTH} at byte {self.pos}")

    def pop_mark(self) -> list[Value]:
        """Return what lies above the last mark, and drop the mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo. Real picklers count up; other indices cost."""
        memo = self.memo
        if index == len(memo):
            memo.append(self.stack[-1])
        elif index < len(memo):
            memo[index] = self.stack[-1]
        else:
            self.charge(ENTRY_COST)
            self.sparse[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push a memo entry."""
        memo = self.memo
        self.stack.append(memo[index] if index < len(memo) else self.sparse[index])

    def push_global(self, module: str, name: str) -> None:
        """Push a name; refuse a dangerous one."""
        key = (module, name)
        known = self.globals.get(key)
        if known is None:
            self.charge(ENTRY_COST)
            known = self.globals[key] = Global(module, name)
            if is_dangerous(known) and not _is_plain_getattr(known):
                raise DangerousPickleError(str(known))
        self.stack.append(known)

    def push_call(self, callee: Value, args: Value) -> None:
        """Push the record of a call."""
        if not isinstance(args, tuple):
            raise MalformedPickleError(f"a call without an argument tuple at byte {self.pos}")
        self.charge(RECORD_COST)
        if isinstance(callee, Global) and _is_plain_getattr(callee):
            self.push_attribute(args)
        else:
            self.stack.append(Record(callee, args))

    def push_attribute(self, args: tuple[Value, ...]) -> None:
        """Protocol 2 spells a nested class `getattr(Outer, "Inner")`: its name is all we need."""
        match args:
            case (Global(module, outer), str(inner)):
                self.push_global(module, f"{outer}.{inner}")
            case _:
                raise DangerousPickleError("builtins.getattr")

    def set_items(self, target: Value, items: list[Value]) -> None:
        """Record `target[key] = value` for alternating keys and values."""
        if len(items) % 2:
            raise MalformedPickleError(f"a key without a value at byte {self.pos}")
        self.charge(ENTRY_COST * (len(items) // 2))
        keys, values = items[::2], items[1::2]
        for key in keys:
            check_key(key)
        if isinstance(target, dict):
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, Record):
            target.items.extend(zip(keys, values, strict=True))
        else:
            raise MalformedPickleError(f"items set on {type(target).__name__} at byte {self.pos}")

    def extend(self, target: Value, values: list[Value]) -> None:
        """Record `target.extend(values)` for a list or a record."""
        match target:
            case list():
                target.extend(values)
            case Record():
                target.elements.extend(values)
            case _:
                kind = type(target).__name__
                raise MalformedPickleError(f"appended to {kind} at byte {self.pos}")

    def checked_elements(self, values: list[Value]) -> list[Value]:
        """Return what is about to become elements of a set, each safe to hash."""
        self.charge(ENTRY_COST * len(values))
        for value in values:
            check_key(value)
        return values


def _is_plain_getattr(name: Global) -> bool:
    return name.name == "getattr" and name.module in ("builtins", "__builtin__")


def check_key(key: Value) -> None:
    """Refuse what must not be hashed: it could take exponential time, or collide on purpose."""
    if isinstance(key, tuple) and len(key) <= _MAX_KEY_ITEMS:
        if all(_is_scalar_key(item) for item in key):
            return
    elif _is_scalar_key(key):
        return
    raise MalformedPickleError(f"a dict key or set element of type {type(key).__name__}")


def _is_scalar_key(key: Value) -> bool:
    if isinstance(key, int):
        return -_MAX_KEY < key < _MAX_KEY
    return key is None or isinstance(key, str | bytes | Global | Record | Persistent)
