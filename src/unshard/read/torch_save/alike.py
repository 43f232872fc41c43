"""Files of ranks that differ in their numbers only: one is read in full, the others as columns.

The pickle of such a file is compared with a template (`containers.pickles.template`), which finds
its numbers. What a rank's table depends on is then the storages' sizes, the local tensors' offsets,
sizes and strides, and the device meshes: these numbers may differ, and are checked here in columns
as `values` and `state_dict` check them one by one. Hashes are not read. All other numbers must be
those of the file that was read in full.

Nothing is reported from here: a file with anything wrong or unusual (strides that are not
row-major, several pieces of one tensor) is read in full, and so are its problems.
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
from unshard.read.torch_save.blanks import Blanks, Group, find_blanks, with_numbers
from unshard.read.torch_save.state_dict import placed_pieces, rank_table, read_integers
from unshard.read.torch_save.table import Cut, RankTable, StoredBox
from unshard.read.torch_save.tensors import TensorDecoder
from unshard.read.torch_save.values import TensorFormError, sizes_of
from unshard.stores.remote_path import RemotePath
from unshard.tensors.boxes import Ints, row_major_strides
from unshard.tensors.placements import DeviceMesh, PlacementError

_KEPT = 4
"""Files that others are compared with; after as many that were like none of them, no more is."""
_MAX_NUMBER = 1 << 58  # elements of 16 bytes each: nothing overflows


def read_rank_files(
    files: Sequence[tuple[int, Path]], allowed: frozenset[str]
) -> Iterator[RankTable]:
    """Yield the table of every (rank, path), in this order; a CheckpointError if one has none."""
    reader, paths = RankFileReader(allowed), [path for _, path in files]
    archives: Iterable[TorchFile | TorchZip] = map(open_torch_file, paths)
    if any(isinstance(path, RemotePath) for path in paths):
        from unshard.stores.at_once import ahead

        archives = ahead(open_torch_file, paths)
    for number, ((rank, _), archive) in enumerate(zip(files, archives, strict=True)):
        yield reader.read(archive, rank=rank, file=number)


class RankFileReader:
    """Reads rank files one after another; of those that are alike, the first in full.

    `allowed` are names of tensor subclasses that the user vouches for.
    """

    def __init__(self, allowed: frozenset[str]) -> None:
        self._allowed = allowed
        self._known: deque[_Known] = deque(maxlen=_KEPT)
        self._unlike = 0  # files that were read in full since the last one that was not
        self._last: tuple[TorchZip, RankTable] | None = None

    def read(self, archive: TorchFile | TorchZip, *, rank: int, file: int) -> RankTable:
        """Return what the file of a rank, number `file` among those being read, contains.

        Raises:
            CheckpointError: the file as a whole cannot be read. Problems of single tensors are in
                the table.
        """
        path = archive.path
        if isinstance(archive, TorchFile):
            return rank_table(archive, rank=rank, file=file, allowed=self._allowed)
        self._learn()
        for known in self._known:
            table = known.table(archive, rank=rank, file=file)
            if table is not None:
                self._unlike = 0
                return table
        value = unpickled(path, archive.pickle)
        whole = TorchFile(path, value, archive.storages)
        table = rank_table(whole, rank=rank, file=file, allowed=self._allowed)
        self._last = archive, table
        self._unlike += 1
        return table

    def _learn(self) -> None:
        """Make a template of the file that was read last in full, unless that is of no use."""
        if self._last is None or self._unlike > _KEPT:
            return
        (archive, table), self._last = self._last, None
        if table.problems:
            return
        try:
            template, value = make_template(archive.pickle)
            blanks = find_blanks(value, table, len(template.at), self._allowed)
            rows = _rows_of(blanks.keys, archive.storages.keys_in_order)
        except (KeyError, MalformedPickleError, DangerousPickleError, TensorFormError):
            return
        keys = archive.storages.keys_in_order
        if template.numbers.fits.all():
            self._known.appendleft(_Known(template, blanks, table, keys, rows, self._allowed))


class _Known(NamedTuple):
    """A file that was read in full, for comparison with others.

    Attributes:
        template, blanks: of its pickle.
        first: what it contains.
        keys: of its storages, in the order of the file.
        rows: which of these storages each tensor has.
        allowed: names of tensor subclasses that the user vouches for.
    """

    template: Template
    blanks: Blanks
    first: RankTable
    keys: list[str]
    rows: Ints
    allowed: frozenset[str]

    def table(self, archive: TorchZip, *, rank: int, file: int) -> RankTable | None:
        """Return the table of a file that is like this one; None of any other."""
        numbers = self.template.numbers_in(archive.pickle)
        if numbers is None or not numbers.fits.all():
            return None
        fixed, mine = self.blanks.fixed, self.template.numbers.values
        if (numbers.values[fixed] != mine[fixed]).any():
            return None
        storages = archive.storages
        read_ints = partial(read_integers, TorchFile(archive.path, None, storages))
        decoder = TensorDecoder(rank, read_ints, self.allowed)
        try:
            places = self.places(storages)
            meshes = [
                decoder.mesh(with_numbers(mesh, numbers.values)) for mesh in self.blanks.meshes
            ]
            found = [_cut_of(group, meshes, numbers.values, places) for group in self.blanks.groups]
        except (KeyError, TensorFormError, PlacementError):
            return None
        cuts = np.empty(len(self.first.names), np.int32)
        starts = np.full(len(self.first.names), -1, np.int64)
        for number, (group, (cut, begins)) in enumerate(
            zip(self.blanks.groups, found, strict=True)
        ):
            cuts[group.tensors] = number
            if cut.boxes:
                starts[group.tensors] = begins
        return RankTable(
            rank,
            file,
            self.first.names,
            [cut for cut, _ in found],
            cuts,
            starts[starts >= 0],
            skipped=self.first.skipped,
            world_size=decoder.world_size,
        )

    def places(self, storages: Storages) -> Ints:
        """Return offset and size of every tensor's storage, bytes; a KeyError if one is missing."""
        keys = storages.keys_in_order
        rows = self.rows if keys == self.keys else _rows_of(self.blanks.keys, keys)
        return np.stack([storages.offset[rows], storages.size[rows]], axis=1)


def _rows_of(wanted: list[str], keys: list[str]) -> Ints:
    """Return the place of each of the wanted keys; a KeyError if one is missing."""
    places = {key: place for place, key in enumerate(keys)}
    return np.array([places[key] for key in wanted], np.int64)


def _cut_of(
    group: Group, meshes: list[DeviceMesh], numbers: Ints, places: Ints
) -> tuple[Cut, Ints]:
    """Return how a rank has cut the tensors of a group, and the first byte of each.

    Args:
        group: the tensors.
        meshes: as the rank sees them.
        numbers: of its pickle.
        places: offset and size, in bytes, of every tensor's storage.

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
    byte, size = places[group.tensors].T
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
