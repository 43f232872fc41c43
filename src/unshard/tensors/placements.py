"""The position of a rank's local tensor in the global one: device meshes and DTensor placements.

The rules were measured against torch, not only taken from its documentation:

* a dimension is cut as `torch.chunk` cuts it: pieces of ceil(n / k), the last ones short or empty;
* several mesh dimensions that cut one tensor dimension are applied in the *shard order*: left to
  right for `Shard`, and decoded right to left where `_StridedShard(split_factor)` occurs. torch's
  own left-to-right `compute_local_shape_and_global_offset` is wrong there for uneven sizes;
* a `_StridedShard` without a later mesh dimension to explain it makes several disjoint segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from unshard.tensors.boxes import Box


class PlacementError(ValueError):
    """The placements do not determine the rank's part of the tensor; the message explains why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dimension `dim` is cut along this mesh dimension."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Like `Shard`, but applied after later mesh dimensions of `split_factor` ranks in all."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of this mesh dimension holds a copy."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every coordinate holds a summand of a pending reduction (`op`)."""

    op: str

    def __str__(self) -> str:
        return f"Partial({self.op})"


Placement = Shard | StridedShard | Replicate | Partial


class DeviceMesh(NamedTuple):
    """The mesh that a tensor is on, as one rank sees it.

    Attributes:
        shape: ranks per mesh dimension.
        dim_names: name per mesh dimension, or None if the mesh has none.
        coordinates: position of this rank, per mesh dimension.
        device_type: "cuda", "cpu" and the like; "" if unknown.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    coordinates: tuple[int, ...]
    device_type: str = ""


class Sharding(NamedTuple):
    """The placement of one rank's tensor.

    Attributes:
        mesh: the device mesh.
        placements: one per mesh dimension.
        shard_order: (tensor dimension, mesh dimensions in the order they cut it), if the checkpoint
            records it; it then takes precedence over split factors.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None


class Piece(NamedTuple):
    """A part of a local tensor: its box in the global tensor, and its start in the local one."""

    box: Box
    local_offsets: tuple[int, ...]


_Segments = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def place(shape: tuple[int, ...], sharding: Sharding) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return the local shape for a global one, and the pieces of the local tensor.

    There is one piece, which is empty for an empty shard; several for a lone `_StridedShard`.

    Raises:
        PlacementError: a placement is pending (`Partial`) or does not fit the mesh or the shape.
    """
    _check_fits(shape, sharding)
    segments = [_segments(dim, size, sharding) for dim, size in enumerate(shape)]
    starts = [list(accumulate((hi - lo for lo, hi in parts), initial=0)) for parts in segments]
    pieces = []
    for number in product(*(range(len(parts)) for parts in segments)):
        ranges = [parts[n] for parts, n in zip(segments, number, strict=True)]
        box = Box(tuple(lo for lo, _ in ranges), tuple(hi - lo for lo, hi in ranges))
        pieces.append(Piece(box, tuple(at[n] for at, n in zip(starts, number, strict=True))))
    return tuple(at[-1] for at in starts), tuple(pieces)


def _check_fits(shape: tuple[int, ...], sharding: Sharding) -> None:
    mesh = sharding.mesh
    if len(sharding.placements) != len(mesh.shape) or len(mesh.coordinates) != len(mesh.shape):
        raise PlacementError(
            f"{len(sharding.placements)} placements and coordinates {mesh.coordinates} "
            f"do not fit a mesh of shape {mesh.shape}"
        )
    if any(not 0 <= at < size for at, size in zip(mesh.coordinates, mesh.shape, strict=True)):
        raise PlacementError(f"coordinates {mesh.coordinates} are outside mesh {mesh.shape}")
    for placement in sharding.placements:
        match placement:
            case Partial():
                raise PlacementError(
                    f"{placement} is a pending reduction: each rank holds a summand, not a part"
                )
            case StridedShard(_, factor) if factor < 1:
                raise PlacementError(f"{placement}: a split factor is at least 1")
            case Shard(dim) | StridedShard(dim, _) if not 0 <= dim < len(shape):
                raise PlacementError(f"{placement} does not fit a tensor of shape {list(shape)}")
            case _:
                pass


def _segments(dim: int, size: int, sharding: Sharding) -> _Segments:
    """Return this rank's ranges of dimension `dim`, in the order of the local tensor."""
    mesh = sharding.mesh
    placements = ", ".join(map(str, sharding.placements))
    cutters = [
        mesh_dim
        for mesh_dim, placement in enumerate(sharding.placements)
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim
    ]
    order = dict(sharding.shard_order or ()).get(dim)
    if order is not None and sorted(order) != cutters:
        raise PlacementError(
            f"the shard order {order} of dimension {dim} contradicts the placements ({placements})"
        )
    if order is None or list(order) == cutters:  # split factors are more specific than the default
        order = _decode_order(cutters, sharding)
    if order is not None:
        lo, hi = 0, size
        for mesh_dim in order:
            start, end = _chunk(hi - lo, mesh.shape[mesh_dim], mesh.coordinates[mesh_dim])
            lo, hi = lo + start, lo + end
        return ((lo, hi),)
    placement = sharding.placements[cutters[0]]
    if len(cutters) > 1 or not isinstance(placement, StridedShard):
        raise PlacementError(f"no order of cuts of dimension {dim} explains ({placements})")
    ranks, at = mesh.shape[cutters[0]], mesh.coordinates[cutters[0]]
    return _lone_strided(size, placement.split_factor, ranks, at)


def _decode_order(cutters: Sequence[int], sharding: Sharding) -> tuple[int, ...] | None:
    """Derive the order of cuts from split factors, right to left; None if no order fits.

    A mesh dimension with split factor f comes after later ones whose sizes multiply to f
    (torch: `DTensorSpec._maybe_convert_StridedShard_to_shard_order`).
    """
    order: list[int] = []
    for mesh_dim in reversed(cutters):
        placement = sharding.placements[mesh_dim]
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        sizes = [sharding.mesh.shape[other] for other in order]
        at = next((i for i in range(len(order) + 1) if prod(sizes[:i]) == factor), None)
        if at is None:
            return None
        order.insert(at, mesh_dim)
    return tuple(order)


def _lone_strided(size: int, parts: int, ranks: int, rank: int) -> _Segments:
    """Place a `_StridedShard` that no later mesh dimension explains.

    The dimension is split into `parts`, and each part is cut over the mesh dimension. A rank holds
    its cuts of all parts in sequence.
    """
    segments = []
    for part in range(min(parts, size)):  # all later parts are empty
        lo, hi = _chunk(size, parts, part)
        start, end = _chunk(hi - lo, ranks, rank)
        segments.append((lo + start, lo + end))
    return tuple((lo, hi) for lo, hi in segments if lo < hi) or ((size, size),)


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of piece `index` of `torch.chunk`, with empty pieces at the end."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)
