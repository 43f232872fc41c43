"""Into torch: tensors of bits in memory, and the parameters and buffers of a module.

This module, `engines.into_transformers` and `write.verification.load` are the only ones that import
torch (the extra `torch`), inside functions, when they are used.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, cast

import numpy as np

from unshard.containers.strided import Elements
from unshard.convert.expected.tensors import Slot
from unshard.engines.arrays import TensorReader
from unshard.errors import ConversionError, UsageError, how_to_install
from unshard.plan.operations import Tiled
from unshard.tensors import placements as ours
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import DType, DTypeKind
from unshard.tensors.selection import Selection, of_box

if TYPE_CHECKING:
    from torch import Tensor as Tensor
    from torch.distributed.tensor import DTensor
    from torch.nn import Module as Module


_RECYCLED = 1024 * 1024  # bytes; malloc keeps the memory of what is smaller


def need_torch() -> None:
    """Check that torch is installed.

    Raises:
        UsageError: it is not.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        hint = how_to_install("torch", "torch")
        raise UsageError("torch is not installed", hint=hint) from error


def as_tensor(bits: Elements, dtype: DType) -> "Tensor":
    """Return a tensor of this dtype in the memory of an array of bits, row-major.

    Raises:
        UsageError: this version of torch does not have the dtype.
    """
    import torch

    meant = getattr(torch, dtype.name, None)
    if not isinstance(meant, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no {dtype}", hint="use a newer one")
    flat = torch.from_numpy(bits.reshape(-1).view(np.uint8))
    return flat.view(meant).reshape(bits.shape)


def torch_memory(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Elements:
    """Return an array, without values, in memory that torch allocated and aligned for a tensor.

    numpy aligns to 16 bytes, and asks for huge pages, which cost some machines far more time.
    """
    import torch

    size = prod(shape) * dtype.itemsize
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is
    bits: Elements = memory.numpy().view(dtype).reshape(shape)
    return bits


class RecycledMemory:
    """Makes arrays as `torch_memory` does, large ones in memory that is no longer used.

    Fresh memory costs a fault for each page, which takes longer than reading what is in the page
    cache. When all that is unused is too small, it is given back. Threads may share it.
    """

    def __init__(self) -> None:
        # An array of all the memory is alive as long as any array or tensor that is made of it.
        self._blocks: dict[Tensor, weakref.ref[Elements]] = {}
        self._lock = Lock()

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Elements:
        """Return an array, its values whatever they are."""
        import torch

        size = prod(shape) * dtype.itemsize
        if size < _RECYCLED:
            return torch_memory(shape, dtype)
        with self._lock:
            unused = [memory for memory, array in self._blocks.items() if array() is None]
            fitting = [memory for memory in unused if len(memory) >= size]
            if fitting:
                memory = min(fitting, key=len)
            else:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
                for unfit in unused:
                    del self._blocks[unfit]
            whole: Elements = memory.numpy()
            self._blocks[memory] = weakref.ref(whole)
        bits: Elements = whole[:size].view(dtype).reshape(shape)
        return bits


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint, as torch reads it.

    Attributes:
        reader: has the checkpoint open.
        operation: makes the tensor.
    """

    reader: TensorReader
    operation: Tiled

    def read(self, selection: Selection) -> "Tensor":
        """Return what a selection takes, in the dtype of the operation, in memory of its own."""
        return as_tensor(self.reader.read(self.operation, selection), self.operation.to)

    def copy_to(self, out: "Tensor", selection: Selection) -> None:
        """Copy what a selection takes, without turning it, into a tensor of its counts.

        torch casts values to the dtype of `out` part by part, so no second tensor is needed.
        """
        for place, bits in self.reader.parts(self.operation, selection):
            out[place].copy_(as_tensor(bits, self.operation.to))


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """A parameter or buffer of a model, and the modules that hold it.

    Attributes:
        slot: its names and its (global) shape.
        tensor: its present value.
        owners: (module, attribute) of every name.
    """

    slot: Slot
    tensor: "Tensor"
    owners: tuple[tuple["Module", str], ...]

    @property
    def pieces(self) -> list[ours.Piece]:
        """The parts of the whole tensor that belong here: of a DTensor those of this rank.

        Raises:
            ConversionError: it is not known which part this rank has, or it has no memory.
        """
        name, whole = self.slot.names[0], self.slot.shape
        if not hasattr(self.tensor, "placements"):
            return [ours.Piece(Box.whole(whole), (0,) * len(whole))]
        tensor = cast("DTensor", self.tensor)
        local = tensor.to_local()
        if local.is_meta:
            raise ConversionError(
                f"parameter {name}: a shard on the meta device has no memory to be filled",
                hint="call model.to_empty(device=…) first",
            )
        try:
            shape, pieces = ours.place(whole, _sharding(tensor))
        except ours.PlacementError as error:
            raise ConversionError(f"parameter {name}: {error}") from error
        if shape != tuple(local.shape):
            raise ConversionError(
                f"parameter {name}: this rank's part is not what its placements say",
                expected=str(list(shape)),
                found=str(list(local.shape)),
            )
        return list(pieces)

    def check(self, stored: DType | None) -> None:
        """Check that values of a dtype, if there are any, can be copied into the tensor.

        Raises:
            ConversionError: as by `pieces`; or integers would be made of fractions.
        """
        _ = self.pieces
        there = self.tensor.dtype
        has_fractions = stored is not None and stored.kind is DTypeKind.FLOAT
        takes_any = there.is_floating_point or there.is_complex or self.tensor.is_meta
        if has_fractions and not takes_any:
            raise ConversionError(
                f"parameter {self.slot.names[0]}: is {str(there).removeprefix('torch.')} in the "
                f"model, and {stored} in the checkpoint, whose fractions would be lost",
                hint="quantise the model after it is loaded",
            )

    def fill(self, stored: StoredTensor) -> None:
        """Copy values into the tensor, cast to its dtype; a meta tensor is replaced by them.

        Raises:
            ConversionError: as by `pieces`; nothing was read.
        """
        import torch

        pieces = self.pieces
        if self.tensor.is_meta:
            values = stored.read(of_box(pieces[0].box))
            if isinstance(self.tensor, torch.nn.Parameter):
                learns = self.tensor.requires_grad and values.dtype.is_floating_point
                values = torch.nn.Parameter(values, requires_grad=learns)
            for module, name in self.owners:  # under all its names, so that tied ones stay tied
                setattr(module, name, values)
            return
        tensor = self.tensor
        with torch.no_grad():
            if hasattr(tensor, "placements"):
                tensor = cast("DTensor", tensor).to_local()
            for piece in pieces:
                sizes = zip(piece.local_offsets, piece.box.sizes, strict=True)
                local = tensor[tuple(slice(at, at + size) for at, size in sizes)]
                stored.copy_to(local, of_box(piece.box))


def model_tensors(model: "Module") -> list[ModelTensor]:
    """Return the parameters of a model and the buffers that it saves, in order.

    Models of transformers whose parameters are on the meta device are tied first: moving them
    there may have untied them.
    """
    if any(one.is_meta for one in model.parameters()):
        for module in list(model.modules()):
            tie = getattr(module, "tie_weights", None)
            if callable(tie):
                tie()
    # Tied names share one tensor, so its identity groups them.
    known: dict[int, tuple[Tensor, list[str], list[tuple[Module, str]]]] = {}
    for name, tensor, owner in _saved(model):
        _, names, owners = known.setdefault(id(tensor), (tensor, [], []))
        names.append(name)
        owners.append(owner)
    return [
        ModelTensor(Slot(tuple(names), tuple(tensor.shape)), tensor, tuple(owners))
        for tensor, names, owners in known.values()
    ]


def on_meta(model: "Module") -> list[str]:
    """Return the names of all parameters and buffers without values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def _saved(model: "Module") -> Iterator[tuple[str, "Tensor", tuple["Module", str]]]:
    """Yield what a state dict has: the name, the tensor itself, and its module and attribute."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 (torch names it nowhere else)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + name, parameter, (module, name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in unsaved:
                yield prefix + name, buffer, (module, name)


def _sharding(tensor: "DTensor") -> ours.Sharding:
    """Return the sharding of a tensor in the form that the readers of checkpoints use."""
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    ranks = mesh.mesh.flatten().tolist()
    if at is None or ranks != sorted(ranks):
        raise ours.PlacementError(f"which part this rank has on a mesh of {ranks} is not known")
    stated = getattr(tensor._spec, "shard_order", None) or ()  # noqa: SLF001 (no other way)
    order = tuple((int(one.tensor_dim), tuple(map(int, one.mesh_dims))) for one in stated)
    placed = tuple(map(_placement, tensor.placements))
    place = ours.DeviceMesh(tuple(mesh.mesh.shape), None, tuple(at))
    return ours.Sharding(place, placed, order or None)


def _placement(value: object) -> ours.Placement:
    dim, factor = getattr(value, "dim", None), getattr(value, "split_factor", None)
    match type(value).__name__, dim, factor:
        case "Replicate", _, _:
            return ours.Replicate()
        case "Shard", int(), _:
            return ours.Shard(dim)
        case "_StridedShard", int(), int():
            return ours.StridedShard(dim, factor)
        case _:
            raise ours.PlacementError(f"{type(value).__name__}: a rank has no part of the values")
