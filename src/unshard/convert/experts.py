"""The experts of a layer in their layouts: all in one tensor, one tensor a part, or one by one.

A part (gate, up, down) of all experts is a tensor [E, out, in]; gate and up together are
[E, 2I, H], the gate's rows before. Sizes are checked against config.json, never guessed from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unshard.convert.families import Experts, Stored
from unshard.convert.recipes import (
    Concat,
    LowRank,
    Recipe,
    Stack,
    WeightedSum,
    cut,
    dtype_of,
    pick,
    shape_of,
    transposed,
)
from unshard.errors import ConversionError
from unshard.tensors.boxes import Box

__all__ = ["GATE_UP", "Part", "Sizes", "find_part", "find_sizes", "fused", "one_by_one"]

GATE_UP = "gate_up_proj"
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HIDDEN = ("hidden_size", "moe_latent_size")


@dataclass(frozen=True, slots=True)
class Part:
    """What a tensor holds of the experts of a layer.

    Attributes:
        block: the path of their module.
        experts: what the family says of them.
        name: a part's name in training, or `GATE_UP`.
        index: the expert, or None where the tensor holds all of them.
    """

    block: str
    experts: Experts
    name: str
    index: int | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one config says of experts; an empty set where it says nothing.

    Attributes:
        count: E. hidden: H. fields: the config, for I.
    """

    count: frozenset[int]
    hidden: frozenset[int]
    fields: Mapping[str, object]

    def fit(self, shape: Sequence[int], part: Part) -> bool:
        """Tell whether [E, out, in] can be this part of all experts."""
        widths = _integers(self.fields, part.experts.width)
        if part.name == GATE_UP:
            widths = frozenset(2 * width for width in widths)
        count, *matrix = shape
        rows, columns = matrix if part.name != _DOWN else reversed(matrix)
        wanted = ((self.count, count), (widths, rows), (self.hidden, columns))
        return all(not known or value in known for known, value in wanted)

    def shown(self, part: Part) -> str:
        """Return the shape that is expected, for people."""
        widths = _integers(self.fields, part.experts.width)
        twice = "2 x " if part.name == GATE_UP else ""
        rows, columns = twice + _one_of(widths), _one_of(self.hidden)
        matrix = (rows, columns) if part.name != _DOWN else (columns, rows)
        return f"[{_one_of(self.count)}, {', '.join(matrix)}]"


def find_sizes(configs: Sequence[Mapping[str, object]]) -> tuple[Sizes, ...]:
    """Return what configs say of experts; those that count none say nothing."""
    found = (
        Sizes(_integers(config, _COUNT), _integers(config, _HIDDEN), config) for config in configs
    )
    return tuple(sizes for sizes in found if sizes.count)


def find_part(name: str, shape: Sequence[int], known: Sequence[Experts]) -> Part | None:
    """Return what a tensor holds of a layer's experts, by its name in training; None if nothing."""
    for experts in known:
        block, separator, tail = name.rpartition(f".{experts.at}.")
        block += separator[:-1]
        if not separator:
            continue
        if len(shape) == 3 and (
            tail in dict(experts.parts) or (tail == GATE_UP and _gated(experts))
        ):
            return Part(block, experts, tail, None)
        one = re.fullmatch(r"(\d+)\.(\w+)\.weight", tail)
        for part, on_hub in experts.parts:
            if one is not None and len(shape) == 2 and one[2] in (on_hub, part):
                return Part(block, experts, part, int(one[1]))
    return None


def one_by_one(
    name: str, recipe: Recipe, part: Part, sizes: Sequence[Sizes]
) -> Iterator[tuple[str, Recipe]]:
    """Yield the tensors of every expert from one that holds all; byte ranges of it.

    Raises:
        ConversionError: the shape is not that of the config's experts, or says too little.
    """
    whole = _oriented(name, recipe, part, sizes)
    count, rows, columns = shape_of(whole)
    if part.name != GATE_UP:
        parts = {part.name: whole}
    else:
        if rows % 2:
            raise ConversionError(f"tensor {name}: {rows} rows are not two equal halves")
        half = (count, rows // 2, columns)
        parts = {
            _GATE: cut(whole, Box((0, 0, 0), half)),
            _UP: cut(whole, Box((0, rows // 2, 0), half)),
        }
    on_hub = dict(part.experts.parts)
    for index in range(count):
        for inner, values in parts.items():
            yield f"{part.block}.{index}.{on_hub[inner]}.weight", pick(values, index)


def fused(tensors: Mapping[str, tuple[Part, Recipe]]) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """Return what the tensors of one block make together, and of which: by the tail of its name.

    Args:
        tensors: by name: tensors of single experts, and of one part of all of them. What is not
            complete is left out.

    Raises:
        ConversionError: tensors differ in shape or dtype, or are computed and cannot be joined.
    """
    parts: dict[str, tuple[Recipe, tuple[str, ...]]] = {}
    experts = next(iter(tensors.values()))[0].experts
    for part, _ in experts.parts:
        found = {
            held.index: (name, recipe)
            for name, (held, recipe) in tensors.items()
            if held.name == part
        }
        if None in found and len(found) == 1:
            name, recipe = found[None]
            parts[part] = recipe, (name,)
        elif found and set(found) == set(range(len(found))):
            names, recipes = zip(*(found[index] for index in range(len(found))), strict=True)
            parts[part] = _joined(names, recipes, 0, stacked=True), names
    gate, up = parts.get(_GATE), parts.get(_UP)
    if gate is not None and up is not None and shape_of(gate[0]) == shape_of(up[0]):
        names = (*gate[1], *up[1])
        parts[GATE_UP] = _joined(names, (gate[0], up[0]), 1, stacked=False), names
    return parts


def _oriented(name: str, recipe: Recipe, part: Part, sizes: Sequence[Sizes]) -> Recipe:
    """Return the tensor as [E, out, in]: turned, where the family was once stored turned."""
    count, rows, columns = shape_of(recipe)
    straight = _fits((count, rows, columns), part, sizes)
    turned = _fits((count, columns, rows), part, sizes)
    old = part.experts.stored is Stored.FUSED
    if straight and not (old and turned):
        return recipe
    if straight:
        raise ConversionError(
            f"tensor {name}: its rows may be the inputs or the outputs of the experts",
            expected="sizes in config.json that tell hidden_size and moe_intermediate_size apart",
            found=f"shape {[count, rows, columns]}",
            hint="leave the names as they are with --names training",
        )
    if old and turned:
        return transposed(recipe)
    raise ConversionError(
        f"tensor {name}: these are not the experts that config.json describes",
        expected=" or ".join(one.shown(part) for one in sizes),
        found=str([count, rows, columns]),
        hint="check --config, or leave the names as they are with --names training",
    )


def _fits(shape: Sequence[int], part: Part, sizes: Sequence[Sizes]) -> bool:
    return not sizes or any(one.fit(shape, part) for one in sizes)


def _joined(names: Sequence[str], recipes: Sequence[Recipe], dim: int, *, stacked: bool) -> Recipe:
    """Return tensors of equal shape and dtype as one, stacked or one after another."""
    kinds = {(shape_of(recipe), dtype_of(recipe).name) for recipe in recipes}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise ConversionError(f"tensors {names[0]} … {names[-1]}: not alike", found=found)
    weights = {
        tuple(weight for weight, _ in one.terms) if isinstance(one, WeightedSum) else ()
        for one in recipes
    }
    if any(isinstance(one, LowRank) for one in recipes) or len(weights) > 1:
        raise ConversionError(
            f"tensors {names[0]} … {names[-1]}: updated one by one, and the base has them as one",
            hint="leave --base out, or write the adapter by itself: --lora adapter",
        )
    terms = [one.terms for one in recipes if isinstance(one, WeightedSum)]
    if not terms:
        return Stack(dim, tuple(recipes)) if stacked else Concat(dim, tuple(recipes))
    return WeightedSum(
        tuple(
            (column[0][0], _joined(names, [part for _, part in column], dim, stacked=stacked))
            for column in zip(*terms, strict=True)
        )
    )


def _gated(experts: Experts) -> bool:
    return _GATE in dict(experts.parts)


def _integers(fields: Mapping[str, object], keys: Sequence[str]) -> frozenset[int]:
    values = (fields.get(key) for key in keys)
    return frozenset(value for value in values if type(value) is int and value > 0)


def _one_of(known: frozenset[int]) -> str:
    return "|".join(str(value) for value in sorted(known)) or "?"
