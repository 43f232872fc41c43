"""Lay out the output files: which tensor in which file, at which bytes; headers and weight map.

Tensors are distributed over files by huggingface_hub's own rule (greedy, in the model's order).
Inside a file they are ordered as safetensors' own writer orders them: widest elements first, then
by name, so that every tensor is aligned and the file is byte for byte what `save_file` would write.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from unshard.containers.safetensors_file import MAX_HEADER, HeaderEntry, encode_header
from unshard.convert.outputs import Converted
from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, UsageError
from unshard.tensors.dtypes import DType

OPTIMIZER_FILES = "optimizer{suffix}.safetensors"
"""What the files of an optimizer's state are called."""
_METADATA = {"format": "pt"}  # transformers 4 refuses files without it
_NOTHING: Mapping[str, str] = MappingProxyType({})
ONE_FILE = 1 << 62
"""The size of a file that has all tensors."""
# safetensors' Rust writer sorts by its dtype enum, then by name.
_FILE_ORDER = """
U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8
BOOL
""".split()
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


class OutputTensor(NamedTuple):
    """A tensor in an output file; `data_offsets` are bytes from the start of the file's data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    recipe: Recipe
    data_offsets: tuple[int, int]


class OutputFile(NamedTuple):
    """A file to write.

    Attributes:
        filename: its path inside the output.
        header: what is before the data of the first tensor.
        tensors: in the order of their data.
        rest: offset and bytes of what else is fixed: in torch's files records are around the data.
    """

    filename: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    rest: tuple[tuple[int, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        end = len(self.header) + (self.tensors[-1].data_offsets[1] if self.tensors else 0)
        return max([end, *(at + len(piece) for at, piece in self.rest[-1:])])

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors alone."""
        offsets = (tensor.data_offsets for tensor in self.tensors)
        return sum(end - begin for begin, end in offsets)


class Layout(NamedTuple):
    """All output files.

    Attributes:
        files: those of the model, and after them those of what is written beside it.
        weight_map: the file of every tensor of the model; `total_size`: their bytes.
        name: of the model's file, if it is one.
        beside: of what is written beside it: the state of the optimizer, an adapter by itself.
    """

    files: tuple[OutputFile, ...]
    weight_map: Mapping[str, str]
    total_size: int
    name: str = "model.safetensors"
    beside: tuple["Layout", ...] = ()

    @property
    def model_files(self) -> tuple[OutputFile, ...]:
        """The files of the model alone."""
        return self.files[: len(self.files) - sum(len(one.files) for one in self.beside)]

    @property
    def total_parameters(self) -> int:
        """Number of elements of all tensors of the model."""
        return sum(prod(tensor.shape) for file in self.model_files for tensor in file.tensors)

    def with_files_of(self, others: Sequence["Layout"]) -> "Layout":
        """Return a layout that also has the files of others, beside those of the model."""
        files = (file for one in others for file in one.files)
        return self._replace(files=(*self.files, *files), beside=tuple(others))

    @property
    def indices(self) -> dict[str, bytes]:
        """The index files that it needs, by name: of a model or a state in several files."""
        several = (one for one in (self, *self.beside) if len(one.model_files) > 1)
        return {f"{one.name}.index.json": index_json(one) for one in several}


def size_in_bytes(text: str) -> int:
    """Return the bytes that a size like "5GB" or "64MB" means; units are decimal.

    Raises:
        UsageError: it is not a positive number with an optional unit.
    """
    upper = text.strip().upper()
    unit = next((unit for unit in _UNITS if upper.endswith(unit)), "")
    number = upper.removesuffix(unit).strip()
    try:
        size = int(float(number) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{text!r} is not a size", expected="a number and a unit: 64MB, 5GB")
    return size


def lay_out(
    tensors: Sequence[Converted],
    max_shard_size: int,
    *,
    like: Mapping[str, str] | None = None,
    pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] = _NOTHING,
) -> Layout:
    """Distribute tensors over files of at most `max_shard_size` bytes of data (or one tensor).

    With `like`, the weight map of another model, its files are made instead; a tensor that it does
    not have goes where the one before it goes. `pattern` may begin with a folder. `metadata` is
    what headers state besides the format.

    Raises:
        ConversionError: a header would be longer than the format allows, or there is no tensor.
    """
    if not tensors:
        raise ConversionError("there is no tensor to write")
    by_name = {tensor.name: tensor for tensor in tensors}
    if like is not None and any(name in like for name in by_name):
        folder, slash, _ = pattern.rpartition("/")
        like = {name: folder + slash + file for name, file in like.items()}
        weight_map = _followed(by_name, like, pattern)
    elif sum(map(_size, tensors)) <= max_shard_size:
        weight_map = dict.fromkeys(by_name, pattern.format(suffix=""))
    else:
        # It takes as long to import as a tenth of a small merge.
        from huggingface_hub import split_state_dict_into_shards_factory

        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=_size,
            filename_pattern=pattern,
            max_shard_size=max_shard_size,
        )
        weight_map = {name: split.tensor_to_filename[name] for name in by_name}
    members: dict[str, list[Converted]] = {}
    for name, tensor in by_name.items():
        members.setdefault(weight_map[name], []).append(tensor)
    stated = {**_METADATA, **metadata}
    files = tuple(_output_file(name, members[name], stated) for name in sorted(members))
    return Layout(files, weight_map, sum(map(_size, tensors)), pattern.format(suffix=""))


def lay_out_apart(
    tensors: Sequence[Converted], folders: tuple[str, ...]
) -> tuple[Sequence[Converted], list[Layout]]:
    """Lay out the tensors whose names begin with a folder, in one file in it; return the others.

    Args:
        tensors: of a model of several modules.
        folders: of the modules, each with a slash.
    """
    apart: list[Layout] = []
    for folder in sorted(folders):
        own = [one for one in tensors if one.name.startswith(folder)]
        named = [one._replace(name=one.name.removeprefix(folder)) for one in own]
        if named:
            apart.append(lay_out(named, ONE_FILE, pattern=f"{folder}model{{suffix}}.safetensors"))
    return [one for one in tensors if not one.name.startswith(folders)], apart


def _followed(names: Iterable[str], like: Mapping[str, str], pattern: str) -> dict[str, str]:
    """Return the file of every tensor: that of the other model, or that of its neighbour."""
    file = next(like[name] for name in names if name in like)
    followed = {}
    for name in names:
        file = like.get(name, file)
        followed[name] = file
    one = len(set(followed.values())) == 1
    return dict.fromkeys(followed, pattern.format(suffix="")) if one else followed


def index_json(layout: Layout) -> bytes:
    """Return the index file, which maps tensors to files beside it, as transformers writes it."""
    metadata = {"total_parameters": layout.total_parameters, "total_size": layout.total_size}
    files = {name: file.rpartition("/")[2] for name, file in layout.weight_map.items()}
    index = {"metadata": metadata, "weight_map": files}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _size(tensor: Converted) -> int:
    return prod(shape_of(tensor.recipe)) * tensor.dtype.itemsize


def _output_file(
    filename: str, tensors: list[Converted], metadata: Mapping[str, str]
) -> OutputFile:
    placed = []
    at = 0
    order = {code: place for place, code in enumerate(_FILE_ORDER)}
    for tensor in sorted(tensors, key=lambda t: (order[t.dtype.code or ""], t.name.encode())):
        end = at + _size(tensor)
        shape = shape_of(tensor.recipe)
        placed.append(OutputTensor(tensor.name, tensor.dtype, shape, tensor.recipe, (at, end)))
        at = end
    entries = [HeaderEntry(t.name, t.dtype, t.shape, *t.data_offsets) for t in placed]
    header = encode_header(entries, metadata)
    if len(header) - 8 > MAX_HEADER:
        raise ConversionError(
            f"{filename}: its header of {len(placed)} tensors would take {len(header)} bytes",
            expected=f"at most {MAX_HEADER}",
            hint="make smaller files: ⟦+--max-shard-size SIZE⟧",
        )
    return OutputFile(filename, header, tuple(placed))
