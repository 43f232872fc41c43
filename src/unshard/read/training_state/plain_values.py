"""Converts the inert records of a pickle into plain values: those that `Plain` lists.

numpy's numbers become Python's, its arrays tensors, defaultdicts dicts. Values without a plain form
(objects, functions, DTensors, numpy's arrays of objects or texts) are left out with a note: from a
dict with their keys, while a list or tuple has None in their place. Subclasses of list keep their
elements, subclasses of dict their items, and OmegaConf's containers both, except interpolations.
Values may be shared and even form cycles, so depth, number and bytes of the result are bounded.

Sources: numpy's `ndarray.__reduce__`, the pickles of numpy 1.26 (`numpy.core`) and 2.x
(`numpy._core`), those of OmegaConf 2.4.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from math import prod
from zlib import crc32

import numpy as np

from unshard.containers.open_files import Opened, opened, size_of
from unshard.containers.pickles.pickler import MAX_INT_BYTES
from unshard.containers.pickles.records import Record, Value
from unshard.containers.strided import Elements, raw_dtype, read_exactly, read_strided
from unshard.containers.torch_files.reader import TorchFile
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.errors import CorruptError
from unshard.read.torch_save.values import (
    StorageView,
    TensorFormError,
    is_tensor,
    named,
    read_view,
    sizes_of,
)
from unshard.tensors.boxes import is_row_major
from unshard.tensors.catalog import ByteRange
from unshard.tensors.dtypes import BY_NAME
from unshard.with_notes import WithNotes

_MAX_DEPTH = 80  # less than `pickler.MAX_DEPTH`: the values are written inside other values
_MAX_VALUES = 2_000_000  # a rank's random state has some 1,300
_SMALL = 1 << 16  # bytes of a tensor that is read at once, so that two can be compared
_MAX_STRIDED = 1 << 24
_MAX_NOTES, _MAX_PLACE = 1000, 200
_ORDERED, _COUNTER = "collections.OrderedDict", "collections.Counter"
_DEFAULT = "collections.defaultdict"
_SETS = ("__builtin__.set", "builtins.set")
_ARRAYS = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
_CONTAINERS = ("omegaconf.listconfig.ListConfig", "omegaconf.dictconfig.DictConfig")
_PARTS = {True: "elements", False: "items"}
_NODE = re.compile(r"omegaconf\.nodes\.[A-Za-z]+Node")
_BYTES = ("__builtin__.bytes", "builtins.bytes")
_CODE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")  # longer floats differ between machines


def plain_values(file: TorchFile) -> WithNotes[Plain]:
    """Return the contents of a file as plain values: small tensors read, large ones by their place.

    The notes are about values that were left out: "lr_scheduler.x: an instance …".

    Raises:
        CorruptError: it has too many values, or cannot be read.
    """
    with opened(file.path) as source:
        decoder = _Decoder(file, source)
        try:
            value = decoder.plain(file.value, "", 0)
        except TensorFormError as error:
            raise CorruptError(f"{file.path}: has no plain values: {error}") from error
        return WithNotes(value, tuple(decoder.left_out))


class _Decoder:
    def __init__(self, file: TorchFile, source: Opened) -> None:
        self.left_out: list[str] = []
        self._file = file
        self._source = source
        self._values = 0
        self._bytes = 4 * size_of(source)  # views may share a storage, within reason

    def plain(self, value: Value, at: str, depth: int) -> Plain:
        """Return one value; `at` is its place, for messages.

        Raises:
            TensorFormError: it has no plain form.
            CorruptError: there are too many.
        """
        self._values += 1
        if self._values > _MAX_VALUES:
            raise CorruptError(f"{self._file.path}: has more than {_MAX_VALUES} values")
        if depth > _MAX_DEPTH:
            raise TensorFormError(f"nested deeper than {_MAX_DEPTH}")
        match value:
            case Record():
                return self._record(value, at, depth)
            case list():
                return self._items(value, at, depth)
            case tuple():
                return tuple(self._items(value, at, depth))
            case dict():
                return self._dict(value, at, depth)
            case set() | frozenset():
                return self._set(value, at)
        return _scalar(value)

    def _record(self, value: Record, at: str, depth: int) -> Plain:
        if is_tensor(value):
            return self._tensor(read_view(value))
        if value.is_call_of(*_SCALARS):
            return read_scalar(value)
        if value.is_call_of(*_ARRAYS):
            array = read_array(value)
            self._charge(array.nbytes)
            return SavedTensor(BY_NAME[array.dtype.name], array.shape, array.tobytes())
        if value.is_call_of(_ORDERED, _COUNTER, _DEFAULT):
            return self._dict_record(value, at, depth)
        if value.is_call_of(*_CONTAINERS) or _NODE.fullmatch(named(value.callee)):
            return self._configured(value, at, depth)
        plain: Plain = bytes_of(value)
        match value.args:
            case (list() as elements,) if value.is_call_of(*_SETS):
                plain = self._set(elements, at)
            case (tuple() as sizes,) if value.is_call_of("torch.Size"):
                plain = tuple(self._items(sizes, at, depth))
            case () if plain is None:
                plain = self._derived(value, at, depth)
        if plain is None:
            raise TensorFormError(named(value))
        return plain

    def _derived(self, value: Record, at: str, depth: int) -> Plain:
        """Return an instance of a subclass of list or dict without its class; None for others."""
        if value.state is not None or bool(value.elements) == bool(value.items):
            return None
        is_list = bool(value.elements)
        self._note(at, f"the class of {named(value)} (its {_PARTS[is_list]} are kept)")
        if is_list:
            return self._items(value.elements, at, depth)
        return self._dict(dict(value.items), at, depth)

    def _configured(self, value: Record, at: str, depth: int) -> Plain:
        """Return a value of OmegaConf; for a container, note that its class is left out."""
        state = value.state if isinstance(value.state, dict) else {}
        content = state.get("_content", state.get("_val"))
        if isinstance(content, str) and ("${" in content or content == "???"):
            raise TensorFormError(f"{content[:_MAX_PLACE]!r}, which only OmegaConf resolves")
        if value.is_call_of(*_CONTAINERS) and isinstance(content, list | dict):
            self._note(at, f"the class of {named(value)} (its values are kept)")
        return self.plain(content, at, depth)

    def _dict_record(self, value: Record, at: str, depth: int) -> Plain:
        """Return an OrderedDict or Counter as such, a defaultdict as a dict."""
        items: dict[Value, Value] = {}
        match value.args:
            case ():
                pass
            case (dict() as items,) if value.is_call_of(_COUNTER):
                pass
            case (_,) if value.is_call_of(_DEFAULT):
                pass  # the factory of missing keys
            case _:
                raise TensorFormError(named(value))
        if value.state:
            self._note(at, f"the attributes of {named(value)}")
        plain = self._dict({**items, **dict(value.items)}, at, depth)
        if value.is_call_of(_ORDERED):
            return OrderedDict(plain)
        return Counter(plain) if value.is_call_of(_COUNTER) else plain

    def _dict(self, items: Mapping[Value, Value], at: str, depth: int) -> dict[Plain, Plain]:
        plain: dict[Plain, Plain] = {}
        for key, value in items.items():
            is_word = isinstance(key, str) and key.isprintable()
            place = f"{at}.{key}" if is_word else f"{at}[{named(key)}]"
            try:
                plain[_key(key)] = self.plain(value, place, depth + 1)
            except TensorFormError as error:
                self._note(place, str(error))
        return plain

    def _items(self, values: Iterable[Value], at: str, depth: int) -> list[Plain]:
        plain: list[Plain] = []
        for index, value in enumerate(values):
            try:
                plain.append(self.plain(value, f"{at}[{index}]", depth + 1))
            except TensorFormError as error:
                self._note(f"{at}[{index}]", str(error))
                plain.append(None)
        return plain

    def _set(self, elements: Iterable[Value], at: str) -> set[Plain]:
        plain: set[Plain] = set()
        for element in elements:
            self._values += 1
            try:
                plain.add(_key(element))
            except TensorFormError as error:
                self._note(f"{at}{{…}}", str(error))
        return plain

    def _tensor(self, view: StorageView) -> SavedTensor:
        size = view.dtype.itemsize * prod(view.sizes)
        if size == 0:
            return SavedTensor(view.dtype, view.sizes, b"")
        stored = self._file.storages.get(view.key)
        if stored is None or stored.size < view.storage_elements * view.dtype.itemsize:
            raise TensorFormError("a tensor whose storage is missing or too short")
        self._charge(size)
        start = stored.offset + view.offset * view.dtype.itemsize
        if not is_row_major(view.sizes, view.strides):
            if size > _MAX_STRIDED:
                raise TensorFormError(f"a tensor of {size} bytes that is not stored row by row")
            raw = raw_dtype(view.dtype)
            strides = tuple(step * raw.itemsize for step in view.strides)
            elements = read_strided(self._source, start, strides, view.sizes, raw)
            return SavedTensor(view.dtype, view.sizes, elements.tobytes())
        if size > _SMALL:
            return SavedTensor(view.dtype, view.sizes, ByteRange(self._file.path, start, size))
        data = bytearray(size)
        read_exactly(self._source, start, memoryview(data))
        if size == stored.size and stored.crc not in (0, crc32(data)):
            raise TensorFormError("a tensor that does not fit its checksum (CRC-32)")
        return SavedTensor(view.dtype, view.sizes, bytes(data))

    def _note(self, at: str, problem: str) -> None:
        """Note a value that was left out, up to a limit."""
        if len(self.left_out) < _MAX_NOTES:
            self.left_out.append(f"{at.lstrip('.')[-_MAX_PLACE:] or 'all'}: {problem}")

    def _charge(self, size: int) -> None:
        """Count the bytes of tensors: views of one storage may be many, and expanded."""
        self._bytes -= size
        if self._bytes < 0:
            raise CorruptError(f"{self._file.path}: its tensors are far larger than the file")


def _scalar(value: Value) -> Plain:
    match value:
        case None | bool() | str() | bytes():
            return value
        case float():
            return float(value)  # dict keys hash by a salt
        case int() if value.bit_length() < 8 * MAX_INT_BYTES:
            return int(value)
        case int():
            raise TensorFormError(f"an integer of {value.bit_length()} bits")
    raise TensorFormError(named(value))


def _key(value: Value) -> Plain:
    """Return a dict key or an element of a set."""
    if isinstance(value, tuple):
        return tuple(_key(part) for part in value)  # never nested: see `Machine.safe_elements`
    data = bytes_of(value)
    return _scalar(value) if data is None else data


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


def read_scalar(value: Record) -> bool | int | float:
    """Return the number of a pickled numpy scalar.

    Raises:
        TensorFormError: it is not a number of Python, or contradicts itself.
    """
    match value.args:
        case (kind, data):
            number = _elements(kind, data, 1)[0].item()
            if isinstance(number, bool | int | float):
                return number
    raise TensorFormError("a numpy scalar of unknown form")


def read_array(value: Record) -> Elements:
    """Return a pickled array, row-major and little-endian.

    Raises:
        TensorFormError: its elements are not numbers, or it contradicts itself.
    """
    match value.state:
        case (int(), sizes, kind, bool(is_fortran), data):
            wanted = sizes_of(sizes)
        case _:
            raise TensorFormError("a numpy array of unknown form")
    flat = _elements(kind, data, prod(wanted))
    return np.ascontiguousarray(flat.reshape(wanted, order="F" if is_fortran else "C")).reshape(
        wanted
    )


def _elements(kind: Value, data: Value, count: int) -> Elements:
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
