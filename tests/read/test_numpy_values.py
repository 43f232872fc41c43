"""numpy's pickles, read back into numbers: against numpy itself."""

import pickle
import warnings

import numpy as np
import pytest

from unshard.containers.pickles.records import Record
from unshard.containers.pickles.unpickle import unpickle
from unshard.read.torch_save.values import TensorFormError
from unshard.read.training_state.plain_values import bytes_of, read_array, read_scalar

DTYPES = ("b1", "i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u4", "u8", "f2", ">f4", "f8", "c8", "c16")


def record(value: object, protocol: int = 2) -> Record:
    found = unpickle(pickle.dumps(value, protocol=protocol))
    assert isinstance(found, Record)
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("code", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 1)])
def test_arrays_of_numbers(code: str, shape: tuple[int, ...], protocol: int) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(code)
    for stored in (array, np.asfortranarray(array), array[::-1] if array.ndim else array):
        value = record(np.ascontiguousarray(stored) if stored.ndim == 1 else stored, protocol)
        found = read_array(value)
        assert found.dtype == stored.dtype.newbyteorder("<")
        assert found.shape == stored.shape
        assert found.flags.c_contiguous
        assert (found == stored).all()


def test_numpy_1_has_its_multiarray_elsewhere() -> None:
    data = pickle.dumps(np.arange(3), protocol=2).replace(b"numpy._core", b"numpy.core")
    value = unpickle(data)
    assert isinstance(value, Record)
    assert read_array(value).tolist() == [0, 1, 2]


@pytest.mark.parametrize("code", ["b1", "i1", ">i8", "u4", "f2", "<f4", "f8"])
def test_scalars_become_pythons_own(code: str) -> None:
    scalar = np.array([1]).astype(code)[0]
    found = read_scalar(record(scalar))
    assert type(found) is type(scalar.item())
    assert found == scalar


def test_an_array_is_not_a_scalar() -> None:
    with pytest.raises(TensorFormError, match="unknown form"):
        read_scalar(record(np.arange(2)))


@pytest.mark.parametrize(
    "array",
    [
        np.array([{}, None], dtype=object),
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_anything_else_are_refused(array: np.ndarray[tuple[int], np.dtype]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = record(array)
    with pytest.raises(TensorFormError, match="of dtype"):
        read_array(value)


@pytest.mark.parametrize("scalar", [np.complex64(1j), np.longdouble(1)])
def test_scalars_that_python_does_not_have_are_refused(scalar: object) -> None:
    with pytest.raises(TensorFormError, match="numpy"):
        read_scalar(record(scalar))


def test_an_array_without_all_its_elements_is_refused() -> None:
    value = record(np.arange(3, dtype=np.int8))
    assert isinstance(value.state, tuple)
    version, _, *rest = value.state
    for sizes in ((4,), (2,), (-3,), (3, 2**60), "x"):
        value.state = (version, sizes, *rest)
        with pytest.raises(TensorFormError):
            read_array(value)
    value.state = None
    with pytest.raises(TensorFormError, match="unknown form"):
        read_array(value)


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256))])
@pytest.mark.parametrize("protocol", [2, 4])
def test_bytes_of_every_protocol(data: bytes, protocol: int) -> None:
    assert bytes_of(unpickle(pickle.dumps(data, protocol=protocol))) == data


@pytest.mark.parametrize("value", ["a", 1, None, [b"a"]])
def test_what_is_not_bytes(value: object) -> None:
    assert bytes_of(value) is None
