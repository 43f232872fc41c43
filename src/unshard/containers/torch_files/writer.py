"""Write files like `torch.save`: plain values and tensors in a zip, without torch.

`torch.load` reads them with `weights_only=True`, also with `mmap=True`: the pickle names only
classes that torch's restricted unpickler knows. The same value gives the same bytes, because times
are fixed.

Sources: `torch._weights_only_unpickler`, `torch._utils._rebuild_tensor_v2` and
`_rebuild_tensor_v3`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import pack
from typing import BinaryIO
from zipfile import ZipFile, ZipInfo

from unshard.containers.open_files import opened
from unshard.containers.pickles.pickler import PickledCall, pickled
from unshard.containers.pickles.records import Global, Persistent
from unshard.containers.strided import read_exactly
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import ByteRange
from unshard.tensors.dtypes import DType

Plain = object
"""None, bool, int, float, str, bytes and `SavedTensor`; and lists, tuples, dicts, sets,
OrderedDicts and Counters of them."""

STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""torch's storage classes by dtype; other dtypes are stored untyped."""

_ROOT = "archive"
_VERSION = b"3\n"
_ALIGNMENT = 64
_BLOCK = 1 << 20
_LOCAL_SIZE = 30
_ZIP64_FIELD = 20
_ZIP64_FROM = 1 << 30  # lower than zipfile's own limit of about 2 GiB, so it never decides
_UNIX = 3


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor to write.

    Attributes:
        dtype: the dtype of its elements.
        shape: its sizes.
        source: its elements, row-major: bytes, or a range of a file; None if only the pickle is
            written.
    """

    dtype: DType
    shape: tuple[int, ...]
    source: bytes | ByteRange | None

    @property
    def nbytes(self) -> int:
        """Size of the elements, bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_torch_file(path: Path, value: Plain) -> None:
    """Write a value as `torch.save` would; elements of tensors are copied block by block.

    Raises:
        TypeError, ValueError: it cannot be written (see `write_pickle`).
        CorruptError: the file that has a tensor's elements ends too early.
    """
    pickle, tensors = write_pickle(value)
    with path.open("wb") as raw, ZipFile(raw, "w") as archive:
        _add(archive, raw, "data.pkl", len(pickle), [pickle])
        _add(archive, raw, "byteorder", 6, [b"little"])
        for key, tensor in enumerate(tensors):
            _add(archive, raw, f"data/{key}", tensor.nbytes, _elements(tensor))
        _add(archive, raw, "version", len(_VERSION), [_VERSION])


def _add(
    archive: ZipFile, raw: BinaryIO, name: str, size: int, blocks: Iterable[bytes | bytearray]
) -> None:
    """Add a record of `size` bytes, stored, at the next multiple of 64 bytes."""
    record = ZipInfo(f"{_ROOT}/{name}")
    is_large = size > _ZIP64_FROM
    before = raw.tell() + _LOCAL_SIZE + len(record.filename) + _ZIP64_FIELD * is_large + 4
    padding = -before % _ALIGNMENT
    record.extra = pack("<2sH", b"FB", padding) + b"Z" * padding
    record.create_system = _UNIX
    record.file_size = size
    with archive.open(record, "w", force_zip64=is_large) as out:
        for block in blocks:
            out.write(block)


def _elements(tensor: SavedTensor) -> Iterator[bytes | bytearray]:
    """Yield a tensor's bytes, block by block."""
    source = tensor.source
    if source is None:
        raise TypeError("a tensor whose elements are not known cannot be written")
    if isinstance(source, bytes):
        yield source
        return
    with opened(source.path) as file:
        for start in range(0, source.length, _BLOCK):
            block = bytearray(min(_BLOCK, source.length - start))
            read_exactly(file, source.offset + start, memoryview(block))
            yield block


def write_pickle(value: Plain) -> tuple[bytes, tuple[SavedTensor, ...]]:
    """Return the pickle of a value, and the tensors of its storages "0", "1", ….

    Raises:
        TypeError, ValueError: it cannot be written (see `pickler.pickled`).
    """
    tensors: list[SavedTensor] = []

    def reduce(part: object) -> PickledCall:
        if not isinstance(part, SavedTensor):
            raise TypeError(f"a value of type {type(part).__name__} cannot be written")
        tensors.append(part)
        return rebuilt(part, str(len(tensors) - 1))

    return pickled(value, reduce), tuple(tensors)


def rebuilt(tensor: SavedTensor, key: str) -> PickledCall:
    """Return the call that makes a tensor from the storage with this key."""
    storage = STORAGES.get(tensor.dtype.name)
    kind = Global("torch", storage) if storage else Global("torch.storage", "UntypedStorage")
    count = tensor.nbytes // tensor.dtype.itemsize if storage else tensor.nbytes
    at = Persistent(("storage", kind, key, "cpu", count))
    strides = row_major_strides(tensor.shape)
    args = (at, 0, tensor.shape, strides, False, OrderedDict[str, object]())
    if storage:
        return PickledCall(Global("torch._utils", "_rebuild_tensor_v2"), args)
    dtype = Global("torch", tensor.dtype.name)
    return PickledCall(Global("torch._utils", "_rebuild_tensor_v3"), (*args, dtype))
