"""One model of transformers in the layouts that engines are given, as trainers leave them."""

import json
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from oracle.writers.dcp_saving import dcp_writer
from oracle.writers.saving import rank_file
from ranks import save_ranks
from tiny_models import tiny_model, tiny_tokenizer

__all__ = [
    "RANKS",
    "greedy",
    "hybrid_model",
    "matrices",
    "model_with_experts",
    "save_layouts",
    "save_lora",
    "save_verl_step",
    "served_model",
]

RANKS = 2
_EMA_SHARE = 0.5
_SIZES: Mapping[str, int] = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's attention on CPUs has
    "max_position_embeddings": 128,
}


def served_model(**fields: object) -> Any:
    """Return a model that vLLM can serve."""
    return tiny_model("qwen2", **{**_SIZES, **fields})


def matrices() -> list[int]:
    """Return how many bytes each matrix of the served model has."""
    return [one.nbytes for one in served_model().state_dict().values() if one.ndim > 1]


def model_with_experts() -> Any:
    """Return a model with experts, of a size that vLLM's kernel for CPUs pads."""
    return tiny_model(
        "qwen3_moe",
        **_SIZES,
        moe_intermediate_size=48,
        architectures=["Qwen3MoeForCausalLM"],  # vLLM takes it for an embedding model without
    )


def hybrid_model() -> Any:
    """Return a model whose layers have attention and a state, of Mamba."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    torch.manual_seed(0)
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
    fields: dict[str, Any] = {**_SIZES, **mamba, "mamba_chunk_size": 16}
    config = FalconH1Config(**fields, architectures=["FalconH1ForCausalLM"])
    return FalconH1ForCausalLM(config).train(mode=False)


def save_companions(directory: Path, model: Any) -> None:
    # As `model.save_pretrained` does; SGLang needs it.
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)


def save_layouts(rank: int, world: int, directory: Path) -> None:
    """Save the model in all layouts that ranks write, each in a run of its own."""
    model = served_model()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    runs = {name: directory / name for name in ("verl", "lmms", "dcp", "fsdp1", "shards")}
    steps = {
        "verl": runs["verl"] / "global_step_10/actor",
        **{name: runs[name] / "checkpoint-10" for name in ("lmms", "dcp", "fsdp1", "shards")},
    }
    if rank == 0:
        for name, step in steps.items():
            save_companions(step / "huggingface" if name == "verl" else step, model)
    _save(state, rank_file(steps["verl"], world, rank))
    _save(state, rank_file(steps["lmms"] / "pytorch_model_fsdp_0", world, rank))
    ema = {name: tensor.detach() * _EMA_SHARE for name, tensor in state.items()}
    _save(ema, rank_file(steps["lmms"] / "pytorch_ema_model_fsdp_0", world, rank))
    dcp = steps["dcp"] / "pytorch_model_fsdp_0"
    state_dict_saver.save({"model": state}, storage_writer=dcp_writer(dcp))
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    writer = HuggingFaceStorageWriter(str(steps["shards"]), save_distributed=True)
    state_dict_saver.save(copies, storage_writer=writer)
    _save(_fsdp1_state(), rank_file(steps["fsdp1"] / "pytorch_model_fsdp_0", world, rank))


def _save(state: Mapping[str, object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), path)


def _fsdp1_state() -> dict[str, torch.Tensor]:
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    wrapped = wrap(served_model())
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, torch.Tensor] = wrapped.state_dict()
    return state


def save_lora(run: Path) -> None:
    """Save the model with an adapter of PEFT, as verl does."""
    actor = run / "global_step_10" / "actor"
    model = served_model()
    save_companions(actor / "huggingface", model)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers what it will no longer answer
        adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # is zero before training
            torch.nn.init.normal_(parameter, std=0.1)
    save_ranks(actor, adapted.state_dict(), RANKS)
    meta = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    (actor / "lora_train_meta.json").write_text(json.dumps(meta))


def save_verl_step(run: Path, model: Any, step: int) -> None:
    """Save a model as a step of a run of verl."""
    actor = run / f"global_step_{step}" / "actor"
    save_companions(actor / "huggingface", model)
    save_ranks(actor, model.state_dict(), RANKS)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return the eight tokens that a model adds to a prompt."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
