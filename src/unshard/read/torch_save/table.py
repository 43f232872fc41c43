"""The contents of a rank file, as columns of integers.

A file of a thousand tensors has a dozen distinct cuts and a thousand starts. Nothing of the pickle
is kept, so a table is small.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unshard.errors import UnshardError
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import Sharding


class TensorForm(NamedTuple):
    """A tensor as one rank sees it.

    Attributes:
        dtype: as stored.
        shape: the global shape; of a plain tensor the stored one.
        sharding: mesh and placements, if it has any.
        boxed: whether each stored part has its own box instead (ShardedTensor).
    """

    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding | None
    boxed: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the pickle has no record of which part of the tensor is stored."""
        return self.sharding is None and not self.boxed

    def __str__(self) -> str:
        return f"{'plain' if self.is_plain else 'sharded'} {self.dtype} {list(self.shape)}"


class StoredBox(NamedTuple):
    """A box of a tensor as it is stored: `offsets`, `sizes` and `strides` in elements.

    `strides` is None if it is row-major; `length` is in bytes, to the end of its last element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None
    length: int


class Cut(NamedTuple):
    """The boxes that a rank stores of a tensor of some form: usually one, none of an empty part."""

    form: TensorForm
    boxes: tuple[StoredBox, ...]


@dataclass(slots=True)
class RankTable:
    """The tensors of one rank file.

    Attributes:
        rank: the rank that wrote it; `file`: its number among the files being read.
        names: of the tensors, in order.
        cut_table: the distinct cuts.
        cuts: number of each tensor's cut in `cut_table`.
        starts: first byte of each stored box, box after box, tensor after tensor.
        skipped: values that are not tensors, with the reason.
        problems: tensors that cannot be merged.
        world_size: of the ranks that wrote it: at least this many.
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
