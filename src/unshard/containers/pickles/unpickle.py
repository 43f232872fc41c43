"""The only unpickler: a pickle machine that resolves nothing.

Every protocol (0 to 5) is read. A global becomes a `Global`, a call a `Record`, a storage a
`Persistent`; no class is looked up, so no code of the checkpoint can run. Python's own unpicklers
are not used, because even with `find_class` overridden they are not safe: a memo index allocates
gigabytes, a nested tuple as a dict key takes exponential time or overflows the C stack.

Bounds, whatever the bytes: time is linear in the pickle; memory stays below max(300 MB, 20 x the
pickle) (allocations are charged to a budget); only strings, integers, records and short flat tuples
of them are ever hashed; no recursion.

Several pickles may follow one another (torch's legacy format): `unpickle_first` says where one
ends.

Source of the opcodes: `pickletools` of the standard library.
"""

import gc
from collections.abc import Sequence
from struct import error as StructError  # noqa: N812 (it is a class)
from struct import unpack_from

from unshard.containers.pickles.machine import DangerousPickleError, Machine, MalformedPickleError
from unshard.containers.pickles.opcodes import OPERATIONS, STOP, Operation
from unshard.containers.pickles.records import Global, Value

_BINPUT, _LONG_BINPUT, _BINGET, _BININT1 = b"qrhK"


class TruncatedPickleError(MalformedPickleError):
    """The bytes end before the pickle does. The message says where."""


def unpickle(
    data: bytes, operations: Sequence[Operation] = OPERATIONS
) -> tuple[Value, frozenset[Global]]:
    """Return what a pickle describes, and every global it names.

    Args:
        data: the pickle.
        operations: the machine's steps, by opcode.

    Raises:
        MalformedPickleError: not a pickle, or one beyond the bounds.
        DangerousPickleError: it names something that runs commands (see `is_dangerous`).
    """
    try:
        value, names, _ = unpickle_first(data, operations)
    except TruncatedPickleError as error:  # there are no more data that could complete it
        raise MalformedPickleError(str(error)) from error
    return value, names


def unpickle_first(
    data: bytes, operations: Sequence[Operation] = OPERATIONS
) -> tuple[Value, frozenset[Global], int]:
    """Return what the pickle at the start of `data` describes, its globals, and its length, bytes.

    Raises:
        TruncatedPickleError: the data end before the pickle does: with more of them it may be read.
        MalformedPickleError: not a pickle, or one beyond the bounds.
        DangerousPickleError: it names something that runs commands (see `is_dangerous`).
    """
    machine = Machine(data)
    value = run_all(machine, operations, inline=True)
    return value, frozenset(machine.globals.values()), machine.pos


def run_all(machine: Machine, operations: Sequence[Operation], *, inline: bool) -> Value:
    """Run a machine until its pickle stops, with these steps; errors as of `unpickle_first`.

    With `inline`, small integers are pushed without their step, which is faster.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # there is no garbage, and looking for it takes a third of the time
    try:
        return _run(machine, operations, _BININT1 if inline else -1)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, StructError) as error:
        if isinstance(error, DangerousPickleError):
            raise
        what = f"broken at byte {machine.pos}: {error}"
        if isinstance(error, StructError) or machine.pos >= len(machine.data):
            raise TruncatedPickleError(what) from error
        if isinstance(error, MalformedPickleError):
            raise
        raise MalformedPickleError(what) from error
    finally:
        if was_enabled:
            gc.enable()


def _run(machine: Machine, operations: Sequence[Operation], small_int: int) -> Value:
    """Run all operations; the four that make up half of every pickle are done here, for speed.

    Leaves the machine's position behind what was run, also where the data end too early.
    """
    data, memo = machine.data, machine.memo
    stack, pos = machine.stack, 0
    try:
        while True:
            code = data[pos]
            pos += 1
            if code == _LONG_BINPUT and unpack_from("<I", data, pos)[0] == len(memo):
                memo.append(stack[-1])
                pos += 4
            elif code == _BINPUT and data[pos] == len(memo):
                memo.append(stack[-1])
                pos += 1
            elif code == _BINGET and data[pos] < len(memo):
                stack.append(memo[data[pos]])
                pos += 1
            elif code == small_int:
                stack.append(data[pos])
                pos += 1
            elif code == STOP:
                if machine.marks or len(stack) != 1:
                    raise MalformedPickleError(f"stopped at byte {pos} with a full stack")
                return stack[0]
            else:
                machine.pos = pos
                operations[code](machine)
                stack, pos = machine.stack, machine.pos
    finally:
        machine.pos = max(machine.pos, pos)
