"""Source files written byte by byte, chunks at odd places between random bytes; and plans run."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray

from unshard.containers import chunks, strided
from unshard.convert.outputs import Precision, finish
from unshard.convert.recipes import take
from unshard.engines import threads
from unshard.engines.threads import MIN_BUFFER, Resources, run_plan
from unshard.plan import planner, work
from unshard.plan.layout import lay_out
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.progress import ignore
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_CODE, BY_NAME, DType

Shape = tuple[int, ...]
Bits = NDArray[np.generic]
DEFAULT = Resources(workers=2, memory_bytes=64_000_000)


# checkpoints, byte by byte


@dataclass(frozen=True)
class Chunk:
    """Where a box is stored: after `padding` bytes of file `file`, elements `strides` apart."""

    box: Box
    strides: Shape
    file: int = 0
    padding: int = 0
    garbage: bool = False


@dataclass(frozen=True)
class Tensor:
    dtype: DType
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass
class Sources:
    """Source files in the making, and the tensors that are spread over them."""

    directory: Path
    files: int = 3
    seed: int = 0
    values: dict[str, Bits] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.paths = tuple(self.directory / f"rank{n}.bin" for n in range(self.files))
        self._data = [bytearray() for _ in self.paths]

    def add(self, name: str, tensor: Tensor, values: Bits | None = None) -> None:
        """Spread a tensor of these values (default: random bits) over the files."""
        if values is None:
            values = self._random_bits(tensor.dtype, tensor.shape)
        rows = ChunkRows(len(tensor.shape))
        for rank, chunk in enumerate(tensor.chunks):
            rows.add(
                rank=rank,
                file=chunk.file,
                start=self._store(chunk, values),
                itemsize=tensor.dtype.itemsize,
                offsets=chunk.box.offsets,
                sizes=chunk.box.sizes,
                strides=chunk.strides,
            )
        self.values[name] = values
        self.entries[name] = TensorEntry(name, tensor.dtype, tensor.shape, rows.table(self.paths))

    def plan(self, target: str | None = None, max_shard_size: int = 10**9) -> Plan:
        """Write the files and return the plan that merges them."""
        for path, data in zip(self.paths, self._data, strict=True):
            path.write_bytes(data)
        precision = Precision(None if target is None else BY_NAME[target])
        recipes = {name: take(entry) for name, entry in self.entries.items()}
        return make_plan(lay_out(finish(recipes, precision), max_shard_size))

    def expected(self) -> dict[str, bytes]:
        return {name: values.tobytes() for name, values in self.values.items()}

    def _random_bits(self, dtype: DType, shape: Shape) -> Bits:
        data = self.random.bytes(prod(shape) * dtype.itemsize)
        return np.frombuffer(data, f"u{dtype.itemsize}").reshape(shape)

    def _store(self, chunk: Chunk, values: Bits) -> int:
        if 0 in chunk.box.sizes:
            return 0
        width = values.itemsize
        steps = zip(chunk.box.sizes, chunk.strides, strict=True)
        span = width * (1 + sum((size - 1) * step for size, step in steps))
        stored = np.frombuffer(self.random.bytes(span), np.uint8).copy()
        if not chunk.garbage:
            where = zip(chunk.box.offsets, chunk.box.ends, strict=True)
            part = values[tuple(slice(lo, hi) for lo, hi in where)]
            byte_strides = tuple(step * width for step in chunk.strides)
            np.ndarray(part.shape, values.dtype, stored, 0, byte_strides)[...] = part
        data = self._data[chunk.file]
        data += self.random.bytes(chunk.padding)
        data += stored.tobytes()
        return len(data) - span


def row_major(sizes: Shape) -> Shape:
    return tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def column_major(sizes: Shape) -> Shape:
    return tuple(prod(sizes[:dim]) for dim in range(len(sizes)))


def grid(
    dtype: str,
    shape: Shape,
    pieces: Shape,
    lie: Callable[[Shape], Shape] = row_major,
    files: int = 3,
) -> Tensor:
    """Return a tensor cut evenly into a grid of pieces, dealt out to the files."""
    sizes = tuple(size // parts for size, parts in zip(shape, pieces, strict=True))
    chunks = [
        Chunk(
            Box(tuple(at * size for at, size in zip(index, sizes, strict=True)), sizes),
            lie(sizes),
            file=number % files,
            padding=number % 5,
        )
        for number, index in enumerate(np.ndindex(pieces))
    ]
    return Tensor(BY_NAME[dtype], shape, tuple(chunks))


# running


def merged(plan: Plan, resources: Resources = DEFAULT) -> dict[str, bytes]:
    """Run a plan and return the files it makes, by name."""
    with tempfile.TemporaryDirectory() as directory:
        run_plan(plan, Path(directory), resources, ignore)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def tensors_in(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the bytes of every tensor, as safetensors' own reader finds them."""
    return {
        name: bytes(fields["data"])
        for data in files.values()
        for name, fields in safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # no types
    }


@dataclass(frozen=True)
class Knobs:
    """Thresholds of the machinery, made small so that small tensors meet them."""

    long_run: int = 64 * 1024
    copy_unit: int = 16 * 1024 * 1024
    small_read: int = 16384
    tile_bytes: int = 4 * 1024 * 1024
    least_buffer: int = MIN_BUFFER
    block: int = 256 * 1024

    @contextmanager
    def turned(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "LONG_RUN", self.long_run)
            patch.setattr(work, "_COPY_UNIT", self.copy_unit)
            patch.setattr(work, "_MAX_TILE", self.tile_bytes)
            patch.setattr(strided, "SMALL", self.small_read)
            patch.setattr(threads, "MIN_BUFFER", self.least_buffer)
            patch.setattr(chunks, "_BLOCK", self.block)
            yield


COPYING = Knobs(long_run=1)


# checkpoints drawn by hypothesis


def cut_in_two(box: Box, dim: int, at: int) -> list[Box]:
    first, second = list(box.sizes), list(box.sizes)
    first[dim], second[dim] = at, box.sizes[dim] - at
    moved = list(box.offsets)
    moved[dim] += at
    return [Box(box.offsets, tuple(first)), Box(tuple(moved), tuple(second))]


@st.composite
def tilings(draw: DrawFn, shape: Shape) -> list[Box]:
    boxes = [Box.whole(shape)] if 0 not in shape else []
    for _ in range(draw(st.integers(0, 5)) if boxes else 0):
        which = draw(st.integers(0, len(boxes) - 1))
        wide = [dim for dim, size in enumerate(boxes[which].sizes) if size > 1]
        if wide:
            dim = draw(st.sampled_from(wide))
            at = draw(st.integers(1, boxes[which].sizes[dim] - 1))
            boxes[which : which + 1] = cut_in_two(boxes[which], dim, at)
    return list(draw(st.permutations(boxes)))


@st.composite
def strides_of(draw: DrawFn, sizes: Shape) -> Shape:
    """Strides in any order of dimensions, with gaps between elements and between rows."""
    strides = [0] * len(sizes)
    step = draw(st.integers(1, 3))
    for dim in draw(st.permutations(range(len(sizes)))):
        strides[dim] = step
        step = step * sizes[dim] + draw(st.integers(0, 2))
    return tuple(strides)


@st.composite
def chunks_of(draw: DrawFn, box: Box, *, odd: bool, garbage: bool = False) -> Chunk:
    strides = draw(strides_of(box.sizes)) if odd else row_major(box.sizes)
    file, padding = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    return Chunk(box, strides, file, padding, garbage=garbage)


@st.composite
def tensors(draw: DrawFn, dtypes: list[DType]) -> Tensor:
    """A tensor in chunks; later replicas hold garbage, so that taking one of them shows."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    odd = draw(st.booleans())
    boxes = draw(tilings(shape))
    chunks = [draw(chunks_of(box, odd=odd)) for box in boxes]
    again = draw(st.lists(st.sampled_from(boxes), max_size=2)) if boxes else []
    chunks += [draw(chunks_of(box, odd=odd, garbage=True)) for box in again]
    return Tensor(draw(st.sampled_from(dtypes)), shape, tuple(chunks))


ANY_DTYPE = list(BY_CODE.values())
some_tensors = st.lists(tensors(ANY_DTYPE), min_size=1, max_size=4)
some_settings = st.builds(Resources, st.integers(1, 3), st.integers(MIN_BUFFER, 64_000_000))
