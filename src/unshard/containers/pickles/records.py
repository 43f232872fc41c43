"""What unpickling yields: inert records of what a pickle *says*, never the objects it asks for."""

from dataclasses import dataclass, field

__all__ = ["Global", "Persistent", "Record", "Value"]


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to something importable. It is a name and stays one: nothing is imported.

    `dotted` is the whole name, made once: it is compared for every tensor.
    """

    module: str
    name: str
    dotted: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dotted", f"{self.module}.{self.name}")

    def __str__(self) -> str:
        return self.dotted


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
        callee: the class or function, by name (or whatever is in its place).
        args: positional arguments.
        state: what BUILD sets; the last, if there are several.
    """

    callee: "Value"
    args: tuple["Value", ...]
    state: "Value" = None
    _items: list[tuple["Value", "Value"]] | None = None
    _elements: list["Value"] | None = None

    @property
    def items(self) -> list[tuple["Value", "Value"]]:
        """What SETITEM(S) adds, in order."""
        if self._items is None:
            self._items = []
        return self._items

    @property
    def elements(self) -> list["Value"]:
        """What APPEND(S) or ADDITEMS adds, in order."""
        if self._elements is None:
            self._elements = []
        return self._elements

    def is_call_of(self, *names: str) -> bool:
        """Return whether this is a call of one of these dotted names."""
        return isinstance(self.callee, Global) and self.callee.dotted in names


# A JSON-like value, or a record. Containers hold further values; `object` keeps the checker honest
# about the fact that nothing is known of them until it is looked at.
Value = object
