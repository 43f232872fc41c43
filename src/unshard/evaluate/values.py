"""Types of the values that people and clients write, for pydantic, with errors in our words."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, TypeVar

from pydantic import (
    Field,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from unshard.errors import UsageError, raise_all

LARGEST = 2**53
"""The largest whole number that JSON has everywhere."""

Scalar = str | int | float | bool
_Value = TypeVar("_Value")


def split_names(text: str) -> list[str]:
    """Return the names in a text: one, or several with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def expected(text: str) -> PydanticCustomError:
    """Return the error of a validator: what is expected instead of the value."""
    return PydanticCustomError("expected", "expected {expected}", {"expected": text})


def expects(
    text: str, holds: Callable[[_Value], bool] | None = None, *, or_boolean: bool = False
) -> WrapValidator:
    """Make a validator that reports whatever is wrong with a value as one problem.

    Args:
        text: what is expected.
        holds: what must be true of the value, in addition to its type.
        or_boolean: accept a boolean too, which pydantic would else read as a number.
    """

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        with suppress(ValidationError):
            if or_boolean or not isinstance(value, bool):
                found = validate(value)
                if holds is None or holds(found):
                    return found
        raise expected(text)

    return WrapValidator(check)


def whole(least: int, most: int = LARGEST) -> PlainValidator:
    """Make a validator of a whole number in a file, which must not be written as text."""
    limits = f"at least {least}" if most == LARGEST else f"{least} to {most}"

    def check(value: object) -> object:
        if type(value) is int and least <= value <= most:
            return value
        raise expected(f"a whole number, {limits}")

    return PlainValidator(check)


Whole = Annotated[int, Field(ge=0, le=LARGEST), expects("a whole number, at least 0")]


@contextmanager
def in_our_words(subject: Callable[[str], str]) -> Iterator[None]:
    """Raise what pydantic finds as one error of ours.

    Args:
        subject: makes the first line of an error from the dotted name of a key.

    Raises:
        UsageError: names every key whose value does not fit.
    """
    try:
        yield
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [problem_of(one, subject(".".join(map(str, one["loc"])))) for one in found]
        raise_all(UsageError, f"{len(found)} values cannot be accepted", problems)
        raise


def problem_of(problem: ErrorDetails, subject: str) -> UsageError:
    """Return one of pydantic's problems as an error of ours."""
    is_mapping = problem["type"] in {"dict_type", "mapping_type", "dataclass_type"}
    expected = "a mapping" if is_mapping else problem.get("ctx", {}).get("expected", problem["msg"])
    found = "nothing" if problem["type"] == "missing" else shown(problem["input"])
    return UsageError(subject, expected=str(expected), found=found)


def shown(value: object) -> str:
    """Return a value, and its type, for an error."""
    return f"{value!r:.100} ({type(value).__name__})"
