"""Lay out DCP directories for a number of ranks: metadata, items, and what each is taken of.

Every rank has its part of every tensor that is cut, and its share of those that are not, as
`dcp.save` distributes them. torch reads the result on any number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from uuid import NAMESPACE_OID, uuid5

from unshard.containers.torch_files.dcp_files import DcpFile, lay_out_dcp
from unshard.containers.torch_files.dcp_metadata import (
    ItemPath,
    SavedItem,
    SavedObject,
    SavedPart,
    SavePlan,
    flat_name,
)
from unshard.containers.torch_files.dtensors import Version
from unshard.convert.recipes import Take
from unshard.plan.layout import OutputFile, OutputTensor
from unshard.plan.resharding import Resharded, meshes_of
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import Shard, Sharding, place


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntry:
    """A tensor to save.

    Attributes:
        path: where it is in the saved dict.
        entry: where its elements come from.
        dtype: to write.
        dim: along which it is cut; None: one rank saves it whole.
    """

    path: ItemPath
    entry: TensorEntry
    dtype: DType
    dim: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DcpDirectory:
    """What one call of `dcp.save` writes.

    Attributes:
        name: of the directory inside the output; "" for the output itself.
        items: tensors and objects, in the order of the saved dict.
    """

    name: str
    items: Sequence[SavedEntry | SavedObject]

    def path_of(self, filename: str) -> str:
        """Return the path of one of its files inside the output."""
        return f"{self.name}/{filename}" if self.name else filename


def lay_out_directories(
    directories: Sequence[DcpDirectory], world: int, version: Version, target: PurePosixPath
) -> tuple[Resharded, dict[str, bytes]]:
    """Lay out directories of DCP; return their files and, by path, what each `.metadata` contains.

    Args:
        directories: what each has.
        world: the number of ranks, each of which has a file unless it saves nothing.
        version: of the torch that is to read it.
        target: the directory of the output, which torch notes in the metadata.
    """
    files: list[tuple[OutputFile, DcpFile]] = []
    metadata: dict[str, bytes] = {}
    for one in directories:
        ranks, takes = _distribute(one.items, world)
        names = "\n".join(flat_name(item.path) for item in one.items)
        layout = lay_out_dcp(
            SavePlan([item.path for item in one.items], ranks),
            version,
            checkpoint_id=target / one.name,
            save_id=str(uuid5(NAMESPACE_OID, names)),
        )
        for file, taken in zip(layout.files, takes, strict=True):
            if file.places:
                files.append((_output_file(one.path_of(file.name), file, taken), file))
        metadata[one.path_of(".metadata")] = layout.metadata
    return Resharded.of(files), metadata


_Taken = tuple[Take, DType]


def _distribute(
    items: Sequence[SavedEntry | SavedObject], world: int
) -> tuple[list[list[SavedItem]], list[list[_Taken]]]:
    """Return the items of each rank, and of its tensors what they are taken of."""
    ranks: list[list[SavedItem]] = [[] for _ in range(world)]
    takes: list[list[_Taken]] = [[] for _ in range(world)]
    loads = [0] * world  # bytes
    for item in items:
        if isinstance(item, SavedObject):
            ranks[0].append(item)
            continue
        for rank, box in _boxes(item, world):
            least = loads.index(min(loads)) if rank is None else rank
            entry = item.entry
            ranks[least].append(
                SavedPart(item.path, item.dtype, entry.shape, box.offsets, box.sizes)
            )
            takes[least].append((Take(entry, box), item.dtype))
            loads[least] += box.volume * item.dtype.itemsize
    return ranks, takes


def _boxes(item: SavedEntry, world: int) -> Iterator[tuple[int | None, Box]]:
    """Yield the rank and box of each part; without a rank, any may save it."""
    shape = item.entry.shape
    if item.dim is None or 0 in shape:
        yield None, Box.whole(shape)
        return
    for rank, mesh in enumerate(meshes_of((world,), ("fsdp",), "")):
        _, (piece,) = place(shape, Sharding(mesh, (Shard(item.dim),)))
        if piece.box.volume:
            yield rank, piece.box


def _output_file(filename: str, file: DcpFile, takes: Sequence[_Taken]) -> OutputFile:
    """Return a file of which nothing but the tensors is written before it gets its checksums.

    What is fixed would take 1.5 KB of memory per item; its last byte states the size.
    """
    placed = sorted(
        (
            (start, start + size, take, dtype)
            for (start, size), (take, dtype) in zip(file.storages, takes, strict=True)
        ),
        key=lambda one: one[:2],
    )
    tensors = tuple(
        OutputTensor(take.entry.fqn, dtype, take.box.sizes, take, (start, end))
        for start, end, take, dtype in placed
    )
    return OutputFile(filename, b"", tensors, ((file.size - 1, b"\0"),))
