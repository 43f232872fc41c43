"""What unpickling yields: inert records of what a pickle *says*, never the objects it asks for."""

from dataclasses import dataclass, field

__all__ = ["Global", "Persistent", "Record", "Value"]


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to something importable. It is a name and stays one: nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something outside the pickle: in torch's files, a storage."""

    pid: "Value"


@dataclass(slots=True, eq=False)
class Record:
    """A call that a pickle asks for, and everything it then does to the result.

    Compared and hashed by identity: records may be dict keys and may form cycles, so never walk
    them without a bound.

    Attributes:
        callee: the class or function, by name (or whatever stands in its place).
        args: positional arguments.
        state: what BUILD sets; the last, if there are several.
        items: what SETITEM(S) adds.
        elements: what APPEND(S) or ADDITEMS adds.
    """

    callee: "Value"
    args: tuple["Value", ...]
    state: "Value" = None
    items: list[tuple["Value", "Value"]] = field(default_factory=list)
    elements: list["Value"] = field(default_factory=list)

    def is_call_of(self, *names: str) -> bool:
        """Tell whether this is a call of one of these dotted names."""
        return isinstance(self.callee, Global) and str(self.callee) in names


# A JSON-like value, or a record. Containers hold further values; `object` keeps the checker honest
# about the fact that nothing is known of them until it is looked at.
Value = object
