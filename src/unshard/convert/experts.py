"""The experts of a layer in their layouts: all in one tensor, one tensor a part, or one by one.

A part (gate, up, down) of all experts is a tensor [E, out, in]; gate and up together are
[E, 2I, H], the gate's rows first. Sizes are checked against config.json, never guessed.
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
    """What a tensor contains of the experts of a layer.

    Attributes:
        block: the path of their module.
        experts: how their family has them.
        name: a part's name in training, or `_GATE_UP`.
        index: the expert, or None if the tensor contains all of them.
    """

    block: str
    experts: Experts
    name: str
    index: int | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of experts that one config states; an empty set where it states none.

    Attributes:
        count: E. hidden: H. fields: the config, for I.
    """

    count: frozenset[int]
    hidden: frozenset[int]
    fields: Mapping[str, object]

    def fits(self, shape: Sequence[int], part: ExpertPart) -> bool:
        """Return whether [E, out, in] can be this part of all experts."""
        stated = zip(shape, self._dimensions(part), strict=True)
        return all(
            not known or size in {times * one for one in known} for size, (times, known) in stated
        )

    def shown(self, part: ExpertPart) -> str:
        """Return the expected shape for a message."""
        stated = self._dimensions(part)
        sizes = (
            ("2 x " if times == 2 else "") + ("|".join(map(str, sorted(known))) or "?")
            for times, known in stated
        )
        return f"[{', '.join(sizes)}]"

    def _dimensions(self, part: ExpertPart) -> tuple[tuple[int, frozenset[int]], ...]:
        """Return for each dimension of [E, out, in] a factor and the sizes that are stated."""
        rows = (2 if part.name == _GATE_UP else 1, _integers(self.fields, part.experts.width))
        columns = (1, self.hidden)
        matrix = (columns, rows) if part.name == _DOWN else (rows, columns)
        return (1, self.count), *matrix


def find_sizes(configs: Sequence[Mapping[str, object]]) -> tuple[Sizes, ...]:
    """Return the sizes that configs state, of those that count experts."""
    found = (
        Sizes(_integers(config, _COUNT), _integers(config, _HIDDEN), config) for config in configs
    )
    return tuple(sizes for sizes in found if sizes.count)


def find_part(name: str, shape: Sequence[int], known: Sequence[Experts]) -> ExpertPart | None:
    """Return what a tensor contains of a layer's experts, by its training name; None if nothing."""
    for experts in known:
        block, separator, tail = name.rpartition(f".{experts.at}.")
        block += separator[:-1]
        if not separator:
            continue
        parts = dict(experts.parts)
        if len(shape) == 3 and (tail in parts or (tail == _GATE_UP and _GATE in parts)):
            return ExpertPart(block, experts, tail, None)
        one = re.fullmatch(r"(\d+)\.(\w+)\.weight", tail)
        for part, on_hub in parts.items():
            if one is not None and len(shape) == 2 and one[2] in (on_hub, part):
                return ExpertPart(block, experts, part, int(one[1]))
    return None


def split_experts(
    name: str, recipe: Recipe, part: ExpertPart, sizes: Sequence[Sizes]
) -> Iterator[tuple[str, Recipe]]:
    """Yield the tensors of every expert from one of all: byte ranges of it.

    Raises:
        ConversionError: the shape is not that of the config's experts, or is ambiguous; or their
            elements are quantised.
    """
    if not dtype_of(recipe).castable:
        raise ConversionError(
            f"tensor {name}: has all experts in one tensor of {dtype_of(recipe)}, and what scales "
            "them cannot be split with it",
            hint="leave the names as they are with ⟦+--names training⟧",
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
    """Return the joined tensors of one block, by the tails of their names, with their sources.

    The tensors are those of single experts, and of one part of all of them. Incomplete parts are
    left out.

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
        parts[_GATE_UP] = _joined(names, (gate[0], up[0]), 1, stacked=False), names
    return parts


def _oriented(name: str, recipe: Recipe, part: ExpertPart, sizes: Sequence[Sizes]) -> Recipe:
    """Return the tensor as [E, out, in]: turned if it is stored as transformers 4 had it."""
    count, rows, columns = shape_of(recipe)
    straight = _fits((count, rows, columns), part, sizes)
    turned = _fits((count, columns, rows), part, sizes)
    old = part.experts.stored is Stored.FUSED
    if straight and not (old and turned):  # both are possible in an old family only
        return recipe
    if straight:
        raise ConversionError(
            f"tensor {name}: its rows may be the inputs or the outputs of the experts",
            expected="a hidden_size in config.json that differs from moe_intermediate_size",
            found=f"shape {[count, rows, columns]}",
            hint="leave the names as they are with ⟦+--names training⟧",
        )
    if old and turned:
        return transpose(recipe)
    lost = (lost_experts(count, size) for one in sizes for size in one.count)
    hint = "check ⟦--config⟧, or leave the names as they are with ⟦+--names training⟧"
    raise ConversionError(
        f"tensor {name}: these are not the experts that config.json describes",
        expected=" or ".join(one.shown(part) for one in sizes),
        found=str([count, rows, columns]),
        hint=next(filter(None, lost), hint),
    )


def lost_experts(count: int, stated: int) -> str:
    """Return a hint for layers with `count` of `stated` experts; "" if it is not an equal share.

    torch saves a tensor once per name, offset and shape. Where every group of expert parallelism
    uses the same names, only the experts of the first group are written.
    """
    if not 0 < count < stated or stated % count:
        return ""
    return (
        f"layers have {count} of {stated} experts: if groups of ranks saved theirs under the same "
        "names, the others were never written and are lost"
    )


def _fits(shape: Sequence[int], part: ExpertPart, sizes: Sequence[Sizes]) -> bool:
    return not sizes or any(one.fits(shape, part) for one in sizes)


def _joined(names: Sequence[str], recipes: Sequence[Recipe], dim: int, *, stacked: bool) -> Recipe:
    """Return tensors of equal shape and dtype as one, stacked or one after another."""
    kinds = {(shape_of(recipe), dtype_of(recipe).name) for recipe in recipes}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise ConversionError(f"tensors {names[0]} … {names[-1]} are not alike", found=found)
    weights = {
        tuple(weight for weight, _ in one.terms) if isinstance(one, WeightedSum) else ()
        for one in recipes
    }
    if any(isinstance(one, LowRank) for one in recipes) or len(weights) > 1:
        raise ConversionError(
            f"tensors {names[0]} … {names[-1]} are updated one by one, but one tensor in the base",
            hint="leave ⟦--base⟧ out, or write the adapter by itself: ⟦+--lora adapter⟧",
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


def _integers(fields: Mapping[str, object], keys: Sequence[str]) -> frozenset[int]:
    values = (fields.get(key) for key in keys)
    return frozenset(value for value in values if type(value) is int and value > 0)
