"""The element types that safetensors can hold, under torch's names.

Source: the safetensors format's dtype table, and torch's storage classes for the torch names.
Knows names, codes and sizes; numpy is needed only where elements are looked at (`numpy_dtype`).
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
    """What a dtype's elements are. Only floating point is ever cast, and only to floating point."""

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
        kind: what the elements are.
        castable: whether `--dtype` may change it. 8-bit floats are quantised values that belong to
            scale tensors next to them, and stay as they are.
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
    """Return the numpy dtype with the same elements; bfloat16 and float8 come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    scalar = getattr(ml_dtypes, dtype.name, None)
    return np.dtype(dtype.name if scalar is None else scalar)
