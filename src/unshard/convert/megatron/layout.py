"""Undo Megatron's layouts: number layers and experts, and divide fused matrices.

Homogeneous layers are one tensor [L, ...] under a name without a number. The experts of a layer are
one tensor [E, ...] or a tensor each, and the halves of a gated matrix may be separate tensors,
`weight_w` (gate) and `weight_v` (up). Every result is a box of the stored tensors.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from unshard.convert.recipes import (
    Concat,
    Recipe,
    Stack,
    Take,
    check_alike,
    cut,
    pick,
    shape_of,
    take,
)
from unshard.errors import ConversionError
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.selection import cut_out

_HALF = re.compile(r"(.+\.(?:weight|bias)\d*)_([wv])")
# The last form is that of a state dict in memory, which Megatron-FSDP saves unchanged.
_EXPERT = re.compile(
    r"(?P<block>.+\.experts)\."
    r"(?:(?:local_)?experts\.(?P<number>\d{1,9})\.(?P<part>linear_fc[12])\.weight"
    r"|(?P<grouped>linear_fc[12])\.weight(?P<last>\d{1,9}))"
)
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d{1,9})\.)?(.+)")


class Heads(NamedTuple):
    """The numbers of query heads and key heads (groups) of an attention, and the rows of a head."""

    queries: int
    groups: int
    rows: int


def with_whole_matrices(tensors: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Join the halves of gated matrices, then the experts of each layer.

    Raises:
        ConversionError: a half or an expert is missing, or they differ in shape or dtype.
    """
    whole = _joined(tensors, _half_of, Concat, 2)
    return _joined(whole, _expert_of, Stack, 1)


_Part = tuple[str, int]
"""The name of the joined tensor, and the number of a part."""


def _half_of(name: str) -> _Part | None:
    half = _HALF.fullmatch(name)
    return None if half is None else (half[1], "wv".index(half[2]))


def _expert_of(name: str) -> _Part | None:
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return None
    whole = f"{expert['block']}.experts.{expert['part'] or expert['grouped']}.weight"
    return whole, int(expert["number"] or expert["last"])


def _joined(
    tensors: Mapping[str, Recipe],
    part_of: Callable[[str], _Part | None],
    join: type[Concat | Stack],
    least: int,
) -> dict[str, Recipe]:
    """Return the tensors with parts joined along dimension 0, in the place of the first part."""
    whole: dict[str, Recipe | dict[int, Recipe]] = {}
    for name, recipe in tensors.items():
        part = part_of(name)
        if part is None:
            whole[name] = recipe
            continue
        parts = whole.setdefault(part[0], {})
        if not isinstance(parts, dict) or part[1] in parts:
            raise ConversionError(f"tensor {name}: is stored twice, also as a part of {part[0]}")
        parts[part[1]] = recipe
    return {
        name: join(0, _in_order(name, value, least)) if isinstance(value, dict) else value
        for name, value in whole.items()
    }


def _in_order(name: str, parts: Mapping[int, Recipe], least: int) -> tuple[Recipe, ...]:
    """Return the parts by number.

    Raises:
        ConversionError: there are fewer than `least`, a part is missing, or parts are not alike.
    """
    missing = sorted({*range(max(len(parts), least))} - parts.keys())
    if missing:
        raise ConversionError(
            f"tensor {name}: its part {missing[0]} is missing", found=f"{len(parts)} parts"
        )
    check_alike(f"tensor {name}: its parts", parts.values())
    return tuple(parts[number] for number in range(len(parts)))


def single_layers(name: str, recipe: Recipe, layers: int) -> Iterator[tuple[str, int, str, Recipe]]:
    """Yield the layers in a tensor: "decoder" or "mtp", number, the rest of the name, recipe.

    Yields nothing for a tensor outside of layers.

    Raises:
        ConversionError: a tensor of all layers does not have as many as the model.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return
    part, number, rest = match.groups()
    if number is not None:
        yield part, int(number), rest, recipe
        return
    shape = shape_of(recipe)
    if part != "decoder" or shape[:1] != (layers,):
        raise ConversionError(
            f"tensor {name} has {shape[0] if shape else 0} layers",
            expected=f"{layers}, the num_hidden_layers of config.json",
            hint="check that this is the config of the model that was trained",
        )
    for layer, piece in enumerate(_layers(recipe, layers)):
        yield part, layer, rest, piece


def _layers(recipe: Recipe, layers: int) -> Iterable[Recipe]:
    """Return the layers of a tensor.

    The layers of a stored tensor become tensors with only their own chunks, so that planning an
    expert does not search the chunks of all layers.
    """
    if not isinstance(recipe, Take) or recipe != take(recipe.entry):
        return (pick(recipe, layer) for layer in range(layers))
    entry, shape = recipe.entry, recipe.entry.shape[1:]
    steps, start = (1,) * len(entry.shape), (0,) * len(shape)
    grids = [((layer, *start), steps, (1, *shape)) for layer in range(layers)]
    order = range(1, len(entry.shape))
    tables = cut_out(entry.chunks, grids, entry.dtype.itemsize, order)
    return (take(TensorEntry(entry.fqn, entry.dtype, shape, table)) for table in tables)


def halves(name: str, recipe: Recipe) -> list[Recipe]:
    """Return the upper and the lower half of a matrix.

    Raises:
        ConversionError: it has an odd number of rows.
    """
    count = shape_of(recipe)[0] if shape_of(recipe) else 1
    if count % 2:
        raise ConversionError(f"tensor {name}: {count} rows are not two equal halves")
    return [rows(recipe, 0, count // 2), rows(recipe, count // 2, count // 2)]


def by_groups(name: str, recipe: Recipe, heads: Heads) -> list[Recipe]:
    """Return queries, keys and values of a matrix or bias in which they alternate by group.

    A group has its query heads, then one key head and one value head.

    Raises:
        ConversionError: it does not have the rows of these heads.
    """
    shape, (queries, groups, size) = shape_of(recipe), heads
    each = queries // groups
    group = (each + 2) * size
    if queries % groups or not shape or shape[0] != groups * group:
        raise ConversionError(
            f"tensor {name} does not have the rows of {queries} heads in {groups} groups, of "
            f"{size} rows each",
            expected=f"{groups * group} rows",
            found=str(list(shape)),
            hint="check that this is the config of the model that was trained",
        )
    spans = ((0, each * size), (each * size, size), ((each + 1) * size, size))
    return [
        Concat(0, tuple(rows(recipe, number * group + start, count) for number in range(groups)))
        for start, count in spans
    ]


def rows(recipe: Recipe, start: int, count: int) -> Recipe:
    """Return `count` rows of a matrix from the row `start` on."""
    shape = shape_of(recipe)
    return cut(recipe, Box((start, *(0 for _ in shape[1:])), (count, *shape[1:])))
