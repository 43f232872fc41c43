"""Opcodes that push a value of their own: numbers, strings, bytes, constants."""

import re
from collections.abc import Callable
from struct import unpack_from

from unshard.containers.pickles.machine import NUMBER_COST, TEXT_COST, Machine, MalformedPickleError
from unshard.containers.pickles.records import Value

__all__ = ["LITERALS", "Operation"]

Operation = Callable[[Machine], None]

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.?))", re.DOTALL)


def _constant(value: Value) -> Operation:
    return lambda m: m.stack.append(value)


def _integer(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        m.charge(NUMBER_COST)
        m.stack.append(m.number(layout, width))

    return push


def _binint1(m: Machine) -> None:
    m.stack.append(m.data[m.pos])
    m.pos += 1


def _long(width: int) -> Operation:
    def push(m: Machine) -> None:
        count = m.number("<B" if width == 1 else "<i", width)
        m.charge(NUMBER_COST + 2 * count)
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return push


def _binfloat(m: Machine) -> None:
    m.charge(NUMBER_COST)
    m.stack.append(unpack_from(">d", m.data, m.pos)[0])
    m.pos += 8


def _text_int(m: Machine) -> None:
    text = m.line()
    m.charge(NUMBER_COST)
    m.stack.append({b"00": False, b"01": True}.get(text, int(text.removesuffix(b"L"))))


def _text_float(m: Machine) -> None:
    m.charge(NUMBER_COST)
    m.stack.append(float(m.line()))


def _text_string(m: Machine) -> None:
    """Python 2 wrote the repr of its strings; what `repr` escapes is all there is to undo."""
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


def _string(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        text = m.take(m.number(layout, width))
        m.push_text(text.decode("utf-8", "surrogatepass"), len(text))

    return push


def _latin(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        text = m.take(m.number(layout, width))
        m.push_text(text.decode("latin-1"), len(text))

    return push


def _bytes(layout: str, width: int) -> Operation:
    def push(m: Machine) -> None:
        data = m.take(m.number(layout, width))
        m.charge(TEXT_COST + len(data))
        m.stack.append(data)

    return push


LITERALS: dict[bytes, Operation] = {
    b"N": _constant(None),
    b"\x88": _constant(value=True),
    b"\x89": _constant(value=False),
    b")": _constant(()),
    b"J": _integer("<i", 4),
    b"K": _binint1,
    b"M": _integer("<H", 2),
    b"\x8a": _long(1),
    b"\x8b": _long(4),
    b"G": _binfloat,
    b"I": _text_int,
    b"L": _text_int,
    b"F": _text_float,
    b"S": _text_string,
    b"V": _text_unicode,
    b"X": _string("<I", 4),
    b"\x8c": _string("<B", 1),
    b"\x8d": _string("<Q", 8),
    b"T": _latin("<i", 4),
    b"U": _latin("<B", 1),
    b"B": _bytes("<I", 4),
    b"C": _bytes("<B", 1),
    b"\x8e": _bytes("<Q", 8),
    b"\x96": _bytes("<Q", 8),
}
