"""Lay out the output files: the tensors of each file, their offsets, headers and weight map.

huggingface_hub's own function distributes tensors over files (greedily, in the model's order).
Inside a file they have the order of safetensors' own writer: widest elements first, then by name.
Every tensor is then aligned, and the file equals the output of `save_file` byte for byte.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from unshard.containers.safetensors_file import MAX_HEADER, HeaderEntry, encode_header
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import Recipe, shape_of
from unshard.errors import ConversionError, UsageError
from unshard.tensors.dtypes import DType

OPTIMIZER_FILES = "optimizer{suffix}.safetensors"
"""File name pattern of an optimizer's state."""
_METADATA = {"format": "pt"}  # transformers 4 refuses files without it
_NOTHING: Mapping[str, str] = MappingProxyType({})
ONE_FILE = 1 << 62
"""A `max_shard_size` that no model reaches."""
# safetensors' Rust writer sorts by its dtype enum, then by name.
_FILE_ORDER = """
U64 I64 F64 C64 F32 U32 I32 BF16 F16 U16 I16 F8_E5M2FNUZ F8_E4M3FNUZ F8_E8M0 F8_E4M3 F8_E5M2 I8 U8
BOOL
""".split()
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}


class OutputTensor(NamedTuple):
    """A tensor in an output file; `data_offsets` are bytes from the end of the file's header."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    recipe: Recipe
    data_offsets: tuple[int, int]


class OutputFile(NamedTuple):
    """A file to write.

    Attributes:
        filename: its path inside the output.
        header: the bytes before the data of the first tensor.
        tensors: in the order of their data.
        rest: offsets and bytes of other fixed parts: torch's files have records around the data.
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
        files: the files of the model, then the files of `beside`.
        weight_map: the file of every tensor of the model; `total_size`: their bytes.
        name: the name of the model's file if there is only one.
        beside: layouts of the optimizer's state, of modules, of a separate adapter.
    """

    files: tuple[OutputFile, ...]
    weight_map: Mapping[str, str]
    total_size: int
    name: str = "model.safetensors"
    beside: tuple["Layout", ...] = ()

    @property
    def model_files(self) -> tuple[OutputFile, ...]:
        """The files of the model alone."""
        return self.files[: len(self.files) - sum(len(layout.files) for layout in self.beside)]

    @property
    def total_parameters(self) -> int:
        """Number of elements of all tensors of the model."""
        return sum(prod(tensor.shape) for file in self.model_files for tensor in file.tensors)

    def with_files_of(self, others: Sequence["Layout"]) -> "Layout":
        """Return a layout that also has the files of others."""
        files = (file for layout in others for file in layout.files)
        return self._replace(files=(*self.files, *files), beside=tuple(others))

    @property
    def indices(self) -> dict[str, bytes]:
        """The index files by name, one for each layout of several files."""
        several = (layout for layout in (self, *self.beside) if len(layout.model_files) > 1)
        return {f"{layout.name}.index.json": index_json(layout) for layout in several}


def size_in_bytes(text: str) -> int:
    """Return a size like "5GB" or "64MB" in bytes; units are decimal.

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
    tensors: Sequence[ConvertedTensor],
    max_shard_size: int,
    *,
    like: Mapping[str, str] | None = None,
    pattern: str = "model{suffix}.safetensors",
    metadata: Mapping[str, str] = _NOTHING,
) -> Layout:
    """Distribute tensors over files of at most `max_shard_size` bytes of data (or one tensor).

    With `like`, the weight map of another model, the files are those of that model, and a tensor
    that it lacks follows the tensor before it. `pattern` may begin with a folder. `metadata` is
    added to the headers.

    Raises:
        ConversionError: a header would be longer than the format allows, or there is no tensor.
    """
    if not tensors:
        raise ConversionError("there is no tensor to write")
    by_name = {tensor.name: tensor for tensor in tensors}
    if like is not None and any(name in like for name in by_name):
        folder, slash, _ = pattern.rpartition("/")
        like = {name: folder + slash + file for name, file in like.items()}
        weight_map = _weight_map_like(by_name, like, pattern)
    elif sum(map(_size, tensors)) <= max_shard_size:
        weight_map = dict.fromkeys(by_name, pattern.format(suffix=""))
    else:
        # Importing it takes a tenth of the time of a small merge.
        from huggingface_hub import split_state_dict_into_shards_factory

        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=_size,
            filename_pattern=pattern,
            max_shard_size=max_shard_size,
        )
        weight_map = {name: split.tensor_to_filename[name] for name in by_name}
    members: dict[str, list[ConvertedTensor]] = {}
    for name, tensor in by_name.items():
        members.setdefault(weight_map[name], []).append(tensor)
    metadata = {**_METADATA, **metadata}
    files = tuple(_output_file(name, members[name], metadata) for name in sorted(members))
    return Layout(files, weight_map, sum(map(_size, tensors)), pattern.format(suffix=""))


def lay_out_apart(
    tensors: Sequence[ConvertedTensor], folders: tuple[str, ...]
) -> tuple[Sequence[ConvertedTensor], list[Layout]]:
    """Lay out each module's tensors as a file in its folder; return all other tensors, and these.

    Args:
        tensors: a model of several modules.
        folders: the folders of modules with files of their own, each with a trailing slash.
    """
    layouts: list[Layout] = []
    for folder in sorted(folders):
        named = [
            tensor._replace(name=tensor.name.removeprefix(folder))
            for tensor in tensors
            if tensor.name.startswith(folder)
        ]
        if named:
            layouts.append(lay_out(named, ONE_FILE, pattern=f"{folder}model{{suffix}}.safetensors"))
    return [tensor for tensor in tensors if not tensor.name.startswith(folders)], layouts


def _weight_map_like(names: Iterable[str], like: Mapping[str, str], pattern: str) -> dict[str, str]:
    """Return the file of every tensor: as in the other model, or that of the tensor before it."""
    file = next(like[name] for name in names if name in like)
    weight_map = {}
    for name in names:
        file = like.get(name, file)
        weight_map[name] = file
    if len(set(weight_map.values())) == 1:
        return dict.fromkeys(weight_map, pattern.format(suffix=""))
    return weight_map


def index_json(layout: Layout) -> bytes:
    """Return the index file, which maps tensors to files in its folder, as transformers does."""
    metadata = {"total_parameters": layout.total_parameters, "total_size": layout.total_size}
    files = {name: file.rpartition("/")[2] for name, file in layout.weight_map.items()}
    index = {"metadata": metadata, "weight_map": files}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _size(tensor: ConvertedTensor) -> int:
    return prod(shape_of(tensor.recipe)) * tensor.dtype.itemsize


def _output_file(
    filename: str, tensors: list[ConvertedTensor], metadata: Mapping[str, str]
) -> OutputFile:
    placed = []
    at = 0
    order = {code: rank for rank, code in enumerate(_FILE_ORDER)}
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
