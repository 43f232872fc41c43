"""torch tensors from bits in memory, and the parameters and buffers of a module.

Only this module, `engines.into_transformers` and `write.verification.load` import torch (the extra
`torch`), inside functions, when they are used.
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
from unshard.errors import ConversionError, UsageError
from unshard.plan.operations import Tiled
from unshard.tensors import placements as ours
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import DType, DTypeKind
from unshard.tensors.selection import Selection, of_box
from unshard.write.verification.load import need_modules

if TYPE_CHECKING:
    from torch import Tensor as Tensor
    from torch.distributed.tensor import DTensor
    from torch.nn import Module as Module


_RECYCLED = 1024 * 1024  # bytes; malloc itself reuses smaller blocks


def need_torch() -> None:
    """Check that torch is installed; raise as `need_modules`."""
    need_modules("", "torch")


def as_tensor(bits: Elements, dtype: DType) -> "Tensor":
    """Return a tensor of this dtype that shares the memory of an array of bits, row-major.

    Raises:
        UsageError: this version of torch does not have the dtype.
    """
    import torch

    torch_dtype = getattr(torch, dtype.name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no {dtype}", hint="use a newer torch")
    flat = torch.from_numpy(bits.reshape(-1).view(np.uint8))
    return flat.view(torch_dtype).reshape(bits.shape)


def torch_memory(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Elements:
    """Return an uninitialised array in memory that torch allocated and aligned for a tensor.

    numpy aligns to 16 bytes, and requests huge pages, which are far slower on some machines.
    """
    import torch

    size = prod(shape) * dtype.itemsize
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")  # not the default device
    bits: Elements = memory.numpy().view(dtype).reshape(shape)
    return bits


class RecycledMemory:
    """Allocates arrays like `torch_memory`, large arrays in memory that is no longer used.

    Fresh memory costs a fault for each page, which takes longer than reading from the page cache.
    If all unused blocks are too small, they are freed. Threads may share it.
    """

    def __init__(self) -> None:
        # The array of a whole block lives as long as any array or tensor made from it.
        self._blocks: dict[Tensor, weakref.ref[Elements]] = {}
        self._lock = Lock()

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Elements:
        """Return an uninitialised array."""
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
class ReadableTensor:
    """A tensor of a checkpoint, to be read into torch.

    Attributes:
        reader: the open checkpoint.
        operation: the operation that makes the tensor.
    """

    reader: TensorReader
    operation: Tiled

    def read(self, selection: Selection) -> "Tensor":
        """Return a selection in the dtype of the operation, in its own memory."""
        return as_tensor(self.reader.read(self.operation, selection), self.operation.to)

    def copy_to(self, out: "Tensor", selection: Selection) -> None:
        """Copy a selection, without turning it, into a tensor of its counts.

        torch casts values to the dtype of `out` part by part, so no second tensor is needed.
        """
        for index, bits in self.reader.parts(self.operation, selection):
            out[index].copy_(as_tensor(bits, self.operation.to))


@dataclass(frozen=True, slots=True, eq=False)
class ModelTensor:
    """A parameter or buffer of a model, and its modules.

    Attributes:
        slot: its names and its (global) shape.
        tensor: its current value.
        owners: (module, attribute) of every name.
    """

    slot: Slot
    tensor: "Tensor"
    owners: tuple[tuple["Module", str], ...]

    @property
    def pieces(self) -> list[ours.Piece]:
        """The local parts of the whole tensor: for a DTensor, the parts of this rank.

        Raises:
            ConversionError: the parts of this rank are unknown, or have no memory.
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
                f"parameter {name}: this rank's part does not fit its placements",
                expected=str(list(shape)),
                found=str(list(local.shape)),
            )
        return list(pieces)

    def check(self, stored: DType | None) -> None:
        """Check that values of a stored dtype, if any, can be copied into the tensor.

        Raises:
            ConversionError: as by `pieces`, or fractions would become integers.
        """
        _ = self.pieces
        dtype = self.tensor.dtype
        has_fractions = stored is not None and stored.kind is DTypeKind.FLOAT
        takes_any = dtype.is_floating_point or dtype.is_complex or self.tensor.is_meta
        if has_fractions and not takes_any:
            raise ConversionError(
                f"parameter {self.slot.names[0]}: is {str(dtype).removeprefix('torch.')} in the "
                f"model and {stored} in the checkpoint, whose fractions would be lost",
                hint="quantise the model after it is loaded",
            )

    def fill(self, stored: ReadableTensor) -> None:
        """Copy values into the tensor, cast to its dtype; replace a meta tensor.

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
            for module, name in self.owners:  # under all names, so that tied parameters stay tied
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
    """Return the parameters and persistent buffers of a model, in order.

    Models of transformers with parameters on the meta device are tied first, because moving them
    there may have untied them.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        for module in list(model.modules()):
            tie = getattr(module, "tie_weights", None)
            if callable(tie):
                tie()
    # Tied names share a tensor, so its identity groups them.
    by_id: dict[int, tuple[Tensor, list[str], list[tuple[Module, str]]]] = {}
    for name, tensor, owner in _saved(model):
        _, names, owners = by_id.setdefault(id(tensor), (tensor, [], []))
        names.append(name)
        owners.append(owner)
    return [
        ModelTensor(Slot(tuple(names), tuple(tensor.shape)), tensor, tuple(owners))
        for tensor, names, owners in by_id.values()
    ]


def on_meta(model: "Module") -> list[str]:
    """Return the names of all parameters and buffers without values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


def _saved(model: "Module") -> Iterator[tuple[str, "Tensor", tuple["Module", str]]]:
    """Yield the entries of a state dict: name, the tensor itself, and its module and attribute."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        unsaved = module._non_persistent_buffers_set  # noqa: SLF001 (no public equivalent)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield prefix + name, parameter, (module, name)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in unsaved:
                yield prefix + name, buffer, (module, name)


def _sharding(tensor: "DTensor") -> ours.Sharding:
    """Return the sharding of a tensor, as the readers of checkpoints represent it."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    ranks = mesh.mesh.flatten().tolist()
    if coordinate is None or ranks != sorted(ranks):
        raise ours.PlacementError(f"this rank's part on a mesh of {ranks} is unknown")
    entries = getattr(tensor._spec, "shard_order", None) or ()  # noqa: SLF001 (not public)
    order = tuple((int(entry.tensor_dim), tuple(map(int, entry.mesh_dims))) for entry in entries)
    placements = tuple(map(_placement, tensor.placements))
    device_mesh = ours.DeviceMesh(tuple(mesh.mesh.shape), None, tuple(coordinate))
    return ours.Sharding(device_mesh, placements, order or None)


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
