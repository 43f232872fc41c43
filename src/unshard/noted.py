"""A value with notes: what a function returns, and what a user should know of how it was made."""

from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Noted(Generic[_T]):
    """A value, and the notes that its caller hands on to the user."""

    value: _T
    notes: tuple[str, ...] = ()
