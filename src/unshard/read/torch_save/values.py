"""Reads torch's pickles: sizes, attributes, dtypes, and plain tensors with the storages they view.

Sources: the pickles of torch 2.1 to 2.15 (`docs/formats.md`), `torch._utils`, `torch._tensor`.
"""

import re
from typing import NamedTuple

from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.torch_files.writer import STORAGES
from unshard.tensors.dtypes import BY_NAME, DType

_MAX_DIMENSIONS = 32
_MAX_WRAPPED = 8
_MAX_NUMBER = 1 << 58  # elements of 16 bytes each, what 64-bit offsets can address
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
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
# Weights that torchao quantises in every forward pass: the wrapped tensor is the weight itself.
_WHOLE_WEIGHT = re.compile(
    r"torchao\.(?:\w+\.)*(?:WeightWith(?:Dynamic|Delayed|Static)Float8CastTensor|ScaledGroupedMMTensor"
    r"|(?:MX)?F(?:loat|P)8TrainingWeightWrapperTensor|Int8MixedPrecisionTrainingLinearWeight)"
)
_TENSORS = _PARAMETERS | _VIEWS | frozenset(_UNREADABLE) | {TYPED}


class TensorFormError(ValueError):
    """A pickled tensor is of a form that cannot be read. The message completes "it is …"."""


def ints(value: Value) -> tuple[int, ...]:
    """Return a sequence of integers: a tuple, a list, or a pickled `torch.Size`."""
    if isinstance(value, Record) and value.is_call_of("torch.Size"):
        value = value.args[0] if value.args else ()
    if isinstance(value, tuple | list):
        for item in value:
            if type(item) is not int or not -_MAX_NUMBER < item < _MAX_NUMBER:
                break
        else:
            return tuple(value)
    raise TensorFormError(f"a sequence of sizes was expected, not {named(value)}")


def sizes_of(value: Value) -> tuple[int, ...]:
    """Return a tensor's sizes: few integers, none negative, whose product is addressable."""
    sizes = ints(value)
    elements = 1
    for size in sizes[:_MAX_DIMENSIONS]:
        elements *= max(size, 1)
    if len(sizes) > _MAX_DIMENSIONS or min(sizes, default=0) < 0 or elements >= _MAX_NUMBER:
        raise TensorFormError(
            f"a tensor of {len(sizes)} sizes {list(sizes[:8])}, which is impossible"
        )
    return sizes


def named(value: Value) -> str:
    """Return a few words for any value: never long, never nested, even for hostile pickles."""
    match value:
        case Global():
            return value.dotted[:200]
        case Record(callee=Global() as callee):
            return f"an instance of {callee.dotted[:200]}"
        case None | bool() | float():
            return repr(value)
        case str() | bytes():
            return repr(value[:80])
        case int() if -_MAX_NUMBER < value < _MAX_NUMBER:
            return repr(value)
    return f"a value of type {type(value).__name__}"


def state_of(value: Value) -> dict[str, Value]:
    """Return an object's attributes, from `{…}`, `(None, {…})` or `({…}, {…})`, if any."""
    state = value.state if isinstance(value, Record) else value
    if isinstance(state, dict):
        return state
    fields: dict[str, Value] = {}
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            fields = part if not fields else fields | part
        elif part is not None:
            raise TensorFormError(f"attributes of unknown form ({type(part).__name__})")
    return fields


def member(fields: dict[str, Value], *names: str) -> Value:
    """Return the first of these attributes that is present."""
    for name in names:
        if name in fields:
            return fields[name]
    raise TensorFormError(f"the attribute {names[0]} is missing")


def items_of(value: Value) -> dict[str, Value] | None:
    """Return a pickled dict (or OrderedDict) whose keys are all strings; None for anything else."""
    items: dict[Value, Value]
    if isinstance(value, dict):
        items = value
    elif isinstance(value, Record) and value.is_call_of("collections.OrderedDict"):
        items = dict(value.items)
    else:
        return None
    named = {name: item for name, item in items.items() if isinstance(name, str)}
    return named if len(named) == len(items) else None


def is_lightning(value: Value) -> bool:
    """Return whether Lightning's Trainer saved a value, with its module around the model."""
    return "pytorch-lightning_version" in (items_of(value) or {})


class StorageView(NamedTuple):
    """A view of a storage of `storage_elements`; `offset` and `strides` in elements too."""

    key: str
    dtype: DType
    storage_elements: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def is_tensor(value: Value) -> bool:
    """Return whether a pickled value is a tensor of any kind, readable or not."""
    if not isinstance(value, Record) or not isinstance(value.callee, Global):
        return False
    return value.callee.dotted in _TENSORS


def unwrap(value: Value, allowed: frozenset[str]) -> tuple[str, tuple[Value, ...]]:
    """Strip parameters and tensors that carry attributes; return the function and its arguments.

    Subclasses that are `allowed` (`--allow-global`) are read as the plain tensors that they store.

    Raises:
        TensorFormError: it is of a kind that cannot be read.
    """
    plain_types = _PLAIN_TYPES | allowed
    for _ in range(_MAX_WRAPPED):  # a wrapper may be inside itself
        match value:
            case Record(callee=Global() as callee, args=args):
                name = callee.dotted
            case _:
                raise TensorFormError(f"{named(value)}, with tensors in it")
        kind = args[1].dotted if len(args) > 1 and isinstance(args[1], Global) else ""
        if name in _UNREADABLE:
            raise TensorFormError(_UNREADABLE[name])
        if name in _PARAMETERS and args:
            value = args[0]
        elif name == TYPED and len(args) >= 4 and _WHOLE_WEIGHT.fullmatch(named(args[1])):
            value = member(state_of(args[3]), "_tensor", "_data")
        elif name == TYPED and len(args) >= 4 and kind in plain_types and not packed(args):
            inner = args[2]
            value = Record(args[0], inner if isinstance(inner, tuple) else ())
        elif name in _VIEWS or (name == TYPED and len(args) >= 4):
            return name, args
        else:
            raise TensorFormError(f"pickled in an unknown way, by {name}")
    raise TensorFormError("wrapped too often")


def packed(args: tuple[Value, ...]) -> str:
    """Return advice about a tensor that is made of others; "" if it has bytes of its own."""
    is_packed = named(args[0]) == _WRAPPER
    return ", packed into other tensors: dequantise it and save it again" if is_packed else ""


def read_view(value: Value, allowed: frozenset[str] = frozenset()) -> StorageView:
    """Return the view of a tensor that must be plain: a local tensor, a mesh's ranks.

    Raises:
        TensorFormError: it is not plain, or reaches outside its storage.
    """
    name, args = unwrap(value, allowed)
    if name == TYPED:
        problem = f"of type {named(args[1])}, where a plain tensor was expected"
        raise TensorFormError(problem + packed(args))
    return view_of(name, args)


def view_of(name: str, args: tuple[Value, ...]) -> StorageView:
    """Return the view of a plain tensor, from the call that rebuilds it."""
    match args:
        case (Persistent() as storage, int(offset), sizes, strides, *rest):
            pass
        case _:
            raise TensorFormError(f"pickled by {name} in an unknown form")
    if name == _VIEW_V3 and len(rest) < 3:
        raise TensorFormError(f"pickled by {name} without a dtype")
    # The third version has the dtype as an argument, next to an untyped storage.
    dtype_of_view = dtype_named(rest.pop(2)) if name == _VIEW_V3 else None
    dtype, key, elements = _storage(storage, dtype_of_view)
    if any(rest[2:]):
        raise TensorFormError("under lazy conjugation or negation: resolve it and save")
    view = StorageView(key, dtype, elements, offset, sizes_of(sizes), ints(strides))
    _check_inside(view)
    return view


def _storage(storage: Persistent, view_dtype: DType | None) -> tuple[DType, str, int]:
    """Return (dtype, key, number of elements) of a storage; `view_dtype` is of untyped ones."""
    match storage.pid:
        case ("storage", Global(module, name), str(key), str(), int(count), *_) if count >= 0:
            pass
        case _:
            raise TensorFormError(f"a storage reference of unknown form: {named(storage.pid)}")
    if name == "UntypedStorage" and view_dtype is not None:
        return view_dtype, key, count // view_dtype.itemsize
    if module not in ("torch", "torch.cuda", "torch.storage") or name not in _DTYPES:
        raise TensorFormError(f"a storage of unknown type {module}.{name}")
    dtype = _DTYPES[name]
    if view_dtype not in (None, dtype):
        raise TensorFormError(f"a storage of {dtype} for a tensor of {view_dtype}")
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
    if view.offset >= _MAX_NUMBER or view.storage_elements >= _MAX_NUMBER:
        raise TensorFormError("a view of a storage that is larger than any file")
    if 0 in view.sizes:
        return
    last = sum((n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True))
    if view.offset + last >= view.storage_elements:
        raise TensorFormError(
            f"its elements {view.offset} to {view.offset + last} are outside its storage of "
            f"{view.storage_elements}"
        )
