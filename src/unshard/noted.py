"""A value with notes: what a function returns, and what a user should know of how it was made."""

from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Noted(NamedTuple, Generic[_T]):
    """A value, and the notes that its caller hands on to the user."""

    value: _T
    notes: tuple[str, ...] = ()
