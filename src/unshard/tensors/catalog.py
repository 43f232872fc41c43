"""The catalog: the tensors of a checkpoint, made of chunks at known byte offsets in files.

A chunk is one stored box of a tensor. A large model on many ranks has millions of chunks, so a
tensor keeps them as columns (about 60 bytes per chunk); `Chunk` is a view of a row.
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
    """`length` bytes of a file, starting at `offset`."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Byte ranges as columns; `file` is an index into `paths`."""

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
        box: its region of the global tensor.
        source: its bytes, starting at its first element; see `ChunkTable.compressed`.
        strides: elements to step per dimension, or None if it is stored row-major.
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
        offsets: (count, dimensions), elements: the start of each box.
        sizes: (count, dimensions), elements.
        strides: (count, dimensions), elements, or None if every chunk is row-major.
        file: index into `paths`.
        start: byte offset of the chunk's first element, or compressed item, in its file.
        length: bytes from `start` to the end of its last element, or of the compressed item.
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
            format records none (plain tensors).
        doubt: an error to raise if the first rank's values may not stand for those of other ranks.
        is_buffer: whether they may; None: only if the tensor is not a parameter.
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
        """File, start and length of its first bytes, equal for tied weights; None if empty."""
        chunks = self.chunks
        if not len(chunks) or not chunks.length[0]:
            return None
        return int(chunks.file[0]), int(chunks.start[0]), int(chunks.length[0])


class Skipped(NamedTuple):
    """A value of the checkpoint that is not merged, and why."""

    fqn: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """The contents of a checkpoint.

    Attributes:
        writer: the tool that wrote it, as far as the layout shows.
        world_size: number of ranks that wrote it.
        tensors: by name, in the order of the state dict; all chunk tables share one tuple of paths.
        skipped: values that are not model weights.
        training_state: files of optimizer, scheduler, random state.
        archives: the torch.save zips that hold the tensors, whose records may carry checksums.
        missing: expected files of ranks that do not exist; replicas may make up for them.
        missing_ranks: the ranks that would have written them.
        notes: messages for the user about how the checkpoint was read.
        roots: the directories of the weight files.
        format: the storage format, for people: "FSDP rank files".
        step: training step, if the directory's name contains it.
        recorded: training arguments in the files, plain values only.
        stored_names: names in the files of tensors whose wrapper prefixes were removed.
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
    """Return the files that hold tensors."""
    # Most tensors share one tuple of paths: hashing it for each of them would be slow.
    tables = {id(entry.chunks.paths): entry.chunks.paths for entry in tensors}
    return {path for paths in tables.values() for path in paths}
