"""Lay out the `.distcp` files of DCP before any weight is read: every byte but the weights.

Each rank has one file, of its objects and then its tensors; each of them is a file of `torch.save`
by itself, one after another without padding between them.

Sources: `torch.distributed.checkpoint.filesystem`; the files of torch 2.4 to 2.13.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from zlib import crc32

from unshard.containers.torch_files.dcp_metadata import (
    Place,
    SavedItem,
    SavedObject,
    SavedPart,
    SavePlan,
    in_file_order,
    metadata_pickle,
)
from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.writer import Plain, SavedTensor, write_pickle
from unshard.containers.torch_files.zip_layout import ZipLayout, lay_out_zip
from unshard.tensors.dtypes import DType

_ROOT = "archive"  # what torch calls a zip that it writes into an open file


@dataclass(frozen=True, slots=True)
class DcpFile:
    """The file of one rank.

    Attributes:
        name: in the directory of the checkpoint.
        size: of the file, bytes.
        places: of the rank's items, in the order of its plan.
        items: what each of them is: an object's bytes, or the layout of a tensor's file.
    """

    name: str
    size: int
    places: tuple[Place, ...]
    items: tuple[bytes | ZipLayout, ...]

    @property
    def storages(self) -> tuple[tuple[int, int], ...]:
        """The offset and size, bytes, of every tensor's elements, in the plan's order."""
        found = []
        for place, item in zip(self.places, self.items, strict=True):
            if isinstance(item, ZipLayout):
                at, size = item.storages[0]
                found.append((place.offset + at, size))
        return tuple(found)

    def fixed(self, crcs: Sequence[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and bytes of everything but the elements.

        Args:
            crcs: CRC-32 of the elements of each tensor, in the plan's order; None while they are
                not known.
        """
        tensors = 0
        for place, item in zip(self.places, self.items, strict=True):
            if isinstance(item, bytes):
                yield place.offset, item
            else:
                crc = None if crcs is None else [crcs[tensors]]
                tensors += 1
                for at, piece in item.fixed(crc):
                    yield place.offset + at, piece


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """A checkpoint: the files of its ranks, and what `.metadata` contains, to be written last."""

    files: tuple[DcpFile, ...]
    metadata: bytes


def lay_out_dcp(
    plan: SavePlan, version: Version, *, checkpoint_id: PurePosixPath, save_id: str
) -> DcpLayout:
    """Lay out a checkpoint for a version of torch.

    Args:
        plan: what each rank saves.
        version: of the torch that is to read it.
        checkpoint_id: the directory that is saved to.
        save_id: a UUID.

    Raises:
        ValueError: an object is in the plan twice.
    """
    layouts: dict[tuple[DType, tuple[int, ...]], ZipLayout] = {}

    def item_file(item: SavedItem) -> bytes | ZipLayout:
        if isinstance(item, SavedObject):
            return item.data
        key = item.dtype, item.sizes
        if key not in layouts:
            layouts[key] = _tensor_file(item, version)
        return layouts[key]

    files = tuple(
        _lay_out_file(f"__{rank}_0.distcp", items, [item_file(item) for item in items])
        for rank, items in enumerate(plan.ranks)
    )
    places = [file.places for file in files]
    pickle = metadata_pickle(plan, places, version, checkpoint_id=checkpoint_id, save_id=save_id)
    return DcpLayout(files, pickle)


def object_data(value: Plain, version: Version) -> bytes:
    """Return the item that a value is which is not a tensor, and has none that is in a file.

    Raises:
        TypeError, ValueError: it cannot be written (see `pickler.pickled`).
    """
    pickle, tensors = write_pickle(value)
    elements = [one.source for one in tensors]
    known = [one for one in elements if isinstance(one, bytes)]
    if len(known) < len(elements):
        raise TypeError("a tensor whose elements are in a file cannot be part of an object")
    layout = lay_out_zip(_ROOT, pickle, [len(one) for one in known], version)
    data = bytearray(layout.size)
    places = [at for at, _ in layout.storages]
    for at, piece in (
        *layout.fixed([crc32(one) for one in known]),
        *zip(places, known, strict=True),
    ):
        data[at : at + len(piece)] = piece
    return bytes(data)


def _tensor_file(part: SavedPart, version: Version) -> ZipLayout:
    pickle, (tensor,) = write_pickle(SavedTensor(part.dtype, part.sizes, None))
    return lay_out_zip(_ROOT, pickle, [tensor.nbytes], version)


def _lay_out_file(
    name: str, items: Sequence[SavedItem], contents: Sequence[bytes | ZipLayout]
) -> DcpFile:
    lengths = [len(one) if isinstance(one, bytes) else one.size for one in contents]
    places = [Place(name, 0, length) for length in lengths]
    at = 0
    for _, number in in_file_order(zip(items, range(len(items)), strict=True)):
        places[number] = replace(places[number], offset=at)
        at += lengths[number]
    return DcpFile(name, at, tuple(places), tuple(contents))
