"""The catalog: what a checkpoint has, as tensors made of chunks at known places in files.

A chunk is one stored box of a tensor. A large model on many ranks has millions of them, so a tensor
keeps its chunks as columns (one array row per chunk, about 60 bytes); `Chunk` is a view of a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unshard.errors import UnshardError
from unshard.tensors.boxes import Box, Ints
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import Sharding


class ByteRange(NamedTuple):
    """`length` bytes of a file from `offset` on."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Many byte ranges, as columns: of each the number of its path, and offset and length."""

    paths: tuple[Path, ...]
    file: Ints
    offset: Ints
    length: Ints

    def __iter__(self) -> Iterator[ByteRange]:
        rows = zip(self.file.tolist(), self.offset.tolist(), self.length.tolist(), strict=True)
        return (ByteRange(self.paths[file], offset, length) for file, offset, length in rows)


class Chunk(NamedTuple):
    """One stored box of a tensor.

    Attributes:
        box: where it is in the global tensor.
        source: its bytes, from the first of its first element on; see `ChunkTable.compressed`.
        strides: elements to step per dimension, or None where it is stored contiguously, row-major.
        rank: the rank whose file holds it.
    """

    box: Box
    source: ByteRange
    strides: tuple[int, ...] | None
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of one tensor, as columns of equal length.

    Attributes:
        paths: the files of the checkpoint; shared by all tensors.
        offsets: (count, dimensions), elements: where each box starts.
        sizes: (count, dimensions), elements.
        strides: (count, dimensions), elements, or None where every chunk is row-major.
        file: index into `paths`.
        start: byte of the chunk's first element in its file.
        length: bytes from there to the end of its last element (of the compressed item, if so).
        rank: the rank whose file holds it.
        compressed: whether the bytes must be decompressed (zstd) before use.
    """

    paths: tuple[Path, ...]
    offsets: Ints
    sizes: Ints
    strides: Ints | None
    file: NDArray[np.int32]
    start: Ints
    length: Ints
    rank: NDArray[np.int32]
    compressed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, row: int) -> Chunk:
        path, start = self.paths[self.file[row]], int(self.start[row])
        box = Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))
        strides = None if self.strides is None else tuple(self.strides[row].tolist())
        source = ByteRange(path, start, int(self.length[row]))
        return Chunk(box, source, strides, int(self.rank[row]))

    def __iter__(self) -> Iterator[Chunk]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: Ints | slice) -> "ChunkTable":
        """Return the table of these rows, in this order."""
        return ChunkTable(
            self.paths,
            self.offsets[rows],
            self.sizes[rows],
            None if self.strides is None else self.strides[rows],
            self.file[rows],
            self.start[rows],
            self.length[rows],
            self.rank[rows],
            self.compressed[rows],
        )


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """One tensor of the checkpoint.

    Attributes:
        fqn: its name in the state dict.
        dtype: as stored.
        shape: global shape, elements.
        chunks: every stored box, replicas included, in rank order.
        sharding: mesh and placements as the lowest rank that has it sees them; None where the
            format states none (plain tensors).
        doubt: that ranks have different values, of which the first rank's is read; the error where
            that is wrong.
        is_buffer: whether it is right; None: it is if this is no parameter.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: ChunkTable
    sharding: Sharding | None = None
    doubt: UnshardError | None = None
    is_buffer: bool | None = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[int, int, int] | None:
        """Where its first bytes are (file, start, length): tied weights share it; None without."""
        chunks = self.chunks
        if not len(chunks) or not chunks.length[0]:
            return None
        return int(chunks.file[0]), int(chunks.start[0]), int(chunks.length[0])


class Skipped(NamedTuple):
    """A value of the checkpoint that is not a tensor to merge, and why it was left out."""

    fqn: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """What a checkpoint has.

    Attributes:
        writer: the tool that wrote it, as far as the layout shows.
        world_size: number of ranks that wrote it.
        tensors: by name, in the order of the state dict; all chunk tables share one tuple of paths.
        skipped: values that are not model weights.
        training_state: files of optimizer, scheduler, random state.
        archives: the torch.save zips that hold the tensors, whose records may carry checksums.
        missing: files of ranks that should be there and are not; replicas may make up for them.
        missing_ranks: the ranks that would have written them.
        notes: what a user should know about how the checkpoint was read.
        roots: the directories of the weight files.
        format: how the weights are stored, for people: "FSDP rank files".
        step: training step, where the directory's name states it.
        recorded: arguments of the training that the files record, plain values only.
        stored_names: what the files call the tensors whose names had wrappers in them.
    """

    writer: str
    world_size: int
    tensors: Mapping[str, TensorEntry]
    skipped: tuple[Skipped, ...] = ()
    training_state: tuple[Path, ...] = ()
    archives: Iterable[ByteRange] = ()
    missing: tuple[Path, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    format: str = ""
    step: int | None = None
    recorded: Mapping[str, object] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_files(self) -> set[Path]:
        """The files that hold the tensors."""
        return weight_files(self.tensors.values())

    @property
    def is_compressed(self) -> bool:
        """Whether any bytes must be decompressed before use."""
        return any(entry.chunks.compressed.any() for entry in self.tensors.values())


def weight_files(tensors: Iterable[TensorEntry]) -> set[Path]:
    """Return the files that hold tensors, most of which share the tuple of their paths."""
    tables = {id(one.chunks.paths): one.chunks.paths for one in tensors}
    return {path for paths in tables.values() for path in paths}
