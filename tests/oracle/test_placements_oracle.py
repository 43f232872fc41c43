"""Placements against torch itself: `distribute_tensor`, as every rank of a fake process group."""

from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from ranks import as_rank
from unshard.tensors.placements import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    place,
)

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]

SHAPES: tuple[Shape, ...] = ((12, 6), (11, 7), (5, 4), (1, 3), (0, 5))


def as_torch(placement: Placement) -> TorchPlacement:
    match placement:
        case Shard(dim):
            return dtensor.Shard(dim)
        case StridedShard(dim, factor):
            return _StridedShard(dim, split_factor=factor)
        case _:
            return dtensor.Replicate()


def held_by_torch(
    mesh: Shape, cases: list[tuple[Shape, Placements]]
) -> list[tuple[Shape, list[torch.Tensor]]]:
    """Return, for every rank, its coordinates and its local tensor of every case."""
    held = []
    for rank in range(prod(mesh)):
        with as_rank(rank, prod(mesh)):
            device_mesh = init_device_mesh("cpu", mesh)
            local = [local_tensor(device_mesh, shape, placed) for shape, placed in cases]
            held.append((tuple(device_mesh.get_coordinate() or ()), local))
    return held


def local_tensor(
    mesh: dist.device_mesh.DeviceMesh, shape: Shape, placements: Placements
) -> torch.Tensor:
    full = torch.arange(prod(shape)).reshape(shape)
    torch_placements = [as_torch(placement) for placement in placements]
    return dtensor.distribute_tensor(full, mesh, torch_placements, src_data_rank=None).to_local()


def held_by_us(mesh: Shape, at: Shape, shape: Shape, placements: Placements) -> torch.Tensor:
    local, pieces = place(shape, Sharding(DeviceMesh(mesh, None, at), placements))
    full = torch.arange(prod(shape)).reshape(shape)
    out = torch.full(local, -1)
    for piece in pieces:
        part, into = full, out
        for dim, size in enumerate(piece.box.sizes):
            part = part.narrow(dim, piece.box.offsets[dim], size)
            into = into.narrow(dim, piece.local_offsets[dim], size)
        into.copy_(part)
    return out


def assert_as_torch(mesh: Shape, cases: list[tuple[Shape, Placements]]) -> None:
    for at, locals_ in held_by_torch(mesh, cases):
        for (shape, placements), expected in zip(cases, locals_, strict=True):
            ours = held_by_us(mesh, at, shape, placements)
            what = f"{shape} {placements} at {at} of {mesh}"
            assert ours.tolist() == expected.tolist(), what


@pytest.mark.parametrize("mesh", [(1,), (4,), (7,), (2, 3), (3, 2), (2, 2, 2)])
def test_shards_and_replicas_are_where_torch_puts_them(mesh: Shape) -> None:
    each: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())
    combinations = product(each, repeat=len(mesh))
    assert_as_torch(mesh, list(product(SHAPES, combinations)))


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_strided_shards_are_where_torch_puts_them(mesh: Shape, dim: int) -> None:
    """Even sizes only: where they are not, `distribute_tensor` cuts otherwise than FSDP does."""
    placements = (StridedShard(dim, mesh[1]), Shard(dim))
    assert_as_torch(mesh, [((36, 72), placements), ((0, 0), placements)])


def test_strided_shards_of_three_mesh_dimensions_are_where_torch_puts_them() -> None:
    cases: list[Placements] = [
        (StridedShard(0, 6), Shard(0), Shard(0)),
        (StridedShard(0, 6), StridedShard(0, 2), Shard(0)),
        (StridedShard(0, 2), Shard(1), Shard(0)),
        (Replicate(), StridedShard(0, 2), Shard(0)),
        (StridedShard(1, 3), Shard(1), Shard(0)),
    ]
    assert_as_torch((2, 3, 2), [((36, 12), placements) for placements in cases])


@pytest.mark.parametrize("factor", [2, 3, 5])
@pytest.mark.parametrize("ranks", [2, 9])
def test_lone_strided_shards_are_where_torch_puts_them(factor: int, ranks: int) -> None:
    placements = (StridedShard(0, factor),)
    assert_as_torch((ranks,), [((36,), placements), ((36, 2), placements)])
