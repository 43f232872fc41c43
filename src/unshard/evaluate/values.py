"""Types of the values that people and clients write, for pydantic, with errors in our words."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from unshard.errors import UsageError

__all__ = ["LARGEST", "Scalar", "Whole", "expects", "problems_of"]

LARGEST = 2**53
"""The largest whole number that JSON has everywhere."""

_SHOWN = 100

Scalar = str | int | float | bool


def expects(text: str) -> WrapValidator:
    """Make a validator that reports whatever is wrong with a value as one problem.

    A boolean is refused: pydantic would read it as a number.

    Args:
        text: what is expected.
    """

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            if not isinstance(value, bool):
                return validate(value)
        except ValidationError:
            pass
        raise PydanticCustomError("expected", "expected {expected}", {"expected": text})

    return WrapValidator(check)


Whole = Annotated[int, Field(ge=0, le=LARGEST), expects("a whole number, at least 0")]


def problems_of(error: ValidationError, subject: Callable[[str], str]) -> list[UsageError]:
    """Return an error of ours for every problem that pydantic found.

    Args:
        error: what pydantic raised.
        subject: makes the first line of an error from the dotted name of the key.
    """
    return [
        UsageError(
            subject(".".join(map(str, one["loc"]))),
            expected=one.get("ctx", {}).get("expected") or one["msg"],
            found=repr(one["input"])[:_SHOWN],
        )
        for one in error.errors(include_url=False)
    ]
