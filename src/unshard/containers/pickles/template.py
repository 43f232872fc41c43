"""Read pickles that differ only in their numbers: run one of them, and compare the others.

The pickles of a checkpoint's ranks are alike except for sizes, coordinates and hashes, and a larger
number takes more bytes. `make_template` runs the machine once, with a mark in place of every
number, which shows the position of each number in the value. `numbers_in` finds the same numbers in
another pickle if all bytes between them are the same.

The machine would then take the same steps for both: no step depends on a number, except that
numbers as keys of a dict may be equal, and that NEWOBJ_EX tests a popped value (it is refused in a
template). So the other pickle's value is the template's value with its own numbers in place of the
marks; only values below numeric keys of a dict remain unknown.
"""

from typing import NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from unshard.containers.pickles.machine import NUMBER_COST, Machine
from unshard.containers.pickles.opcodes import OPERATIONS, Operation, refuse
from unshard.containers.pickles.records import Value
from unshard.containers.pickles.unpickle import run_all

_FIRST_MARK = 1 << 48
_LAST_MARK = 1 << 49
_LONG1 = 0x8A
_WIDTHS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_REFUSED = b"IL\x8b\x92"  # other integers could look like a mark; NEWOBJ_EX tests a popped value
_PADDING = 300  # bytes after a pickle, as many as the longest number
_WINDOW = 4096

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def is_mark(value: Value) -> TypeGuard[int]:
    """Return whether this is the mark of a number."""
    return type(value) is int and _FIRST_MARK <= value < _LAST_MARK


def number_of(mark: int) -> int:
    """Return the index of a mark's number in the pickle."""
    return mark - _FIRST_MARK


class Numbers(NamedTuple):
    """The numbers of a pickle, in the order of its bytes.

    Attributes:
        values: the numbers that fit 64 bits; others are arbitrary.
        fits: whether each number fits.
    """

    values: Ints
    fits: NDArray[np.bool_]


class Template(NamedTuple):
    """A pickle with the positions of its numbers.

    Attributes:
        data: its bytes, padded.
        size: number of bytes without the padding.
        at: the first byte of each number, its opcode.
        width: bytes of each number, with its opcode.
        fixed: 0 for the bytes of numbers, 255 for all others.
        numbers: its own numbers.
    """

    data: Bytes
    size: int
    at: Ints
    width: Ints
    fixed: Bytes
    numbers: Numbers

    def numbers_in(self, data: bytes) -> Numbers | None:
        """Return the numbers of another pickle; None if it differs in other bytes."""
        other = _padded(data)
        positions = self._positions(other, len(data))
        if positions is None or not self._same_between(other, len(data), positions):
            return None
        return _numbers(other, positions)

    def _positions(self, other: Bytes, size: int) -> Ints | None:
        """Return the positions of numbers in another pickle; None if one is missing.

        While opcodes (and counts) equal the template's, distances between numbers do, too.
        """
        positions = np.empty_like(self.at)
        shift = start = 0
        while start < len(positions):
            at = self.at[start : start + _WINDOW] + shift
            mine = self.at[start : start + _WINDOW]
            np.minimum(at, size, out=at)
            same = other[at] == self.data[mine]
            same &= (other[at] != _LONG1) | (other[at + 1] == self.data[mine + 1])
            odd = len(at) if same.all() else int(same.argmin())
            positions[start : start + len(at[: odd + 1])] = at[: odd + 1]
            start += odd
            if odd < len(at):
                width = _width(other, int(at[odd]))
                if width is None:
                    return None
                shift += width - int(self.width[start])
                start += 1
        return positions

    def _same_between(self, other: Bytes, size: int, positions: Ints) -> bool:
        """Compare the bytes between the numbers, in parts with a constant shift."""
        ends, theirs = self.at + self.width, positions + _widths(other, positions)
        shift = theirs - ends
        changes = np.flatnonzero(np.diff(shift, prepend=0)).tolist()
        starts = [(0, 0), *((int(ends[k]), int(theirs[k])) for k in changes)]
        stops = [*(int(self.at[k]) for k in changes), self.size]
        for (mine, its), stop in zip(starts, stops, strict=True):
            length = stop - mine
            if its + length > size:
                return False
            differs = self.data[mine:stop] ^ other[its : its + length]
            if (differs & self.fixed[mine:stop]).any():
                return False
        return starts[-1][1] + self.size - starts[-1][0] == size


def make_template(data: bytes) -> tuple[Template, Value]:
    """Return the template of a pickle, and its value with marks for its numbers.

    Raises:
        MalformedPickleError: not a pickle, beyond the bounds, or with opcodes that depend on
            numbers.
        DangerousPickleError: it names code that runs commands (see `is_dangerous`).
    """
    machine, positions = Machine(data), list[int]()
    value = run_all(machine, _marking(positions), inline=False)
    padded = _padded(data[: machine.pos])
    at = np.array(positions, dtype=np.int64)
    width = _widths(padded, at)
    fixed = np.full(machine.pos, 255, np.uint8)
    for wide in {*width.tolist()}:
        rows = at[width == wide]
        fixed[rows[:, None] + np.arange(wide)] = 0
    return Template(padded, machine.pos, at, width, fixed, _numbers(padded, at)), value


def _marking(positions: list[int]) -> tuple[Operation, ...]:
    """Return the machine's steps, with number steps that record the position and push a mark."""

    def step(width: int) -> Operation:
        def push_mark(m: Machine) -> None:
            count = m.data[m.pos] if width == 0 and m.pos < len(m.data) else 0
            m.push(_FIRST_MARK + len(positions), NUMBER_COST)
            positions.append(m.pos - 1)
            m.take(width or 1 + count)

        return push_mark

    steps = {code: step(width) for code, width in _WIDTHS.items()} | {_LONG1: step(0)}
    return tuple(
        refuse if code in _REFUSED else steps.get(code, operation)
        for code, operation in enumerate(OPERATIONS)
    )


def _padded(data: bytes) -> Bytes:
    return np.frombuffer(data + bytes(_PADDING), np.uint8)


def _width(data: Bytes, at: int) -> int | None:
    """Return the bytes of a number with its opcode; None if it is not a number."""
    code = int(data[at])
    if code == _LONG1:
        return 2 + int(data[at + 1])
    return None if code not in _WIDTHS else 1 + _WIDTHS[code]


_WIDTH_TABLE = np.array([1 + _WIDTHS.get(code, 0) for code in range(256)], np.int64)


def _widths(data: Bytes, at: Ints) -> Ints:
    codes = data[at]
    width: Ints = _WIDTH_TABLE[codes]
    long = codes == _LONG1
    width[long] = 2 + data[at[long] + 1].astype(np.int64)
    return width


def numbers_at(data: bytes, at: Ints) -> Ints:
    """Return the integers whose opcodes (BININT, BININT1, BININT2, LONG1) are at these bytes.

    All of them must fit 64 bits.
    """
    return _numbers(_padded(data), at).values


def _numbers(data: Bytes, at: Ints) -> Numbers:
    """Return the numbers that begin at these bytes: little-endian, K and M unsigned."""
    codes, width = data[at], _widths(data, at)
    head = np.where(codes == _LONG1, 2, 1)
    size = width - head
    eight = np.lib.stride_tricks.sliding_window_view(data, 8)[at + head]
    unused = (64 - 8 * np.minimum(size, 8)).astype(np.uint64)
    # Shifting to the top and back drops later bytes; an arithmetic shift extends the sign.
    top = np.where(size > 0, eight.view("<u8")[:, 0] << (unused & np.uint64(63)), 0)
    signed = (codes == _LONG1) | (codes == ord("J"))
    shift = unused & np.uint64(63)
    plain = (top >> shift).astype(np.int64)
    values = np.where(signed, top.astype(np.int64) >> shift.astype(np.int64), plain)
    return Numbers(values, size <= 8)
