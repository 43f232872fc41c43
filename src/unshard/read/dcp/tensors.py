"""The tensors of torch.distributed.checkpoint (DCP), each as declared and as stored.

Each chunk that the metadata declares is compared with the stored tensor, because torch itself
writes wrong metadata: with FSDP2 and tensor parallelism of uneven sizes, the declared boxes are not
the stored ones.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unshard.containers.open_files import opened, pread
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, UnshardError, raise_all
from unshard.read.dcp.item_table import ItemTable
from unshard.read.dcp.items import StoredItems, read_items
from unshard.read.dcp.metadata import DcpMetadata, DescribedTensor
from unshard.read.dcp.names import METADATA, UNFINISHED
from unshard.read.format import Location, files_in, find_file, shortened
from unshard.read.torch_save.values import StorageView
from unshard.tensors.boxes import Ints, is_row_major, row_major_strides
from unshard.tensors.catalog import ByteRanges, Catalog, ChunkTable, TensorEntry

_Scalar = TypeVar("_Scalar", np.int64, np.bool_)
_ITEMS = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


def metadata_files(location: Location) -> list[Path]:
    """Return `.metadata`, or else the metadata files of single ranks."""
    paths = files_in(location.roots, lambda name: bool(METADATA.fullmatch(name)))
    if paths:
        return [path for path in paths if path.name == ".metadata"] or paths
    unfinished = files_in(location.roots, lambda name: bool(UNFINISHED.fullmatch(name)))
    raise IncompleteError(
        f"{location.weights_dir}: its .metadata is missing",
        expected=".metadata, which torch writes last",
        found=", ".join(path.name for path in unfinished) or "*.distcp files only",
        hint="the save was interrupted, or the file is on another node: name that node's "
        "directory: ⟦+--also DIR⟧",
    )


def read_catalog(metadata: DcpMetadata, names: Mapping[str, str], location: Location) -> Catalog:
    """Return the tensors under the names that flat names map to, and the number of ranks.

    Raises:
        CheckpointError: files are missing or damaged, or the metadata contradicts them or itself.
    """
    _refuse_safetensors(metadata, location.roots)
    _check_disjoint(metadata, location)
    tensors, archives = read_tensors(metadata, names, location.roots)
    world_size = max(map(_rank, metadata.stored.paths), default=0) + 1
    return Catalog(writer="torch", world_size=world_size, tensors=tensors, archives=archives)


def _refuse_safetensors(metadata: DcpMetadata, roots: tuple[Path, ...]) -> None:
    """Refuse torch's safetensors serialization, where several items share one header."""
    stored = metadata.stored
    numbers = [stored.names[name] for name in metadata.tensors if name in stored.names]
    rows = np.flatnonzero(np.isin(stored.keys[:, 0], numbers))
    path = find_file(roots, stored.paths[stored.file[rows[0]]]) if len(rows) else None
    if path is None:
        return
    with opened(path) as file:
        head = pread(file, 9, int(stored.start[rows[0]]))
    if head[8:] == b"{":
        raise NotMergeableError(
            f"{path}: its items are serialized as safetensors",
            hint="save without FileSystemWriter's serialization_format, in torch.save's form",
        )


def _check_disjoint(metadata: DcpMetadata, location: Location) -> None:
    """Refuse items on the same bytes: the metadata is wrong about one of them at least."""
    stored = metadata.stored
    ends = stored.start + stored.length
    order = np.lexsort((ends, stored.start, stored.file))
    file, start, end = (column[order] for column in (stored.file, stored.start, ends))
    overlap = (file[1:] == file[:-1]) & (start[1:] < end[:-1])
    if overlap.any():
        at = int(overlap.argmax())
        names = list(stored.names)
        first, second = (names[stored.keys[row, 0]] for row in order[at : at + 2])
        raise CorruptError(
            f"{location.weights_dir}: the metadata puts {first} and {second} on the same bytes",
            found=f"{stored.paths[file[at]]}, from byte {start[at + 1]} on",
            hint="the metadata was damaged; take another checkpoint",
        )


def _rank(path: str) -> int:
    """Return the rank that wrote a file; 0 if its name has none."""
    match = _ITEMS.fullmatch(PurePosixPath(path).name)
    return int(match["rank"]) if match else 0


class _Declared(NamedTuple):
    """The declared chunks of tensors, as columns.

    Attributes:
        flats: flat names of the tensors.
        tensors: their descriptions in the metadata.
        ends: the number of chunks of the tensors up to each.
        keys: see `ItemTable`.
        sizes: (count, dimensions), in elements, padded with zeros.
        item: the row of each chunk's item; -1 if there is none.
        stored: the items.
    """

    flats: list[str]
    tensors: list[DescribedTensor]
    ends: Ints
    keys: Ints
    sizes: Ints
    item: Ints
    stored: ItemTable

    def of_items(self, column: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Return a column of the items for these chunks; 0 where there is no item."""
        return np.append(column, np.zeros(1, column.dtype))[self.item]

    def tensor(self, row: int) -> int:
        """Return the number of a chunk's tensor."""
        return int(np.searchsorted(self.ends, row, "right"))

    def box(self, row: int) -> tuple[list[int], list[int]]:
        """Return the offsets and sizes of a chunk."""
        ndim = self.keys[row, 1]
        return self.keys[row, 2 : 2 + ndim].tolist(), self.sizes[row, :ndim].tolist()

    def where(self, row: int) -> str:
        """Name a chunk that has an item."""
        path = self.stored.paths[self.stored.file[self.item[row]]]
        return f"tensor {self.flats[self.tensor(row)]}: {path}: its chunk {self.box(row)[0]}"


def read_tensors(
    metadata: DcpMetadata, names: Mapping[str, str], roots: tuple[Path, ...]
) -> tuple[dict[str, TensorEntry], ByteRanges]:
    """Return the tensors under their names, each as it is stored, and the ranges of their items."""
    _refuse_safetensors(metadata, roots)
    declared = _declare(metadata, list(names))
    paths, file = _files(declared, roots)
    problems = _misplaced(declared, paths, file)
    is_plain = ~declared.of_items(declared.stored.compressed)
    is_plain[[row for row, _ in problems]] = False
    stored = declared.stored
    start, length = declared.of_items(stored.start), declared.of_items(stored.length)
    rows = np.flatnonzero(is_plain)
    windows = ByteRanges(paths, file[rows], start[rows], length[rows])
    items = read_items(paths, windows.file, windows.offset, windows.length)
    problems += _misfits(declared, rows, items)
    raise_all(CorruptError, "the items do not fit the metadata", [error for _, error in problems])
    view = np.full(len(file), -1)
    view[rows], start[rows] = items.view, items.start
    length[rows] = _per_view(items, _span)[items.view]
    table = ByteRanges(paths, file, start, length)
    entries = _entries(declared, names, table, items, view)
    return {entry.fqn: entry for entry in entries}, windows


def _declare(metadata: DcpMetadata, flats: list[str]) -> _Declared:
    tensors = [metadata.tensors[flat] for flat in flats]
    ends = np.cumsum([len(tensor.chunks) for tensor in tensors], dtype=np.int64)
    count = int(ends[-1]) if flats else 0
    most = max((len(tensor.shape) for tensor in tensors), default=0)
    keys, sizes = np.zeros((count, 2 + most), np.int64), np.zeros((count, most), np.int64)
    for flat, tensor, end in zip(flats, tensors, ends.tolist(), strict=True):
        chunks, ndim = tensor.chunks, len(tensor.shape)
        rows = slice(end - len(chunks), end)
        keys[rows, 0], keys[rows, 1] = metadata.stored.names.get(flat, -1), ndim
        keys[rows, 2 : 2 + ndim], sizes[rows, :ndim] = chunks[:, 0], chunks[:, 1]
    item = metadata.stored.rows_of(keys)
    return _Declared(flats, tensors, ends, keys, sizes, item, metadata.stored)


def _files(declared: _Declared, roots: tuple[Path, ...]) -> tuple[tuple[Path, ...], Ints]:
    """Return the files that contain the chunks, and the number of each chunk's file."""
    stored, items = declared.stored, declared.item[declared.item >= 0]
    used, firsts = np.unique(stored.file[items], return_index=True)
    used = used[np.argsort(firsts)]
    paths = {stored.paths[number]: find_file(roots, stored.paths[number]) for number in used}
    if missing := [name for name, path in paths.items() if path is None]:
        raise IncompleteError(
            f"{roots[0]}: files that the metadata lists are missing: {shortened(missing, 8)}",
            hint="copy them here from the nodes that wrote them, or name those nodes' "
            "directories: ⟦+--also DIR⟧",
        )
    numbers = np.zeros(max(len(stored.paths), 1), np.int64)
    numbers[used] = np.arange(len(used))
    file = numbers[declared.of_items(stored.file)]
    return tuple(path for path in paths.values() if path is not None), file


def _misplaced(
    declared: _Declared, paths: tuple[Path, ...], file: Ints
) -> list[tuple[int, UnshardError]]:
    """Return the chunks that have no item, or whose item is not inside its file."""
    stored, rows = declared.stored, declared.item
    sizes = np.array([path.stat().st_size for path in paths] or [0])
    ends = declared.of_items(stored.start + stored.length)
    problems: list[tuple[int, UnshardError]] = []
    for row in np.flatnonzero((rows < 0) | (ends > sizes[file])).tolist():
        flat, size = declared.flats[declared.tensor(row)], sizes[file[row]]
        if rows[row] < 0:
            offsets, _ = declared.box(row)
            missing = f"tensor {flat}: the metadata has no item for its chunk {offsets}"
            problems.append((row, CorruptError(missing)))
            continue
        truncated = IncompleteError(
            f"{paths[file[row]]}: truncated: tensor {flat} is outside its {size} bytes",
            expected=f"at least {ends[row]} bytes",
            hint="the save was interrupted, or the file was copied in part",
        )
        problems.append((row, truncated))
    return problems


def _misfits(declared: _Declared, rows: Ints, items: StoredItems) -> list[tuple[int, UnshardError]]:
    """Return the chunks among `rows` whose stored tensor in `items` is not the declared one."""
    width = declared.sizes.shape[1]
    dtypes = dict.fromkeys(view.dtype for view in items.views.values())
    numbers = {dtype: number for number, dtype in enumerate(dtypes)}
    ndim = _per_view(items, lambda view: len(view.sizes))
    dtype = _per_view(items, lambda view: numbers[view.dtype])
    sizes = np.zeros((len(ndim), width), np.int64)
    for number, view in items.views.items():
        sizes[number, : len(view.sizes)] = view.sizes[:width]
    counts = np.diff(declared.ends, prepend=0)
    expected = np.repeat([numbers.get(t.dtype, -1) for t in declared.tensors], counts)
    same = (ndim[items.view] == declared.keys[rows, 1]) & (dtype[items.view] == expected[rows])
    same &= (sizes[items.view] == declared.sizes[rows]).all(axis=1) & (items.view >= 0)
    odd = np.flatnonzero(~same).tolist()
    return [(int(rows[at]), _misfit(declared, int(rows[at]), items, at)) for at in odd]


def _misfit(declared: _Declared, row: int, items: StoredItems, at: int) -> UnshardError:
    """Return the error of a chunk whose stored tensor is not the declared one."""
    where = declared.where(row)
    if (problem := items.problems.get(at)) is not None:
        problem.subject = f"{where}: " + problem.subject
        return problem
    view, (_, sizes) = items.views[int(items.view[at])], declared.box(row)
    if list(view.sizes) != sizes:
        return CorruptError(
            f"{where} is stored with other sizes",
            expected=f"{sizes}, as the metadata declares",
            found=f"{list(view.sizes)}",
            hint="torch declares wrong boxes when FSDP2 and tensor parallelism cut unevenly; "
            "save with sizes that divide, or the full state dict",
        )
    dtype = declared.tensors[declared.tensor(row)].dtype
    return CorruptError(
        f"{where} is stored as {view.dtype}", expected=f"{dtype}, as the metadata declares"
    )


def _per_view(items: StoredItems, value_of: Callable[[StorageView], int]) -> Ints:
    """Return a number of each view, by the number of the view."""
    values = np.zeros(max(items.views, default=0) + 1, np.int64)
    for number, view in items.views.items():
        values[number] = value_of(view)
    return values


def _span(view: StorageView) -> int:
    """Return the bytes from the first element to the end of the last."""
    last = sum((n - 1) * step for n, step in zip(view.sizes, view.strides, strict=True))
    return 0 if 0 in view.sizes else (last + 1) * view.dtype.itemsize


def _entries(
    declared: _Declared,
    names: Mapping[str, str],
    ranges: ByteRanges,
    items: StoredItems,
    view: Ints,
) -> Iterator[TensorEntry]:
    """Yield the tensors under `names`; tensors that are cut alike share their arrays of boxes.

    `ranges` are the bytes of each chunk, of the whole item if it is compressed. `view` is the
    number of each chunk's view in `items`; -1 for a compressed chunk.
    """
    odd = _per_view(items, lambda v: not is_row_major(v.sizes, v.strides))[view] & (view >= 0)
    ranks = np.array([_rank(path) for path in declared.stored.paths] or [0], np.int32)
    rank, file = ranks[declared.of_items(declared.stored.file)], ranges.file.astype(np.int32)
    shared: dict[int, tuple[Ints, Ints, Ints]] = {}
    rows_of_tensors = zip(declared.flats, declared.tensors, declared.ends.tolist(), strict=True)
    for flat, tensor, end in rows_of_tensors:
        chunks = tensor.chunks
        if id(chunks) not in shared:
            offsets, sizes = chunks[:, 0], chunks[:, 1]
            filled = np.flatnonzero((sizes > 0).all(axis=1))
            shared[id(chunks)] = filled, offsets[filled], sizes[filled]
        filled, offsets, sizes = shared[id(chunks)]
        rows = filled + (end - len(chunks))
        strides = _strides(sizes, view[rows], items) if odd[rows].any() else None
        places = file[rows], ranges.offset[rows], ranges.length[rows], rank[rows], view[rows] < 0
        table = ChunkTable(ranges.paths, offsets, sizes, strides, *places)
        yield TensorEntry(names[flat], tensor.dtype, tensor.shape, table)


def _strides(sizes: Ints, view: Ints, items: StoredItems) -> Ints:
    """Return the strides of chunks, in elements."""
    rows = zip(view.tolist(), sizes.tolist(), strict=True)
    strides = [items.views[at].strides if at >= 0 else row_major_strides(n) for at, n in rows]
    return np.array(strides, np.int64)
