"""Scenarios without a model: every dtype and placement, partial sums, strides, plain tensors."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from oracle.writers.saving import save_rank

__all__ = [
    "DTYPES",
    "dtensor_dtypes",
    "noncontiguous",
    "partial",
    "plain_differ",
    "plain_equal",
    "random_values",
]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)
"""The dtypes of `dtensor_dtypes`; names there are `{dtype}.{cut}`, such as `bfloat16.rows`."""

_CUTS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "rows": ((13, 5), Shard(0)),
    "columns": ((4, 11), Shard(1)),
    "middle": ((3, 10, 2), Shard(1)),
    "copies": ((3, 5), Replicate()),
    "scalar": ((), Replicate()),
    "empty": ((0, 4), Shard(0)),
}

_State = OrderedDict[str, torch.Tensor]


def dtensor_dtypes(rank: int, world: int, directory: Path) -> None:
    """Cut a tensor of every dtype in every way of `_CUTS`; any world size.

    The `special.*` tensors hold what only a comparison of bits tells apart: NaN, infinities, -0.0,
    the largest and the smallest numbers.
    """
    mesh = _mesh(world)
    truth, state = _State(), _State()
    for dtype in DTYPES:
        for cut, (shape, placement) in _CUTS.items():
            name = f"{_short(dtype)}.{cut}"
            truth[name] = random_values(dtype, shape)
            state[name] = _cut(truth[name], mesh, placement)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = f"special.{_short(dtype)}"
        truth[name] = _specials(dtype)
        state[name] = _cut(truth[name], mesh, Shard(0))
    save_rank((rank, world, directory), state, truth)


def plain_equal(rank: int, world: int, directory: Path) -> None:
    """Save the same plain tensors on every rank; any world size."""
    state = _State(
        {
            "linear.weight": torch.randn(6, 4),
            "linear.bias": torch.randn(6, dtype=torch.bfloat16),
            "counter": torch.tensor(12),
            "mask": torch.tensor([True, False, True]),
        }
    )
    save_rank((rank, world, directory), state, state)


def plain_differ(rank: int, world: int, directory: Path) -> None:
    """Save plain tensors that are shards along dimension 0 without saying so; world size 2 or more.

    `sharded.*` differ between ranks and the truth is their concatenation; `norm.weight` (all ones)
    and `counter` (no dimensions) are equal, the truth is one copy; `linear.weight` is a DTensor.
    """
    truth = _State(
        {
            "sharded.weight": torch.randn(3 * world + 1, 4),
            "sharded.bias": torch.randn(3 * world + 1, dtype=torch.bfloat16),
            "norm.weight": torch.ones(6),
            "counter": torch.tensor(12),
            "linear.weight": torch.randn(9, 4),
        }
    )
    state = _State(truth)
    for name in ("sharded.weight", "sharded.bias"):
        state[name] = _piece(truth[name], world, rank).clone()
    state["linear.weight"] = _cut(truth["linear.weight"], _mesh(world), Shard(0))
    parts = ("sharded.weight", "sharded.bias")
    save_rank((rank, world, directory), state, truth, parts=parts)


def partial(rank: int, world: int, directory: Path) -> None:
    """Save a DTensor that still awaits its sum, and a whole one; any world size.

    The truth of `pending` is the sum over ranks; its terms are small integers, so that it is exact.
    """
    mesh = _mesh(world)
    terms = torch.randint(-8, 8, (world, 5, 3)).float()
    truth = _State({"pending": terms.sum(0), "linear.weight": torch.randn(9, 4)})
    state = _State(
        {
            "pending": DTensor.from_local(terms[rank].clone(), mesh, [Partial()]),
            "linear.weight": _cut(truth["linear.weight"], mesh, Shard(0)),
        }
    )
    save_rank((rank, world, directory), state, truth)


def noncontiguous(rank: int, world: int, directory: Path) -> None:
    """Save tensors whose elements are not in row-major order; any world size.

    `transposed` and `channels_last` are DTensors with such local tensors, `window` is one whose
    local tensor starts inside a larger storage; `plain_*` are the same without DTensor.
    """
    mesh = _mesh(world)
    channels = torch.randn(7, 3, 2, 4).to(memory_format=torch.channels_last)
    surrounding = torch.randn(11, 9)
    plain = {
        "plain_transposed": torch.randn(4, 6).t(),
        "plain_channels_last": channels,
        "plain_window": surrounding[2:5, 1:7],
    }
    truth = _State(
        {
            "transposed": torch.randn(13, 6),
            "channels_last": channels,
            "window": torch.randn(11, 5),
            **plain,
        }
    )
    local = {
        name: _piece(truth[name], world, rank).clone()
        for name in ("transposed", "channels_last", "window")
    }
    local["transposed"] = local["transposed"].t().contiguous().t()
    cut = {name: _from_local(piece, truth[name], mesh) for name, piece in local.items()}
    # Set afterwards: torch cannot save a DTensor that was made from a window.
    cut["window"]._local_tensor = nn.functional.pad(local["window"], (1, 2, 1, 0))[1:, 1:-2]
    assert cut["window"].to_local().storage_offset() > 0
    save_rank((rank, world, directory), _State(cut | plain), truth)


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _piece(tensor: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Return the rows of one rank: blocks of the same length, the last ones short or empty."""
    length = -(-len(tensor) // world)
    return tensor[rank * length : (rank + 1) * length]


def _cut(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Distribute without communication: gloo cannot scatter every dtype."""
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def _from_local(local: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())


def random_values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return finite random numbers; integers of all sizes, negative ones too."""
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=wide).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    octets = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return octets.view(dtype).reshape(shape)


def _specials(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    numbers = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, info.max, info.min]
    subnormal = info.smallest_normal / 2
    return torch.tensor([*numbers, info.smallest_normal, subnormal], dtype=dtype)
