"""One model, saved in every way: what `test_contract` wants every reader to pass.

Every writer runs in all ranks, or, where one process saves, in rank 0. What is no weight lies
beside the model wherever a format lets it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch.distributed import barrier
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from item_files import save_item
from oracle.writers.dcp_saving import dcp_writer, megatron_files
from oracle.writers.model import Mixed
from oracle.writers.saving import accelerate_rank_file, rank_file
from zero_files import save_zero, zero_model

__all__ = [
    "contract_tensors",
    "dcp_flat",
    "dcp_many_files",
    "dcp_model",
    "dcp_no_collectives",
    "dcp_zstd",
    "fsdp1_bins",
    "fsdp1_ranks",
    "fsdp2_bins",
    "fsdp2_ranks",
    "hub_shards",
    "item_files",
    "item_files_of_safetensors",
    "megatron",
    "whole_bin",
    "whole_file",
    "whole_files",
    "whole_legacy",
    "whole_nested",
    "zero2",
    "zero3",
]

_UNITS = ("block", "bfloat16_layer", "float16_layer")  # a unit has one dtype


def contract_tensors() -> dict[str, torch.Tensor]:
    """Return the whole tensors, no two of which share memory, in the order of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in _model().state_dict().items()}


def fsdp2_ranks(rank: int, world: int, directory: Path) -> None:
    """DTensors, a file per rank, as verl saves them."""
    torch.save({**_fsdp2(world), "note": "text"}, rank_file(directory, world, rank))


def fsdp1_ranks(rank: int, world: int, directory: Path) -> None:
    """ShardedTensors, a file per rank."""
    torch.save({**_fsdp1(), "note": "text"}, rank_file(directory, world, rank))


def fsdp2_bins(rank: int, world: int, directory: Path) -> None:
    """DTensors in accelerate's files, whose names tell no world size."""
    torch.save({**_fsdp2(world), "note": "text"}, accelerate_rank_file(directory, rank))


def fsdp1_bins(rank: int, world: int, directory: Path) -> None:
    """ShardedTensors in accelerate's files."""
    del world
    torch.save({**_fsdp1(), "note": "text"}, accelerate_rank_file(directory, rank))


def dcp_flat(rank: int, world: int, directory: Path) -> None:
    """DCP of the model at the top level, as torchtitan saves it."""
    del rank
    state = {**_fsdp2(world), "optimizer": {"scale": torch.ones(3)}, "train_state": {"step": 3}}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory))


def megatron(rank: int, world: int, directory: Path) -> None:
    """`torch_dist`: DCP that is not flattened, with Megatron's files next to it."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state_dict_saver.save(_fsdp2(world), storage_writer=dcp_writer(directory), planner=planner)
    if rank == 0:
        megatron_files(directory)


def dcp_no_collectives(rank: int, world: int, directory: Path) -> None:
    """DCP without coordination: metadata of every rank."""
    del rank
    state = {"model": _fsdp2(world), "step": 3}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory), use_collectives=False)
    barrier()


def _dcp_model(rank: int, world: int, directory: Path, **options: Any) -> None:
    del rank
    state = {"model": _fsdp2(world), "step": 3}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory, **options))


dcp_model = partial(_dcp_model)
dcp_zstd = partial(_dcp_model, _extensions=[ZStandard()])


def dcp_many_files(rank: int, world: int, directory: Path) -> None:
    """DCP, a file per item; of the model alone, so that no file may be lost."""
    del rank
    writer = dcp_writer(directory, single_file_per_rank=False)
    state_dict_saver.save({"model": _fsdp2(world)}, storage_writer=writer)


def hub_shards(rank: int, world: int, directory: Path) -> None:
    """Shards of torch's HuggingFaceStorageWriter, which refuses tensors that share memory."""
    del rank
    state = {name: tensor.detach().clone() for name, tensor in _fsdp2(world).items()}
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    state_dict_saver.save(state, storage_writer=writer)


def item_files(rank: int, world: int, directory: Path) -> None:
    """The files of torch_checkpointing, as torch saves them."""
    save_item(directory, {**_fsdp2(world), "note": "text"}, rank)


def item_files_of_safetensors(rank: int, world: int, directory: Path) -> None:
    """The same as safetensors, which have no place for other values."""
    save_item(directory, _fsdp2(world), rank, suffix=".safetensors")


def whole_file(rank: int, world: int, directory: Path) -> None:
    """One safetensors file."""
    del rank, world
    save_file(contract_tensors(), directory / "model.safetensors", metadata={"format": "pt"})


def whole_files(rank: int, world: int, directory: Path) -> None:
    """Several safetensors files and their index, as huggingface_hub splits them."""
    del rank, world
    save_torch_state_dict(contract_tensors(), directory, max_shard_size=2000)


def _zero(rank: int, world: int, directory: Path, *, stage: int) -> None:
    tensors = contract_tensors()
    order, shared = list(tensors), {"head.weight": "embed.weight"}
    del tensors["head.weight"]
    model = zero_model(tensors, shared=shared, order=order, extra={"note": "text"})
    save_zero(directory, model, world=world, stage=stage, ranks=[rank])
    (directory.parent / "latest").write_text(directory.name)


zero2 = partial(_zero, stage=2)
zero3 = partial(_zero, stage=3)


def _whole_torch(rank: int, world: int, directory: Path, *, save: Callable[[Path], None]) -> None:
    del rank, world
    save(directory)


def _save_bin(directory: Path) -> None:
    torch.save({**_model().state_dict(), "note": "text"}, directory / "pytorch_model.bin")


def _save_nested(directory: Path) -> None:
    state = {"epoch": 3, "state_dict": _model().state_dict(), "optimizer": {"state": {}}}
    torch.save(state, directory / "last.pt")


def _save_legacy(directory: Path) -> None:
    state = {**_model().state_dict(), "note": "text"}
    path = directory / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)


whole_bin = partial(_whole_torch, save=_save_bin)
whole_nested = partial(_whole_torch, save=_save_nested)
whole_legacy = partial(_whole_torch, save=_save_legacy)


def _model() -> Mixed:
    torch.manual_seed(11)
    return Mixed()


def _fsdp2(world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model = _model()
    for name in _UNITS:
        fully_shard(getattr(model, name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(model.state_dict())


def _fsdp1() -> dict[str, torch.Tensor]:
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    model = _model()
    for name in _UNITS:
        setattr(model, name, wrap(getattr(model, name)))
    whole = wrap(model)
    FullyShardedDataParallel.set_state_dict_type(whole, StateDictType.SHARDED_STATE_DICT)
    return dict(whole.state_dict())
