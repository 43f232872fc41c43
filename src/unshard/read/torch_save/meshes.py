"""Pickled device meshes of every torch version: sizes, names, and which piece a rank has.

Sizes are, in order of age, in a `mesh` tensor, in `_layout.shape` or in `_layout.axes`; the
coordinates in `_coordinate_on_dim` in all of them. torch cuts along a mesh dimension in the order
of the *sorted* ranks of its group, so a coordinate is the number of a piece only if ranks ascend;
otherwise the index in the sorted group is used (measured with torch 2.13).
"""

from collections.abc import Callable
from itertools import product
from math import prod

from unshard.containers.pickles.records import Record, Value
from unshard.read.torch_save.values import (
    TensorFormError,
    ints,
    member,
    named,
    sizes_of,
    state_of,
)
from unshard.tensors.placements import DeviceMesh

_MAX_AXES = 64
_ReadInts = Callable[[Value], tuple[int, ...]]


def read_mesh(fields: dict[str, Value], rank: int, read_ints: _ReadInts) -> tuple[DeviceMesh, int]:
    """Return a mesh as a rank sees it, and the highest of its ranks plus one.

    `fields` are its attributes; `read_ints` reads the integers of a pickled tensor.

    Raises:
        TensorFormError: it is of unknown form, or its facts contradict one another.
    """
    own_rank = fields.get("_rank")
    if isinstance(own_rank, int) and own_rank != rank:
        raise TensorFormError(
            f"its mesh has rank {own_rank}, the file's name rank {rank}: was it renamed?"
        )
    coordinates = member(fields, "_coordinate_on_dim")
    if coordinates is None:
        raise TensorFormError(f"rank {rank} is not part of its mesh")
    at = ints(coordinates)
    shape, ranks = _grid(fields, rank, read_ints, at)
    if not _is_inside(at, shape):
        raise TensorFormError(f"coordinates {at} do not fit a mesh of shape {shape}")
    if fields.get("_preserve_rank_order") and list(ranks) != sorted(ranks):
        raise TensorFormError(
            f"a device mesh with preserved, non-ascending rank order {list(ranks)}: "
            "how torch cuts it is unknown"
        )
    device = fields.get("_device_type", fields.get("device_type"))
    numbers = piece_numbers(shape, ranks, at)
    mesh = DeviceMesh(shape, _names(fields), numbers, device if isinstance(device, str) else "")
    return mesh, max(ranks, default=0) + 1


def _is_inside(at: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(at) == len(shape) and all(0 <= c < n for c, n in zip(at, shape, strict=True))


def _grid(
    fields: dict[str, Value], rank: int, read_ints: _ReadInts, at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes, and the ranks in row-major order; of a slice of a mesh, those in it."""
    layout = fields.get("_layout")
    if layout is None:
        return _grid_of_tensor(fields, read_ints)
    flat = fields.get("_flatten_rank_map")
    ranks = read_ints(member(fields, "_rank_map")) if flat is None else ints(flat)
    shape, steps = _layout(state_of(layout), len(ranks))
    if not _is_inside(at, shape) or rank not in ranks:
        raise TensorFormError(f"a mesh of shape {shape} that does not contain rank {rank}")
    own = sum(offsets[c] for offsets, c in zip(steps, at, strict=True))
    base = ranks.index(rank) - own
    places = [base + sum(offsets) for offsets in product(*steps)]
    if min(places) < 0 or max(places) >= len(ranks):
        raise TensorFormError(f"a slice of shape {shape} that does not fit its mesh of {ranks}")
    return shape, tuple(ranks[place] for place in places)


def _grid_of_tensor(
    fields: dict[str, Value], read_ints: _ReadInts
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    mesh = member(fields, "mesh", "_mesh")
    if not isinstance(mesh, Record) or len(mesh.args) < 3:
        raise TensorFormError("a device mesh of unknown form")
    shape = sizes_of(mesh.args[2])
    flat = fields.get("_flatten_mesh_list")
    ranks = read_ints(mesh) if flat is None else ints(flat)
    if len(ranks) != prod(shape):
        raise TensorFormError(f"a mesh of shape {shape} with {len(ranks)} ranks")
    return shape, ranks


def piece_numbers(
    shape: tuple[int, ...], ranks: tuple[int, ...], at: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the number of the piece, per mesh dimension, of the rank at these coordinates.

    It is the rank's index in the sorted group; `ranks` are those of the mesh, in row-major order.
    """
    if list(ranks) == sorted(ranks):
        return at
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(c * step for c, step in zip(at, steps, strict=True))
    numbers = []
    for size, step, c in zip(shape, steps, at, strict=True):
        group = [ranks[start + (i - c) * step] for i in range(size)]
        numbers.append(sorted(group).index(group[c]))
    return tuple(numbers)


def _layout(fields: dict[str, Value], ranks: int) -> tuple[tuple[int, ...], list[list[int]]]:
    """Return the size of every mesh dimension, and the offsets of its coordinates."""
    if "axes" in fields:
        axes = fields["axes"]
        if not isinstance(axes, tuple | list):
            raise TensorFormError("a mesh layout of unknown form")
        parts = [(state_of(axis).get("shape"), state_of(axis).get("stride")) for axis in axes]
    else:
        shape, stride = member(fields, "shape"), member(fields, "stride")
        parts = list(zip(_sequence(shape), _sequence(stride), strict=True))
    axes = [(_flat(shape), _flat(stride)) for shape, stride in parts]
    sizes = [size for shape, _ in axes for size in shape]
    if len(sizes) > _MAX_AXES or min(sizes, default=1) < 1 or prod(sizes) > ranks:
        raise TensorFormError(f"a mesh layout of more places than its {ranks} ranks")
    steps: list[list[int]] = []
    for shape, stride in axes:  # one mesh dimension may itself be made of several
        if len(shape) != len(stride):
            raise TensorFormError(f"a mesh axis of shape {shape} with strides {stride}")
        ranges = [[i * step for i in range(n)] for n, step in zip(shape, stride, strict=True)]
        steps.append([sum(at) for at in product(*ranges)])
    return tuple(len(offsets) for offsets in steps), steps


def _sequence(value: Value) -> tuple[Value, ...]:
    if isinstance(value, Record) and value.is_call_of("torch.Size") and value.args:
        value = value.args[0]
    if isinstance(value, tuple | list):
        return tuple(value)
    return (value,)


def _flat(value: Value) -> list[int]:
    """Return the integers of a possibly nested tuple, left to right; its depth is bounded."""
    numbers: list[int] = []
    waiting: list[tuple[Value, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if type(item) is int:
            numbers.append(item)
        elif depth < 8 and len(numbers) + len(waiting) < _MAX_AXES:
            waiting.extend((part, depth + 1) for part in reversed(_sequence(item)))
        else:
            raise TensorFormError("a mesh layout of unknown form")
    return numbers


def _names(fields: dict[str, Value]) -> tuple[str, ...] | None:
    names = fields.get("mesh_dim_names", fields.get("_mesh_dim_names"))
    if not isinstance(names, tuple | list):
        return None
    return tuple(name if isinstance(name, str) else named(name) for name in names)
