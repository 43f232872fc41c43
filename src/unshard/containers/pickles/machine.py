"""The state of the pickle machine (stack, marks, memo, budget) and the steps that opcodes share.

`opcodes` maps every opcode to a step; `unpickle` runs them and documents the bounds.
"""

import secrets
from struct import unpack_from
from typing import cast

from unshard.containers.pickles.records import (
    SKIPPED,
    Global,
    Persistent,
    Record,
    Value,
    is_dangerous,
)

_MAX_DEPTH = 1000
_MEMORY_FLOOR = 300_000_000  # bytes that a pickle of any length may take
_MAX_NAME = 1000
_MAX_KEY = 1 << 64
_BATCH = 20_000
_MAX_KEY_LENGTH = 4096
_MAX_KEY_ITEMS = 8
_SALT = secrets.randbits(61)

# Approximate allocations of CPython, in bytes.
TUPLE_COST, LIST_COST, DICT_COST, SET_COST = 56, 72, 80, 232
RECORD_COST, ENTRY_COST, NUMBER_COST, TEXT_COST = 110, 130, 28, 60
TABLE_COST = 120  # the smallest hash table
_FIRST_TABLE = 5  # entries of a dict that fit the smallest table: the state of an object
SALTED_COST = 64
SLOT_COST = 9  # a slot of the stack or the memo
_CHECK_EVERY = 1_000_000


class MalformedPickleError(ValueError):
    """The bytes are not a readable pickle, or exceed the bounds."""


class DangerousPickleError(ValueError):
    """The pickle names code that runs commands. The message is the name."""


class RecalledError(Exception):
    """The pickle recalls a memo entry that a step of the caller skipped."""


class SaltedInt(int):
    """An integer as a dict key with a salted hash, so that no pickle can make keys collide.

    To look up a key: `value[SaltedInt(3)]`.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((_SALT, int(self)))


class SaltedFloat(float):
    """A float as a dict key, such as a milestone of a scheduler, with a salted hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((_SALT, float(self)))


class Machine:
    """The pickle virtual machine: one stack, one memo, and an account of its allocations."""

    __slots__ = (
        "allowance",
        "check_at",
        "data",
        "globals",
        "marks",
        "memo",
        "pos",
        "sparse",
        "spent",
        "stack",
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0
        self.stack: list[Value] = []
        self.marks: list[list[Value]] = []
        self.memo: list[Value] = []
        self.sparse: dict[int, Value] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.spent = 0
        self.check_at = _CHECK_EVERY
        self.allowance = max(_MEMORY_FLOOR - 10 * len(data), SLOT_COST * len(data))

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        start = self.pos
        self.pos = end = start + count
        if count < 0 or end > len(self.data):
            raise MalformedPickleError(f"truncated: {count} bytes expected after byte {start}")
        return self.data[start:end]

    def line(self) -> bytes:
        """Return the bytes up to the next newline (protocol 0 and GLOBAL)."""
        start, end = self.pos, self.data.find(b"\n", self.pos)
        if end < 0:
            self.pos = len(self.data)
            raise MalformedPickleError(f"truncated: the line at byte {start} has no end")
        text = self.data[start:end]
        self.pos = end + 1
        return text

    def number(self, layout: str, width: int) -> int:
        """Return the next number: an integer, except for the layout of a float."""
        (value,) = unpack_from(layout, self.data, self.pos)
        self.pos += width
        return cast(int, value)

    def push(self, value: Value, cost: int) -> None:
        """Push a value whose allocation costs about `cost` bytes."""
        self.charge(cost)
        self.stack.append(value)

    def push_text(self, text: str, stored_bytes: int) -> None:
        """Push a string, at 4 bytes per stored byte: one wide character makes all wide."""
        self.push(text, TEXT_COST + 4 * stored_bytes)

    def charge(self, cost: int) -> None:
        """Account for an allocation of about `cost` bytes."""
        self.spent += cost
        if self.spent <= self.check_at:
            return
        # Refuses early a pickle that would exceed max(300 MB, 20 x its length). Each remaining
        # byte takes at most one slot, so the allowed memory grows with the bytes read so far.
        self.check_at = self.spent + _CHECK_EVERY
        slots = len(self.memo) + len(self.stack) + sum(map(len, self.marks))
        if self.spent + SLOT_COST * slots > self.allowance + SLOT_COST * self.pos:
            raise MalformedPickleError(
                f"beyond the memory bound at byte {self.pos}: more objects than "
                f"{len(self.data)} bytes of pickle can need"
            )

    def mark(self) -> None:
        """Open a mark: later pushes belong to it."""
        self.charge(LIST_COST)
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > _MAX_DEPTH:
            raise MalformedPickleError(f"nested deeper than {_MAX_DEPTH} at byte {self.pos}")

    def pop_mark(self) -> list[Value]:
        """Remove the last mark, and return the values above it."""
        items = self.stack
        self.stack = self.marks.pop()
        self.spent -= LIST_COST
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
            self.sparse[SaltedInt(index)] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push a memo entry."""
        memo = self.memo
        value = memo[index] if index < len(memo) else self.sparse[SaltedInt(index)]
        if value is SKIPPED:
            raise RecalledError
        self.stack.append(value)

    def push_global(self, module: str, name: str) -> None:
        """Push a name; refuse a dangerous name."""
        key = (module, name)
        value = self.globals.get(key)
        if value is None:
            if len(module) + len(name) > _MAX_NAME:
                raise MalformedPickleError(f"a name of {len(module) + len(name)} characters")
            self.charge(4 * TEXT_COST + 2 * ENTRY_COST + 8 * (len(module) + len(name)))
            value = self.globals[key] = Global(module, name)
            if is_dangerous(value) and not _is_plain_getattr(value):
                raise DangerousPickleError(str(value))
        self.stack.append(value)

    def push_call(self, callee: Value, args: Value) -> None:
        """Push the record of a call."""
        if not isinstance(args, tuple):
            raise MalformedPickleError(f"a call without an argument tuple at byte {self.pos}")
        if not isinstance(callee, Global | Record | Persistent):
            kind = type(callee).__name__
            raise MalformedPickleError(f"a call of {kind} at byte {self.pos}")
        self.charge(RECORD_COST)
        if not isinstance(callee, Global) or not _is_plain_getattr(callee):
            self.stack.append(Record(callee, args))
            return
        match args:  # protocol 2 spells a nested class `getattr(Outer, "Inner")`
            case (Global(module, outer), str(inner)):
                self.push_global(module, f"{outer}.{inner}")
            case _:
                raise DangerousPickleError("builtins.getattr")

    def set_items(self, items: list[Value]) -> None:
        """Record `top[key] = value` for alternating keys and values."""
        target = self.stack[-1]
        if len(items) % 2:
            raise MalformedPickleError(f"a key without a value at byte {self.pos}")
        for start in range(0, len(items), _BATCH):  # bounds the memory of copied keys
            batch = items[start : start + _BATCH]
            keys = batch[::2]
            self.charge(TABLE_COST)
            pairs = zip(self.safe_elements(keys), batch[1::2], strict=True)
            if isinstance(target, dict):
                if not target and all(type(key) is str for key in keys):
                    self.spent -= ENTRY_COST * (len(keys) if len(keys) <= _FIRST_TABLE else 4)
                target.update(pairs)
            elif isinstance(target, Record):
                target.items.extend(pairs)
            else:
                kind = type(target).__name__
                raise MalformedPickleError(f"items set on {kind} at byte {self.pos}")

    def extend(self, values: list[Value]) -> None:
        """Record `top.extend(values)` for a list or a record."""
        target = self.stack[-1]
        self.charge(SLOT_COST * len(values))
        match target:
            case list():
                target.extend(values)
            case Record():
                target.elements.extend(values)
            case _:
                kind = type(target).__name__
                raise MalformedPickleError(f"appended to {kind} at byte {self.pos}")

    def safe_elements(self, values: list[Value]) -> list[Value]:
        """Return future dict keys or elements of a set, each safe to hash."""
        self.charge(ENTRY_COST * len(values))
        tuples = sum(isinstance(value, tuple) for value in values)
        if tuples:
            self.charge(tuples * (2 * TUPLE_COST + _MAX_KEY_ITEMS * (SLOT_COST + SALTED_COST)))
        return list(map(_safe_key, values))


def _is_plain_getattr(name: Global) -> bool:
    return name.name == "getattr" and name.module in ("builtins", "__builtin__")


def _safe_key(key: Value) -> Value:
    """Return a dict key or set element that is safe to hash.

    Numbers are salted, because they can be made to collide. Nested tuples, whose hash may take
    exponential time, and long strings are refused.
    """
    if isinstance(key, str | bytes):
        if len(key) <= _MAX_KEY_LENGTH:
            return key
        raise MalformedPickleError(f"a dict key of {len(key)} characters")
    if key is None or isinstance(key, bool | Global | Record | Persistent):
        return key
    if isinstance(key, int) and -_MAX_KEY < key < _MAX_KEY:
        return SaltedInt(key)
    if isinstance(key, float):
        return SaltedFloat(key)
    flat = isinstance(key, tuple) and not any(isinstance(item, tuple) for item in key)
    if isinstance(key, tuple) and flat and len(key) <= _MAX_KEY_ITEMS:
        return tuple(map(_safe_key, key))
    raise MalformedPickleError(f"a dict key or set element of type {type(key).__name__}")
