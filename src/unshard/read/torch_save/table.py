"""What a rank file contains, as columns of integers.

A file of a thousand tensors has a dozen distinct cuts and a thousand places; nothing of the pickle
is kept, so a table is small to keep and quick to send between processes. Its byte form is JSON for
what is varied, raw integers for what is many.
"""

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from struct import pack, unpack_from

import numpy as np
from numpy.typing import NDArray

from unshard import errors
from unshard.errors import UnshardError
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


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor as it is stored: `offsets`, `sizes` and `strides` in elements.

    `strides` are None where it is row-major; `length` is in bytes, to the end of its last element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    length: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank stores of a tensor of some form; usually one box, none of an empty part."""

    form: TensorForm
    boxes: tuple[StoredBox, ...]


@dataclass(slots=True)
class RankTable:
    """The tensors of one rank file.

    Attributes:
        rank: the one that wrote it; `file`: its number among the files being read.
        names: of the tensors, in order.
        cut_table: the distinct cuts.
        cuts: number of each tensor's cut in `cut_table`.
        starts: first byte of each stored box, box after box, tensor after tensor.
        skipped: values that are not tensors, with the reason.
        problems: tensors that cannot be merged.
        world_size: of the ranks that wrote it, as far as the file says: at least this many.
    """

    rank: int
    file: int
    names: list[str]
    cut_table: list[Cut]
    cuts: NDArray[np.int32]
    starts: NDArray[np.int64]
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[UnshardError] = field(default_factory=list)
    world_size: int = 1

    def forms(self) -> list[tuple[str, TensorForm]]:
        """Return the name and the form of every tensor."""
        forms = [self.cut_table[number].form for number in self.cuts.tolist()]
        return list(zip(self.names, forms, strict=True))

    def to_bytes(self, known: list[str] | None = None) -> bytes:
        """Return the byte form; names that the receiver knows are left out."""
        parts = {
            "rank": self.rank,
            "file": self.file,
            "names": None if self.names == known else self.names,
            "cut_table": [
                (_form_fields(cut.form), [astuple(box) for box in cut.boxes])
                for cut in self.cut_table
            ],
            "skipped": self.skipped,
            "problems": [problem_fields(problem) for problem in self.problems],
            "world_size": self.world_size,
        }
        text = json.dumps(parts, separators=(",", ":")).encode()
        sizes = pack("<QQ", len(text), self.cuts.nbytes)
        return sizes + text + self.cuts.tobytes() + self.starts.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, known: list[str] | None = None) -> "RankTable":
        """Return the table of a byte form that `to_bytes` made."""
        size, cuts_size = unpack_from("<QQ", data)
        parts = json.loads(data[16 : 16 + size])
        if parts["names"] is None:
            parts["names"] = known
        parts["cut_table"] = [
            Cut(_form(**form), tuple(map(_box, boxes))) for form, boxes in parts["cut_table"]
        ]
        parts["problems"] = [problem(item) for item in parts["problems"]]
        middle = 16 + size + cuts_size
        cuts = np.frombuffer(data[16 + size : middle], np.int32)
        return cls(cuts=cuts, starts=np.frombuffer(data[middle:], np.int64), **parts)


def _box(parts: tuple[list[int], list[int], list[int] | None, int]) -> StoredBox:
    offsets, sizes, strides, length = parts
    return StoredBox(
        tuple(offsets), tuple(sizes), None if strides is None else tuple(strides), length
    )


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
    str,
    list[tuple[str, list[object]]],
    list[tuple[int, list[int]]] | None,
]
"""The fields of the mesh; placements, each a class and its arguments; shard order."""


def _form_fields(form: TensorForm) -> dict[str, object]:
    fields = {"dtype": form.dtype.name, "shape": form.shape, "boxed": form.boxed, "how": None}
    if form.sharding is None:
        return fields
    mesh = form.sharding.mesh
    placements = [(type(one).__name__, astuple(one)) for one in form.sharding.placements]
    order = form.sharding.shard_order
    return fields | {"how": (*astuple(mesh), placements, order)}


def _form(*, dtype: str, shape: list[int], boxed: bool, how: _ShardingFields | None) -> TensorForm:
    sharding = None
    if how is not None:
        sizes, names, at, device, stated, order = how
        mesh = DeviceMesh(tuple(sizes), None if names is None else tuple(names), tuple(at), device)
        placements = tuple(_PLACEMENTS[name](*args) for name, args in stated)
        orders = None if order is None else tuple((dim, tuple(dims)) for dim, dims in order)
        sharding = Sharding(mesh, placements, orders)
    return TensorForm(BY_NAME[dtype], tuple(shape), sharding, boxed)
