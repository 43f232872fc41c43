"""The element types of safetensors, under torch's names.

Sources: the dtype table of the safetensors format, and torch's storage classes for the names.
Only `numpy_dtype` needs numpy.
"""

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, get_args

from unshard.keywords import Cast

if TYPE_CHECKING:
    import numpy as np

CASTS: tuple[str, ...] = get_args(Cast)
"""Dtypes that a merge can cast floating point tensors to."""


class DTypeKind(Enum):
    """The kind of a dtype's elements. Only floats are ever cast, and only to floats."""

    FLOAT = "float"
    INTEGER = "integer"
    BOOL = "bool"
    COMPLEX = "complex"


class DType(NamedTuple):
    """An element type.

    Attributes:
        name: torch's name, without the `torch.`.
        code: the name in a safetensors header; None where safetensors has none.
        itemsize: bytes per element.
        kind: the kind of the elements.
        castable: whether `--dtype` may change it. 8-bit floats are quantised values with separate
            scale tensors, so they stay as they are.
    """

    name: str
    code: str | None
    itemsize: int
    kind: DTypeKind
    castable: bool = False

    def __str__(self) -> str:
        return self.name


_ALL = (
    DType("float64", "F64", 8, DTypeKind.FLOAT, castable=True),
    DType("float32", "F32", 4, DTypeKind.FLOAT, castable=True),
    DType("float16", "F16", 2, DTypeKind.FLOAT, castable=True),
    DType("bfloat16", "BF16", 2, DTypeKind.FLOAT, castable=True),
    DType("float8_e4m3fn", "F8_E4M3", 1, DTypeKind.FLOAT),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, DTypeKind.FLOAT),
    DType("float8_e5m2", "F8_E5M2", 1, DTypeKind.FLOAT),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, DTypeKind.FLOAT),
    DType("float8_e8m0fnu", "F8_E8M0", 1, DTypeKind.FLOAT),
    DType("int64", "I64", 8, DTypeKind.INTEGER),
    DType("int32", "I32", 4, DTypeKind.INTEGER),
    DType("int16", "I16", 2, DTypeKind.INTEGER),
    DType("int8", "I8", 1, DTypeKind.INTEGER),
    DType("uint64", "U64", 8, DTypeKind.INTEGER),
    DType("uint32", "U32", 4, DTypeKind.INTEGER),
    DType("uint16", "U16", 2, DTypeKind.INTEGER),
    DType("uint8", "U8", 1, DTypeKind.INTEGER),
    DType("bool", "BOOL", 1, DTypeKind.BOOL),
    DType("complex64", "C64", 8, DTypeKind.COMPLEX),
    DType("complex128", None, 16, DTypeKind.COMPLEX),
)

BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_CODE = {dtype.code: dtype for dtype in _ALL if dtype.code is not None}


@cache
def numpy_dtype(dtype: DType) -> "np.dtype[np.generic]":
    """Return the equivalent numpy dtype; bfloat16 and float8 come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    scalar = getattr(ml_dtypes, dtype.name, None)
    return np.dtype(dtype.name if scalar is None else scalar)
