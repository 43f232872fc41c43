"""Files as `torch.save` writes them: plain values and tensors in a zip, written without torch.

`torch.load` reads them with `weights_only=True`, also with `mmap=True`. The same value gives the
same bytes: times are fixed, and sets are written in the order of their elements' bytes. The pickle
is of protocol 2, and has only what torch's restricted unpickler knows; nothing is memoised, so what
occurs twice is written twice.

Sources: `pickletools`, `torch._weights_only_unpickler`, `torch._utils._rebuild_tensor_v2` and
`_rebuild_tensor_v3`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import BinaryIO
from zipfile import ZipFile, ZipInfo

from unshard.containers.open_files import opened
from unshard.containers.strided import read_exactly
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import ByteRange
from unshard.tensors.dtypes import DType

__all__ = [
    "MAX_DEPTH",
    "MAX_INT_BYTES",
    "STORAGES",
    "Plain",
    "SavedTensor",
    "write_pickle",
    "write_torch_file",
]

MAX_DEPTH = 100
"""How deep containers may be nested."""
MAX_INT_BYTES = 255
"""The longest integer, in two's complement."""

Plain = object
"""What can be written: None, bool, int, float, str, bytes and `SavedTensor`; and lists, tuples,
dicts, sets, OrderedDicts and Counters of them."""

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
"""torch's storage classes by dtype; the dtypes that have none are stored untyped."""

_ROOT = "archive"
_VERSION = b"3\n"
_ALIGNMENT = 64
_BLOCK = 1 << 20
_LOCAL_SIZE = 30
_ZIP64_FIELD = 20
_ZIP64_FROM = 1 << 30  # zipfile would decide by itself from about 2 GiB on
_UNIX = 3


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor to write.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        source: its elements, row-major: the bytes, or where they are in a file.
    """

    dtype: DType
    shape: tuple[int, ...]
    source: bytes | ByteRange

    @property
    def nbytes(self) -> int:
        """Size of the elements, bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.length


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
    if isinstance(source, bytes):
        yield source
        return
    with opened(source.path) as file:
        for start in range(0, source.length, _BLOCK):
            block = bytearray(min(_BLOCK, source.length - start))
            read_exactly(file, source.offset + start, memoryview(block))
            yield block


def write_pickle(value: Plain) -> tuple[bytes, tuple[SavedTensor, ...]]:
    """Return the pickle of a value, and the tensors whose storages it names "0", "1", ….

    An instance of a subclass is written as what `Plain` lists: a defaultdict as a dict.

    Raises:
        TypeError: a part of it is nothing that `Plain` lists.
        ValueError: it is nested too deep, or has an integer that is too long.
    """
    writer = _Writer()
    writer.out += b"\x80\x02"
    writer.emit(value, 0)
    writer.out += b"."
    return bytes(writer.out), tuple(writer.tensors)


class _Writer:
    """The opcodes written so far, and the tensors they refer to."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.tensors: list[SavedTensor] = []

    def emit(self, value: Plain, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        match value:
            case None | bool() | int() | float() | str() | bytes():
                self.out += _scalar(value)
            case list():
                self.out += b"]"
                self.marked(value, depth, b"e")
            case tuple() if value:
                self.marked(value, depth, b"t")
            case tuple():
                self.out += b")"
            case dict():
                self.mapping(value, depth)
            case set():
                self.elements(value, depth)
            case SavedTensor():
                self.tensor(value, depth)
            case _:
                raise TypeError(f"a value of type {type(value).__name__} cannot be written")

    def marked(self, values: Iterable[Plain], depth: int, end: bytes) -> None:
        """Write values between a mark and the opcode that takes them together."""
        self.out += b"("
        for value in values:
            self.emit(value, depth + 1)
        self.out += end

    def mapping(self, value: dict[Plain, Plain], depth: int) -> None:
        is_counter = isinstance(value, Counter)
        if isinstance(value, OrderedDict):
            self.out += _named("collections", "OrderedDict") + b")R"
        else:
            self.out += (_named("collections", "Counter") if is_counter else b"") + b"}"
        self.marked((part for item in value.items() for part in item), depth, b"u")
        self.out += b"\x85R" if is_counter else b""

    def elements(self, value: set[Plain], depth: int) -> None:
        """Write the elements in the order of their bytes: a set has none of its own."""
        parts = []
        for element in value:
            part = _Writer()
            part.emit(element, depth + 1)
            if part.tensors:
                raise TypeError("a tensor in a set cannot be written")
            parts.append(bytes(part.out))
        self.out += _named("__builtin__", "set") + b"](" + b"".join(sorted(parts)) + b"e\x85R"

    def tensor(self, value: SavedTensor, depth: int) -> None:
        storage = STORAGES.get(value.dtype.name)
        count = value.nbytes // value.dtype.itemsize if storage else value.nbytes
        self.out += _named("torch._utils", f"_rebuild_tensor_v{2 if storage else 3}") + b"(("
        self.out += _scalar("storage")
        self.out += _named("torch" if storage else "torch.storage", storage or "UntypedStorage")
        self.out += _scalar(str(len(self.tensors))) + _scalar("cpu") + _scalar(count) + b"tQ"
        view: list[Plain] = [0, value.shape, row_major_strides(value.shape), False, OrderedDict()]
        for field in view:
            self.emit(field, depth)
        self.out += (b"" if storage else _named("torch", value.dtype.name)) + b"tR"
        self.tensors.append(value)


def _named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _scalar(value: float | str | bytes | None) -> bytes:
    """Return the opcodes of one value. Protocol 2 has no bytes: they are encoded text."""
    match value:
        case None:
            code = b"N"
        case bool():
            code = b"\x88" if value else b"\x89"
        case int():
            code = _integer(value)
        case float():
            code = pack(">cd", b"G", value)
        case str():
            data = value.encode("utf-8", "surrogatepass")
            code = pack("<cI", b"X", len(data)) + data
        case bytes():
            text = _scalar(value.decode("latin1"))
            code = _named("_codecs", "encode") + text + _scalar("latin1") + b"\x86R"
    return code


_INTEGERS = ((b"K", "B", 0, 1 << 8), (b"M", "H", 0, 1 << 16), (b"J", "i", -(1 << 31), 1 << 31))


def _integer(value: int) -> bytes:
    for code, layout, low, high in _INTEGERS:
        if low <= value < high:
            return pack(f"<c{layout}", code, value)
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise ValueError(f"an integer of {size} bytes; torch reads up to {MAX_INT_BYTES}")
    return pack("<cB", b"\x8a", size) + value.to_bytes(size, "little", signed=True)
