"""Pydantic types of users' and clients' values, with our own error messages."""

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

LARGEST = 2**53  # whole numbers above it are not exact in every JSON reader
Scalar = str | int | float | bool
_Value = TypeVar("_Value")


def split_names(text: str) -> list[str]:
    """Split a comma-separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def expected(text: str) -> PydanticCustomError:
    """Return the error of a validator, from a text for "expected ..."."""
    return PydanticCustomError("expected", "expected {expected}", {"expected": text})


def expects(
    text: str, holds: Callable[[_Value], bool] | None = None, *, or_boolean: bool = False
) -> WrapValidator:
    """Make a validator that reports any number of problems of a value as one.

    Args:
        text: the error's text for "expected ...".
        holds: a further condition on the value.
        or_boolean: accept booleans; otherwise they are refused, because pydantic would read them
            as numbers.
    """

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        with suppress(ValidationError):
            if or_boolean or not isinstance(value, bool):
                valid = validate(value)
                if holds is None or holds(valid):
                    return valid
        raise expected(text)

    return WrapValidator(check)


def whole(least: int, most: int = LARGEST) -> PlainValidator:
    """Make a validator of a whole number in a file; a text is refused."""
    limits = f"at least {least}" if most == LARGEST else f"{least} to {most}"

    def check(value: object) -> object:
        if type(value) is int and least <= value <= most:
            return value
        raise expected(f"a whole number, {limits}")

    return PlainValidator(check)


Whole = Annotated[int, Field(ge=0, le=LARGEST), expects("a whole number, at least 0")]


@contextmanager
def in_our_words(subject: Callable[[str], str]) -> Iterator[None]:
    """Raise pydantic's problems as one error of ours, with every key that has an invalid value.

    `subject` makes the first line of a problem from the dotted name of its key.

    Raises:
        UsageError: a value is invalid.
    """
    try:
        yield
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [problem_of(one, subject(".".join(map(str, one["loc"])))) for one in details]
        raise_all(UsageError, f"{len(details)} values cannot be accepted", problems)
        raise


def problem_of(problem: ErrorDetails, subject: str) -> UsageError:
    """Return one of pydantic's problems as an error of ours."""
    is_mapping = problem["type"] in {"dict_type", "mapping_type", "dataclass_type"}
    expected = "a mapping" if is_mapping else problem.get("ctx", {}).get("expected", problem["msg"])
    actual = "nothing" if problem["type"] == "missing" else shown(problem["input"])
    return UsageError(subject, expected=str(expected), found=actual)


def shown(value: object) -> str:
    """Return a value, and its type, for an error."""
    return f"{value!r:.100} ({type(value).__name__})"
