"""Compare the output's tensors with those that the base model has."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, raise_all

__all__ = ["Expected", "check_expected"]

_SHOWN = 8
_PER_TOKEN = frozenset(
    "embed_tokens lm_head wte embed_in embed_out word_embeddings tok_embeddings shared".split()
)


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
    unexpected = [name for name in tensors if name not in {*expected.names, *expected.excused}]
    problems, notes = [], []
    for kind, names, allowed in (
        ("missing", missing, allow_missing),
        ("unexpected", unexpected, allow_unexpected),
    ):
        if not names:
            continue
        what = (
            "that the base model has" if kind == "missing" else "that the base model does not have"
        )
        shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        if allowed:
            notes.append(f"{len(names)} {kind} tensors ({what}): {shown}")
        else:
            problems.append(
                ConversionError(
                    f"{len(names)} {kind} tensors: {shown}",
                    expected=f"the tensors of {expected.name}",
                    hint="check that it was trained from this model; to write it all the same: "
                    f"--allow-{kind}",
                )
            )
    problems += _misfits(tensors, expected)
    raise_all(ConversionError, f"the tensors do not fit {expected.name}", problems)
    return notes + _resized(tensors, expected)


def _changed(tensors: Mapping[str, Recipe], expected: Expected) -> dict[str, str]:
    """Return what became of every shape that is not the base's."""
    return {
        name: f"{name} {list(expected.shapes[name])} -> {list(shape_of(recipe))}"
        for name, recipe in tensors.items()
        if name in expected.shapes and shape_of(recipe) != expected.shapes[name]
    }


def _is_resized(name: str, found: tuple[int, ...], stated: tuple[int, ...]) -> bool:
    """Tell whether only the vocabulary of an embedding or a head may have been resized."""
    end = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return end in _PER_TOKEN and found[1:] == stated[1:]


def _misfits(tensors: Mapping[str, Recipe], expected: Expected) -> list[ConversionError]:
    """Refuse other shapes: this is not the model that was trained."""
    wrong = [
        text
        for name, text in _changed(tensors, expected).items()
        if not _is_resized(name, shape_of(tensors[name]), expected.shapes[name])
    ]
    if not wrong:
        return []
    return [
        ConversionError(
            f"{len(wrong)} tensors have another shape than in {expected.name}",
            found=", ".join(wrong[:_SHOWN]) + (" …" if len(wrong) > _SHOWN else ""),
            hint="is that the model it was trained from?",
        )
    ]


def _resized(tensors: Mapping[str, Recipe], expected: Expected) -> list[str]:
    """Say that the vocabulary was resized."""
    changed = list(_changed(tensors, expected).values())
    if not changed:
        return []
    listed = ", ".join(changed[:_SHOWN])
    return [f"{len(changed)} tensors have another vocabulary than {expected.name}: {listed}"]
