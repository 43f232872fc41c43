"""What numpy pickles its arrays and scalars as: from records to arrays of numbers.

Numbers and booleans only; arrays of objects, texts and records are refused. Sources: numpy's
`ndarray.__reduce__`, the pickles of numpy 1.26 (`numpy.core`) and 2.x (`numpy._core`).
"""

import re
from math import prod

import numpy as np
from numpy.typing import NDArray

from unshard.containers.pickles.records import Record, Value
from unshard.read.torch_save.values import TensorFormError, named, shape

__all__ = ["Array", "bytes_of", "is_numpy", "read_array", "read_scalar"]

Array = NDArray[np.generic]

_ARRAYS = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_BYTES = ("__builtin__.bytes", "builtins.bytes")
_CODE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")  # longer floats differ between machines


def is_numpy(value: Record) -> bool:
    """Return whether a record is an array or a scalar of numpy."""
    return value.is_call_of(*_ARRAYS, *_SCALARS)


def bytes_of(value: Value) -> bytes | None:
    """Return pickled bytes, which protocol 2 spells as encoded text; None for anything else."""
    match value:
        case bytes():
            return value
        case Record(args=()) if value.is_call_of(*_BYTES):
            return b""
        case Record(args=(str(text), "latin1" | "latin-1")) if value.is_call_of("_codecs.encode"):
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                return None
    return None


def read_scalar(value: Record) -> bool | int | float | None:
    """Return the number that a pickled numpy scalar is; None if the record is not a scalar.

    Raises:
        TensorFormError: it is none of Python's numbers, or contradicts itself.
    """
    if not value.is_call_of(*_SCALARS):
        return None
    match value.args:
        case (kind, data):
            number = _elements(kind, data, 1)[0].item()
            if isinstance(number, bool | int | float):
                return number
    raise TensorFormError("a numpy scalar of unknown form")


def read_array(value: Record) -> Array:
    """Return a pickled array, row-major and little-endian.

    Raises:
        TensorFormError: its elements are not numbers, or it contradicts itself.
    """
    match value.state:
        case (int(), sizes, kind, bool(is_fortran), data):
            wanted = shape(sizes)
        case _:
            raise TensorFormError("a numpy array of unknown form")
    flat = _elements(kind, data, prod(wanted))
    return np.ascontiguousarray(flat.reshape(wanted, order="F" if is_fortran else "C")).reshape(
        wanted
    )


def _elements(kind: Value, data: Value, count: int) -> Array:
    """Return `count` elements, little-endian."""
    match kind:
        case Record(args=(str(code), *_), state=(int(), "<" | ">" | "|" | "=" as order, *_)) if (
            kind.is_call_of("numpy.dtype") and _CODE.fullmatch(code)
        ):
            dtype = np.dtype(order + code)
        case Record(args=(str(code), *_)) if kind.is_call_of("numpy.dtype"):
            raise TensorFormError(f"a numpy array or scalar of dtype {named(code)}")
        case _:
            raise TensorFormError("a numpy array or scalar without a dtype")
    raw = bytes_of(data)
    if raw is None or len(raw) != count * dtype.itemsize:
        raise TensorFormError(f"a numpy array or scalar without its {count} elements")
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("<"))
