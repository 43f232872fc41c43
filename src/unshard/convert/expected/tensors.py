"""Compare tensors with those of a base model, of a model of the config, or of one in memory."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from unshard.convert.expected.shapes import Stated
from unshard.convert.experts import lost_experts
from unshard.convert.heads import EMBEDDINGS
from unshard.convert.recipes import Recipe, shape_of, stored_dtype, takes
from unshard.errors import ConversionError, raise_all
from unshard.read.rank_files.buffers import settle
from unshard.showing import counted, having
from unshard.tensors.dtypes import DTypeKind

_Shape = tuple[int, ...]

_SHOWN = 8
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PER_TOKEN = frozenset(
    "embed_tokens lm_head wte embed_in embed_out word_embeddings tok_embeddings shared".split()
)


class Expected(NamedTuple):
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
    shapes: Mapping[str, _Shape]
    excused: Collection[str] = ()
    remarks: tuple[str, ...] = ()
    advice: str = "check that it was trained from this model"

    def with_embeddings_only(self) -> "Expected":
        """Return the same names, but only the shapes of embedding and head, in each vocabulary."""
        shapes = {name: tuple(one) for name, one in self.shapes.items() if _is_per_token(name)}
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
    stated, excused = {*expected.names}, {*expected.excused}
    missing = [name for name in expected.names if name not in tensors and name not in excused]
    unexpected = [name for name in tensors if name not in stated and name not in excused]
    changed, wrong = _other_shapes(tensors, expected)
    lost = _lost_experts(tensors, expected, missing) if missing or wrong else ""
    problems, notes, advice = [], [], lost or expected.advice
    for kind, names, allowed in (
        ("missing", missing, allow_missing),
        ("unexpected", unexpected, allow_unexpected),
    ):
        if names and allowed:
            count = counted(len(names), f"{kind} tensor")
            notes.append(f"{count}, by {expected.name}: {_listed(names)}")
        elif names:
            problems.append(
                ConversionError(
                    f"{kind.capitalize()} key(s) in state_dict: {_listed(names)}",
                    expected=f"the tensors of {expected.name}",
                    hint=f"{advice}; to write the output all the same: "
                    + (f"⟦--allow-{kind}⟧" if wrong or "⟦" in advice else f"⟦+--allow-{kind}⟧"),
                )
            )
    if wrong:
        what = f"{having(len(wrong), 'tensor')} another shape than in {expected.name}"
        found = ", ".join(wrong[:_SHOWN]) + (" …" if len(wrong) > _SHOWN else "")
        problems.append(ConversionError(what, found=found, hint=advice))
    raise_all(ConversionError, f"the tensors do not fit {expected.name}", problems)
    notes += expected.remarks
    if changed:
        listed = ", ".join(changed[:_SHOWN])
        what = f"{having(len(changed), 'tensor')} another vocabulary than {expected.name}: {listed}"
        notes.append(what)
    return notes


def check_plain(
    tensors: Mapping[str, Recipe], listed: Collection[str], *, selects: bool
) -> tuple[str, ...]:
    """Do as `settle` with what an output takes; unless it is a selection, its note was made before.

    Raises:
        NotMergeableError: ranks have different values of plain tensors that are no buffers.
    """
    entries = ((name, one.entry) for name, recipe in tensors.items() for one in takes(recipe))
    note = settle(entries, listed)
    return note if selects else ()


def _listed(names: Sequence[str]) -> str:
    """Return the first names as torch lists them, and how many there are if more."""
    shown = ", ".join(f'"{name}"' for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"


def _other_shapes(tensors: Mapping[str, Recipe], expected: Expected) -> tuple[list[str], list[str]]:
    """Return all shapes that differ, and those that are not just a resized vocabulary.

    A config does not state the shapes of packed values, which are integers. By a config, the head
    must have the vocabulary of the embedding.
    """
    rows = {
        shape_of(tensors[name])[:1]
        for name, stated in expected.shapes.items()
        if isinstance(stated, Stated) and name in tensors and _is_per_token(name)
    }
    vocabularies = {  # of embeddings; heads have biases of many names and shapes
        pair
        for name, stated in expected.shapes.items()
        if name.endswith(EMBEDDINGS) and name in tensors
        for pair in zip(stated[:1], shape_of(tensors[name])[:1], strict=False)
    }
    changed, wrong = [], []
    for name, recipe in tensors.items():
        found, stated, fields = shape_of(recipe), expected.shapes.get(name), ""
        if stated is None or found == stated:
            continue
        if isinstance(stated, Stated):
            if found == stated.other or stored_dtype(recipe).kind is not DTypeKind.FLOAT:
                continue
            fields = f"{name} {list(found)} instead of {list(stated)} ({', '.join(stated.fields)})"
        changed.append(f"{name} {list(stated)} -> {list(found)}")
        sides = {pair for pair in zip(stated, found, strict=False) if pair[0] != pair[1]}
        of_base = not fields and len(found) == len(stated) and sides <= vocabularies
        is_resized = of_base or (_is_per_token(name) and found[1:] == stated[1:])
        resized = is_resized and 0 not in found
        if not resized or (fields and len(rows) > 1):
            wrong.append(fields or changed[-1])
    return changed, wrong


def _lost_experts(tensors: Mapping[str, Recipe], expected: Expected, missing: Sequence[str]) -> str:
    """Return what to say if all layers have the first part of their experts; "" if not."""
    kept, absent = (
        {int(one[1]) for one in map(_EXPERT.search, names) if one} for names in (tensors, missing)
    )
    counts = {(len(kept), len(kept | absent))} if absent else set()
    for name, stated in expected.shapes.items():
        found = shape_of(tensors[name]) if name in tensors and ".experts." in name else stated
        if found != stated and found[1:] == stated[1:]:
            counts.add((found[0], stated[0]))
    return lost_experts(*counts.pop()) if len(counts) == 1 else ""


def _is_per_token(name: str) -> bool:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] in _PER_TOKEN


class Slot(NamedTuple):
    """A parameter or buffer of a model: all its names, of which tied weights have several."""

    names: tuple[str, ...]
    shape: _Shape


class Matches(NamedTuple):
    """Which tensors of a checkpoint match which slots of a model.

    Attributes:
        sources: per slot the names of its tensors: several of tied weights, none if it is missing.
        missing: names in the model without a tensor; for tied weights one tensor is enough.
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
    pairs = list(zip(slots, sources, strict=True))
    wanted = {name for slot in slots for name in slot.names}
    return Matches(
        sources,
        tuple(name for slot, found in pairs if not found for name in slot.names),
        tuple(name for name in tensors if name not in wanted),
    )


def wrong_shapes(
    tensors: Mapping[str, Recipe], slots: Sequence[Slot], found: Matches
) -> list[ConversionError]:
    """Return an error for every tensor whose shape is not that of its slot."""
    return [
        ConversionError(
            f"tensor {name} has another shape than in the model",
            expected=f"{list(slot.shape)}, as in the model",
            found=str(list(shape_of(tensors[name]))),
        )
        for slot, names in zip(slots, found.sources, strict=True)
        for name in names
        if shape_of(tensors[name]) != slot.shape
    ]
