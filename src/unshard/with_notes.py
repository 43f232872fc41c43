"""A value with notes for the user."""

from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class WithNotes(NamedTuple, Generic[_T]):
    """A value, and notes that its caller passes on to the user."""

    value: _T
    notes: tuple[str, ...] = ()
