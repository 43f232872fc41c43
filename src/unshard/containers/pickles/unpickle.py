"""The only unpickler: a pickle machine that resolves nothing.

Reads protocols 0 to 5. A global becomes a `Global`, a call a `Record`, a storage a `Persistent`; no
class is looked up, so no code of the checkpoint can run. Python's own unpicklers are unsafe even
with `find_class` overridden: a memo index allocates gigabytes, a nested tuple as a dict key takes
exponential time or overflows the C stack.

Bounds for any bytes: time is linear in the pickle; memory stays below max(300 MB, 20 x the pickle),
because allocations are charged to a budget; only strings, numbers, records and short flat tuples of
them are hashed; no recursion.

Source of the opcodes: `pickletools` of the standard library.
"""

import gc
from collections.abc import Sequence
from struct import error as StructError  # noqa: N812 (it is a class)
from struct import unpack_from

from unshard.containers.pickles.machine import DangerousPickleError, Machine, MalformedPickleError
from unshard.containers.pickles.opcodes import OPERATIONS, STOP, Operation
from unshard.containers.pickles.records import Value

_BINPUT, _LONG_BINPUT, _BINGET, _BININT1 = b"qrhK"


class TruncatedPickleError(MalformedPickleError):
    """The bytes end before the pickle does."""


def unpickle(data: bytes, operations: Sequence[Operation] = OPERATIONS) -> Value:
    """Return the value of a pickle.

    Args:
        data: the pickle.
        operations: the machine's steps, by opcode.

    Raises:
        MalformedPickleError: not a pickle, or beyond the bounds.
        DangerousPickleError: it names code that runs commands (see `is_dangerous`).
    """
    try:
        return unpickle_first(data, operations)[0]
    except TruncatedPickleError as error:  # `data` is complete
        raise MalformedPickleError(str(error)) from error


def unpickle_first(data: bytes, operations: Sequence[Operation] = OPERATIONS) -> tuple[Value, int]:
    """Return value and length (bytes) of the pickle at the start of `data`.

    Raises:
        TruncatedPickleError: the data end before the pickle does, and more data may complete it.
        MalformedPickleError: not a pickle, or beyond the bounds.
        DangerousPickleError: it names code that runs commands (see `is_dangerous`).
    """
    machine = Machine(data)
    return run_all(machine, operations, inline=True), machine.pos


def run_all(machine: Machine, operations: Sequence[Operation], *, inline: bool) -> Value:
    """Run a machine with these steps until its pickle stops; errors as of `unpickle_first`.

    With `inline`, small integers are pushed without their step, which is faster.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # there is no garbage, and searching for it takes a third of the time
    try:
        return _run(machine, operations, _BININT1 if inline else -1)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, StructError) as error:
        if isinstance(error, DangerousPickleError):
            raise
        message = f"broken at byte {machine.pos}: {error}"
        if isinstance(error, StructError) or machine.pos >= len(machine.data):
            raise TruncatedPickleError(message) from error
        if isinstance(error, MalformedPickleError):
            raise
        raise MalformedPickleError(message) from error
    finally:
        if was_enabled:
            gc.enable()


def _run(machine: Machine, operations: Sequence[Operation], small_int: int) -> Value:
    """Run all operations; the four that make up half of every pickle are inlined, for speed.

    Leaves the machine's position after the last operation, even if the data end too early.
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
