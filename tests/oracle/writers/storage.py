"""Scenarios of torch's `HuggingFaceStorageWriter`: DCP whose files are safetensors.

Files of one rank say at which offsets its pieces lie (`DCP_SHARDING_INFO`); no file says how large
a tensor is, or how many ranks there were. A rank that has nothing to write writes no file.
"""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from oracle.writers.hub_models import full_state, hub_mesh, sharded_llama
from oracle.writers.saving import leave_truth

__all__ = [
    "storage_consolidated",
    "storage_consolidated_extras",
    "storage_consolidated_files",
    "storage_consolidated_scalar",
    "storage_extras",
    "storage_extras_files",
    "storage_files",
    "storage_shards",
    "storage_whole",
    "storage_whole_files",
]

_FILES = 3
_Place = tuple[int, int, Path]
_State = OrderedDict[str, torch.Tensor]


def storage_shards(rank: int, world: int, directory: Path) -> None:
    """Save a model's shards, one file per rank; any world size, four ranks replicate (HSDP)."""
    _save_model((rank, world, directory), files=1, save_distributed=True)


def storage_files(rank: int, world: int, directory: Path) -> None:
    """Save a model's shards, in several files per rank; any world size."""
    _save_model((rank, world, directory), files=_FILES, save_distributed=True)


def storage_consolidated(rank: int, world: int, directory: Path) -> None:
    """Save shards into `sharded/`, which torch then makes one whole file of; any world size."""
    _save_model((rank, world, directory), files=1, save_distributed=True, enable_consolidation=True)


def storage_consolidated_files(rank: int, world: int, directory: Path) -> None:
    """Save as `storage_consolidated`, several whole files; any world size."""
    place = (rank, world, directory)
    _save_model(place, files=_FILES, save_distributed=True, enable_consolidation=True)


def storage_whole(rank: int, world: int, directory: Path) -> None:
    """Gather the model on rank 0, which alone writes one whole file; any world size."""
    _save_whole((rank, world, directory), files=1)


def storage_whole_files(rank: int, world: int, directory: Path) -> None:
    """Save as `storage_whole`, several whole files; any world size."""
    _save_whole((rank, world, directory), files=_FILES)


def storage_extras(rank: int, world: int, directory: Path) -> None:
    """Save tensors of unusual dtypes and cuts; any world size, four ranks replicate (HSDP)."""
    _save_extras((rank, world, directory), files=1, save_distributed=True)


def storage_extras_files(rank: int, world: int, directory: Path) -> None:
    """Save as `storage_extras`, in several files per rank; any world size."""
    _save_extras((rank, world, directory), files=_FILES, save_distributed=True)


def storage_consolidated_extras(rank: int, world: int, directory: Path) -> None:
    """Let torch consolidate integers, in which it fails once the shards are written."""
    place = (rank, world, directory)
    with suppress(CheckpointException):
        _save_extras(place, files=1, save_distributed=True, enable_consolidation=True)


def storage_consolidated_scalar(rank: int, world: int, directory: Path) -> None:
    """Let torch consolidate a tensor without dimensions, of which it makes a zero."""
    mesh = hub_mesh(world)
    truth = _State(rows=torch.randn(13, 5), scale=torch.tensor(0.75))
    cuts = {"rows": Shard(0), "scale": Replicate()}
    before: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    state = {name: distribute_tensor(truth[name], mesh, [*before, cuts[name]]) for name in truth}
    _save((rank, world, directory), state, 1, save_distributed=True, enable_consolidation=True)
    leave_truth((rank, world, directory), truth)


def _extras() -> _State:
    """Return whole tensors; the name's last part says how they are cut."""
    return _State(
        {
            "float32.rows": torch.randn(13, 5),
            "float32.columns": torch.randn(4, 11),
            "bfloat16.rows": torch.randn(7, 3).bfloat16(),
            "bfloat16.columns": torch.randn(2, 3, 5).bfloat16(),
            "float16.copies": torch.randn(3, 2).half(),
            "float8.rows": torch.randn(10, 2).to(torch.float8_e4m3fn),
            "int64.rows": torch.arange(2**40, 2**40 + 9),
            "int64.copies": torch.tensor(2**40 + 1),
            "uint8.rows": torch.arange(9, dtype=torch.uint8),
            "bool.rows": torch.tensor([True, False, True, True, False]),
            "scalar.copies": torch.tensor(0.75),
            "empty.rows": torch.empty(0, 4),
            "single.rows": torch.tensor([0.25]),
            "plain": torch.linspace(-1, 1, 7),
            "plain_scalar": torch.tensor(7),
        }
    )


def _cut(name: str, tensor: torch.Tensor, world: int) -> torch.Tensor:
    cuts: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    cut = cuts.get(name.rpartition(".")[2])
    if cut is None:
        return tensor
    mesh = hub_mesh(world)
    before: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    return distribute_tensor(tensor, mesh, [*before, cut], src_data_rank=None)


def _save_extras(place: _Place, *, files: int, **options: Any) -> None:
    torch.manual_seed(1)
    truth = _extras()
    leave_truth(place, truth)
    state = {name: _cut(name, tensor, place[1]) for name, tensor in truth.items()}
    _save(place, state, files, **options)


def _save_model(place: _Place, *, files: int, **options: Any) -> None:
    model = sharded_llama(place[1])
    leave_truth(place, full_state(model))
    _save(place, model.state_dict(), files, **options)


def _save_whole(place: _Place, *, files: int) -> None:
    state = full_state(sharded_llama(place[1]))
    leave_truth(place, state)
    if place[0] == 0:
        _save(place, state, files, no_dist=True)


def _save(
    place: _Place,
    state: Mapping[str, torch.Tensor],
    files: int,
    *,
    no_dist: bool = False,
    **options: Any,
) -> None:
    """Save; with more than one file the tensors go into them in turn."""
    index = {name: 1 + number % files for number, name in enumerate(state)} if files > 1 else None
    writer = HuggingFaceStorageWriter(str(place[2]), fqn_to_index_mapping=index, **options)
    save(dict(state), storage_writer=writer, no_dist=no_dist)
