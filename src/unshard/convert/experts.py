"""Convert between layouts of experts: one tensor per layer, per part, or per expert and part.

A part (gate, up, down) of all experts is a tensor [E, out, in]; gate and up together are
[E, 2I, H], the gate's rows first. Sizes are checked against config.json, never guessed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unshard.convert.families import ExpertLayout, Experts
from unshard.convert.recipes import (
    Concat,
    LowRank,
    Recipe,
    Stack,
    WeightedSum,
    check_alike,
    cut,
    dtype_of,
    pick,
    shape_of,
    transpose,
)
from unshard.errors import ConversionError
from unshard.tensors.boxes import Box

_GATE_UP = "gate_up_proj"
_GATE, _UP, _DOWN = "gate_proj", "up_proj", "down_proj"
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HIDDEN = ("hidden_size", "moe_latent_size")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The part of a layer's experts that a tensor contains.

    Attributes:
        block: the path of the experts' module.
        experts: the family's names and layout.
        name: the part's name in training, or `_GATE_UP`.
        index: the expert's number; None for all experts.
    """

    block: str
    experts: Experts
    name: str
    index: int | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of experts in one config; an empty set for a missing size.

    Attributes:
        count: E.
        hidden: H.
        fields: the config, for I.
    """

    count: frozenset[int]
    hidden: frozenset[int]
    fields: Mapping[str, object]

    def fits(self, shape: Sequence[int], part: ExpertPart) -> bool:
        """Return whether [E, out, in] can be this part of all experts."""
        return all(
            not sizes or size in {factor * own for own in sizes}
            for size, (factor, sizes) in zip(shape, self._dimensions(part), strict=True)
        )

    def shown(self, part: ExpertPart) -> str:
        """Return the expected shape for a message."""
        dimensions = (
            ("2 x " if factor == 2 else "") + ("|".join(map(str, sorted(sizes))) or "?")
            for factor, sizes in self._dimensions(part)
        )
        return f"[{', '.join(dimensions)}]"

    def _dimensions(self, part: ExpertPart) -> tuple[tuple[int, frozenset[int]], ...]:
        """Return a factor and the config's sizes for each dimension of [E, out, in]."""
        rows = (2 if part.name == _GATE_UP else 1, _integers(self.fields, part.experts.width))
        columns = (1, self.hidden)
        matrix = (columns, rows) if part.name == _DOWN else (rows, columns)
        return (1, self.count), *matrix


def find_sizes(configs: Sequence[Mapping[str, object]]) -> tuple[Sizes, ...]:
    """Return the sizes in each config that counts experts."""
    return tuple(
        Sizes(count, _integers(config, _HIDDEN), config)
        for config in configs
        if (count := _integers(config, _COUNT))
    )


def find_part(name: str, shape: Sequence[int], layouts: Sequence[Experts]) -> ExpertPart | None:
    """Return the part of a layer's experts in a tensor, by its training name; None if not any."""
    for experts in layouts:
        block, separator, tail = name.rpartition(f".{experts.at}.")
        block += separator[:-1]
        if not separator:
            continue
        parts = dict(experts.parts)
        if len(shape) == 3 and (tail in parts or (tail == _GATE_UP and _GATE in parts)):
            return ExpertPart(block, experts, tail, None)
        single = re.fullmatch(r"(\d+)\.(\w+)\.weight", tail)
        for part, on_hub in parts.items():
            if single is not None and len(shape) == 2 and single[2] in (on_hub, part):
                return ExpertPart(block, experts, part, int(single[1]))
    return None


def split_experts(
    name: str, recipe: Recipe, part: ExpertPart, sizes: Sequence[Sizes]
) -> Iterator[tuple[str, Recipe]]:
    """Yield the tensors of every expert, which are byte ranges of the tensor of all experts.

    Raises:
        ConversionError: the shape does not fit the config's experts, or fits in two ways; or the
            elements are quantised.
    """
    if not dtype_of(recipe).castable:
        raise ConversionError(
            f"tensor {name}: has all experts in one tensor of {dtype_of(recipe)}, whose scales "
            "cannot be split with it",
            hint="keep the names with ⟦+--names training⟧",
        )
    whole = _oriented(name, recipe, part, sizes)
    count, rows, columns = shape_of(whole)
    if part.name != _GATE_UP:
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


def join_experts(
    tensors: Mapping[str, tuple[ExpertPart, Recipe]],
) -> dict[str, tuple[Recipe, tuple[str, ...]]]:
    """Return the joined tensors of one block, by the ends of their names, with their sources.

    `tensors` are single experts, or one part of all of them. Incomplete parts are left out.

    Raises:
        ConversionError: tensors differ in shape or dtype, or are computed and cannot be joined.
    """
    parts: dict[str, tuple[Recipe, tuple[str, ...]]] = {}
    experts = next(iter(tensors.values()))[0].experts
    for part, _ in experts.parts:
        by_index = {
            own.index: (name, recipe) for name, (own, recipe) in tensors.items() if own.name == part
        }
        if None in by_index and len(by_index) == 1:
            name, recipe = by_index[None]
            parts[part] = recipe, (name,)
        elif by_index and set(by_index) == set(range(len(by_index))):
            names, recipes = zip(*(by_index[at] for at in range(len(by_index))), strict=True)
            parts[part] = _joined(names, recipes, 0, stacked=True), names
    gate, up = parts.get(_GATE), parts.get(_UP)
    if gate is not None and up is not None and shape_of(gate[0]) == shape_of(up[0]):
        names = (*gate[1], *up[1])
        parts[_GATE_UP] = _joined(names, (gate[0], up[0]), 1, stacked=False), names
    return parts


def _oriented(name: str, recipe: Recipe, part: ExpertPart, sizes: Sequence[Sizes]) -> Recipe:
    """Return the tensor as [E, out, in]; transformers 4 stored some families as [E, in, out]."""
    count, rows, columns = shape_of(recipe)

    def fits(shape: Sequence[int]) -> bool:
        return not sizes or any(own.fits(shape, part) for own in sizes)

    straight, turned = fits((count, rows, columns)), fits((count, columns, rows))
    may_be_turned = part.experts.layout is ExpertLayout.FUSED
    if straight and not (may_be_turned and turned):
        return recipe
    if straight:
        raise ConversionError(
            f"tensor {name}: its rows may be the inputs or the outputs of the experts",
            expected="a hidden_size in config.json that differs from moe_intermediate_size",
            found=f"shape {[count, rows, columns]}",
            hint="keep the names with ⟦+--names training⟧",
        )
    if may_be_turned and turned:
        return transpose(recipe)
    lost = (lost_experts(count, size) for own in sizes for size in own.count)
    hint = "check ⟦--config⟧, or keep the names with ⟦+--names training⟧"
    raise ConversionError(
        f"tensor {name}: does not fit the experts in config.json",
        expected=" or ".join(own.shown(part) for own in sizes),
        found=str([count, rows, columns]),
        hint=next(filter(None, lost), hint),
    )


def lost_experts(count: int, stated: int) -> str:
    """Return a hint for layers with `count` of `stated` experts; "" if it is not an equal share.

    torch saves a tensor once per name, offset and shape. If all groups of expert parallelism use
    the same names, only the experts of the first group are written.
    """
    if not 0 < count < stated or stated % count:
        return ""
    return (
        f"layers have {count} of {stated} experts: if groups of ranks saved theirs under the same "
        "names, the others were never written and are lost"
    )


def _joined(names: Sequence[str], recipes: Sequence[Recipe], dim: int, *, stacked: bool) -> Recipe:
    """Return tensors of equal shape and dtype as one, stacked or concatenated."""
    check_alike(f"tensors {names[0]} … {names[-1]}", recipes)
    weights = {
        tuple(weight for weight, _ in recipe.terms) if isinstance(recipe, WeightedSum) else ()
        for recipe in recipes
    }
    if any(isinstance(recipe, LowRank) for recipe in recipes) or len(weights) > 1:
        raise ConversionError(
            f"tensors {names[0]} … {names[-1]} have updates of their own, but the base has them in "
            "one tensor",
            hint="leave ⟦--base⟧ out, or write the adapter by itself: ⟦+--lora adapter⟧",
        )
    terms = [recipe.terms for recipe in recipes if isinstance(recipe, WeightedSum)]
    if not terms:
        return Stack(dim, tuple(recipes)) if stacked else Concat(dim, tuple(recipes))
    return WeightedSum(
        tuple(
            (column[0][0], _joined(names, [part for _, part in column], dim, stacked=stacked))
            for column in zip(*terms, strict=True)
        )
    )


def _integers(fields: Mapping[str, object], keys: Sequence[str]) -> frozenset[int]:
    values = (fields.get(key) for key in keys)
    return frozenset(value for value in values if type(value) is int and value > 0)
