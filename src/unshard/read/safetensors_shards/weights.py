"""Reader for sharded safetensors: every rank's pieces, as torch's HuggingFaceStorageWriter saves.

transformers (`save_pretrained(…, distributed_checkpoint=True)`), torchtitan and NeMo AutoModel use
it. The metadata of each file has the offsets of its pieces. The size of a tensor and the number of
ranks are not recorded: a tensor ends where its last piece ends.

A lost file of last pieces therefore leaves no hole. The rank's other files may show the loss, or
the files next to the shards (`losses`). Two losses cannot be noticed: all files of the last ranks,
and a tensor that was, whole, in a lost file only. A copy of another file in place of the lost file
is noticed: torch saves every piece once.

Source: `torch.distributed.checkpoint.hf_storage`, `filesystem` and `_consolidate_hf_safetensors`.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unshard.containers.chunks import equal_chunks, replicas
from unshard.containers.json_file import shown
from unshard.containers.open_files import OpenFiles
from unshard.containers.safetensors_file import HeaderEntry, SafetensorsFile
from unshard.errors import CorruptError, IncompleteError, UnshardError, raise_all
from unshard.read.format import Location, ReadOptions
from unshard.read.hub_files import (
    MAX_INTEGER,
    natural_order,
    read_header,
    saved_offsets,
    size_problem,
)
from unshard.read.safetensors_shards.losses import loss_problems, nearest_config, writer_of
from unshard.read.safetensors_shards.names import ShardSet, choose_shards
from unshard.tensors.boxes import distinct
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft


def read(location: Location, options: ReadOptions) -> Catalog:
    """Read the weights of a checkpoint."""
    chosen, notes = choose_shards(location)
    union = _UnitedShards(chosen)
    for number in range(len(chosen.files)):
        union.add(number)
    summary = f"{location.weights_dir}: the sharded safetensors cannot be merged"
    raise_all(CorruptError, summary, union.problems)
    tensors = union.tensors()
    raise_all(CorruptError, summary, _repetitions(tensors, union.paths))
    config = nearest_config(location, options.config_file)
    losses = loss_problems(location, chosen, tensors, config)
    summary = f"{location.weights_dir}: files of ranks are missing"
    raise_all(IncompleteError, summary, losses.value)
    missing = chosen.missing()
    return Catalog(
        writer=writer_of(location, config),
        world_size=chosen.ranks,
        tensors=tensors,
        missing=tuple(missing),
        missing_ranks=tuple(sorted(set(missing.values()))),
        notes=(*notes, *losses.notes),
    )


class _UnitedShards:
    """Unites the pieces in the files."""

    def __init__(self, chosen: ShardSet) -> None:
        self.problems: list[UnshardError] = []
        self._places = list(chosen.files)  # index and rank of each file
        self.paths = tuple(chosen.files.values())
        self._drafts: dict[str, TensorDraft] = {}
        self._firsts: dict[str, int] = {}  # the number of the first file of a tensor

    def add(self, number: int) -> None:
        """Add the pieces of one file; their errors go to `problems`."""
        file = read_header(self.paths[number])
        saved = saved_offsets(file)
        if saved is None:
            problem = CorruptError(
                f"{file.path}: has no offsets of its pieces",
                expected="DCP_SHARDING_INFO in the metadata of its header",
                hint="was it written again by a tool that drops metadata?",
            )
            self.problems.append(problem)
            return
        for entry in file.entries:
            error = (
                size_problem(file.path, entry)
                or self._misplaced(entry.name, number)
                or self._add(file, entry, saved, number)
            )
            if error is not None:
                self.problems.append(error)

    def _add(
        self, file: SafetensorsFile, entry: HeaderEntry, saved: Mapping[str, object], number: int
    ) -> CorruptError | None:
        offsets = _offsets(entry, saved.get(entry.name))
        if offsets is None:
            return CorruptError(
                f"{file.path}: tensor {entry.name}: the file has no valid offsets of this piece",
                expected=f"{len(entry.shape)} offsets in saved_offsets of DCP_SHARDING_INFO",
                found=shown(saved[entry.name]) if entry.name in saved else "no entry",
            )
        _, rank = self._places[number]
        first = self._firsts.setdefault(entry.name, number)
        if first == number:
            shape = (0,) * len(entry.shape)
            self._drafts[entry.name] = TensorDraft(entry.name, entry.dtype, shape)
        draft = self._drafts[entry.name]
        if draft.dtype is not entry.dtype or len(draft.shape) != len(entry.shape):
            return CorruptError(
                f"tensor {entry.name}: rank {rank} ({file.path.name}) contradicts "
                f"{self.paths[first].name}",
                expected=f"{draft.dtype} of {len(draft.shape)} dimensions",
                found=f"{entry.dtype} of {len(entry.shape)} dimensions",
                hint="do the files belong to one save?",
            )
        ends = zip(offsets, entry.shape, draft.shape, strict=True)
        draft.shape = tuple(max(start + size, end) for start, size, end in ends)
        draft.add(
            rank=rank,
            file=number,
            start=file.data_start + entry.begin,
            offsets=offsets,
            sizes=entry.shape,
        )
        return None

    def _misplaced(self, name: str, number: int) -> CorruptError | None:
        """Return the error of a tensor in files of two numbers; the writer gives it one number."""
        first = self._firsts.get(name, number)
        if self._places[first][0] == self._places[number][0]:
            return None
        return CorruptError(
            f"tensor {name}: is in {self.paths[first].name} and in {self.paths[number].name}",
            expected="all its pieces in files of one number",
            hint="was a file replaced by a copy of another?",
        )

    def tensors(self) -> dict[str, TensorEntry]:
        """Return the tensors, ordered by the index of their file, then by name."""
        indices = {name: self._places[number][0] for name, number in self._firsts.items()}
        names = sorted(indices, key=lambda name: (indices[name], natural_order(name)))
        return {name: self._drafts[name].entry(self.paths) for name in names}


def _repetitions(tensors: Mapping[str, TensorEntry], paths: Sequence[Path]) -> list[CorruptError]:
    """Return errors of tensors with the same piece in two files, and of files that are copies.

    torch saves every piece once. A second one with other values is left from another save, or
    damaged. A file whose pieces are all those of another file has replaced a lost file, and hides
    the loss: the tensors end where their last pieces end.
    """
    problems = []
    shared = Counter[tuple[int, int]]()
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for entry in tensors.values():
            table = entry.chunks
            if len(distinct(table.offsets, table.sizes)) == len(table):
                continue
            for first, other in replicas(table):
                pair = int(table.file[first]), int(table.file[other])
                shared[pair] += 1
                if not equal_chunks(entry, first, other, files):
                    names = (paths[number].name for number in pair)
                    problem = CorruptError(
                        f"tensor {entry.fqn}: two files have region {table[first].box}, with "
                        "different values",
                        found=" and ".join(names),
                        hint="do the files belong to one save?",
                    )
                    problems.append(problem)
    return problems or list(_copies(shared, tensors, paths))


def _copies(
    shared: Mapping[tuple[int, int], int],
    tensors: Mapping[str, TensorEntry],
    paths: Sequence[Path],
) -> Iterator[CorruptError]:
    """Yield a problem for each two files that have the same pieces."""
    if not shared:
        return
    pieces = Counter[int]()
    for entry in tensors.values():
        pieces.update(entry.chunks.file[entry.chunks.length > 0].tolist())
    for (first, other), count in shared.items():
        if count == pieces[first] == pieces[other]:
            yield CorruptError(
                f"{paths[other]}: has the same pieces as {paths[first].name}, with the same values",
                expected="every piece in one file, as torch saves them",
                hint="was one of the files replaced by a copy of the other? Copy both again from "
                "where they were written",
            )


def _offsets(entry: HeaderEntry, saved: object) -> tuple[int, ...] | None:
    """Return the offsets of a piece in its tensor; None if they are not valid."""
    if not isinstance(saved, list) or len(saved) != len(entry.shape):
        return None
    for start, size in zip(saved, entry.shape, strict=True):
        if type(start) is not int or not 0 <= start <= MAX_INTEGER - size:
            return None
    return tuple(saved)
