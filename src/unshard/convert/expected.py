"""Compare the output's tensors with those that the base model has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all

__all__ = ["Expected", "check_expected"]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Expected:
    """What the base model has.

    Attributes:
        name: of the base model.
        names: of its tensors.
        shapes: as far as known, elements.
        excused: names that may be missing (tied weights, what the user left out).
    """

    name: str
    names: Collection[str]
    shapes: Mapping[str, tuple[int, ...]]
    excused: Collection[str] = ()


def check_expected(
    tensors: Mapping[str, Recipe],
    expected: Expected,
    *,
    allow_missing: bool,
    allow_unexpected: bool,
) -> list[str]:
    """Return what to say of allowed differences.

    Raises:
        ConversionError: tensors are missing or unexpected, and that was not allowed.
    """
    missing = [name for name in expected.names if name not in {*tensors, *expected.excused}]
    unexpected = [name for name in tensors if name not in expected.names]
    problems, notes = [], []
    for kind, names, allowed in (
        ("missing", missing, allow_missing),
        ("unexpected", unexpected, allow_unexpected),
    ):
        if not names:
            continue
        what = "that the base model has" if kind == "missing" else "that the base model has not"
        shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        if allowed:
            notes.append(f"{len(names)} {kind} tensors ({what}): {shown}")
        else:
            problems.append(
                ConversionError(
                    f"{len(names)} {kind} tensors: {shown}",
                    expected=f"the tensors of {expected.name}",
                    hint=f"is that the model it was trained from? else --allow-{kind}",
                )
            )
    raise_all(ConversionError, f"the names do not fit {expected.name}", problems)
    return notes + _resized(tensors, expected)


def _resized(tensors: Mapping[str, Recipe], expected: Expected) -> list[str]:
    """Say which tensors have another shape than the base's: a resized vocabulary, or a mistake."""
    changed = [
        f"{name} {list(expected.shapes[name])} -> {list(shape_of(recipe))}"
        for name, recipe in tensors.items()
        if name in expected.shapes and shape_of(recipe) != expected.shapes[name]
    ]
    if not changed:
        return []
    more = " …" if len(changed) > _SHOWN else ""
    listed = ", ".join(changed[:_SHOWN]) + more
    return [f"{len(changed)} tensors have another shape than in {expected.name}: {listed}"]
