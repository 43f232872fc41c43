"""Checkpoints that megatron-core wrote (see tests/data/README.md), and what is true of them.

`hub_truth` is the obvious conversion: whole tensors in memory, one after another.
"""

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["CASES", "hub_truth", "truth_of", "unpack"]

ARCHIVE = Path(__file__).parent / "data" / "megatron.tar.xz"
CASES = (
    "deepseek_v3_tp2",
    "glm4_moe_ep2",
    "llama_dp2_fully_parallel",
    "llama_tp1",
    "llama_tp2_pp2",
    "mixtral_tp2",
    "qwen2_tp2_tied",
    "qwen3_moe_ep2",
    "qwen3_moe_tp2_singleton",
    "qwen3_pp2_per_layer",
    "qwen3_tp2",
    "qwen3_tp2_bf16",
)
Tensors = Mapping[str, torch.Tensor]
_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_LATENT = {
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}


def unpack(directory: Path) -> Path:
    """Unpack all cases into a directory."""
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(directory, filter="data")
    return directory


def truth_of(case: Path, which: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a case: "megatron" or "hub" (as slime's converter made them)."""
    stem = "truth_megatron" if which == "megatron" else "truth_hf"
    with np.load(case / f"{stem}.npz") as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    # numpy has no bfloat16: those are stored as the bits of integers.
    return {
        name: one.view(torch.bfloat16) if one.dtype == torch.uint16 else one
        for name, one in found.items()
    }


def hub_truth(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Convert Megatron's whole tensors into those of a model on the hub."""
    vocabulary, layers = config["vocab_size"], config["num_hidden_layers"]
    found = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"][:vocabulary],
        "model.norm.weight": tensors["decoder.final_layernorm.weight"],
    }
    if "output_layer.weight" in tensors:
        found["lm_head.weight"] = tensors["output_layer.weight"][:vocabulary]
    for layer in range(layers):
        start = f"model.layers.{layer}."
        inside = _of_layer(tensors, layer)
        found |= {start + name: one for name, one in _layer(inside, config)}
    start = "mtp.layers.0."
    mtp = {name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)}
    if mtp:
        above = f"model.layers.{layers}."
        inner = "transformer_layer."
        inside = {
            name.removeprefix(inner): one for name, one in mtp.items() if name.startswith(inner)
        }
        found |= {above + name: one for name, one in _layer(inside, config)}
        for name in ("enorm", "hnorm", "eh_proj"):
            found[f"{above}{name}.weight"] = mtp[f"{name}.weight"]
        found[f"{above}shared_head.norm.weight"] = mtp["final_layernorm.weight"]
        found[f"{above}shared_head.head.weight"] = found["lm_head.weight"]
        found[f"{above}embed_tokens.weight"] = found["model.embed_tokens.weight"]
    return {name: one.contiguous() for name, one in found.items()}


def _of_layer(tensors: Tensors, layer: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, stacked with others or by itself."""
    numbered = f"decoder.layers.{layer}."
    if any(name.startswith(numbered) for name in tensors):
        own = [name for name in tensors if name.startswith(numbered)]
        return {name.removeprefix(numbered): tensors[name] for name in own}
    stacked = "decoder.layers."
    own = [name for name in tensors if name.startswith(stacked)]
    return {name.removeprefix(stacked): tensors[name][layer] for name in own}


def _layer(inside: Tensors, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    renamed = _RENAMED | (_LATENT if "kv_lora_rank" in config else _QK_NORM)
    for name, one in inside.items():
        if name in renamed:
            yield renamed[name], one
        elif ".linear_qkv." in name:
            end = name.rpartition(".")[2]
            for part, rows in _by_groups(one, config).items():
                yield f"self_attn.{part}_proj.{end}", rows
        elif name == "mlp.router.weight" or name.startswith("mlp.experts.experts."):
            yield from _mixture(name, one, is_mixtral=config["model_type"] == "mixtral")
        else:
            path, _, last = name.removesuffix(".weight").rpartition(".")
            if last == "linear_fc2":
                yield f"{path}.down_proj.weight", one
            else:
                assert last == "linear_fc1", name
                yield f"{path}.gate_proj.weight", one[: len(one) // 2]
                yield f"{path}.up_proj.weight", one[len(one) // 2 :]


def _mixture(
    name: str, one: torch.Tensor, *, is_mixtral: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    if name == "mlp.router.weight":
        yield f"{block}.gate.weight", one
        return
    parts = name.split(".")
    if parts[3].isdecimal():
        part = {"weight_w": gate, "weight_v": up, "weight": down}[parts[-1]]
        yield f"{block}.experts.{parts[3]}.{part}.weight", one
        return
    for expert, matrix in enumerate(one):
        start = f"{block}.experts.{expert}."
        if parts[3] == "linear_fc2":
            yield f"{start}{down}.weight", matrix
        else:
            yield f"{start}{gate}.weight", matrix[: len(matrix) // 2]
            yield f"{start}{up}.weight", matrix[len(matrix) // 2 :]


def _by_groups(one: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    rows = config.get("head_dim") or config["hidden_size"] // heads
    grid = one.reshape(groups, heads // groups + 2, rows, *one.shape[1:])
    parts = {"q": grid[:, :-2], "k": grid[:, -2:-1], "v": grid[:, -1:]}
    return {name: part.reshape(-1, *one.shape[1:]) for name, part in parts.items()}
