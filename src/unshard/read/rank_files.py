"""Reader for FSDP rank files: one torch.save per rank, named `model_world_size_W_rank_R.pt`.

Written by verl and lmms-engine. The world size is what the names say, never a count of files.
Every rank's directory and pickle are read, no weights (but for plain tensors, see `plain_tensors`).
"""

import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.containers.pickle_machine import DangerousPickleError, MalformedPickleError
from unshard.containers.records import Record, Value
from unshard.containers.strided import read_strided
from unshard.containers.torch_zip import TorchZip, read_torch_zip
from unshard.containers.unpickle import unpickle
from unshard.errors import CorruptError, NotMergeableError, UnsafeError, UnshardError
from unshard.read.chunk_rows import ChunkRows
from unshard.read.pickle_values import TensorFormError
from unshard.read.torch_tensors import LocalTensor, StorageView, TensorDecoder, is_tensor
from unshard.tensors.catalog import Skipped
from unshard.tensors.dtypes import DType, numpy_dtype
from unshard.tensors.placements import PlacementError, Sharding, place

__all__ = ["Draft", "RankFileReader", "rank_file_name", "rank_files"]

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def rank_file_name(world_size: int, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def rank_files(directory: Path) -> dict[int, dict[int, Path]]:
    """Return the rank files in a directory: world size -> rank -> path."""
    found: dict[int, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return {world: dict(sorted(ranks.items())) for world, ranks in sorted(found.items())}


@dataclass(slots=True)
class Draft:
    """A tensor while its chunks are being gathered.

    `sharding` is None as long as only plain tensors of this name were met; their rows then each
    hold one rank's whole tensor, and `plain_tensors` decides what they are together.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding | None
    rows: ChunkRows
    first_rank: int
    ranks: "array[int]" = field(default_factory=lambda: array("i"))


class RankFileReader:
    """Gathers the tensors of rank files, one file after the other.

    Args:
        paths: all files that will be read, in rank order.
        allowed: names of tensor subclasses that the user vouches for.
    """

    def __init__(self, paths: Sequence[Path], allowed: frozenset[str]) -> None:
        self.paths = tuple(paths)
        self.drafts: dict[str, Draft] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []
        self._allowed = allowed
        self._shardings: dict[Sharding, Sharding] = {}

    def read(self, file: int, rank: int) -> None:
        """Add the tensors of file number `file`, written by `rank`.

        Problems of single tensors are gathered in `problems`; those of the whole file are raised.
        """
        archive = read_torch_zip(self.paths[file])
        decoder = TensorDecoder(rank, lambda view: _integers(archive, view), self._allowed)
        for name, value in _state_dict(archive).items():
            if not is_tensor(value):
                self.skipped.setdefault(name, Skipped(name, _describe(value)))
                continue
            try:
                self._add(name, decoder.decode(value), archive, file, rank)
            except TensorFormError as error:
                self._complain(NotMergeableError, name, file, rank, f"it is {error}")
            except PlacementError as error:
                self._complain(NotMergeableError, name, file, rank, str(error))

    def _complain(
        self, kind: type[UnshardError], name: str, file: int, rank: int, what: str
    ) -> None:
        self.problems.append(kind(f"tensor {name}: rank {rank} ({self.paths[file].name}): {what}"))

    def _add(self, name: str, tensor: LocalTensor, archive: TorchZip, file: int, rank: int) -> None:
        draft = self._draft(name, tensor, file, rank)
        if draft is None:
            return
        storage = archive.storages.get(tensor.view.key)
        size = 0 if storage is None else storage.size
        needed = tensor.view.storage_elements * tensor.view.dtype.itemsize
        if size < needed and 0 not in tensor.view.sizes:
            what = f"its storage {tensor.view.key} has {size} bytes, its pickle says {needed}"
            self._complain(CorruptError, name, file, rank, what)
            return
        self._add_pieces(draft, tensor, 0 if storage is None else storage.offset, file, rank)

    def _draft(self, name: str, tensor: LocalTensor, file: int, rank: int) -> Draft | None:
        """Return the draft that this tensor belongs to; None if it contradicts other ranks."""
        sharding = tensor.sharding and self._shardings.setdefault(tensor.sharding, tensor.sharding)
        draft = self.drafts.get(name)
        if draft is None:
            rows = ChunkRows(len(tensor.shape))
            draft = Draft(name, tensor.view.dtype, tensor.shape, sharding, rows, rank)
            self.drafts[name] = draft
        if _agree(draft, tensor):
            draft.ranks.append(rank)
            return draft
        ours = _summary(tensor.shape, tensor.view.dtype, sharding)
        theirs = _summary(draft.shape, draft.dtype, draft.sharding)
        what = f"{ours}, but rank {draft.first_rank} says {theirs}"
        self._complain(CorruptError, name, file, rank, what)
        return None

    def _add_pieces(
        self, draft: Draft, tensor: LocalTensor, storage_start: int, file: int, rank: int
    ) -> None:
        view = tensor.view
        itemsize = view.dtype.itemsize
        if tensor.sharding is None:
            pieces = [((0,) * len(view.sizes), view.sizes, 0)]
        else:
            local, placed = place(tensor.shape, tensor.sharding)
            _check_local(view.sizes, local, tensor.shape, tensor.sharding)
            if 0 in local:
                return
            pieces = [
                (p.box.offsets, p.box.sizes, _dot(p.local_offsets, view.strides)) for p in placed
            ]
        for offsets, sizes, skip in pieces:
            draft.rows.add(
                rank=rank,
                file=file,
                start=storage_start + (view.offset + skip) * itemsize,
                itemsize=itemsize,
                offsets=offsets,
                sizes=sizes,
                strides=view.strides,
            )


def _agree(draft: Draft, tensor: LocalTensor) -> bool:
    """Tell whether ranks agree. Plain tensors may differ in size: they may be shards themselves."""
    if draft.dtype is not tensor.view.dtype or (draft.sharding is None) != (
        tensor.sharding is None
    ):
        return False
    if tensor.sharding is None:
        return draft.rows.ndim == len(tensor.shape)
    return draft.shape == tensor.shape


def _check_local(
    stored: tuple[int, ...], placed: tuple[int, ...], shape: tuple[int, ...], sharding: Sharding
) -> None:
    if stored == placed or (0 in stored and 0 in placed):
        return
    placements = ", ".join(map(str, sharding.placements))
    raise PlacementError(
        f"its local shape is {list(stored)}, but ({placements}) at coordinates "
        f"{sharding.mesh.coordinates} of mesh {sharding.mesh.shape} makes {list(placed)} of the "
        f"global shape {list(shape)}"
    )


def _state_dict(archive: TorchZip) -> Mapping[str, Value]:
    """Unpickle a file and return its state dict."""
    path = archive.path
    try:
        value, _ = unpickle(archive.pickle)
    except MalformedPickleError as error:
        raise CorruptError(f"{path}: its pickle is not valid: {error}") from error
    except DangerousPickleError as error:
        raise UnsafeError(
            f"{path}: its pickle refers to {error}, which no checkpoint needs: it was made to run "
            "commands when it is loaded",
            hint="nothing was run. Do not load this file with torch; find out where it comes from",
        ) from error
    items: dict[Value, Value] | None = None
    if isinstance(value, dict):
        items = value
    elif isinstance(value, Record) and value.is_call_of("collections.OrderedDict"):
        items = dict(value.items)
    if items is None or not all(isinstance(name, str) for name in items):
        raise NotMergeableError(
            f"{path}: not a state dict",
            expected="a dict of tensors by name",
            found=_describe(value),
        )
    return {name: item for name, item in items.items() if isinstance(name, str)}


def _integers(archive: TorchZip, view: StorageView) -> tuple[int, ...]:
    """Read the integers of a small tensor (the ranks of a device mesh)."""
    storage = archive.storages.get(view.key)
    width = view.dtype.itemsize
    if storage is None or view.storage_elements * width > storage.size:
        raise TensorFormError(f"a mesh whose ranks (storage {view.key}) are missing")
    fd = os.open(archive.path, os.O_RDONLY)
    try:
        strides = tuple(step * width for step in view.strides)
        start = storage.offset + view.offset * width
        ranks = read_strided(fd, start, strides, view.sizes, numpy_dtype(view.dtype))
    finally:
        os.close(fd)
    return tuple(ranks.reshape(-1).tolist())


def _dot(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * step for offset, step in zip(offsets, strides, strict=True))


def _summary(shape: tuple[int, ...], dtype: DType, sharding: Sharding | None) -> str:
    return f"{'plain' if sharding is None else 'sharded'} {dtype} {list(shape)}"


def _describe(value: Value) -> str:
    """Say in a few words what a value is that is not a tensor."""
    if isinstance(value, Record):
        return f"not a tensor: {value.callee}"
    return f"not a tensor: {type(value).__name__}"
