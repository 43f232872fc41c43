"""Opcodes that push a value of their own: numbers, strings, bytes, constants."""

from ast import literal_eval
from collections.abc import Callable
from struct import unpack_from

from unshard.containers.pickle_machine import Machine, MalformedPickleError
from unshard.containers.records import Value

__all__ = ["LITERALS", "Operation"]

Operation = Callable[[Machine], None]


def _constant(value: Value) -> Operation:
    return lambda m: m.stack.append(value)


def _integer(layout: str, width: int) -> Operation:
    return lambda m: m.stack.append(m.number(layout, width))


def _binint1(m: Machine) -> None:
    m.stack.append(m.data[m.pos])
    m.pos += 1


def _long(width: int) -> Operation:
    def push(m: Machine) -> None:
        count = m.number("<B" if width == 1 else "<i", width)
        m.stack.append(int.from_bytes(m.take(count), "little", signed=True))

    return push


def _binfloat(m: Machine) -> None:
    m.stack.append(unpack_from(">d", m.data, m.pos)[0])
    m.pos += 8


def _text_int(m: Machine) -> None:
    text = m.line()
    m.stack.append({"00": False, "01": True}.get(text, int(text.removesuffix("L"))))


def _text_float(m: Machine) -> None:
    m.stack.append(float(m.line()))


def _text_string(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        raise MalformedPickleError(f"an unquoted string before byte {m.pos}")
    m.stack.append(str(literal_eval(text)))


def _text_unicode(m: Machine) -> None:
    m.stack.append(m.line().encode("latin-1").decode("raw-unicode-escape"))


def _string(layout: str, width: int, encoding: str) -> Operation:
    def push(m: Machine) -> None:
        m.stack.append(m.take(m.number(layout, width)).decode(encoding, "surrogatepass"))

    return push


def _latin(layout: str, width: int) -> Operation:
    return lambda m: m.stack.append(m.take(m.number(layout, width)).decode("latin-1"))


def _bytes(layout: str, width: int) -> Operation:
    return lambda m: m.stack.append(m.take(m.number(layout, width)))


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
    b"X": _string("<I", 4, "utf-8"),
    b"\x8c": _string("<B", 1, "utf-8"),
    b"\x8d": _string("<Q", 8, "utf-8"),
    b"T": _latin("<i", 4),
    b"U": _latin("<B", 1),
    b"B": _bytes("<I", 4),
    b"C": _bytes("<B", 1),
    b"\x8e": _bytes("<Q", 8),
    b"\x96": _bytes("<Q", 8),
}
