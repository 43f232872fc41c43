"""What rank files contain, as flat integers, and how those of all ranks become drafts of tensors.

A file of a thousand tensors has a dozen distinct forms and a thousand rows; nothing of the pickle
is kept, so a table is small to keep and quick to send between processes. Its byte form is JSON for
what is varied, raw 64-bit integers for what is many.
"""

import json
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, fields
from struct import pack, unpack_from

from unshard import errors
from unshard.errors import CorruptError, UnshardError
from unshard.tensors.catalog import Skipped
from unshard.tensors.chunk_rows import TensorDraft
from unshard.tensors.dtypes import BY_NAME, DType
from unshard.tensors.placements import (
    DeviceMesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
)

__all__ = ["Gathering", "RankTable", "TensorForm", "problem", "problem_fields"]

_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    kind.__name__: kind for kind in (Shard, StridedShard, Replicate, Partial)
}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is as one rank sees it.

    Attributes:
        dtype: as stored.
        shape: the global shape; of a plain tensor the stored one.
        sharding: mesh and placements, where it has any.
        boxed: whether each stored part states its own box instead (ShardedTensor).
    """

    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding | None
    boxed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing says what part of which tensor is stored."""
        return self.sharding is None and not self.boxed

    def __str__(self) -> str:
        return f"{'plain' if self.is_plain else 'sharded'} {self.dtype} {list(self.shape)}"


@dataclass(slots=True)
class RankTable:
    """The tensors of one rank file.

    Attributes:
        rank: the one that wrote it; `file`: its number among the files being read.
        names: of the tensors, in order.
        forms: number of each tensor's form in `form_table`.
        counts: how many chunks each tensor has here.
        rows: the chunks: rank, file, start and length (bytes), offsets, sizes (elements).
        odd_strides: strides, in elements, of chunks that are not row-major, by number of the chunk.
        skipped: values that are not tensors, with the reason.
        problems: tensors that cannot be merged.
        world_size: of the ranks that wrote it, as far as the file says: at least this many.
    """

    rank: int
    file: int
    names: list[str] = field(default_factory=list)
    forms: list[int] = field(default_factory=list)
    form_table: list[TensorForm] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    odd_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[UnshardError] = field(default_factory=list)
    world_size: int = 1

    def to_bytes(self) -> bytes:
        """Return the byte form: two lengths, JSON, rows."""
        parts = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "rows"}
        parts["form_table"] = [_form_fields(form) for form in self.form_table]
        parts["odd_strides"] = list(self.odd_strides.items())
        parts["problems"] = [problem_fields(problem) for problem in self.problems]
        text = json.dumps(parts, separators=(",", ":")).encode()
        return pack("<QQ", len(text), len(self.rows) * 8) + text + self.rows.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankTable":
        """Return the table of a byte form that `to_bytes` made."""
        size, rows_size = unpack_from("<QQ", data)
        parts = json.loads(data[16 : 16 + size])
        parts["form_table"] = [_form(**form) for form in parts["form_table"]]
        parts["odd_strides"] = {number: tuple(steps) for number, steps in parts["odd_strides"]}
        parts["problems"] = [problem(item) for item in parts["problems"]]
        rows = array("q")
        rows.frombytes(data[16 + size : 16 + size + rows_size])
        return cls(rows=rows, **parts)


def problem_fields(error: UnshardError) -> dict[str, str]:
    """Return an error as JSON fields."""
    parts = {name: getattr(error, name) for name in ("subject", "expected", "found", "hint")}
    return {"type": type(error).__name__, **parts}


def problem(parts: dict[str, str]) -> UnshardError:
    """Return the error of JSON fields."""
    found: UnshardError = getattr(errors, parts.pop("type"))(**parts)
    return found


_ShardingFields = tuple[
    list[int],
    list[str] | None,
    list[int],
    list[tuple[str, list[object]]],
    list[tuple[int, list[int]]] | None,
]
"""Mesh shape, names and coordinates; placements, each a class and its arguments; shard order."""


def _form_fields(form: TensorForm) -> dict[str, object]:
    fields = {"dtype": form.dtype.name, "shape": form.shape, "boxed": form.boxed, "how": None}
    if form.sharding is None:
        return fields
    mesh = form.sharding.mesh
    placements = [(type(one).__name__, astuple(one)) for one in form.sharding.placements]
    order = form.sharding.shard_order
    return fields | {"how": (mesh.shape, mesh.dim_names, mesh.coordinates, placements, order)}


def _form(*, dtype: str, shape: list[int], boxed: bool, how: _ShardingFields | None) -> TensorForm:
    sharding = None
    if how is not None:
        sizes, names, at, stated, order = how
        mesh = DeviceMesh(tuple(sizes), None if names is None else tuple(names), tuple(at))
        placements = tuple(_PLACEMENTS[name](*args) for name, args in stated)
        orders = None if order is None else tuple((dim, tuple(dims)) for dim, dims in order)
        sharding = Sharding(mesh, placements, orders)
    return TensorForm(BY_NAME[dtype], tuple(shape), sharding, boxed)


class Gathering:
    """Unites the tables of rank files, taken in rank order, into drafts of tensors.

    Attributes:
        drafts: the tensors, as the first rank that has each describes it. Of a plain tensor, each
            chunk is one rank's whole tensor; `copies` decides what they are together.
        ranks: the ranks that have each tensor, including those that store no element of it.
        skipped: values that are not tensors.
        problems: tensors that cannot be read, or on which ranks disagree.
    """

    def __init__(self) -> None:
        self.drafts: dict[str, TensorDraft] = {}
        self.ranks: dict[str, array[int]] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []
        self._forms: dict[str, TensorForm] = {}

    @property
    def plain(self) -> list[TensorDraft]:
        """The tensors of which nothing says how they are cut."""
        return [self.drafts[name] for name, form in self._forms.items() if form.is_plain]

    def add(self, table: RankTable) -> None:
        """Add what one file contains; contradictions to earlier files go to `problems`."""
        self.problems.extend(table.problems)
        for name, reason in table.skipped.items():
            self.skipped.setdefault(name, Skipped(name, reason))
        at = chunk = 0
        for name, number, count in zip(table.names, table.forms, table.counts, strict=True):
            form = table.form_table[number]
            if name not in self.drafts:
                self._forms[name], self.ranks[name] = form, array("i")
                self.drafts[name] = TensorDraft(name, form.dtype, form.shape, form.sharding)
            first, ranks = self._forms[name], self.ranks[name]
            end = at + count * (4 + 2 * len(form.shape))
            if _agree(first, form):
                ranks.append(table.rank)
                odd = table.odd_strides
                steps = {n: odd[chunk + n] for n in range(count) if chunk + n in odd}
                self.drafts[name].rows.extend(table.rows[at:end], steps)
            else:
                what = f"rank {table.rank}: {form}, but rank {ranks[0]} says {first}"
                self.problems.append(CorruptError(f"tensor {name}: {what}"))
            at, chunk = end, chunk + count


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
