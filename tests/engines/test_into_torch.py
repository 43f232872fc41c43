"""Bits into tensors of torch, and into the parameters and buffers of modules."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ranks import as_rank, bits
from sources import Sources, grid
from unshard.containers.strided import raw_dtype
from unshard.convert.expected.tensors import Slot
from unshard.convert.recipes import take
from unshard.engines.arrays import IndexedBits, TensorReader
from unshard.engines.into_torch import (
    ReadableTensor,
    as_tensor,
    model_tensors,
    need_torch,
    on_meta,
)
from unshard.errors import ConversionError, UsageError, how_to_install
from unshard.plan.operations import Target, Tiled
from unshard.plan.planner import make_operation
from unshard.tensors.dtypes import BY_NAME, DType, DTypeKind
from unshard.tensors.selection import Selection


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (2, 1, 3)])
def test_every_dtype_keeps_its_bits(name: str, shape: tuple[int, ...]) -> None:
    dtype = BY_NAME[name]
    random = np.random.default_rng(0)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = random.integers(0, 2 if name == "bool" else 256, size, np.uint8)
    array: NDArray[np.generic] = raw.view(raw_dtype(dtype)).reshape(shape)
    tensor = as_tensor(array, dtype)
    assert tensor.dtype == getattr(torch, name)
    assert tuple(tensor.shape) == shape
    assert bits(tensor) == raw.tobytes()
    tensor.zero_()  # its memory can be written
    assert tensor.is_contiguous()


def test_a_dtype_that_this_torch_does_not_have_is_reported() -> None:
    unknown = DType("float7", None, 1, DTypeKind.FLOAT)
    with pytest.raises(UsageError, match=r"torch .* has no float7"):
        as_tensor(np.zeros(3, "u1"), unknown)


def test_without_torch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="torch is not installed") as caught:
        need_torch()
    assert caught.value.hint == how_to_install("torch", "torch")


def test_importing_it_imports_no_torch() -> None:
    program = "import sys, unshard.engines.into_torch; print({*sys.modules})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout


class Small(nn.Module):
    """Parameters, buffers that are saved and one that is not, and a tied head."""

    running: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("running", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)


def test_places_are_what_a_state_dict_holds() -> None:
    model = Small()
    places = model_tensors(model)
    assert {name for place in places for name in place.slot.names} == model.state_dict().keys()
    tied = next(place for place in places if len(place.slot.names) > 1)
    assert tied.slot == Slot(("embed.weight", "head.weight"), (7, 4))
    assert [attribute for _, attribute in tied.owners] == ["weight", "weight"]


def test_modules_that_are_used_twice_have_all_their_names() -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleList([layer, layer])
    names = [place.slot.names for place in model_tensors(model)]
    assert names == [("0.weight", "1.weight"), ("0.bias", "1.bias")]
    assert {name for one in names for name in one} == model.state_dict().keys()


def test_values_are_cast_to_what_is_there(tmp_path: Path) -> None:
    model = Small().to(torch.bfloat16)
    before = model.embed.weight
    values = torch.randn(7, 4)
    (place,) = (one for one in model_tensors(model) if one.tensor is before)
    place.fill(stored(tmp_path, values))
    assert model.embed.weight is before is model.head.weight
    assert before.requires_grad
    assert torch.equal(before, values.to(torch.bfloat16))


class Noting(TensorReader):
    """Notes how many elements are read."""

    count = 0

    def parts(self, operation: Tiled, selection: Selection) -> Iterator[IndexedBits]:
        self.count += prod(selection.counts)
        return super().parts(operation, selection)


def stored(directory: Path, values: torch.Tensor, reader: TensorReader | None = None) -> Any:
    """Write a tensor, and return it as a reader has it."""
    dtype = BY_NAME[str(values.dtype).removeprefix("torch.")]
    sources = Sources(directory)
    tensor = grid(dtype.name, tuple(values.shape), (1,) * values.ndim)
    sources.add("w", tensor, np.frombuffer(bits(values), raw_dtype(dtype)).reshape(values.shape))
    sources.plan()
    target = Target(0, 0, tuple(values.shape))
    operation = make_operation(target, take(sources.entries["w"]), dtype)
    return ReadableTensor(reader or TensorReader(directory), operation)


def test_the_meta_device_gets_the_values_themselves_and_ties_stay(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Small()
    model.norm.bias.requires_grad_(False)  # noqa: FBT003 (as torch has it)
    for place in model_tensors(model):
        place.fill(stored(tmp_path, torch.ones(place.slot.shape, dtype=torch.float16)))
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, nn.Parameter)
    assert model.embed.weight.dtype == torch.float16
    assert model.embed.weight.requires_grad
    assert not model.norm.bias.requires_grad
    assert not isinstance(model.running, nn.Parameter)
    assert dict(model.named_buffers())["running"] is model.running
    assert on_meta(model) == ["hidden"]


def test_integers_of_the_checkpoint_do_not_learn(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False, device="meta")
    model_tensors(model)[0].fill(stored(tmp_path, torch.ones(2, 2, dtype=torch.int8)))
    assert not model.weight.requires_grad


class Tying(nn.Module):
    """A model as transformers has it, whose ties the meta device has undone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, device="meta")
        self.head = nn.Linear(4, 7, bias=False, device="meta")

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def test_models_on_the_meta_device_are_tied_first_also_inside_others() -> None:
    for model in (Tying(), nn.Sequential(Tying())):
        assert len(model_tensors(model)) == 1
    real = Tying().to_empty(device="cpu")
    assert len(model_tensors(real)) == 2  # what a user has untied stays so


MESHES: list[tuple[tuple[int, ...], Sequence[Placement]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let torch forget the meshes of other ranks that this process has been."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # no types
    yield
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # no types


def local_part(model: nn.Module) -> torch.Tensor:
    assert isinstance(model.w, DTensor)
    return model.w.to_local()


def sharded(values: torch.Tensor, mesh: DeviceMesh, placed: Sequence[Placement]) -> DTensor:
    return distribute_tensor(values, mesh, list(placed), src_data_rank=None)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("mesh_shape", "placed"), MESHES)
def test_of_a_sharded_parameter_this_ranks_part_is_read(
    rank: int, mesh_shape: tuple[int, ...], placed: Sequence[Placement], tmp_path: Path
) -> None:
    values = torch.arange(56.0).reshape(8, 7)  # torch itself places strided shards evenly only
    with as_rank(rank, 4):
        mesh = init_device_mesh("cpu", mesh_shape)
        expected = sharded(values, mesh, placed).to_local()
        model = nn.Module()
        model.w = nn.Parameter(sharded(torch.zeros(8, 7), mesh, placed))
        (place,) = model_tensors(model)
        reader = Noting(tmp_path)
        place.fill(stored(tmp_path, values, reader))
        assert torch.equal(local_part(model), expected)
        assert reader.count == expected.numel()


def fill_with_zeros(model: nn.Module, directory: Path) -> None:
    (place,) = model_tensors(model)
    place.fill(stored(directory, torch.zeros(place.slot.shape)))


@pytest.mark.usefixtures("fresh")
def test_a_sharded_parameter_of_which_no_part_is_known_is_refused(tmp_path: Path) -> None:
    with as_rank(1, 4):
        model = nn.Module()
        mesh = init_device_mesh("cpu", (4,))
        model.w = nn.Parameter(DTensor.from_local(torch.zeros(8, 3), mesh, [Partial()]))
        with pytest.raises(ConversionError, match="parameter w: Partial"):
            fill_with_zeros(model, tmp_path)
        turned = DeviceMesh("cpu", [3, 2, 1, 0])
        model.w = nn.Parameter(DTensor.from_local(torch.zeros(2, 3), turned, [Shard(0)]))
        with pytest.raises(ConversionError, match=r"parameter w: .*\[3, 2, 1, 0\] is unknown"):
            fill_with_zeros(model, tmp_path)
        model.w = nn.Parameter(
            DTensor.from_local(
                torch.zeros(2, 3), mesh, [Shard(0)], shape=torch.Size((7, 3)), stride=(3, 1)
            )
        )
        fill_with_zeros(model, tmp_path)
        model.w = nn.Parameter(sharded(torch.zeros(8, 3, device="meta"), mesh, [Shard(0)]))
        with pytest.raises(ConversionError, match="meta device") as caught:
            fill_with_zeros(model, tmp_path)
        assert "to_empty" in caught.value.hint


@pytest.mark.usefixtures("fresh")
def test_a_part_of_another_size_than_its_placements_say_is_refused(tmp_path: Path) -> None:
    with as_rank(1, 4):
        model = nn.Module()
        mesh = init_device_mesh("cpu", (4,))
        model.w = nn.Parameter(
            DTensor.from_local(
                torch.zeros(3, 3), mesh, [Shard(0)], shape=torch.Size((8, 3)), stride=(3, 1)
            )
        )
        with pytest.raises(ConversionError, match="does not fit its placements"):
            fill_with_zeros(model, tmp_path)
