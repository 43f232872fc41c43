"""Compare tensors with those of a base model, of the config's model, or of a model in memory."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from unshard.console import counted, having
from unshard.convert.expected.shapes import ConfigShape
from unshard.convert.experts import lost_experts
from unshard.convert.heads import EMBEDDINGS
from unshard.convert.recipes import Recipe, shape_of, stored_dtype, takes
from unshard.errors import ConversionError, raise_all
from unshard.read.rank_files.buffers import settle
from unshard.tensors.dtypes import DTypeKind

_Shape = tuple[int, ...]
_SHOWN = 8
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PER_TOKEN = frozenset(
    "embed_tokens lm_head wte embed_in embed_out word_embeddings tok_embeddings shared".split()
)


class Expected(NamedTuple):
    """The tensors of a base model, or of a config's model.

    Attributes:
        name: name of the base model, or "config.json".
        names: names of the tensors.
        shapes: known shapes, in elements.
        excused: names that may be missing or present (tied weights, tensors that the user left
            out).
        remarks: notes for tensors that fit.
        advice: a hint for tensors that do not fit.
    """

    name: str
    names: Collection[str]
    shapes: Mapping[str, _Shape]
    excused: Collection[str] = ()
    remarks: tuple[str, ...] = ()
    advice: str = "check that it was trained from this model"

    def with_embeddings_only(self) -> "Expected":
        """Return the same names, with only the shapes of tensors that have a row per token."""
        shapes = {name: tuple(own) for name, own in self.shapes.items() if _is_per_token(name)}
        return self._replace(shapes=shapes)


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
    names, excused = {*expected.names}, {*expected.excused}
    missing = [name for name in expected.names if name not in tensors and name not in excused]
    unexpected = [name for name in tensors if name not in names and name not in excused]
    changed, wrong = _other_shapes(tensors, expected)
    lost = _lost_experts(tensors, expected, missing) if missing or wrong else ""
    problems, notes, advice = [], [], lost or expected.advice
    for kind, differing, allowed in (
        ("missing", missing, allow_missing),
        ("unexpected", unexpected, allow_unexpected),
    ):
        if differing and allowed:
            count = counted(len(differing), f"{kind} tensor")
            notes.append(f"{count} compared with {expected.name}: {_listed(differing)}")
        elif differing:
            problems.append(
                ConversionError(
                    f"{kind.capitalize()} key(s) in state_dict: {_listed(differing)}",
                    expected=f"the tensors of {expected.name}",
                    hint=f"{advice}; to write the output anyway: "
                    + (f"⟦--allow-{kind}⟧" if wrong or "⟦" in advice else f"⟦+--allow-{kind}⟧"),
                )
            )
    if wrong:
        message = f"{having(len(wrong), 'tensor')} another shape than in {expected.name}"
        found = ", ".join(wrong[:_SHOWN]) + (" …" if len(wrong) > _SHOWN else "")
        problems.append(ConversionError(message, found=found, hint=advice))
    raise_all(ConversionError, f"the tensors do not fit {expected.name}", problems)
    notes += expected.remarks
    if changed:
        listed = ", ".join(changed[:_SHOWN])
        subject = having(len(changed), "tensor")
        notes.append(f"{subject} another vocabulary than {expected.name}: {listed}")
    return notes


def check_plain(
    tensors: Mapping[str, Recipe], listed: Collection[str], *, selects: bool
) -> tuple[str, ...]:
    """Call `settle` with the tensors of an output; return its note only for a selection.

    Without a selection, the same note exists already.

    Raises:
        NotMergeableError: ranks have different values of plain tensors that are not buffers.
    """
    entries = ((name, one.entry) for name, recipe in tensors.items() for one in takes(recipe))
    note = settle(entries, listed)
    return note if selects else ()


def _listed(names: Sequence[str]) -> str:
    """Return the first names in the form of torch's messages, and the count if there are more."""
    shown = ", ".join(f'"{name}"' for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"


def _other_shapes(tensors: Mapping[str, Recipe], expected: Expected) -> tuple[list[str], list[str]]:
    """Return all shapes that differ, and those that are not just a resized vocabulary.

    Integers are packed values, whose shapes a config does not determine. With a config, the head
    must have the vocabulary of the embedding.
    """
    rows = {
        shape_of(tensors[name])[:1]
        for name, wanted in expected.shapes.items()
        if isinstance(wanted, ConfigShape) and name in tensors and _is_per_token(name)
    }
    vocabularies = {  # of embeddings only: heads have biases of many names and shapes
        pair
        for name, wanted in expected.shapes.items()
        if name.endswith(EMBEDDINGS) and name in tensors
        for pair in zip(wanted[:1], shape_of(tensors[name])[:1], strict=False)
    }
    changed, wrong = [], []
    for name, recipe in tensors.items():
        shape, wanted, reason = shape_of(recipe), expected.shapes.get(name), ""
        if wanted is None or shape == wanted:
            continue
        if isinstance(wanted, ConfigShape):
            if shape == wanted.other or stored_dtype(recipe).kind is not DTypeKind.FLOAT:
                continue
            reason = f"{name} {list(shape)} instead of {list(wanted)} ({', '.join(wanted.fields)})"
        changed.append(f"{name} {list(wanted)} -> {list(shape)}")
        sides = {pair for pair in zip(wanted, shape, strict=False) if pair[0] != pair[1]}
        fits_base = not reason and len(shape) == len(wanted) and sides <= vocabularies
        fits_rows = _is_per_token(name) and shape[1:] == wanted[1:]
        is_resized = (fits_base or fits_rows) and 0 not in shape
        if not is_resized or (reason and len(rows) > 1):
            wrong.append(reason or changed[-1])
    return changed, wrong


def _lost_experts(tensors: Mapping[str, Recipe], expected: Expected, missing: Sequence[str]) -> str:
    """Return a hint if all layers have only the first part of their experts; "" if not."""
    present, absent = (
        {int(match[1]) for match in map(_EXPERT.search, names) if match}
        for names in (tensors, missing)
    )
    counts = {(len(present), len(present | absent))} if absent else set()
    for name, wanted in expected.shapes.items():
        shape = shape_of(tensors[name]) if name in tensors and ".experts." in name else wanted
        if shape != wanted and shape[1:] == wanted[1:]:
            counts.add((shape[0], wanted[0]))
    return lost_experts(*counts.pop()) if len(counts) == 1 else ""


def _is_per_token(name: str) -> bool:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] in _PER_TOKEN


class Slot(NamedTuple):
    """A parameter or buffer of a model. Tied weights have several names."""

    names: tuple[str, ...]
    shape: _Shape


class Matches(NamedTuple):
    """The tensors of a checkpoint that match the slots of a model.

    Attributes:
        sources: names of the tensors of each slot: several for tied weights, none if missing.
        missing: names in the model without a tensor; tied weights need only one.
        unexpected: names in the checkpoint without a slot.
    """

    sources: tuple[tuple[str, ...], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether both sides have all names."""
        return not (self.missing or self.unexpected)


def match_slots(tensors: Mapping[str, Recipe], slots: Sequence[Slot]) -> Matches:
    """Find the tensors of every slot by name."""
    sources = tuple(tuple(name for name in slot.names if name in tensors) for slot in slots)
    pairs = zip(slots, sources, strict=True)
    slot_names = {name for slot in slots for name in slot.names}
    return Matches(
        sources,
        tuple(name for slot, own in pairs if not own for name in slot.names),
        tuple(name for name in tensors if name not in slot_names),
    )


def wrong_shapes(
    tensors: Mapping[str, Recipe], slots: Sequence[Slot], matches: Matches
) -> list[ConversionError]:
    """Return an error for every tensor whose shape differs from its slot's."""
    return [
        ConversionError(
            f"tensor {name} has another shape than in the model",
            expected=f"{list(slot.shape)}, as in the model",
            found=str(list(shape_of(tensors[name]))),
        )
        for slot, names in zip(slots, matches.sources, strict=True)
        for name in names
        if shape_of(tensors[name]) != slot.shape
    ]
