"""The only unpickler: a pickle machine that resolves nothing.

Every protocol (0 to 5) is read. A global becomes a `Global`, a call a `Record`, a storage a
`Persistent`; no class is looked up, so no code of the checkpoint can run. Python's own unpicklers
are not used, because even with `find_class` overridden they are not safe: a memo index allocates
gigabytes, a nested tuple as a dict key takes exponential time or overflows the C stack.

Bounds, whatever the bytes: time is linear in the pickle; memory stays below max(300 MB, 20 x the
pickle) (allocations are charged to a budget); only strings, integers, records and short flat tuples
of them are ever hashed; no recursion.

Source of the opcodes: `pickletools` of the standard library.
"""

from struct import error as StructError  # noqa: N812 (it is a class)

from unshard.containers.pickle_machine import (
    DangerousPickleError,
    Machine,
    MalformedPickleError,
)
from unshard.containers.pickle_opcodes import OPERATIONS, STOP
from unshard.containers.records import Global, Value

__all__ = ["DangerousPickleError", "MalformedPickleError", "unpickle"]


def unpickle(data: bytes) -> tuple[Value, frozenset[Global]]:
    """Return what a pickle describes, and every global it names.

    Raises:
        MalformedPickleError: not a pickle, or one beyond the bounds.
        DangerousPickleError: it names something that runs commands (see `is_dangerous`).
    """
    machine = Machine(data)
    try:
        value = _run(machine)
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, StructError) as error:
        if isinstance(error, MalformedPickleError | DangerousPickleError):
            raise
        raise MalformedPickleError(f"broken at byte {machine.pos}: {error}") from error
    return value, frozenset(machine.globals.values())


def _run(machine: Machine) -> Value:
    data, operations = machine.data, OPERATIONS
    while True:
        code = data[machine.pos]
        machine.pos += 1
        if code == STOP:
            if machine.marks or len(machine.stack) != 1:
                raise MalformedPickleError(f"stopped at byte {machine.pos} with a full stack")
            return machine.stack[0]
        operations[code](machine)
