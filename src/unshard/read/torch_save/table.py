"""What one rank file holds, as flat integers: small to keep, quick to send between processes.

A file of a thousand tensors has a dozen distinct forms and a thousand rows; nothing of the pickle
is kept. The byte form is JSON for what is varied, raw 64-bit integers for what is many.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack, unpack_from

from unshard import errors
from unshard.errors import UnshardError
from unshard.tensors.boxes import is_row_major
from unshard.tensors.chunk_rows import chunk_row
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

__all__ = ["RankTable", "TensorForm"]


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
        rank: who wrote it; `file`: its number among the files being read.
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

    def add_chunk(  # noqa: PLR0913, PLR0917 (one argument per column; called for every chunk)
        self,
        number: int,
        start: int,
        itemsize: int,
        offsets: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        """Add a chunk, the `number`th of this file, whose first element is at byte `start`."""
        if not is_row_major(sizes, strides):
            self.odd_strides[number] = tuple(strides)
        row = chunk_row(self.rank, self.file, start, itemsize, offsets, sizes, strides)
        self.rows.extend(row)

    def to_bytes(self) -> bytes:
        """Return the byte form: two lengths, JSON, rows."""
        fields = {
            "rank": self.rank,
            "file": self.file,
            "names": self.names,
            "forms": self.forms,
            "form_table": [_form_fields(form) for form in self.form_table],
            "counts": self.counts,
            "odd_strides": list(self.odd_strides.items()),
            "skipped": self.skipped,
            "problems": [problem_fields(problem) for problem in self.problems],
            "world_size": self.world_size,
        }
        text = json.dumps(fields, separators=(",", ":")).encode()
        return pack("<QQ", len(text), len(self.rows) * 8) + text + self.rows.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankTable":
        """Return the table of a byte form that `to_bytes` made."""
        size, rows_size = unpack_from("<QQ", data)
        fields = json.loads(data[16 : 16 + size])
        rows = array("q")
        rows.frombytes(data[16 + size : 16 + size + rows_size])
        return cls(
            rank=fields["rank"],
            file=fields["file"],
            names=fields["names"],
            forms=fields["forms"],
            form_table=[_form(form) for form in fields["form_table"]],
            counts=fields["counts"],
            rows=rows,
            odd_strides={number: tuple(strides) for number, strides in fields["odd_strides"]},
            skipped=fields["skipped"],
            problems=[problem(item) for item in fields["problems"]],
            world_size=fields["world_size"],
        )


def problem_fields(error: UnshardError) -> dict[str, str]:
    """Return an error as JSON fields."""
    return {
        "type": type(error).__name__,
        "subject": error.subject,
        "expected": error.expected,
        "found": error.found,
        "hint": error.hint,
    }


def problem(fields: dict[str, str]) -> UnshardError:
    """Return the error of JSON fields."""
    kind = getattr(errors, fields["type"])
    found: UnshardError = kind(
        fields["subject"], expected=fields["expected"], found=fields["found"], hint=fields["hint"]
    )
    return found


def _form_fields(form: TensorForm) -> list[object]:
    sharding = form.sharding
    if sharding is None:
        return [form.dtype.name, form.shape, form.boxed]
    mesh = sharding.mesh
    placements = [_placement_fields(placement) for placement in sharding.placements]
    fields = [mesh.shape, mesh.dim_names, mesh.coordinates, placements, sharding.shard_order]
    return [form.dtype.name, form.shape, fields]


def _form(fields: list[object]) -> TensorForm:
    match fields:
        case [str(dtype), list(shape), bool(boxed)]:
            return TensorForm(BY_NAME[dtype], tuple(shape), None, boxed)
        case [str(dtype), list(shape), [list(sizes), names, list(at), list(placements), order]]:
            names = tuple(names) if isinstance(names, list) else None
            mesh = DeviceMesh(tuple(sizes), names, tuple(at))
            stated = (
                tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in order)
                if isinstance(order, list)
                else None
            )
            sharding = Sharding(mesh, tuple(map(_placement, placements)), stated)
            return TensorForm(BY_NAME[dtype], tuple(shape), sharding)
    raise ValueError(f"not a form: {fields}")


def _placement_fields(placement: Placement) -> list[object]:
    match placement:
        case Shard(dim):
            return ["Shard", dim]
        case StridedShard(dim, factor):
            return ["StridedShard", dim, factor]
        case Replicate():
            return ["Replicate"]
        case Partial(op):
            return ["Partial", op]


def _placement(fields: list[object]) -> Placement:
    match fields:
        case ["Shard", int(dim)]:
            return Shard(dim)
        case ["StridedShard", int(dim), int(factor)]:
            return StridedShard(dim, factor)
        case ["Replicate"]:
            return Replicate()
        case ["Partial", str(op)]:
            return Partial(op)
    raise ValueError(f"not a placement: {fields}")
