"""Save with torch.distributed.checkpoint (DCP), let torch load it back, leave the truth.

Knows how to save and to check; knows no scenario.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlanner

from oracle.writers.saving import State, equal_bits, leave_truth

__all__ = [
    "check_loads",
    "check_pieces",
    "dcp_writer",
    "megatron_files",
    "read_metadata",
    "save_dcp",
    "stored_tensors",
]

Stored = Callable[[str], str]


def dcp_writer(directory: Path, **options: Any) -> FileSystemWriter:
    """Return torch's writer with these options; it does not wait for the disk."""
    return FileSystemWriter(directory, sync_files=False, **options)


def megatron_files(directory: Path) -> None:
    """Write the files that Megatron puts next to DCP; metadata.json comes last."""
    recorded = Namespace(num_layers=2, params_dtype=torch.float32, exit_signal=Signals(15))
    torch.save({"args": recorded, "iteration": 7}, directory / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backends))


def save_dcp(
    place: tuple[int, int, Path],
    state: dict[str, Any],
    truth: State,
    *,
    stored: Stored = str,
    into: str = "",
    writer: FileSystemWriter | None = None,
    planner: SavePlanner | None = None,
) -> None:
    """Save a state dict in all ranks, make sure that torch loads the truth back, and leave it.

    Args:
        place: rank, world size and the checkpoint's directory.
        state: what to save, nested as the framework nests it.
        truth: whole tensors by the names that a user wants.
        stored: makes the flattened name of a tensor from its name in `truth`.
        into: the directory in the checkpoint's that is to hold `.metadata`; itself if empty.
        writer: torch's writer if not the plain one.
        planner: torch's planner if not the default.

    Raises:
        AssertionError: torch loads something else than the truth.
    """
    rank, _, directory = place
    target = directory / into
    state_dict_saver.save(state, storage_writer=writer or dcp_writer(target), planner=planner)
    if rank == 0:
        check_loads(target, truth, stored=stored)
    leave_truth(place, truth)


def check_loads(directory: Path, truth: State, *, stored: Stored = str) -> None:
    """Load whole tensors in one process and compare them with the truth, bit for bit."""
    known = read_metadata(directory).state_dict_metadata
    found = {stored(name): torch.empty_like(tensor) for name, tensor in truth.items()}
    state_dict_loader.load(found, storage_reader=FileSystemReader(directory), no_dist=True)
    for name, tensor in truth.items():
        entry = known[stored(name)]
        assert isinstance(entry, TensorStorageMetadata), name
        assert entry.properties.dtype == tensor.dtype, name
        assert equal_bits(found[stored(name)], tensor), name


def check_pieces(directory: Path, world: int, truth: State, *, stored: Stored = str) -> None:
    """Do the same where each rank has left metadata of its own, which torch never unites."""
    found = {stored(name): torch.empty_like(tensor) for name, tensor in truth.items()}
    for rank in range(world):
        metadata = FileSystemReader(directory).read_metadata(rank=rank)
        for index, piece in stored_tensors(directory, metadata):
            box = zip(index.offset or (), piece.shape, strict=True)
            found[index.fqn][tuple(slice(start, start + size) for start, size in box)] = piece
    for name, tensor in truth.items():
        assert equal_bits(found[stored(name)], tensor), name


def read_metadata(directory: Path) -> Metadata:
    """Return what torch itself reads from `.metadata`."""
    return FileSystemReader(directory).read_metadata()


def stored_tensors(
    directory: Path, metadata: Metadata
) -> Iterator[tuple[MetadataIndex, torch.Tensor]]:
    """Yield every stored piece of a tensor as its own bytes have it, whatever is declared."""
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (directory / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                yield index, torch.load(BytesIO(stream.read(info.length)))
