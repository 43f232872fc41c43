"""How the tables of all rank files become tensors, in columns: no step is done per chunk."""

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
class _Boxes:
    """The distinct boxes of all files, by number: rank, file, length, offsets, sizes."""

    rows: "array[int]" = field(default_factory=lambda: array("q"))
    at: "array[int]" = field(default_factory=lambda: array("q"))
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, table: RankTable) -> Numbers:
        """Add those of a file; return the number of the first one of each of its cuts."""
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
        """Return the chunks that are these boxes, without the places where they start."""
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
            np.zeros(len(grid), np.int64),  # each tensor has its own
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

    A tensor is as the first rank that has it describes it. Of a plain tensor, each chunk is one
    rank's whole tensor. Tensors whose boxes are the same, on the same ranks, share the arrays that
    say so.

    Attributes:
        names: the number of each tensor, in the order in which they were found.
        skipped: values that are not tensors.
        problems: tensors that cannot be read, or on which ranks disagree.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []
        self._forms: dict[TensorForm, int] = {}
        self._known: list[TensorForm] = []
        self._first = np.empty(0, np.int32)  # of each tensor: its form on the first rank
        self._first_rank = np.empty(0, np.int32)
        self._numbered: tuple[list[str], Numbers] = ([], np.empty(0, np.int32))
        self._boxes = _Boxes()
        self._chunks: list[tuple[Numbers, Numbers, Ints]] = []  # tensor, box, first byte
        self._on: list[tuple[int, Numbers]] = []  # rank, tensors

    @property
    def plain(self) -> list[str]:
        """The tensors of which nothing says how they are cut."""
        is_plain = np.array([form.is_plain for form in self._known], np.bool_)
        names = list(self.names)
        return [names[number] for number in np.flatnonzero(is_plain[self._first]).tolist()]

    def add(self, table: RankTable) -> None:
        """Add what one file contains; contradictions to earlier files go to `problems`."""
        self.problems.extend(table.problems)
        for name, reason in table.skipped.items():
            self.skipped.setdefault(name, Skipped(name, reason))
        tensors = self._numbers(table.names)
        forms = [self._form_number(cut.form) for cut in table.cut_table]
        agreed = self._agreed(table, tensors, np.array(forms, np.int32)[table.cuts])
        boxes = self._boxes.add(table)[table.cuts]
        counts = np.array([len(cut.boxes) for cut in table.cut_table], np.int32)[table.cuts]
        starts = table.starts
        self._on.append((table.rank, tensors if agreed.all() else tensors[agreed]))
        if not agreed.all() or (counts != 1).any():
            kept = np.repeat(agreed, counts)
            within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
            boxes = (np.repeat(boxes, counts) + within).astype(np.int32)[kept]
            tensors, starts = np.repeat(tensors, counts)[kept], starts[kept]
        self._chunks.append((tensors, boxes, starts))

    def _form_number(self, form: TensorForm) -> int:
        if form not in self._forms:
            self._forms[form] = len(self._known)
            self._known.append(form)
        return self._forms[form]

    def _numbers(self, names: list[str]) -> Numbers:
        """Return the number of each tensor; the files of most ranks have equal lists."""
        if names != self._numbered[0]:
            known = self.names
            numbers = [known.setdefault(name, len(known)) for name in names]
            self._numbered = names, np.array(numbers, np.int32)
            new = len(known) - len(self._first)
            self._first = np.append(self._first, np.full(new, -1, np.int32))
            self._first_rank = np.append(self._first_rank, np.full(new, -1, np.int32))
        return self._numbered[1]

    def _agreed(self, table: RankTable, tensors: Numbers, forms: Numbers) -> NDArray[np.bool_]:
        """Return of which tensors of a file the form is that of earlier files, or the first one."""
        new = tensors[self._first[tensors] < 0]
        if len(new):
            self._first[tensors] = np.where(self._first[tensors] < 0, forms, self._first[tensors])
            self._first_rank[new] = table.rank
        pairs = self._first[tensors].astype(np.int64) << 32 | forms
        agreed = np.ones(len(tensors), np.bool_)
        known = self._known
        for pair in sorted({*pairs.tolist()}):  # np.unique imports all of numpy.ma
            if not _agree(known[pair >> 32], known[pair & 0xFFFFFFFF]):
                agreed &= pairs != pair
        for place in np.flatnonzero(~agreed).tolist():
            number = tensors[place]
            what = (
                f"rank {table.rank}: {known[forms[place]]}, "
                f"but rank {self._first_rank[number]} says {known[self._first[number]]}"
            )
            self.problems.append(CorruptError(f"tensor {table.names[place]}: {what}"))
        return agreed

    def lacking(self) -> dict[str, list[int]]:
        """Return the tensors that some of the files do not have, and those files' ranks."""
        names = list(self.names)
        counts = np.zeros(len(names), np.int64)
        for _, tensors in self._on:
            counts[tensors] += 1
        lacking: dict[str, list[int]] = {
            names[number]: [] for number in np.flatnonzero(counts < len(self._on)).tolist()
        }
        if lacking:
            for rank, tensors in self._on:
                have = set(tensors.tolist())
                for name, ranks in lacking.items():
                    if self.names[name] not in have:
                        ranks.append(rank)
        return lacking

    def entries(self, paths: tuple[Path, ...]) -> dict[str, TensorEntry]:
        """Return the tensors; `paths` are the files by number. To be called once, at the end."""
        tensors, boxes, starts = self._sorted()
        ends = np.cumsum(np.bincount(tensors, minlength=len(self.names))).tolist()
        shared: dict[tuple[int, bytes], ChunkTable] = {}
        entries = {}
        begin = 0
        for name, end, first in zip(self.names, ends, self._first.tolist(), strict=True):
            form, numbers = self._known[first], boxes[begin:end]
            key = len(form.shape), numbers.tobytes()
            if key not in shared:
                shared[key] = self._boxes.columns(numbers, len(form.shape), paths)
            chunks = replace(shared[key], start=starts[begin:end])
            entries[name] = TensorEntry(name, form.dtype, form.shape, chunks, form.sharding)
            begin = end
        return entries

    def _sorted(self) -> tuple[Numbers, Numbers, Ints]:
        """Return all chunks, by tensor and then in the order of the files: tensor, box, start."""
        if not self._chunks:
            return np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
        tensors = np.concatenate([one[0] for one in self._chunks])
        boxes = np.concatenate([one[1] for one in self._chunks])
        starts = np.concatenate([one[2] for one in self._chunks])
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
