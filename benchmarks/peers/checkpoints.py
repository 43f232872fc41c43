"""Write what the tools merge, with real torch: one process of gloo per rank, FSDP2's DTensors.

The truth is one safetensors file of random values in the shapes of a Qwen2.5; every rank stores its
rows of each tensor. The embeddings are tied, and stored under both names, as FSDP2 stores them.
"""

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import start_processes

from peers.cells import EMBEDDINGS, HEAD, Cell, Made

__all__ = ["make"]

_SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2},
}

State = dict[str, DTensor]
Save = Callable[[State, Path, int, int], None]


def _save_rank_file(state: State, folder: Path, rank: int, ranks: int) -> None:
    torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")


def _save_dcp(state: State, folder: Path, _rank: int, _ranks: int) -> None:
    save({"model": state}, checkpoint_id=folder)


def _save_safetensors(state: State, folder: Path, _rank: int, _ranks: int) -> None:
    """Without the tied name: safetensors refuses to store a tensor twice."""
    single = {name: tensor for name, tensor in state.items() if name != HEAD}
    save(single, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


_LAYOUTS: dict[str, tuple[str, str, Save]] = {
    "verl": ("global_step_10/actor", ".", _save_rank_file),
    "lmms-engine": ("checkpoint-10", "pytorch_model_fsdp_0", _save_rank_file),
    "DCP": ("checkpoint-10", "pytorch_model_fsdp_0", _save_dcp),
    "safetensors": ("checkpoint-10", ".", _save_safetensors),
}
"""By the layout's name: the step's directory, that of the weights in it, and what writes them."""


def make(cell: Cell, directory: Path) -> Made:
    """Write a checkpoint below a directory, unless it is there; layouts share the truth."""
    truth = directory / f"{cell.size}-{cell.dtype}.safetensors"
    if not truth.exists():
        _write_truth(cell, truth)
    step, weights, _ = _LAYOUTS[cell.layout]
    root = directory / cell.label.replace(" ", "-")
    made = Made(root, root / step, root / step / weights, truth)
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        made.weights.mkdir(parents=True)
        # One process imports torch, and the ranks are forked from it before it has any threads.
        multiprocessing.set_forkserver_preload([__name__])
        start_processes(  # type: ignore[no-untyped-call]
            _be_rank, (cell, made), nprocs=cell.ranks, start_method="forkserver"
        )
        _write_companions(cell, made.checkpoint)
        (root / "complete").touch()
    return made


def _write_truth(cell: Cell, path: Path) -> None:
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        shapes = {n: one.shape for n, one in Qwen2ForCausalLM(_config(cell)).state_dict().items()}
    generator = torch.Generator().manual_seed(10)
    dtype = getattr(torch, cell.dtype)
    tensors = {
        name: torch.empty(shape, dtype=torch.float32).uniform_(-1, 1, generator=generator).to(dtype)
        for name, shape in shapes.items()
        if name != HEAD
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _config(cell: Cell) -> Any:
    from transformers import Qwen2Config

    shape = _SHAPES[cell.size]
    return Qwen2Config(
        **shape,
        vocab_size=151_936,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        dtype=cell.dtype,
    )


def _be_rank(rank: int, cell: Cell, made: Made) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{made.root.resolve() / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=cell.ranks)
    mesh = init_device_mesh("cpu", (cell.ranks,), mesh_dim_names=("fsdp",))
    with safe_open(made.truth, framework="pt") as truth:
        state = {name: _sharded(truth, name, mesh, rank) for name in truth.keys()}  # noqa: SIM118
    state[HEAD] = state[EMBEDDINGS]
    _LAYOUTS[cell.layout][2](state, made.weights, rank, cell.ranks)
    dist.barrier()
    dist.destroy_process_group()


def _sharded(truth: Any, name: str, mesh: DeviceMesh, rank: int) -> DTensor:
    """Return this rank's rows; all are divisible by 8 ranks."""
    stored = truth.get_slice(name)
    shape = torch.Size(stored.get_shape())
    rows = shape[0] // mesh.size()
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        stored[rank * rows : (rank + 1) * rows].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=whole.stride(),
    )


def _write_companions(cell: Cell, checkpoint: Path) -> None:
    """Write config and tokenizer where the trainer of this layout writes them."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "a": 1, "b": 2}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),  # noqa: S106
        unk_token="<unk>",  # noqa: S106
    )
    folder = checkpoint / "huggingface" if cell.layout == "verl" else checkpoint
    _config(cell).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if cell.layout == "verl":
        text = f'{{"FSDP_version": 2, "world_size": {cell.ranks}}}'
        (checkpoint / "fsdp_config.json").write_text(text, encoding="utf-8")
