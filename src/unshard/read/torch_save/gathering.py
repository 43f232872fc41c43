"""Unites the tables of all rank files into tensors, in columns: no step is done per chunk."""

from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unshard.errors import CorruptError, UnshardError
from unshard.read.torch_save.table import RankTable, TensorForm
from unshard.tensors.boxes import Ints, row_major_strides
from unshard.tensors.catalog import ChunkTable, Skipped, TensorEntry

Numbers = NDArray[np.int32]


@dataclass(slots=True)
class _BoxTable:
    """The distinct boxes of all files, by number: rank, file, length, offsets, sizes."""

    rows: "array[int]" = field(default_factory=lambda: array("q"))
    at: "array[int]" = field(default_factory=lambda: array("q"))
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, table: RankTable) -> Numbers:
        """Add the boxes of a file; return the number of the first box of each of its cuts."""
        first = []
        for cut in table.cut_table:
            first.append(len(self.at))
            for box in cut.boxes:
                if box.strides is not None:
                    self.strides[len(self.at)] = box.strides
                self.at.append(len(self.rows))
                self.rows.extend((table.rank, table.file, box.length, *box.offsets, *box.sizes))
        return np.array(first, np.int32)

    def columns(self, numbers: Numbers, ndim: int, paths: tuple[Path, ...]) -> ChunkTable:
        """Return the chunks with these boxes; each tensor fills in where its chunks start."""
        at = np.frombuffer(self.at, np.int64)[numbers] if len(numbers) else np.empty(0, np.int64)
        rows = np.frombuffer(self.rows, np.int64) if len(self.rows) else np.empty(0, np.int64)
        grid = rows[at[:, None] + np.arange(3 + 2 * ndim)]
        rank, file, length = grid[:, :3].T
        offsets, sizes = grid[:, 3 : 3 + ndim].copy(), grid[:, 3 + ndim :].copy()
        strides = self._strides(numbers.tolist(), sizes) if self.strides else None
        return ChunkTable(
            paths,
            offsets,
            sizes,
            strides,
            file.astype(np.int32),
            np.zeros(len(grid), np.int64),
            length.copy(),
            rank.astype(np.int32),
            np.zeros(len(grid), np.bool_),
        )

    def _strides(self, numbers: list[int], sizes: Ints) -> Ints | None:
        if not any(number in self.strides for number in numbers):
            return None
        each = [
            self.strides.get(number) or row_major_strides(size)
            for number, size in zip(numbers, sizes.tolist(), strict=True)
        ]
        return np.array(each, np.int64)


class Gathering:
    """Unites the tables of rank files, taken in rank order, into tensors.

    The first rank that has a tensor decides its form. Each chunk of a plain tensor is one rank's
    whole tensor. Tensors with the same boxes, on the same ranks, share the arrays of these.

    Attributes:
        names: the number of each tensor, in the order of the files.
        skipped: values that are not tensors.
        problems: tensors that cannot be read, or on which ranks disagree.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []
        self._form_numbers: dict[TensorForm, int] = {}
        self._forms: list[TensorForm] = []
        self._first = np.empty(0, np.int32)  # of each tensor: its form on the first rank
        self._first_rank = np.empty(0, np.int32)
        self._numbered: tuple[list[str], Numbers] = ([], np.empty(0, np.int32))
        self._boxes = _BoxTable()
        self._chunks: list[tuple[Numbers, Numbers, Ints]] = []  # tensor, box, first byte
        self._by_rank: list[tuple[int, Numbers]] = []  # rank, tensors

    @property
    def plain(self) -> list[str]:
        """The tensors without a record of how they are cut."""
        is_plain = np.array([form.is_plain for form in self._forms], np.bool_)
        names = list(self.names)
        return [names[number] for number in np.flatnonzero(is_plain[self._first]).tolist()]

    def add(self, table: RankTable) -> None:
        """Add the tensors of one file; contradictions to earlier files go to `problems`."""
        self.problems.extend(table.problems)
        for name, reason in table.skipped.items():
            self.skipped.setdefault(name, Skipped(name, reason))
        tensors = self._numbers(table.names)
        forms = [self._form_number(cut.form) for cut in table.cut_table]
        agreed = self._agreed(table, tensors, np.array(forms, np.int32)[table.cuts])
        boxes = self._boxes.add(table)[table.cuts]
        counts = np.array([len(cut.boxes) for cut in table.cut_table], np.int32)[table.cuts]
        starts = table.starts
        self._by_rank.append((table.rank, tensors if agreed.all() else tensors[agreed]))
        if not agreed.all() or (counts != 1).any():
            usable = np.repeat(agreed, counts)
            within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
            boxes = (np.repeat(boxes, counts) + within).astype(np.int32)[usable]
            tensors, starts = np.repeat(tensors, counts)[usable], starts[usable]
        self._chunks.append((tensors, boxes, starts))

    def _form_number(self, form: TensorForm) -> int:
        if form not in self._form_numbers:
            self._form_numbers[form] = len(self._forms)
            self._forms.append(form)
        return self._form_numbers[form]

    def _numbers(self, names: list[str]) -> Numbers:
        """Return the number of each tensor; the files of most ranks have equal lists."""
        if names != self._numbered[0]:
            numbers = [self.names.setdefault(name, len(self.names)) for name in names]
            self._numbered = names, np.array(numbers, np.int32)
            new = np.full(len(self.names) - len(self._first), -1, np.int32)
            self._first = np.append(self._first, new)
            self._first_rank = np.append(self._first_rank, new)
        return self._numbered[1]

    def _agreed(self, table: RankTable, tensors: Numbers, forms: Numbers) -> NDArray[np.bool_]:
        """Return whether each tensor of a file has the form that earlier files have, if any."""
        new = tensors[self._first[tensors] < 0]
        if len(new):
            self._first[tensors] = np.where(self._first[tensors] < 0, forms, self._first[tensors])
            self._first_rank[new] = table.rank
        pairs = self._first[tensors].astype(np.int64) << 32 | forms
        agreed = np.ones(len(tensors), np.bool_)
        for pair in sorted({*pairs.tolist()}):  # np.unique imports all of numpy.ma
            if not _agree(self._forms[pair >> 32], self._forms[pair & 0xFFFFFFFF]):
                agreed &= pairs != pair
        for place in np.flatnonzero(~agreed).tolist():
            number = tensors[place]
            contradiction = (
                f"rank {table.rank}: {self._forms[forms[place]]}, "
                f"but rank {self._first_rank[number]} has {self._forms[self._first[number]]}"
            )
            self.problems.append(CorruptError(f"tensor {table.names[place]}: {contradiction}"))
        return agreed

    def lacking(self) -> dict[str, list[int]]:
        """Return the tensors that are missing in some files, and the ranks of those files."""
        names = list(self.names)
        counts = np.zeros(len(names), np.int64)
        for _, tensors in self._by_rank:
            counts[tensors] += 1
        rare = np.flatnonzero(counts < len(self._by_rank)).tolist()
        lacking: dict[str, list[int]] = {names[number]: [] for number in rare}
        for rank, tensors in self._by_rank if lacking else ():
            present = set(tensors.tolist())
            for name, ranks in lacking.items():
                if self.names[name] not in present:
                    ranks.append(rank)
        return lacking

    def entries(self, paths: tuple[Path, ...]) -> dict[str, TensorEntry]:
        """Return the tensors; `paths` are the files by number. Call it once, at the end."""
        tensors, boxes, starts = self._sorted()
        ends = np.cumsum(np.bincount(tensors, minlength=len(self.names))).tolist()
        shared: dict[tuple[int, bytes], ChunkTable] = {}
        entries = {}
        begin = 0
        for name, end, first in zip(self.names, ends, self._first.tolist(), strict=True):
            form, numbers = self._forms[first], boxes[begin:end]
            key = len(form.shape), numbers.tobytes()
            if key not in shared:
                shared[key] = self._boxes.columns(numbers, len(form.shape), paths)
            chunks = replace(shared[key], start=starts[begin:end])
            entries[name] = TensorEntry(name, form.dtype, form.shape, chunks, form.sharding)
            begin = end
        return entries

    def _sorted(self) -> tuple[Numbers, Numbers, Ints]:
        """Return tensor, box and start of all chunks, by tensor and then in the order of files."""
        if not self._chunks:
            return np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
        tensors = np.concatenate([tensor for tensor, _, _ in self._chunks])
        boxes = np.concatenate([box for _, box, _ in self._chunks])
        starts = np.concatenate([start for _, _, start in self._chunks])
        self._chunks.clear()
        order = np.argsort(tensors, kind="stable")
        return tensors[order], boxes[order], starts[order]


def _agree(first: TensorForm, other: TensorForm) -> bool:
    """Return whether ranks agree: plain tensors may differ in size, as they may be shards."""
    if first.dtype is not other.dtype or first.is_plain is not other.is_plain:
        return False
    if first.is_plain:
        return len(first.shape) == len(other.shape)
    ours, theirs = first.sharding, other.sharding
    if ours is None or theirs is None:
        return first.shape == other.shape and ours is theirs
    same_mesh = ours.mesh.shape == theirs.mesh.shape  # coordinates on it differ between ranks
    return first.shape == other.shape and same_mesh and ours.placements == theirs.placements
