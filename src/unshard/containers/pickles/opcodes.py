"""The table of pickle opcodes, each a step of a few lines on the machine.

Grouped as `pickletools` groups them. Refused, because no checkpoint needs them: the extension
registry (EXT1, EXT2, EXT4), which would name globals by number, and out-of-band buffers.
"""

from struct import unpack_from

from unshard.containers.pickles.literals import LITERALS, Operation
from unshard.containers.pickles.machine import (
    DICT_COST,
    LIST_COST,
    SET_COST,
    SLOT_COST,
    TEXT_COST,
    TUPLE_COST,
    Machine,
    MalformedPickleError,
)
from unshard.containers.pickles.records import Persistent, Record

__all__ = ["OPERATIONS", "STOP"]

STOP = ord(".")
_MAX_PROTOCOL = 5


def _unknown(m: Machine) -> None:
    code = m.data[m.pos - 1]
    raise MalformedPickleError(f"opcode 0x{code:02x} at byte {m.pos - 1} is not allowed")


# --- containers ----------------------------------------------------------------------------------


def _empty_list(m: Machine) -> None:
    m.charge(LIST_COST)
    m.stack.append([])


def _empty_dict(m: Machine) -> None:
    m.charge(DICT_COST)
    m.stack.append({})


def _empty_set(m: Machine) -> None:
    m.charge(SET_COST)
    m.stack.append(set())


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
    m.charge(TUPLE_COST + SLOT_COST * len(items))
    m.stack.append(tuple(items))


def _list(m: Machine) -> None:
    items = m.pop_mark()
    m.charge(LIST_COST + SLOT_COST * len(items))
    m.stack.append(items)


def _dict(m: Machine) -> None:
    items = m.pop_mark()
    _empty_dict(m)
    m.set_items(m.stack[-1], items)


def _frozenset(m: Machine) -> None:
    items = m.pop_mark()
    m.charge(SET_COST)
    m.stack.append(frozenset(m.safe_elements(items)))


def _append(m: Machine) -> None:
    value = m.stack.pop()
    m.extend(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    m.extend(m.stack[-1], items)


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items(m.stack[-1], [key, value])


def _setitems(m: Machine) -> None:
    items = m.pop_mark()
    m.set_items(m.stack[-1], items)


def _additems(m: Machine) -> None:
    items = m.safe_elements(m.pop_mark())
    target = m.stack[-1]
    if isinstance(target, set):
        target.update(items)
    else:
        m.extend(target, items)


# --- stack and memo ------------------------------------------------------------------------------


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.pop_mark()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _long_binput(m: Machine) -> None:
    (index,) = unpack_from("<I", m.data, m.pos)
    m.pos += 4
    if index == len(m.memo):
        m.memo.append(m.stack[-1])
    else:
        m.remember(index)


def _long_binget(m: Machine) -> None:
    m.recall(m.number("<I", 4))


def _binput(m: Machine) -> None:
    index = m.data[m.pos]
    m.pos += 1
    if index == len(m.memo):  # what a real pickler writes; it pays to be quick here
        m.memo.append(m.stack[-1])
    else:
        m.remember(index)


def _binget(m: Machine) -> None:
    m.recall(m.data[m.pos])
    m.pos += 1


def _memoize(m: Machine) -> None:
    m.remember(len(m.memo))


def _text_put(m: Machine) -> None:
    m.remember(_index(m))


def _text_get(m: Machine) -> None:
    m.recall(_index(m))


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


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.push_call(m.stack.pop(), args)


def _newobj_ex(m: Machine) -> None:
    if m.stack.pop():
        raise MalformedPickleError(f"keyword arguments of a call at byte {m.pos}")
    _reduce(m)


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
    m.charge(TUPLE_COST + TEXT_COST + len(text))
    m.stack.append(Persistent(text.decode("ascii")))


def _binpersid(m: Machine) -> None:
    m.charge(TUPLE_COST)
    m.stack.append(Persistent(m.stack.pop()))


# --- framing -------------------------------------------------------------------------------------


def _proto(m: Machine) -> None:
    version = m.number("<B", 1)
    if version > _MAX_PROTOCOL:
        raise MalformedPickleError(f"pickle protocol {version}; up to {_MAX_PROTOCOL} is known")


def _frame(m: Machine) -> None:
    m.number("<Q", 8)


_NAMED: dict[bytes, Operation] = {
    **LITERALS,
    b"]": _empty_list,
    b"}": _empty_dict,
    b"\x8f": _empty_set,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": _tuple,
    b"l": _list,
    b"d": _dict,
    b"\x91": _frozenset,
    b"a": _append,
    b"e": _appends,
    b"s": _setitem,
    b"u": _setitems,
    b"\x90": _additems,
    b"(": Machine.mark,
    b"0": _pop,
    b"1": lambda m: m.pop_mark().clear(),
    b"2": _dup,
    b"q": _binput,
    b"r": _long_binput,
    b"h": _binget,
    b"j": _long_binget,
    b"\x94": _memoize,
    b"p": _text_put,
    b"g": _text_get,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,
    b"\x92": _newobj_ex,
    b"b": _build,
    b"i": _inst,
    b"o": _obj,
    b"P": _text_persistent,
    b"Q": _binpersid,
    b"\x80": _proto,
    b"\x95": _frame,
}
OPERATIONS: tuple[Operation, ...] = tuple(
    _NAMED.get(bytes([code]), _unknown) for code in range(256)
)
