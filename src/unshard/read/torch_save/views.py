"""What torch pickles a plain tensor as: from records to storage, shape and strides.

Sources: the pickles of torch 2.1 to 2.15 (`docs/formats.md`), `torch._utils`, `torch._tensor`.
"""

from dataclasses import dataclass

from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.pickles.writer import STORAGES
from unshard.read.torch_save.values import TensorFormError, ints, named, shape
from unshard.tensors.dtypes import BY_NAME, DType

__all__ = [
    "TYPED",
    "Call",
    "StorageView",
    "dtype_named",
    "is_tensor",
    "read_view",
    "unwrap",
    "view_of",
]

Call = tuple[str, tuple[Value, ...]]
"""What rebuilds a tensor: the function's dotted name, and its arguments."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """A view of a storage of `storage_elements`; `offset` and `strides` in elements too."""

    key: str
    dtype: DType
    storage_elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


_MAX_ELEMENTS = 1 << 58  # of 16 bytes each, what 64-bit offsets can address
_DTYPES = {storage: BY_NAME[dtype] for dtype, storage in STORAGES.items()}
_PLAIN_TYPES = frozenset(
    {
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    }
)
_UNREADABLE = {
    "torch._utils._rebuild_meta_tensor_no_storage": "it is on the meta device: it has no values",
    "torch._utils._rebuild_qtensor": "a quantized torch tensor: its values need their scales",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor: safetensors stores dense ones only",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor: safetensors stores dense ones",
    "torch._utils._rebuild_nested_tensor": "a nested tensor: it has no rectangular shape",
    "torch._utils._rebuild_device_tensor_from_numpy": "a device tensor pickled through numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a device tensor pickled through a copy",
}
TYPED = "torch._tensor._rebuild_from_type_v2"
_PARAMETERS = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_VIEW_V3 = "torch._utils._rebuild_tensor_v3"
_VIEWS = frozenset({"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", _VIEW_V3})
_TENSORS = _PARAMETERS | _VIEWS | frozenset(_UNREADABLE) | {TYPED}


def is_tensor(value: Value) -> bool:
    """Return whether a pickled value is a tensor of any kind, readable or not."""
    if not isinstance(value, Record) or not isinstance(value.callee, Global):
        return False
    return value.callee.dotted in _TENSORS


def unwrap(value: Value, allowed: frozenset[str]) -> Call:
    """Strip parameters and tensors that carry attributes; return the call that is left.

    Args:
        value: a pickled tensor.
        allowed: names of tensor subclasses that the user vouches for (`--allow-global`): read as
            the plain tensors they are stored as.

    Raises:
        TensorFormError: it is of a kind that cannot be read.
    """
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
        elif name == TYPED and len(args) >= 4 and _is_plain(args[1], allowed):
            inner = args[2]
            value = Record(args[0], inner if isinstance(inner, tuple) else ())
        elif name in _VIEWS or (name == TYPED and len(args) >= 4):
            return name, args
        else:
            raise TensorFormError(f"pickled in an unknown way, by {name}")


def _is_plain(kind: Value, allowed: frozenset[str]) -> bool:
    return isinstance(kind, Global) and (kind.dotted in _PLAIN_TYPES or kind.dotted in allowed)


def read_view(value: Value, allowed: frozenset[str] = frozenset()) -> StorageView:
    """Return what is stored of a tensor that must be plain: a local tensor, a mesh's ranks.

    Raises:
        TensorFormError: it is not plain, or reaches outside its storage.
    """
    name, args = unwrap(value, allowed)
    if name == TYPED:
        raise TensorFormError(f"of type {named(args[1])}, where a plain tensor was expected")
    return view_of(name, args)


def view_of(name: str, args: tuple[Value, ...]) -> StorageView:
    """Return what is stored of a plain tensor, from the call that rebuilds it."""
    match args:
        case (Persistent() as storage, int(offset), sizes, strides, *rest):
            dtype, key, elements = _storage(storage, _stated_dtype(name, rest))
        case _:
            raise TensorFormError(f"pickled by {name} in an unknown form")
    extra = rest[3:] if name == _VIEW_V3 else rest[2:]
    if any(extra):
        raise TensorFormError("under lazy conjugation or negation: resolve it and save")
    view = StorageView(key, dtype, elements, offset, shape(sizes), ints(strides))
    _check_inside(view)
    return view


def _stated_dtype(name: str, rest: list[Value]) -> DType | None:
    """Return the dtype that `_rebuild_tensor_v3` states next to an untyped storage."""
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
            raise TensorFormError(f"a storage reference of unknown form: {named(storage.pid)}")
    if name == "UntypedStorage" and stated is not None:
        return stated, key, count // stated.itemsize
    if module not in ("torch", "torch.cuda", "torch.storage") or name not in _DTYPES:
        raise TensorFormError(f"a storage of unknown type {module}.{name}")
    dtype = _DTYPES[name]
    if stated not in (None, dtype):
        raise TensorFormError(f"a storage of {dtype} for a tensor of {stated}")
    return dtype, key, count


def dtype_named(value: Value) -> DType:
    """Return the dtype of a pickled `torch.<name>`."""
    match value:
        case Global("torch", name) if name in BY_NAME:
            return BY_NAME[name]
    raise TensorFormError(f"of an unknown dtype, {named(value)}")


def _check_inside(view: StorageView) -> None:
    if len(view.sizes) != len(view.strides) or min((view.offset, *view.strides)) < 0:
        raise TensorFormError(f"sizes {view.sizes} and strides {view.strides} do not fit")
    if view.offset >= _MAX_ELEMENTS or view.storage_elements >= _MAX_ELEMENTS:
        raise TensorFormError("a view of a storage that is larger than any file")
    if 0 in view.sizes:
        return
    last = sum((n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True))
    if view.offset + last >= view.storage_elements:
        raise TensorFormError(
            f"its elements {view.offset} to {view.offset + last} are outside its storage of "
            f"{view.storage_elements}"
        )
