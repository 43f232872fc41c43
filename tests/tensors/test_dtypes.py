"""The dtype table against the libraries it names: safetensors, torch, numpy and ml_dtypes."""

import json
from collections.abc import Callable
from struct import pack

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save

from unshard.tensors.dtypes import BY_CODE, BY_NAME, DType, DTypeKind, numpy_dtype

ALL = list(BY_NAME.values())
STORABLE = list(BY_CODE.values())
CASTABLE = {"float64", "float32", "float16", "bfloat16"}
KINDS: dict[DTypeKind, Callable[[torch.dtype], bool]] = {
    DTypeKind.FLOAT: lambda dtype: dtype.is_floating_point,
    DTypeKind.COMPLEX: lambda dtype: dtype.is_complex,
    DTypeKind.BOOL: lambda dtype: dtype is torch.bool,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def only_entry(data: bytes) -> tuple[object, object]:
    """Return dtype code and shape of a file's only tensor, as safetensors' own reader sees it."""
    ((_, fields),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # no types
    return fields["dtype"], fields["shape"]


def file_of_one(code: str, data_size: int, elements: int) -> bytes:
    """Return a safetensors file with one tensor, written without any library."""
    entry = {"dtype": code, "shape": [elements], "data_offsets": [0, data_size]}
    header = json.dumps({"t": entry}).encode()
    return pack("<Q", len(header)) + header + bytes(data_size)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_safetensors_reads_the_code_with_this_element_size(dtype: DType) -> None:
    data = file_of_one(dtype.code or "", 3 * dtype.itemsize, elements=3)
    assert only_entry(data) == (dtype.code, [3])


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_safetensors_refuses_the_code_with_another_element_size(dtype: DType) -> None:
    data = file_of_one(dtype.code or "", 3 * dtype.itemsize + 1, elements=3)
    with pytest.raises(safetensors.SafetensorError):
        only_entry(data)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_sizes_are_torchs(dtype: DType) -> None:
    assert dtype.itemsize == torch_dtype(dtype).itemsize


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_numpys_elements_have_the_same_size(dtype: DType) -> None:
    assert numpy_dtype(dtype).itemsize == dtype.itemsize


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_kinds_are_torchs(dtype: DType) -> None:
    theirs = torch_dtype(dtype)
    kind = next((kind for kind, is_kind in KINDS.items() if is_kind(theirs)), DTypeKind.INTEGER)
    assert dtype.kind is kind


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_only_floats_of_16_bits_and_more_are_castable(dtype: DType) -> None:
    assert dtype.castable == (dtype.kind is DTypeKind.FLOAT and dtype.itemsize >= 2)
    assert dtype.castable == (dtype.name in CASTABLE)


def test_bfloat16_and_float8_come_from_ml_dtypes() -> None:
    assert numpy_dtype(BY_NAME["bfloat16"]) == np.dtype(ml_dtypes.bfloat16)
    assert numpy_dtype(BY_NAME["float8_e8m0fnu"]) == np.dtype(ml_dtypes.float8_e8m0fnu)
    assert numpy_dtype(BY_NAME["float16"]) == np.dtype(np.float16)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"float8_e8m0fnu", "complex128"}))
def test_the_code_is_what_safetensors_writes_for_torch(name: str) -> None:
    tensor = torch.zeros(1).to(getattr(torch, name))
    assert only_entry(save({"t": tensor})) == (BY_NAME[name].code, [1])


def test_no_code_stands_for_two_dtypes() -> None:
    assert len(STORABLE) == len([dtype for dtype in ALL if dtype.code is not None])


def test_complex128_has_no_place_in_safetensors() -> None:
    assert BY_NAME["complex128"].code is None


def test_a_dtype_is_shown_by_its_torch_name() -> None:
    assert f"{BY_NAME['bfloat16']}" == "bfloat16"
