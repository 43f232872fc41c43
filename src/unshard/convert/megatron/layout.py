"""Megatron's layouts undone: layers and experts by number, and the parts of fused matrices.

Homogeneous layers are one tensor [L, ...] under a name without a number. The experts of a layer are
one tensor [E, ...] or a tensor each, and the halves of a gated matrix may be stored by themselves,
as `weight_w` (gate) and `weight_v` (up). Everything is a box of what is stored.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from unshard.convert.recipes import (
    Concat,
    Recipe,
    Stack,
    Take,
    cut,
    dtype_of,
    pick,
    shape_of,
    take,
)
from unshard.errors import ConversionError
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.selection import cut_out

_HALF = re.compile(r"(.+\.(?:weight|bias)\d*)_([wv])")
# The last form is that of a state dict in memory, which Megatron-FSDP saves as it is.
_EXPERT = re.compile(
    r"(?P<block>.+\.experts)\."
    r"(?:(?:local_)?experts\.(?P<number>\d{1,9})\.(?P<part>linear_fc[12])\.weight"
    r"|(?P<grouped>linear_fc[12])\.weight(?P<last>\d{1,9}))"
)
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d{1,9})\.)?(.+)")


class Heads(NamedTuple):
    """The heads of an attention: of queries, of keys (the groups), and the rows of one."""

    queries: int
    groups: int
    rows: int


def with_whole_matrices(tensors: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Join the halves of gated matrices, then single experts into tensors of all of a layer.

    Raises:
        ConversionError: a half or an expert is missing, or they differ in shape or dtype.
    """
    whole = _joined(tensors, _half_of, lambda parts: Concat(0, parts), 2)
    return _joined(whole, _expert_of, lambda parts: Stack(0, parts), 1)


_Part = tuple[str, int]
"""The name of a whole, and the number of a part."""


def _half_of(name: str) -> _Part | None:
    found = _HALF.fullmatch(name)
    return None if found is None else (found[1], "wv".index(found[2]))


def _expert_of(name: str) -> _Part | None:
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    whole = f"{found['block']}.experts.{found['part'] or found['grouped']}.weight"
    return whole, int(found["number"] or found["last"])


def _joined(
    tensors: Mapping[str, Recipe],
    part_of: Callable[[str], _Part | None],
    join: Callable[[tuple[Recipe, ...]], Recipe],
    least: int,
) -> dict[str, Recipe]:
    """Return the tensors with parts joined, each whole in the place of its first part."""
    found: dict[str, Recipe | dict[int, Recipe]] = {}
    for name, recipe in tensors.items():
        part = part_of(name)
        if part is None:
            found[name] = recipe
            continue
        parts = found.setdefault(part[0], {})
        if not isinstance(parts, dict) or part[1] in parts:
            raise ConversionError(f"tensor {name}: is there twice, also as a part of {part[0]}")
        parts[part[1]] = recipe
    return {
        name: join(_in_order(name, one, least)) if isinstance(one, dict) else one
        for name, one in found.items()
    }


def _in_order(name: str, parts: Mapping[int, Recipe], least: int) -> tuple[Recipe, ...]:
    """Return the parts by number.

    Raises:
        ConversionError: there are fewer than `least`, or one is missing, or they are not alike.
    """
    missing = sorted({*range(max(len(parts), least))} - parts.keys())
    if missing:
        raise ConversionError(
            f"tensor {name}: its part {missing[0]} is missing", found=f"{len(parts)} parts"
        )
    kinds = {(shape_of(one), dtype_of(one).name) for one in parts.values()}
    if len(kinds) > 1:
        shown = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise ConversionError(f"tensor {name}: its parts are not alike", found=shown)
    return tuple(parts[number] for number in range(len(parts)))


def single_layers(name: str, recipe: Recipe, layers: int) -> Iterator[tuple[str, int, str, Recipe]]:
    """Yield the layers in a tensor: "decoder" or "mtp", number, the rest of the name, recipe.

    Nothing for a tensor that is in no layer.

    Raises:
        ConversionError: a tensor of all layers does not have as many as the model.
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return
    part, number, rest = found.groups()
    if number is not None:
        yield part, int(number), rest, recipe
        return
    shape = shape_of(recipe)
    if part != "decoder" or shape[:1] != (layers,):
        raise ConversionError(
            f"tensor {name} has {shape[0] if shape else 0} layers",
            expected=f"{layers}, as num_hidden_layers of config.json says",
            hint="check that this is the config of the model that was trained",
        )
    for layer, one in enumerate(_layers(recipe, layers)):
        yield part, layer, rest, one


def _layers(recipe: Recipe, layers: int) -> Iterable[Recipe]:
    """Return the layers of a tensor: of a stored one as tensors, which have only their own chunks.

    Its experts are looked for among these then, and not among those of all layers.
    """
    if not isinstance(recipe, Take) or recipe != take(recipe.entry):
        return (pick(recipe, layer) for layer in range(layers))
    entry, shape = recipe.entry, recipe.entry.shape[1:]
    steps, start = (1,) * len(entry.shape), (0,) * len(shape)
    grids = [((layer, *start), steps, (1, *shape)) for layer in range(layers)]
    order = range(1, len(entry.shape))
    tables = cut_out(entry.chunks, grids, entry.dtype.itemsize, order)
    return (take(TensorEntry(entry.fqn, entry.dtype, shape, table)) for table in tables)


def first_rows(recipe: Recipe, rows: int) -> Recipe:
    """Return the first rows of a matrix."""
    return _rows(recipe, 0, rows)


def halves(name: str, recipe: Recipe) -> list[Recipe]:
    """Return the upper and the lower half of a matrix.

    Raises:
        ConversionError: it has an odd number of rows.
    """
    rows = shape_of(recipe)[0] if shape_of(recipe) else 1
    if rows % 2:
        raise ConversionError(f"tensor {name}: {rows} rows are not two equal halves")
    return [_rows(recipe, 0, rows // 2), _rows(recipe, rows // 2, rows // 2)]


def by_groups(name: str, recipe: Recipe, heads: Heads) -> list[Recipe]:
    """Return queries, keys and values of a matrix, or bias, in which they come group by group.

    A group has its heads of queries, then one of keys and one of values.

    Raises:
        ConversionError: it does not have the rows of these heads.
    """
    shape, (queries, groups, rows) = shape_of(recipe), heads
    each = queries // groups
    group = (each + 2) * rows
    if queries % groups or not shape or shape[0] != groups * group:
        raise ConversionError(
            f"tensor {name} does not have the rows of {queries} heads in {groups} groups, of "
            f"{rows} rows each",
            expected=f"{groups * group} rows",
            found=str(list(shape)),
            hint="check that this is the config of the model that was trained",
        )
    spans = ((0, each * rows), (each * rows, rows), ((each + 1) * rows, rows))
    return [
        Concat(0, tuple(_rows(recipe, one * group + start, size) for one in range(groups)))
        for start, size in spans
    ]


def _rows(recipe: Recipe, start: int, count: int) -> Recipe:
    shape = shape_of(recipe)
    return cut(recipe, Box((start, *(0 for _ in shape[1:])), (count, *shape[1:])))
