"""Compare the output's tensors with those that a base model has, or a model of the config."""

from collections.abc import Collection, Mapping, Sequence
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
    """The tensors that a base model has, or a model of a config.

    Attributes:
        name: of the base model, or "config.json".
        names: of its tensors.
        shapes: as far as known, elements.
        excused: names that may be missing or present (tied weights, what the user left out).
        remarks: notes for tensors that fit.
        advice: a hint for tensors that do not.
    """

    name: str
    names: Collection[str]
    shapes: Mapping[str, tuple[int, ...]]
    excused: Collection[str] = ()
    remarks: tuple[str, ...] = ()
    advice: str = "check that it was trained from this model"


def check_expected(
    tensors: Mapping[str, Recipe],
    expected: Expected,
    *,
    allow_missing: bool,
    allow_unexpected: bool,
) -> list[str]:
    """Return notes about allowed differences. A resized vocabulary is always allowed.

    Raises:
        ConversionError: tensors are missing or unexpected, and that was not allowed.
    """
    stated, excused = {*expected.names}, {*expected.excused}
    missing = [name for name in expected.names if name not in tensors and name not in excused]
    unexpected = [name for name in tensors if name not in stated and name not in excused]
    problems, notes = [], []
    for kind, names, allowed in (
        ("missing", missing, allow_missing),
        ("unexpected", unexpected, allow_unexpected),
    ):
        if names and allowed:
            notes.append(f"{len(names)} {kind} tensors, by {expected.name}: {_listed(names)}")
        elif names:
            problems.append(
                ConversionError(
                    f"{kind.capitalize()} key(s) in state_dict: {_listed(names)}",
                    expected=f"the tensors of {expected.name}",
                    hint=f"{expected.advice}; to write the output all the same: --allow-{kind}",
                )
            )
    changed, wrong = _other_shapes(tensors, expected)
    if wrong:
        what = f"{len(wrong)} tensors have another shape than in {expected.name}"
        found = ", ".join(wrong[:_SHOWN]) + (" …" if len(wrong) > _SHOWN else "")
        problems.append(ConversionError(what, found=found, hint=expected.advice))
    raise_all(ConversionError, f"the tensors do not fit {expected.name}", problems)
    notes += expected.remarks
    if changed:
        listed = ", ".join(changed[:_SHOWN])
        what = f"{len(changed)} tensors have another vocabulary than {expected.name}: {listed}"
        notes.append(what)
    return notes


def _listed(names: Sequence[str]) -> str:
    """Return the first names as torch lists them, and how many there are if more."""
    shown = ", ".join(f'"{name}"' for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"


def _other_shapes(tensors: Mapping[str, Recipe], expected: Expected) -> tuple[list[str], list[str]]:
    """Return all shapes that differ, and those that are not just a resized vocabulary."""
    changed = {
        name: f"{name} {list(expected.shapes[name])} -> {list(shape_of(recipe))}"
        for name, recipe in tensors.items()
        if name in expected.shapes and shape_of(recipe) != expected.shapes[name]
    }
    wrong = [
        text
        for name, text in changed.items()
        if not _is_resized(name, shape_of(tensors[name]), expected.shapes[name])
    ]
    return list(changed.values()), wrong


def _is_resized(name: str, found: tuple[int, ...], stated: tuple[int, ...]) -> bool:
    """Return whether it may be just a resized vocabulary of an embedding or a head."""
    end = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return end in _PER_TOKEN and found[1:] == stated[1:]
