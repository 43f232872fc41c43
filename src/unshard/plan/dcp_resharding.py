"""Lay out DCP directories for a number of ranks: metadata, items, and the source of each item.

Every rank has its part of every tensor that is cut, and its share of the others, as `dcp.save`
distributes them. torch reads the result on any number of ranks.
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
        path: its keys in the saved dict.
        entry: the source of its elements.
        dtype: the dtype to write.
        dim: the dimension that is cut; None if one rank saves the whole tensor.
    """

    path: ItemPath
    entry: TensorEntry
    dtype: DType
    dim: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DcpDirectory:
    """The output of one call of `dcp.save`.

    Attributes:
        name: the directory inside the output; "" for the output itself.
        items: tensors and objects, in the order of the saved dict.
    """

    name: str
    items: Sequence[SavedEntry | SavedObject]

    def path_of(self, filename: str) -> str:
        """Return the path of a file of this directory inside the output."""
        return f"{self.name}/{filename}" if self.name else filename


def lay_out_directories(
    directories: Sequence[DcpDirectory], world: int, version: Version, target: PurePosixPath
) -> tuple[Resharded, dict[str, bytes]]:
    """Lay out DCP directories; return their files and the contents of each `.metadata`, by path.

    Args:
        directories: the directories to write.
        world: the number of ranks; a rank that saves nothing gets no file.
        version: the version of torch that is to read it.
        target: the directory of the output, which torch records in the metadata.
    """
    files: list[tuple[OutputFile, DcpFile]] = []
    metadata: dict[str, bytes] = {}
    for directory in directories:
        ranks, sources = _distribute(directory.items, world)
        names = "\n".join(flat_name(item.path) for item in directory.items)
        layout = lay_out_dcp(
            SavePlan([item.path for item in directory.items], ranks),
            version,
            checkpoint_id=target / directory.name,
            save_id=str(uuid5(NAMESPACE_OID, names)),
        )
        for file, takes in zip(layout.files, sources, strict=True):
            if file.places:
                files.append((_output_file(directory.path_of(file.name), file, takes), file))
        metadata[directory.path_of(".metadata")] = layout.metadata
    return Resharded.of(files), metadata


_TypedTake = tuple[Take, DType]


def _distribute(
    items: Sequence[SavedEntry | SavedObject], world: int
) -> tuple[list[list[SavedItem]], list[list[_TypedTake]]]:
    """Return the items of each rank, and the sources of its tensors."""
    ranks: list[list[SavedItem]] = [[] for _ in range(world)]
    takes: list[list[_TypedTake]] = [[] for _ in range(world)]
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
    """Yield the rank and box of each part; the rank is None if any rank may save it."""
    shape = item.entry.shape
    if item.dim is None or 0 in shape:
        yield None, Box.whole(shape)
        return
    for rank, mesh in enumerate(meshes_of((world,), ("fsdp",), "")):
        _, (piece,) = place(shape, Sharding(mesh, (Shard(item.dim),)))
        if piece.box.volume:
            yield rank, piece.box


def _output_file(filename: str, file: DcpFile, takes: Sequence[_TypedTake]) -> OutputFile:
    """Return a file with only its tensors; `write.sealing` adds the bytes around them.

    Those bytes would take 1.5 KB of memory per item here. The last byte alone fixes the size.
    """
    placed = sorted(
        (
            (start, start + size, take, dtype)
            for (start, size), (take, dtype) in zip(file.storages, takes, strict=True)
        ),
        key=lambda item: item[:2],
    )
    tensors = tuple(
        OutputTensor(take.entry.fqn, dtype, take.box.sizes, take, (start, end))
        for start, end, take, dtype in placed
    )
    return OutputFile(filename, b"", tensors, ((file.size - 1, b"\0"),))
