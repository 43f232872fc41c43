"""Verify everything that was read and written, byte by byte: `--verify full`.

* every storage of the source files against its CRC-32, where the file carries one;
* every replica against the one that was used;
* every byte of the output, read back, against its source.

What is found is a problem that names file, tensor and rank.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from zlib import crc32

import numpy as np

from unshard.containers.chunks import first_difference, replicas
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import raw_dtype, read_exactly
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.zip import StorageRecord
from unshard.errors import CorruptError, OutputError, UnshardError
from unshard.plan.layout import Layout, OutputTensor
from unshard.plan.operations import CopyRange
from unshard.plan.work import Tile, Unit
from unshard.tensors.boxes import Box, row_tile, tiles
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry
from unshard.write.execute import make_tile, tile_runs

__all__ = ["Archive", "Check", "Checker", "Replicas", "source_jobs"]


@dataclass(frozen=True, slots=True)
class Archive:
    """Check the checksums of one torch.save zip among the sources."""

    archive: ByteRange


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """Compare the replicas of one tensor."""

    entry: TensorEntry


Check = Archive | Replicas | Unit


def source_jobs(catalogs: Sequence[Catalog]) -> Iterator[Archive | Replicas]:
    """Yield what there is to check about the sources."""
    for catalog in catalogs:
        yield from map(Archive, catalog.archives)
        yield from (Replicas(e) for e in catalog.tensors.values() if len(e.chunks) > 1)


class Checker:
    """Does jobs of verification, one at a time; one checker per thread.

    Args:
        catalogs: what was merged; more than one, if an average was made.
        layout: what was made of it.
        directory: where the output files are.
        problems: where findings go.
        open_files: how many descriptors it may keep open, at least 2.
        block_bytes: how much to read at a time.
    """

    def __init__(  # noqa: PLR0913 (one worker's whole environment)
        self,
        catalogs: Sequence[Catalog],
        layout: Layout,
        directory: Path,
        problems: list[UnshardError],
        *,
        open_files: int,
        block_bytes: int,
    ) -> None:
        self._catalogs = catalogs
        self._layout = layout
        self._outputs = tuple(directory / file.filename for file in layout.files)
        self._problems = problems
        self._files = OpenFiles(os.O_RDONLY, limit=open_files)
        self._block = block_bytes

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def do(self, job: Check) -> int:
        """Do a job; return the bytes of output that it compared."""
        match job:
            case Archive(archive):
                self._check_source(archive)
            case Replicas(entry):
                self._check_replicas(entry)
            case Tile():
                return self._check_tile(job)
            case CopyRange():
                return self._check_copy(job)
        return 0

    def _check_source(self, archive: ByteRange) -> None:
        path = archive.path
        found = read_torch_file(path, offset=archive.offset, length=archive.length)
        for key, record in found.storages.items():
            if record.crc and self._crc(path, record) != record.crc:
                names = ", ".join(_tensors_in(self._catalogs, path, record)) or "no tensor"
                self._problems.append(
                    CorruptError(
                        f"{path}: storage {key} ({names}) does not match its checksum (CRC-32)",
                        hint="the file was damaged after it was saved; take another checkpoint",
                    )
                )

    def _crc(self, path: Path, record: StorageRecord) -> int:
        value = 0
        for done in range(0, record.size, self._block):
            block = bytearray(min(self._block, record.size - done))
            read_exactly(self._files.fd(path), record.offset + done, memoryview(block))
            value = crc32(block, value)
        return value

    def _check_replicas(self, entry: TensorEntry) -> None:
        raw = raw_dtype(entry.dtype)
        for first, other in replicas(entry.chunks):
            sizes = tuple(entry.chunks.sizes[first].tolist())
            boxes = tiles(sizes, row_tile(sizes, max(1, self._block // raw.itemsize)))
            box = first_difference(entry.chunks, (first, other), boxes, raw, self._files)
            if box is not None:
                self._problems.append(_differing(entry, first, other, box))

    def _check_tile(self, tile: Tile) -> int:
        target = tile.operation.target
        made = make_tile(tile, self._files).reshape(-1).view(np.uint8)
        fd = self._files.fd(self._outputs[target.file])
        for offset, part in tile_runs(tile.box, target, made.data):
            found = bytearray(len(part))
            read_exactly(fd, offset, memoryview(found))
            if found != part:
                self._report(target.file, offset)
                break
        return made.nbytes

    def _check_copy(self, copy: CopyRange) -> int:
        for run in range(copy.count):
            start, target = copy.start + run * copy.length, copy.target + run * copy.target_stride
            for done in range(0, copy.length, self._block):
                size = min(self._block, copy.length - done)
                expected, found = bytearray(size), bytearray(size)
                read_exactly(self._files.fd(copy.source), start + done, memoryview(expected))
                output = self._files.fd(self._outputs[copy.file])
                read_exactly(output, target + done, memoryview(found))
                if expected != found:
                    self._report(copy.file, target + done)
                    return copy.size
        return copy.size

    def _report(self, file: int, offset: int) -> None:
        tensor = _tensor_at(self._layout, file, offset)
        what = f"{self._outputs[file]}: tensor {tensor.name}: differs from its source"
        self._problems.append(OutputError(what, hint="the disk may be faulty: merge again"))


def _differing(entry: TensorEntry, first: int, other: int, box: Box) -> CorruptError:
    ours, theirs = entry.chunks[first], entry.chunks[other]
    return CorruptError(
        f"tensor {entry.fqn}: the replicas of {ours.box} differ, from their elements {box} on",
        expected=f"the value of rank {ours.rank}, in {ours.source.path.name}",
        found=f"another value on rank {theirs.rank}, in {theirs.source.path.name}",
    )


def _tensors_in(catalogs: Sequence[Catalog], path: Path, record: StorageRecord) -> list[str]:
    """Return "tensor name of rank R" for every tensor in a storage."""
    found: list[str] = []
    for entry in chain.from_iterable(catalog.tensors.values() for catalog in catalogs):
        chunks = entry.chunks
        inside = (chunks.start >= record.offset) & (chunks.start < record.offset + record.size)
        rows = np.flatnonzero(inside & (chunks.length > 0)).tolist()
        found += (
            f"tensor {entry.fqn} of rank {chunks.rank[row]}"
            for row in rows
            if chunks.paths[chunks.file[row]] == path
        )
    return found


def _tensor_at(layout: Layout, file: int, offset: int) -> OutputTensor:
    """Return the tensor that a byte of an output file belongs to."""
    output = layout.files[file]
    ends = [len(output.header) + tensor.data_offsets[1] for tensor in output.tensors]
    return output.tensors[bisect_right(ends, offset)]
