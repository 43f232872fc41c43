"""Reader for torch.distributed.checkpoint (DCP): `.metadata` and `__R_I.distcp` files.

Written by `torch.distributed.checkpoint.save`: accelerate and the HF Trainer, torchtitan,
torchtune, Lightning, Composer, OLMo-core. The metadata declares every chunk; each is compared with
the tensor that is stored for it, because torch itself writes wrong ones: with FSDP2 and tensor
parallelism of uneven sizes the declared boxes are not those that are stored.

Lightning saves the LightningModule and Composer the ComposerModel, whose attribute is the model:
every name starts with it (`model.model.norm.weight`). Nothing else is taken off a name.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CorruptError, IncompleteError, UnshardError, raise_all
from unshard.read.dcp.items import StoredItem, read_items
from unshard.read.dcp.metadata import MODEL_KEYS, DcpMetadata, Item, read_metadata
from unshard.read.dcp.model import model_names, read_object
from unshard.read.format import (
    Format,
    Location,
    ReadOptions,
    files_in,
    find_file,
    has_file,
    shortened,
)
from unshard.read.torch_save.values import is_lightning
from unshard.read.wrapper_names import without_wrapper_module
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft

__all__ = ["DCP"]

_METADATA = re.compile(r"(?:__\d+)?\.metadata")
_UNFINISHED = re.compile(r"(?:__\d+)?\.metadata\.tmp")
_ITEMS = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")
_LIGHTNING, _COMPOSER = "Lightning", "Composer"
_TRAINING_STATE = """
    optimizer_* optim scheduler.bin scheduler.pt random_states_*.pkl rng_state*.pth sampler*.bin
    trainer_state.json meta.pt train
""".split()


def _claims(name: str) -> bool:
    known = (_METADATA, _UNFINISHED)
    return name.endswith(".distcp") or any(pattern.fullmatch(name) for pattern in known)


def _read(location: Location, options: ReadOptions) -> Catalog:
    metadata = read_metadata(_metadata_files(location))
    is_object = not metadata.paths and any(name in metadata.objects for name in MODEL_KEYS)
    if is_object or not metadata.tensors:
        return read_object(metadata, location, options)
    chosen = model_names(metadata, str(location.weights_dir))
    writer = _writer(location, metadata, chosen.prefix)
    names = dict(chosen.names)
    if writer in {_LIGHTNING, _COMPOSER}:  # which save a module around the model
        names = without_wrapper_module(names)
    _check_disjoint(metadata, location)
    pieces = _Pieces(metadata, location.roots)
    for flat in names:
        pieces.add(flat)
    entries = pieces.entries(names)
    ranks = {rank for item in metadata.items.values() if (rank := _rank(item.path)) is not None}
    return Catalog(
        writer=writer,
        world_size=max(ranks, default=0) + 1,
        tensors=entries,
        skipped=chosen.skipped,
        archives=tuple(pieces.archives),
        training_state=_training_state(location),
    )


DCP = Format("torch DCP", has_file(_claims), _read, _claims)


def _writer(location: Location, metadata: DcpMetadata, prefix: tuple[str, ...]) -> str:
    """Return the tool that wrote a checkpoint, as far as its files and paths show."""
    folder, step = location.weights_dir, location.step_dir
    if folder.name.startswith("pytorch_model_fsdp_"):
        trainer = (step / "trainer_state.json").is_file()
        return "HF Trainer (accelerate)" if trainer else "accelerate"
    if os.path.lexists(folder / "meta.pt"):
        is_trainer = is_lightning(read_torch_file(folder / "meta.pt").value)
        return _LIGHTNING if is_trainer else "Lightning Fabric"
    if prefix == ("state", "model"):
        return _COMPOSER
    if folder.name == "model_and_optim":
        return "OLMo-core"
    roots = {path[0] for path in metadata.paths.values() if path}
    return "torchtitan" if not prefix and "train_state" in roots else "torch"


def _training_state(location: Location) -> tuple[Path, ...]:
    found = {path for pattern in _TRAINING_STATE for path in location.step_dir.glob(pattern)}
    return tuple(sorted(found))


def _metadata_files(location: Location) -> list[Path]:
    """Return `.metadata`, or without it those of the single ranks."""
    found = files_in(location.roots, lambda name: bool(_METADATA.fullmatch(name)))
    whole = [path for path in found if path.name == ".metadata"]
    if found:
        return whole or found
    unfinished = files_in(location.roots, lambda name: bool(_UNFINISHED.fullmatch(name)))
    raise IncompleteError(
        f"{location.weights_dir}: its .metadata is missing",
        expected=".metadata, which torch writes last",
        found=", ".join(path.name for path in unfinished) or "*.distcp files only",
        hint="the save was interrupted, or the file is on another node: name that node's "
        "directory: --also DIR",
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
class _Piece:
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


@dataclass(slots=True)
class _Pieces:
    """All declared chunks of the model, the files that contain them, and what is wrong with them.

    Attributes:
        files: by name, the number among `paths`, the path and the size in bytes; None if missing.
    """

    metadata: DcpMetadata
    roots: tuple[Path, ...]
    pieces: list[_Piece] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)
    archives: list[ByteRange] = field(default_factory=list)
    files: dict[str, tuple[int, Path, int] | None] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)

    def add(self, flat: str) -> None:
        """Look up the items of a tensor."""
        for offsets, sizes in dict.fromkeys(self.metadata.tensors[flat].chunks):
            item = self.metadata.items.get((flat, offsets))
            if item is None:
                what = f"tensor {flat}: the metadata has no item for its chunk {list(offsets)}"
                self.problems.append(CorruptError(what))
                continue
            if (found := self._find(item.path)) is None:
                continue
            number, path, size = found
            if item.offset + item.length <= size:
                self.pieces.append(_Piece(flat, offsets, sizes, item, number, path))
                continue
            truncated = IncompleteError(
                f"{path}: truncated: tensor {flat} is outside its {size} bytes",
                expected=f"at least {item.offset + item.length} bytes",
                hint="the save was interrupted, or the file was copied in part",
            )
            self.problems.append(truncated)

    def _find(self, name: str) -> tuple[int, Path, int] | None:
        if name not in self.files:
            path = find_file(self.roots, name)
            self.files[name] = None
            if path is not None:
                self.files[name] = (len(self.paths), path, path.stat().st_size)
                self.paths.append(path)
        return self.files[name]

    def entries(self, names: Mapping[str, str]) -> dict[str, TensorEntry]:
        """Read all items and return the tensors under their names."""
        if missing := [name for name, found in self.files.items() if found is None]:
            raise IncompleteError(
                f"{self.roots[0]}: {len(missing)} files that the metadata names are missing: "
                f"{shortened(missing, 8)}",
                hint="copy them here from the nodes that wrote them, or name those nodes' "
                "directories: --also DIR",
            )
        plain = [piece for piece in self.pieces if not piece.item.compressed]
        items = [(piece.path, piece.item.offset, piece.item.length) for piece in plain]
        self.archives = [ByteRange(*window) for window in items]
        stored = dict(zip(map(id, plain), read_items(items), strict=True))
        tensors = self.metadata.tensors
        drafts = {
            flat: TensorDraft(name, tensors[flat].dtype, tensors[flat].shape)
            for flat, name in names.items()
        }
        for piece in self.pieces:
            if not piece.item.compressed:
                self._add_stored(drafts[piece.flat], piece, stored[id(piece)])
            elif 0 not in piece.sizes:  # nothing more is known until it is decompressed
                row = (piece.rank, piece.file, piece.item.offset, piece.item.length)
                drafts[piece.flat].add_compressed(row, piece.offsets, piece.sizes)
        raise_all(CorruptError, "the items do not fit the metadata", self.problems)
        paths = tuple(self.paths)
        return {draft.fqn: draft.entry(paths) for draft in drafts.values()}

    def _add_stored(
        self, draft: TensorDraft, piece: _Piece, stored: StoredItem | UnshardError
    ) -> None:
        if isinstance(stored, UnshardError):
            problem = f"{piece.where}: {stored.subject}"
            kind = type(stored)
            self.problems.append(
                kind(problem, expected=stored.expected, found=stored.found, hint=stored.hint)
            )
            return
        view = stored.view
        if view.sizes != piece.sizes:
            wrong = CorruptError(
                f"{piece.where} is not what is stored for it",
                expected=f"{list(piece.sizes)}, as the metadata declares",
                found=f"{list(view.sizes)}",
                hint="torch declares wrong boxes when FSDP2 and tensor parallelism cut unevenly; "
                "save with sizes that divide, or the full state dict",
            )
            self.problems.append(wrong)
        elif view.dtype is not draft.dtype:
            what = f"{piece.where} is stored as {view.dtype}"
            expected = f"{draft.dtype}, as the metadata says"
            self.problems.append(CorruptError(what, expected=expected))
        elif 0 not in view.sizes:
            draft.add(
                rank=piece.rank,
                file=piece.file,
                start=stored.start,
                offsets=piece.offsets,
                sizes=piece.sizes,
                strides=view.strides,
            )
