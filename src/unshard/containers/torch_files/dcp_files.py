"""Lay out the `.distcp` files of DCP before any weight is read: every byte but the weights.

Each rank has one file with its objects, then its tensors. Each of them is a complete file of
`torch.save`, without padding between them.

Sources: `torch.distributed.checkpoint.filesystem`; the files of torch 2.4 to 2.13.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePosixPath
from zlib import crc32

from unshard.containers.torch_files.dcp_metadata import (
    ItemPlace,
    SavedItem,
    SavedObject,
    SavePlan,
    in_file_order,
    metadata_pickle,
)
from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.writer import Plain, SavedTensor, write_pickle
from unshard.containers.torch_files.zip_layout import ZipLayout, lay_out_zip
from unshard.tensors.dtypes import DType

_ROOT = "archive"  # torch's name for a zip that it writes into an open file


@dataclass(frozen=True, slots=True)
class DcpFile:
    """The file of one rank.

    Attributes:
        name: its name in the checkpoint's directory.
        size: its size, bytes.
        places: the places of the rank's items, in the order of its plan.
        items: an object's bytes, or the layout of a tensor's file, in the same order.
    """

    name: str
    size: int
    places: tuple[ItemPlace, ...]
    items: tuple[bytes | ZipLayout, ...]

    @property
    def storages(self) -> tuple[tuple[int, int], ...]:
        """The offset and size, bytes, of every tensor's elements, in the plan's order."""
        return tuple(
            (place.offset + at, size)
            for place, item in zip(self.places, self.items, strict=True)
            if isinstance(item, ZipLayout)
            for at, size in item.storages
        )

    def fixed(self, crcs: Sequence[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and bytes of all parts but the elements.

        Args:
            crcs: CRC-32 of the elements of each tensor, in the plan's order; None before they are
                written.
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
    """A checkpoint: the files of its ranks, and the contents of `.metadata`, to be written last."""

    files: tuple[DcpFile, ...]
    metadata: bytes


def lay_out_dcp(
    plan: SavePlan, version: Version, *, checkpoint_id: PurePosixPath, save_id: str
) -> DcpLayout:
    """Lay out a checkpoint for a version of torch.

    Args:
        plan: the items of each rank.
        version: the version of torch that will read it.
        checkpoint_id: the directory of the checkpoint.
        save_id: a UUID.

    Raises:
        ValueError: an object is in the plan twice.
    """

    @cache
    def tensor_file(dtype: DType, sizes: tuple[int, ...]) -> ZipLayout:
        pickle, (tensor,) = write_pickle(SavedTensor(dtype, sizes, None))
        return lay_out_zip(_ROOT, pickle, [tensor.nbytes], version)

    def item_file(item: SavedItem) -> bytes | ZipLayout:
        return item.data if isinstance(item, SavedObject) else tensor_file(item.dtype, item.sizes)

    files = tuple(
        _lay_out_file(f"__{rank}_0.distcp", items, [item_file(item) for item in items])
        for rank, items in enumerate(plan.ranks)
    )
    places = [file.places for file in files]
    pickle = metadata_pickle(plan, places, version, checkpoint_id=checkpoint_id, save_id=save_id)
    return DcpLayout(files, pickle)


def object_data(value: Plain, version: Version) -> bytes:
    """Return the file of a value that is not a tensor; tensors inside it must be bytes.

    Raises:
        TypeError, ValueError: it cannot be written (see `pickler.pickled`).
    """
    pickle, tensors = write_pickle(value)
    elements = [tensor.source for tensor in tensors if isinstance(tensor.source, bytes)]
    if len(elements) < len(tensors):
        raise TypeError("a tensor whose elements are in a file cannot be part of an object")
    layout = lay_out_zip(_ROOT, pickle, [len(own) for own in elements], version)
    data = bytearray(layout.size)
    offsets = (at for at, _ in layout.storages)
    pieces = zip(offsets, elements, strict=True)
    for at, piece in (*layout.fixed(list(map(crc32, elements))), *pieces):
        data[at : at + len(piece)] = piece
    return bytes(data)


def _lay_out_file(
    name: str, items: Sequence[SavedItem], contents: Sequence[bytes | ZipLayout]
) -> DcpFile:
    lengths = [own.size if isinstance(own, ZipLayout) else len(own) for own in contents]
    places = [ItemPlace(name, 0, length) for length in lengths]
    at = 0
    for _, number in in_file_order(zip(items, range(len(items)), strict=True)):
        places[number] = replace(places[number], offset=at)
        at += lengths[number]
    return DcpFile(name, at, tuple(places), tuple(contents))
