"""Verify an output by reading it again from disk.

`light` checks the headers against the rules of the format. `full` also checks, byte by byte:

* every storage of the source files against its CRC-32, if the file has one;
* every replica against the chunk that was used;
* every byte of the output against its source.

A problem is reported with file, tensor and rank. Files are not mapped into memory, so a limit on
address space (`ulimit -v`) may be lower than their size.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from unshard.containers.chunks import first_difference, replicas
from unshard.containers.open_files import OpenFiles
from unshard.containers.safetensors_file import read_safetensors
from unshard.containers.strided import crc_of, raw_dtype, read_exactly
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.zip import StorageRecord
from unshard.errors import CheckpointError, CorruptError, OutputError, UnshardError, raise_all
from unshard.fronts import Text
from unshard.plan.layout import Layout, OutputFile
from unshard.plan.operations import CopyRange
from unshard.plan.work import Tile, Unit
from unshard.tensors.boxes import row_tile, tiles
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry
from unshard.write.execute import make_tile, tile_runs

Check = ByteRange | TensorEntry | Unit
"""A check: the checksums of a torch.save zip, the replicas of a tensor, or part of an output."""


def verify_light(directory: Path, layout: Layout) -> None:
    """Check files, headers, names, dtypes, shapes, sizes and index against the layout.

    Raises:
        OutputError: lists every difference.
    """
    problems = [problem for file in layout.files for problem in _check_file(directory, file)]
    for name, index in layout.indices.items():
        written = json.loads((directory / name).read_bytes())
        if written["weight_map"] != json.loads(index)["weight_map"]:
            problems.append(OutputError(f"{name}: its weight map differs from the plan"))
    raise_all(OutputError, f"{directory}: the output differs from the plan", problems)


def _check_file(directory: Path, file: OutputFile) -> list[OutputError]:
    path = directory / file.filename
    size = path.stat().st_size
    if size != file.size:
        return [OutputError(f"{path}", expected=f"{file.size} bytes", found=f"{size}")]
    problems = []
    with path.open("rb") as opened:
        if opened.read(len(file.header)) != file.header:
            problems.append(OutputError(f"{path}: its header differs from the plan"))
    try:
        entries = {entry.name: entry for entry in read_safetensors(path).entries}
    except CheckpointError as error:
        return [OutputError(f"{path}: is not a valid safetensors file: {error.subject}")]
    if entries.keys() != {tensor.name for tensor in file.tensors}:
        return [OutputError(f"{path}: its tensor names differ from the plan")]
    for tensor in file.tensors:
        entry = entries[tensor.name]
        found = (entry.dtype.code, entry.shape)
        expected = (tensor.dtype.code, tensor.shape)
        if found != expected:
            subject = f"{path}: tensor {tensor.name}"
            problems.append(OutputError(subject, expected=str(expected), found=str(found)))
    return problems


def source_jobs(catalogs: Sequence[Catalog]) -> Iterator[Check]:
    """Yield the checks of the sources."""
    for catalog in catalogs:
        yield from catalog.archives
        yield from (entry for entry in catalog.tensors.values() if len(entry.chunks) > 1)


def without_checksums(catalogs: Sequence[Catalog], verify: str) -> list[str]:
    """Return a note about source files without checksums, in which `full` misses some damage."""
    if verify != "full":
        return []
    # Of all catalogs, because the optimizer may be in the model's files.
    checked = {archive.path for catalog in catalogs for archive in catalog.archives}
    files = sorted({path for catalog in catalogs for path in catalog.weight_files - checked})
    if not files:
        return []
    names = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
    subject = "this file has" if len(files) == 1 else f"these {len(files)} files have"
    return [
        Text(
            f"⟦--verify full⟧ cannot notice bytes of {names} that were damaged after they were "
            f"saved: {subject} no checksums"
        )
    ]


class Checker:
    """Executes checks, one at a time; one checker per thread.

    It appends to `problems`. At most `open_files` (at least 2) descriptors stay open.
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
        """Execute a check; return the bytes of output that it compared."""
        match job:
            case ByteRange():
                self._check_source(job)
            case TensorEntry():
                self._check_replicas(job)
            case Tile():
                return self._check_tile(job)
            case CopyRange():
                return self._check_copy(job)
        return 0

    def _check_source(self, archive: ByteRange) -> None:
        path = archive.path
        torch_file = read_torch_file(path, offset=archive.offset, length=archive.length)
        for key, record in torch_file.storages.items():
            if not record.crc:
                continue
            file = self._files.source(path)
            if crc_of(file, record.offset, record.size, block=self._block) != record.crc:
                names = ", ".join(_tensors_in(self._catalogs, path, record)) or "no tensor"
                self._problems.append(
                    CorruptError(
                        f"{path}: storage {key} ({names}) does not match its checksum (CRC-32)",
                        hint="the file was damaged after it was saved; take another checkpoint",
                    )
                )

    def _check_replicas(self, entry: TensorEntry) -> None:
        raw = raw_dtype(entry.dtype)
        for first, other in replicas(entry.chunks):
            sizes = tuple(entry.chunks.sizes[first].tolist())
            boxes = tiles(sizes, row_tile(sizes, max(1, self._block // raw.itemsize)))
            box = first_difference(entry.chunks, (first, other), boxes, raw, self._files)
            if box is None:
                continue
            ours, theirs = entry.chunks[first], entry.chunks[other]
            self._problems.append(
                CorruptError(
                    f"tensor {entry.fqn}: the replicas of {ours.box} differ, from their elements "
                    f"{box} on",
                    expected=f"the value of rank {ours.rank}, in {ours.source.path.name}",
                    found=f"another value on rank {theirs.rank}, in {theirs.source.path.name}",
                )
            )

    def _check_tile(self, tile: Tile) -> int:
        target = tile.operation.target
        expected = make_tile(tile, self._files).reshape(-1).view(np.uint8)
        fd = self._files.source(self._outputs[target.file])
        for offset, part in tile_runs(tile.box, target, expected.data):
            found = bytearray(len(part))
            read_exactly(fd, offset, memoryview(found))
            if found != part:
                self._report(target.file, offset)
                break
        return expected.nbytes

    def _check_copy(self, copy: CopyRange) -> int:
        for run in range(copy.count):
            start, target = copy.start + run * copy.length, copy.target + run * copy.target_stride
            for done in range(0, copy.length, self._block):
                size = min(self._block, copy.length - done)
                expected, found = bytearray(size), bytearray(size)
                read_exactly(self._files.source(copy.source), start + done, memoryview(expected))
                output = self._files.source(self._outputs[copy.file])
                read_exactly(output, target + done, memoryview(found))
                if expected != found:
                    self._report(copy.file, target + done)
                    return copy.size
        return copy.size

    def _report(self, file: int, offset: int) -> None:
        output = self._layout.files[file]
        ends = [len(output.header) + tensor.data_offsets[1] for tensor in output.tensors]
        name = output.tensors[bisect_right(ends, offset)].name
        subject = f"{self._outputs[file]}: tensor {name}: differs from its source"
        self._problems.append(OutputError(subject, hint="the disk may be faulty: merge again"))


def _tensors_in(catalogs: Sequence[Catalog], path: Path, record: StorageRecord) -> list[str]:
    """Return "tensor name of rank R" for every tensor in a storage."""
    names: list[str] = []
    for entry in chain.from_iterable(catalog.tensors.values() for catalog in catalogs):
        chunks = entry.chunks
        inside = (chunks.start >= record.offset) & (chunks.start < record.offset + record.size)
        rows = np.flatnonzero(inside & (chunks.length > 0)).tolist()
        names += (
            f"tensor {entry.fqn} of rank {chunks.rank[row]}"
            for row in rows
            if chunks.paths[chunks.file[row]] == path
        )
    return names
