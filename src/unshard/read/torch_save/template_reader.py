"""Reads rank files that differ in their numbers only: one in full, the others as columns.

The pickle of such a file is compared with a template (`containers.pickles.template`), which finds
its numbers. A rank's table then depends on the storages' sizes, the local tensors' offsets, sizes
and strides, and the device meshes: these numbers may differ, and are checked here in columns as
`values` and `state_dict` check them one by one. Hashes are not read. All other numbers must equal
those of the file that was read in full.

Problems are not reported here: a file with anything wrong or unusual (strides that are not
row-major, several pieces of one tensor) is read in full, which reports them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unshard.containers.pickles.machine import DangerousPickleError, MalformedPickleError
from unshard.containers.pickles.template import Template, make_template
from unshard.containers.torch_files.reader import TorchFile, open_torch_file, unpickled
from unshard.containers.torch_files.zip import Storages, TorchZip
from unshard.read.torch_save.state_dict import placed_pieces, rank_table, read_integers
from unshard.read.torch_save.table import Cut, RankTable, StoredBox
from unshard.read.torch_save.template_slots import (
    SlotGroup,
    TemplateSlots,
    find_slots,
    with_numbers,
)
from unshard.read.torch_save.tensors import TensorDecoder
from unshard.read.torch_save.values import TensorFormError, sizes_of
from unshard.stores.remote_path import RemotePath
from unshard.tensors.boxes import Ints, row_major_strides
from unshard.tensors.placements import DeviceMesh, PlacementError

_TEMPLATES = 4
"""Templates to compare with; after as many files in a row that fit none, no more are made."""
_MAX_NUMBER = 1 << 58  # elements of 16 bytes each: sums of bytes do not overflow


def read_rank_files(
    files: Sequence[tuple[int, Path]], allowed: frozenset[str]
) -> Iterator[RankTable]:
    """Yield the table of every (rank, path), in this order.

    Raises:
        CheckpointError: a file as a whole cannot be read.
    """
    reader, paths = RankFileReader(allowed), [path for _, path in files]
    archives: Iterable[TorchFile | TorchZip] = map(open_torch_file, paths)
    if any(isinstance(path, RemotePath) for path in paths):
        from unshard.stores.pool import ahead

        archives = ahead(open_torch_file, paths)
    for number, ((rank, _), archive) in enumerate(zip(files, archives, strict=True)):
        yield reader.read(archive, rank=rank, file=number)


class RankFileReader:
    """Reads rank files one after another; of files that fit one template, only the first in full.

    `allowed` are names of tensor subclasses that the user vouches for.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._templates: deque[_FileTemplate] = deque(maxlen=_TEMPLATES)
        self._misses = 0  # files that were read in full since one fitted a template
        self._last: tuple[TorchZip, RankTable] | None = None

    def read(self, archive: TorchFile | TorchZip, *, rank: int, file: int) -> RankTable:
        """Return the table of a rank's file, which is number `file` among those being read.

        Raises:
            CheckpointError: the file as a whole cannot be read. Problems of single tensors are in
                the table.
        """
        path = archive.path
        if isinstance(archive, TorchFile):
            return rank_table(archive, rank=rank, file=file, allowed=self._allowed)
        self._add_template()
        for template in self._templates:
            table = template.table(archive, rank=rank, file=file)
            if table is not None:
                self._misses = 0
                return table
        value = unpickled(path, archive.pickle)
        whole = TorchFile(path, value, archive.storages)
        table = rank_table(whole, rank=rank, file=file, allowed=self._allowed)
        self._last = archive, table
        self._misses += 1
        return table

    def _add_template(self) -> None:
        """Make a template of the file that was last read in full, if one can be made."""
        if self._last is None or self._misses > _TEMPLATES:
            return
        (archive, table), self._last = self._last, None
        if table.problems:
            return
        keys = archive.storages.keys_in_order
        try:
            template, value = make_template(archive.pickle)
            slots = find_slots(value, table, len(template.at), self._allowed)
            rows = _rows_of(slots.keys, keys)
        except (KeyError, MalformedPickleError, DangerousPickleError, TensorFormError):
            return
        if template.numbers.fits.all():
            made = _FileTemplate(template, slots, table, keys, rows, self._allowed)
            self._templates.appendleft(made)


class _FileTemplate(NamedTuple):
    """A file that was read in full, to compare others with.

    Attributes:
        template, slots: of its pickle.
        first: its table.
        keys: of its storages, in the order of the file.
        rows: the row in `keys` of each tensor's storage.
        allowed: names of tensor subclasses that the user vouches for.
    """

    template: Template
    slots: TemplateSlots
    first: RankTable
    keys: list[str]
    rows: Ints
    allowed: frozenset[str]

    def table(self, archive: TorchZip, *, rank: int, file: int) -> RankTable | None:
        """Return the table of a file that fits this template; None for any other file."""
        numbers = self.template.numbers_in(archive.pickle)
        if numbers is None or not numbers.fits.all():
            return None
        fixed = self.slots.fixed
        if (numbers.values[fixed] != self.template.numbers.values[fixed]).any():
            return None
        read_ints = partial(read_integers, TorchFile(archive.path, None, archive.storages))
        decoder = TensorDecoder(rank, read_ints, self.allowed)
        groups, values = self.slots.groups, numbers.values
        try:
            storages = self.storages(archive.storages)
            meshes = [decoder.mesh(with_numbers(mesh, values)) for mesh in self.slots.meshes]
            cuts = [_cut_of(group, meshes, values, storages) for group in groups]
        except (KeyError, TensorFormError, PlacementError):
            return None
        numbers_of_cuts = np.empty(len(self.first.names), np.int32)
        starts = np.full(len(self.first.names), -1, np.int64)
        for number, (group, (cut, begins)) in enumerate(zip(groups, cuts, strict=True)):
            numbers_of_cuts[group.tensors] = number
            if cut.boxes:
                starts[group.tensors] = begins
        return RankTable(
            rank,
            file,
            self.first.names,
            [cut for cut, _ in cuts],
            numbers_of_cuts,
            starts[starts >= 0],
            skipped=self.first.skipped,
            world_size=decoder.world_size,
        )

    def storages(self, storages: Storages) -> Ints:
        """Return offset and size of every tensor's storage, bytes; a KeyError if one is missing."""
        keys = storages.keys_in_order
        rows = self.rows if keys == self.keys else _rows_of(self.slots.keys, keys)
        return np.stack([storages.offset[rows], storages.size[rows]], axis=1)


def _rows_of(wanted: list[str], keys: list[str]) -> Ints:
    """Return the row of each wanted key; a KeyError if one is missing."""
    rows = {key: row for row, key in enumerate(keys)}
    return np.array([rows[key] for key in wanted], np.int64)


def _cut_of(
    group: SlotGroup, meshes: list[DeviceMesh], numbers: Ints, storages: Ints
) -> tuple[Cut, Ints]:
    """Return how a rank has cut the tensors of a group, and the first byte of each.

    `meshes` are as the rank sees them; `storages` has offset and size, in bytes, per tensor.

    Raises:
        TensorFormError: something is wrong with a tensor, or unusual.
        PlacementError: a placement is unknown, or makes another local shape than the stored one.
    """
    form, itemsize = group.form, group.form.dtype.itemsize
    sizes, strides = numbers[group.sizes], numbers[group.strides]
    elements, offset = numbers[group.elements], numbers[group.offset]
    stored = tuple(sizes[0].tolist())
    count = prod(sizes_of(stored))
    unlike = (strides < 0) | (strides >= _MAX_NUMBER)
    if count:
        unlike |= (strides != row_major_strides(stored)) & (sizes > 1)
    if (sizes != sizes[0]).any() or unlike.any():
        raise TensorFormError("of different sizes, or not row-major")
    byte, size = storages[group.tensors].T
    if min(offset.min(), elements.min()) < 0 or max(offset.max(), elements.max()) >= _MAX_NUMBER:
        raise TensorFormError("a view of an impossible storage")
    if count and ((offset + count > elements) | (elements * itemsize > size)).any():
        raise TensorFormError("outside of its storage")
    if group.mesh is not None and form.sharding is not None:
        form = form._replace(sharding=form.sharding._replace(mesh=meshes[group.mesh]))
    offsets: tuple[int, ...] = (0,) * len(stored)
    if form.sharding is not None:
        pieces = placed_pieces(form, form.sharding, stored)
        if not pieces:
            return Cut(form, ()), byte
        if len(pieces) > 1:
            raise TensorFormError("several pieces")
        offsets = pieces[0].box.offsets
    box = StoredBox(offsets, stored, None, count * itemsize)
    return Cut(form, (box,)), byte + offset * itemsize
