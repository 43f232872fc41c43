"""The tensors of torch.distributed.checkpoint (DCP), each as it is declared and as it is stored.

The metadata declares every chunk; each is compared with the tensor that is stored for it, because
torch itself writes wrong ones: with FSDP2 and tensor parallelism of uneven sizes the declared boxes
are not those that are stored.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from unshard.containers.open_files import opened, pread
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, UnshardError, raise_all
from unshard.read.dcp.items import StoredItem, read_items
from unshard.read.dcp.metadata import DcpMetadata, Item
from unshard.read.dcp.names import METADATA, UNFINISHED
from unshard.read.format import Location, files_in, find_file, shortened
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft

_ITEMS = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


def metadata_files(location: Location) -> list[Path]:
    """Return `.metadata`, or without it those of the single ranks."""
    found = files_in(location.roots, lambda name: bool(METADATA.fullmatch(name)))
    whole = [path for path in found if path.name == ".metadata"]
    if found:
        return whole or found
    unfinished = files_in(location.roots, lambda name: bool(UNFINISHED.fullmatch(name)))
    raise IncompleteError(
        f"{location.weights_dir}: its .metadata is missing",
        expected=".metadata, which torch writes last",
        found=", ".join(path.name for path in unfinished) or "*.distcp files only",
        hint="the save was interrupted, or the file is on another node: name that node's "
        "directory: ⟦+--also DIR⟧",
    )


def read_catalog(metadata: DcpMetadata, names: Mapping[str, str], location: Location) -> Catalog:
    """Return the tensors of these flat names under their names, and how many ranks wrote.

    Raises:
        CheckpointError: files are missing or damaged, or the metadata contradicts them or itself.
    """
    _refuse_safetensors(metadata, location.roots)
    _check_disjoint(metadata, location)
    tensors, archives = read_tensors(metadata, names, location.roots)
    ranks = {rank for item in metadata.items.values() if (rank := _rank(item.path)) is not None}
    world_size = max(ranks, default=0) + 1
    return Catalog(writer="torch", world_size=world_size, tensors=tensors, archives=archives)


def _refuse_safetensors(metadata: DcpMetadata, roots: tuple[Path, ...]) -> None:
    """Refuse tensors in torch's other form, of which several share one header."""
    item = next(
        (one for (name, _), one in metadata.items.items() if name in metadata.tensors), None
    )
    if item is None or (path := find_file(roots, item.path)) is None:
        return
    with opened(path) as file:
        head = pread(file, 9, item.offset)
    if head[8:] == b"{":
        raise NotMergeableError(
            f"{path}: its items are saved in the form of safetensors",
            hint="save without FileSystemWriter's serialization_format, as torch.save does",
        )


def _check_disjoint(metadata: DcpMetadata, location: Location) -> None:
    """Two items on the same bytes: then the metadata is wrong about at least one of them."""
    placed = sorted(
        (item.path, item.offset, item.offset + item.length, name)
        for (name, _), item in metadata.items.items()
    )
    for (path, _, end, first), (other, start, _, second) in pairwise(placed):
        if path == other and start < end:
            raise CorruptError(
                f"{location.weights_dir}: the metadata puts {first} and {second} on the same bytes",
                found=f"{path}, from byte {start} on",
                hint="the metadata was damaged; take another checkpoint",
            )


def _rank(path: str) -> int | None:
    match = _ITEMS.fullmatch(Path(path).name)
    return int(match["rank"]) if match else None


@dataclass(frozen=True, slots=True)
class _DeclaredChunk:
    """A declared chunk of a tensor and the item that should hold it."""

    flat: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item
    file: int
    path: Path

    @property
    def rank(self) -> int:
        return _rank(self.item.path) or 0

    @property
    def where(self) -> str:
        return f"tensor {self.flat}: {self.item.path}: its chunk {list(self.offsets)}"


def read_tensors(
    metadata: DcpMetadata, names: Mapping[str, str], roots: tuple[Path, ...]
) -> tuple[dict[str, TensorEntry], tuple[ByteRange, ...]]:
    """Return the tensors under their names, each as it is stored, and the items that were read."""
    _refuse_safetensors(metadata, roots)
    problems: list[UnshardError] = []
    pieces, paths = _pieces(metadata, names, roots, problems)
    drafts = {
        flat: TensorDraft(name, metadata.tensors[flat].dtype, metadata.tensors[flat].shape)
        for flat, name in names.items()
    }
    plain = [
        (piece.path, piece.item.offset, piece.item.length)
        for piece in pieces
        if not piece.item.compressed
    ]
    stored = iter(read_items(plain))
    for piece in pieces:
        if not piece.item.compressed:
            problem = _add_stored(drafts[piece.flat], piece, next(stored))
            problems += [] if problem is None else [problem]
        elif 0 not in piece.sizes:  # nothing more is known until it is decompressed
            row = (piece.rank, piece.file, piece.item.offset, piece.item.length)
            drafts[piece.flat].add_compressed(row, piece.offsets, piece.sizes)
    raise_all(CorruptError, "the items do not fit the metadata", problems)
    entries = {draft.fqn: draft.entry(paths) for draft in drafts.values()}
    return entries, tuple(ByteRange(*window) for window in plain)


def _declared(
    metadata: DcpMetadata, names: Iterable[str]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Item | None]]:
    """Yield the chunks of tensors: flat name, offsets, sizes and item."""
    for flat in names:
        for offsets, sizes in dict.fromkeys(metadata.tensors[flat].chunks):
            yield flat, offsets, sizes, metadata.items.get((flat, offsets))


def _pieces(
    metadata: DcpMetadata,
    names: Iterable[str],
    roots: tuple[Path, ...],
    problems: list[UnshardError],
) -> tuple[list[_DeclaredChunk], tuple[Path, ...]]:
    """Return the declared chunks of tensors, and the files that contain them."""
    used = dict.fromkeys(one.path for *_, one in _declared(metadata, names) if one is not None)
    files = {name: find_file(roots, name) for name in used}
    if missing := [name for name, path in files.items() if path is None]:
        raise IncompleteError(
            f"{roots[0]}: files that the metadata names are missing: {shortened(missing, 8)}",
            hint="copy them here from the nodes that wrote them, or name those nodes' "
            "directories: ⟦+--also DIR⟧",
        )
    paths = tuple(path for path in files.values() if path is not None)
    known = {
        name: (number, path, path.stat().st_size)
        for number, (name, path) in enumerate(zip(files, paths, strict=True))
    }
    pieces: list[_DeclaredChunk] = []
    for flat, offsets, sizes, item in _declared(metadata, names):
        if item is None:
            what = f"tensor {flat}: the metadata has no item for its chunk {list(offsets)}"
            problems.append(CorruptError(what))
            continue
        number, path, size = known[item.path]
        if item.offset + item.length <= size:
            pieces.append(_DeclaredChunk(flat, offsets, sizes, item, number, path))
            continue
        truncated = IncompleteError(
            f"{path}: truncated: tensor {flat} is outside its {size} bytes",
            expected=f"at least {item.offset + item.length} bytes",
            hint="the save was interrupted, or the file was copied in part",
        )
        problems.append(truncated)
    return pieces, paths


def _add_stored(
    draft: TensorDraft, piece: _DeclaredChunk, stored: StoredItem | UnshardError
) -> UnshardError | None:
    """Add a chunk as it is stored, or return why it is not the one that is declared."""
    if isinstance(stored, UnshardError):
        stored.subject = f"{piece.where}: " + stored.subject
        return stored
    view = stored.view
    if view.sizes != piece.sizes:
        return CorruptError(
            f"{piece.where} is not what is stored for it",
            expected=f"{list(piece.sizes)}, as the metadata declares",
            found=f"{list(view.sizes)}",
            hint="torch declares wrong boxes when FSDP2 and tensor parallelism cut unevenly; "
            "save with sizes that divide, or the full state dict",
        )
    if view.dtype is not draft.dtype:
        what = f"{piece.where} is stored as {view.dtype}"
        return CorruptError(what, expected=f"{draft.dtype}, as the metadata says")
    if 0 not in view.sizes:
        draft.add(
            rank=piece.rank,
            file=piece.file,
            start=stored.start,
            offsets=piece.offsets,
            sizes=piece.sizes,
            strides=view.strides,
        )
    return None
