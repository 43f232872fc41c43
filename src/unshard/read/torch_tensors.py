"""What torch pickles a tensor as: from records to storage key, shape, strides, mesh and placements.

Dispatches on the attributes that are present, never on a torch version; every fact that a pickle
states twice is compared. Knows nothing of files.

Sources: the pickles of torch 2.1 to 2.15 (`docs/formats.md`), `torch._utils`, `torch._tensor`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from unshard.containers.records import Global, Persistent, Record, Value
from unshard.read.device_meshes import MeshReader
from unshard.read.pickle_values import TensorFormError, ints, member, state_of
from unshard.tensors.dtypes import BY_NAME, DType
from unshard.tensors.placements import Partial, Placement, Replicate, Shard, Sharding, StridedShard

__all__ = ["LocalTensor", "StorageView", "TensorDecoder", "is_tensor"]


@dataclass(frozen=True, slots=True)
class StorageView:
    """A view of a storage of `storage_elements`; `offset` and `strides` in elements too."""

    key: str
    dtype: DType
    storage_elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor as one rank saved it: what is stored, the global shape, and how it is sharded.

    `sharding` is None for a plain tensor; its global shape is then the stored one.
    """

    view: StorageView
    shape: tuple[int, ...]
    sharding: Sharding | None


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_PLAIN_TYPES = frozenset(
    {
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    }
)
_DTENSORS = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed.tensor.api.DTensor",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed._tensor.DTensor",
    }
)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLACEMENT_MODULES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
)
_UNREADABLE = {
    "torch._utils._rebuild_meta_tensor_no_storage": "it lies on the meta device: it has no values",
    "torch._utils._rebuild_qtensor": "a quantized torch tensor: its values need their scales",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor: safetensors stores dense ones only",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor: safetensors stores dense ones",
    "torch._utils._rebuild_nested_tensor": "a nested tensor: it has no rectangular shape",
    "torch._utils._rebuild_device_tensor_from_numpy": "a device tensor pickled through numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a device tensor pickled through a copy",
}
_TYPED = "torch._tensor._rebuild_from_type_v2"
_PARAMETERS = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_VIEW_V3 = "torch._utils._rebuild_tensor_v3"
_VIEWS = frozenset({"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", _VIEW_V3})
_TENSORS = _PARAMETERS | _VIEWS | frozenset(_UNREADABLE) | {_TYPED}


def is_tensor(value: Value) -> bool:
    """Tell whether a pickled value is a tensor of any kind, readable or not."""
    if not isinstance(value, Record) or not isinstance(value.callee, Global):
        return False
    return value.callee.dotted in _TENSORS


class TensorDecoder:
    """Decodes the tensors of one rank file.

    Args:
        rank: the rank that the file's name states.
        read_ints: reads the integers of a small tensor (old torch keeps mesh ranks in one).
        allowed: names of tensor subclasses that the user vouches for (`--allow-global`): read as
            the plain tensors they are stored as.
    """

    def __init__(
        self,
        rank: int,
        read_ints: Callable[[StorageView], tuple[int, ...]],
        allowed: frozenset[str] = frozenset(),
    ) -> None:
        self._rank = rank
        self._allowed = allowed
        self._meshes = MeshReader(rank, lambda value: read_ints(self.read_view(value)))
        self._specs: dict[int, Sharding] = {}

    def decode(self, value: Value) -> LocalTensor:
        """Return what a pickled tensor says.

        Raises:
            TensorFormError: it is of a kind that cannot be read, or contradicts itself.
        """
        name, args = self._unwrap(value)
        if name != _TYPED:
            view = self._view(name, args)
            return LocalTensor(view, view.sizes, None)
        kind, inner, state = args[1:4]
        if str(kind) in _DTENSORS and isinstance(inner, tuple):
            return self._dtensor(inner, state_of(state))
        if str(kind) == _SHARDED_TENSOR:
            raise TensorFormError(
                "a ShardedTensor (FSDP1 without a device mesh), which is not supported yet"
            )
        raise TensorFormError(
            f"an instance of {kind}, which may mean something else than its stored bytes "
            f"(if it does not: --allow-global {kind})"
        )

    def _unwrap(self, value: Value) -> tuple[str, tuple[Value, ...]]:
        """Strip parameters and tensors that carry attributes; return the call that is left."""
        while True:
            match value:
                case Record(callee=Global() as callee, args=args):
                    name = callee.dotted
                case _:
                    raise TensorFormError("not a tensor")
            if name in _UNREADABLE:
                raise TensorFormError(_UNREADABLE[name])
            if name in _PARAMETERS and args:
                value = args[0]
            elif name == _TYPED and len(args) >= 4 and self._is_plain(str(args[1])):
                inner = args[2]
                value = Record(args[0], inner if isinstance(inner, tuple) else ())
            elif name in _VIEWS or (name == _TYPED and len(args) >= 4):
                return name, args
            else:
                raise TensorFormError(f"pickled in an unknown way, by {name}")

    def _is_plain(self, kind: str) -> bool:
        return kind in _PLAIN_TYPES or kind in self._allowed

    def read_view(self, value: Value) -> StorageView:
        """Return what is stored of a tensor that must be plain: a local tensor, a mesh's ranks."""
        name, args = self._unwrap(value)
        if name == _TYPED:
            raise TensorFormError(f"a {args[1]} where a plain tensor was expected")
        return self._view(name, args)

    def _view(self, name: str, args: tuple[Value, ...]) -> StorageView:
        match args:
            case (Persistent() as storage, int(offset), sizes, strides, *rest):
                dtype, key, elements = _storage(storage, _stated_dtype(name, rest))
            case _:
                raise TensorFormError(f"pickled by {name} in an unknown form")
        extra = rest[3:] if name == _VIEW_V3 else rest[2:]
        if any(extra):
            raise TensorFormError(f"lazy conjugation or negation ({extra[0]}): resolve it and save")
        view = StorageView(key, dtype, elements, offset, ints(sizes), ints(strides))
        _check_inside(view)
        return view

    def _dtensor(self, args: tuple[Value, ...], state: dict[str, Value]) -> LocalTensor:
        if len(args) < 3:
            raise TensorFormError(f"a DTensor with {len(args)} arguments")
        view = self.read_view(member(state, "_local_tensor"))
        spec = member(state, "_spec")
        shape, stated = ints(args[2]), dtype_named(args[1])
        if stated is not view.dtype:
            raise TensorFormError(f"the DTensor says {stated}, its local tensor {view.dtype}")
        sharding = self._specs.get(id(spec))
        if sharding is None:
            sharding = self._specs[id(spec)] = self._sharding(spec)
        _check_meta(spec, shape)
        return LocalTensor(view, shape, sharding)

    def _sharding(self, spec: Value) -> Sharding:
        fields = state_of(spec)
        placements = member(fields, "placements")
        if not isinstance(placements, tuple | list):
            raise TensorFormError("placements that are not a sequence")
        mesh = self._meshes.read(member(fields, "mesh"))
        order = fields.get("shard_order")
        return Sharding(mesh, tuple(_placement(p) for p in placements), _shard_order(order))


def _stated_dtype(name: str, rest: list[Value]) -> DType | None:
    """Return the dtype that `_rebuild_tensor_v3` states beside an untyped storage."""
    if name != _VIEW_V3:
        return None
    if len(rest) < 3:
        raise TensorFormError(f"pickled by {name} without a dtype")
    return dtype_named(rest[2])


def _storage(storage: Persistent, stated: DType | None) -> tuple[DType, str, int]:
    """Return (dtype, key, number of elements) of a storage; `stated` is for untyped ones."""
    match storage.pid:
        case ("storage", Global(module, name), str(key), str(), int(count), *_) if count >= 0:
            pass
        case _:
            raise TensorFormError(f"a storage reference of unknown form: {storage.pid}")
    if name == "UntypedStorage" and stated is not None:
        return stated, key, count // stated.itemsize
    if module not in ("torch", "torch.cuda", "torch.storage") or name not in _STORAGES:
        raise TensorFormError(f"a storage of unknown type {module}.{name}")
    dtype = BY_NAME[_STORAGES[name]]
    if stated not in (None, dtype):
        raise TensorFormError(f"a storage of {dtype} for a tensor of {stated}")
    return dtype, key, count


def dtype_named(value: Value) -> DType:
    """Return the dtype of a pickled `torch.<name>`."""
    match value:
        case Global("torch", name) if name in BY_NAME:
            return BY_NAME[name]
    raise TensorFormError(f"unknown dtype {value}")


def _check_inside(view: StorageView) -> None:
    if len(view.sizes) != len(view.strides) or min((0, *view.sizes, *view.strides)) < 0:
        raise TensorFormError(f"sizes {view.sizes} and strides {view.strides} do not fit")
    if 0 in view.sizes:
        return
    last = sum((n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True))
    if view.offset < 0 or view.offset + last >= view.storage_elements:
        raise TensorFormError(
            f"its elements {view.offset} to {view.offset + last} lie outside its storage of "
            f"{view.storage_elements}"
        )


def _check_meta(spec: Value, shape: tuple[int, ...]) -> None:
    """Compare the shape with what the spec's tensor_meta repeats; in all forms it stands first."""
    match state_of(spec).get("tensor_meta"):
        case Record(args=(stated, *_)) if ints(stated) != shape:
            raise TensorFormError(f"the DTensor says shape {shape}, its spec {ints(stated)}")


def _placement(value: Value) -> Placement:
    if not isinstance(value, Record) or not isinstance(value.callee, Global):
        raise TensorFormError(f"an unknown placement: {value}")
    fields = state_of(value)
    name = value.callee.name if value.callee.module in _PLACEMENT_MODULES else str(value.callee)
    match name, fields:
        case "Shard", {"dim": int(dim)}:
            return Shard(dim)
        case "_StridedShard", {"dim": int(dim), "split_factor": int(factor)}:
            return StridedShard(dim, factor)
        case "Replicate", _:
            return Replicate()
        case "Partial" | "_Partial" | "_NormPartial" | "_MaskPartial", _:
            return Partial(str(fields.get("reduce_op", "sum")))
    raise TensorFormError(f"an unknown placement: {name} {fields}")


def _shard_order(value: Value) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    if value is None:
        return None
    entries = value if isinstance(value, tuple | list) else ()
    order = []
    for entry in entries:
        match entry:
            case Record(args=(int(dim), mesh_dims)):
                order.append((dim, ints(mesh_dims)))
            case Record(state={"tensor_dim": int(dim), "mesh_dims": mesh_dims}):
                order.append((dim, ints(mesh_dims)))
            case _:
                raise TensorFormError("a shard order of unknown form")
    return tuple(order)
