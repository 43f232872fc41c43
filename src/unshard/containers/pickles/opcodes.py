"""The table of pickle opcodes, each a step of a few lines on the machine.

Grouped like `pickletools`. The extension registry (EXT1, EXT2, EXT4), which would name globals by
number, and out-of-band buffers are refused, because no checkpoint needs them.
"""

import re
from collections.abc import Callable

from unshard.containers.pickles.machine import (
    DICT_COST,
    LIST_COST,
    NUMBER_COST,
    SET_COST,
    SLOT_COST,
    TEXT_COST,
    TUPLE_COST,
    Machine,
    MalformedPickleError,
)
from unshard.containers.pickles.records import Persistent, Record

Operation = Callable[[Machine], object]

STOP = ord(".")
_MAX_PROTOCOL = 5
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.?))", re.DOTALL)


def refuse(m: Machine) -> None:
    """Raise that the opcode before this position is not allowed."""
    code = m.data[m.pos - 1]
    raise MalformedPickleError(f"opcode 0x{code:02x} at byte {m.pos - 1} is not allowed")


# --- numbers, strings, bytes, constants ----------------------------------------------------------


def _number(layout: str, width: int) -> Operation:
    return lambda m: m.push(m.number(layout, width), NUMBER_COST)


def _long(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        count = m.number(layout, width)
        m.charge(NUMBER_COST + 2 * count)
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return push


def _text_int(m: Machine) -> None:
    text = m.line()
    m.push({b"00": False, b"01": True}.get(text, int(text.removesuffix(b"L"))), NUMBER_COST)


def _text_string(m: Machine) -> None:
    """Push a string that Python 2 wrote as its repr: only the escapes of `repr` occur."""
    text = m.line()
    if len(text) < 2 or text[:1] not in b"'\"" or text[-1:] != text[:1]:
        raise MalformedPickleError(f"an unquoted string before byte {m.pos}")
    m.push_text(_ESCAPE.sub(_unescape, text[1:-1].decode("latin-1")), len(text))


def _unescape(match: re.Match[str]) -> str:
    if match[1] is not None:
        return chr(int(match[1], 16))
    if match[2] not in _ESCAPES:
        raise MalformedPickleError(f"an unknown escape in a string: {match[0]!r}")
    return _ESCAPES[match[2]]


def _text_unicode(m: Machine) -> None:
    text = m.line()
    m.push_text(text.decode("raw-unicode-escape"), len(text))


def _string(layout: str, width: int, encoding: str = "utf-8") -> Operation:
    def push(m: Machine) -> None:
        text = m.take(m.number(layout, width))
        m.push_text(text.decode(encoding, "surrogatepass"), len(text))

    return push


def _bytes(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        data = m.take(m.number(layout, width))
        m.push(data, TEXT_COST + len(data))

    return push


# --- containers ----------------------------------------------------------------------------------


def _tuple_of(count: int) -> Operation:
    def push(m: Machine) -> None:
        m.charge(TUPLE_COST)
        stack = m.stack
        if len(stack) < count:
            raise MalformedPickleError(f"stack underflow at byte {m.pos}")
        stack[-count:] = [tuple(stack[-count:])]

    return push


def _tuple(m: Machine) -> None:
    items = m.pop_mark()
    m.push(tuple(items), TUPLE_COST + SLOT_COST * len(items))


def _list(m: Machine) -> None:
    items = m.pop_mark()
    m.push(items, LIST_COST + SLOT_COST * len(items))


def _dict(m: Machine) -> None:
    items = m.pop_mark()
    m.push({}, DICT_COST)
    m.set_items(items)


def _additems(m: Machine) -> None:
    items = m.safe_elements(m.pop_mark())
    target = m.stack[-1]
    if isinstance(target, set):
        target.update(items)
    else:
        m.extend(items)


# --- memo ----------------------------------------------------------------------------------------


def _index(m: Machine) -> int:
    index = int(m.line())
    if index < 0:
        raise MalformedPickleError(f"memo index {index} before byte {m.pos}")
    return index


# --- globals and calls ---------------------------------------------------------------------------


def _global(m: Machine) -> None:
    module = m.line().decode("utf-8")
    m.push_global(module, m.line().decode("utf-8"))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise MalformedPickleError(f"a global that is not named by strings at byte {m.pos}")
    m.push_global(module, name)


def _newobj_ex(m: Machine) -> None:
    if m.stack.pop():
        raise MalformedPickleError(f"keyword arguments of a call at byte {m.pos}")
    m.push_call(m.stack.pop(-2), m.stack.pop())


def _build(m: Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if not isinstance(target, Record):
        raise MalformedPickleError(f"state set on {type(target).__name__} at byte {m.pos}")
    target.state = state


def _inst(m: Machine) -> None:
    _global(m)
    callee = m.stack.pop()
    m.push_call(callee, tuple(m.pop_mark()))


def _obj(m: Machine) -> None:
    callee, *args = m.pop_mark()
    m.push_call(callee, tuple(args))


def _text_persistent(m: Machine) -> None:
    text = m.line()
    m.push(Persistent(text.decode("ascii")), TUPLE_COST + TEXT_COST + len(text))


def _protocol(m: Machine) -> None:
    version = m.number("<B", 1)
    if version > _MAX_PROTOCOL:
        raise MalformedPickleError(f"pickle protocol {version}; up to {_MAX_PROTOCOL} is known")


_NAMED: dict[bytes, Operation] = {
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b")": lambda m: m.stack.append(()),
    b"J": _number("<i", 4),
    b"K": _number("<B", 1),
    b"M": _number("<H", 2),
    b"\x8a": _long("<B", 1),
    b"\x8b": _long("<i", 4),
    b"G": _number(">d", 8),
    b"I": _text_int,
    b"L": _text_int,
    b"F": lambda m: m.push(float(m.line()), NUMBER_COST),
    b"S": _text_string,
    b"V": _text_unicode,
    b"X": _string("<I", 4),
    b"\x8c": _string("<B", 1),
    b"\x8d": _string("<Q", 8),
    b"T": _string("<i", 4, "latin-1"),
    b"U": _string("<B", 1, "latin-1"),
    b"B": _bytes("<I", 4),
    b"C": _bytes("<B", 1),
    b"\x8e": _bytes("<Q", 8),
    b"\x96": _bytes("<Q", 8),
    b"]": lambda m: m.push([], LIST_COST),
    b"}": lambda m: m.push({}, DICT_COST),
    b"\x8f": lambda m: m.push(set(), SET_COST),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": _tuple,
    b"l": _list,
    b"d": _dict,
    b"\x91": lambda m: m.push(frozenset(m.safe_elements(m.pop_mark())), SET_COST),
    b"a": lambda m: m.extend([m.stack.pop()]),
    b"e": lambda m: m.extend(m.pop_mark()),
    b"s": lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    b"u": lambda m: m.set_items(m.pop_mark()),
    b"\x90": _additems,
    b"(": Machine.mark,
    b"0": lambda m: m.stack.pop() if m.stack else m.pop_mark(),
    b"1": Machine.pop_mark,
    b"2": lambda m: m.stack.append(m.stack[-1]),
    b"q": lambda m: m.remember(m.number("<B", 1)),
    b"r": lambda m: m.remember(m.number("<I", 4)),
    b"h": lambda m: m.recall(m.number("<B", 1)),
    b"j": lambda m: m.recall(m.number("<I", 4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"p": lambda m: m.remember(_index(m)),
    b"g": lambda m: m.recall(_index(m)),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": lambda m: m.push_call(m.stack.pop(-2), m.stack.pop()),
    b"\x81": lambda m: m.push_call(m.stack.pop(-2), m.stack.pop()),
    b"\x92": _newobj_ex,
    b"b": _build,
    b"i": _inst,
    b"o": _obj,
    b"P": _text_persistent,
    b"Q": lambda m: m.push(Persistent(m.stack.pop()), TUPLE_COST),
    b"\x80": _protocol,
    b"\x95": lambda m: m.number("<Q", 8),  # a frame's size; frames do not change the value
}
OPERATIONS: tuple[Operation, ...] = tuple(_NAMED.get(bytes([code]), refuse) for code in range(256))
