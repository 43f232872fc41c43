"""Adapters alone, as PEFT saves them, fused into a base; PEFT's own merging is the truth."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unshard
from ranks import Tensors, merged, save_ranks
from tiny_models import assert_same_model, logits, model_class, tiny_model
from unshard import ConversionError

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, by peft
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning"),  # peft corrects it
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

IDS = torch.arange(3, 19).reshape(2, 8)
ALL = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Case:
    """A model, what of it PEFT adapts, and other fields of its config."""

    family: str
    lora: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)


BIASES = {
    kind: Case("qwen2", {"target_modules": ["q_proj"], "bias": kind})
    for kind in ("all", "lora_only")
}
HEADS = {
    "layers and head": Case("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "head alone": Case("llama", {"target_modules": ["lm_head"]}),
    "embedding and head": Case("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "all three": Case("llama", {"target_modules": ["v_proj", "embed_tokens", "lm_head"]}),
    "a pattern": Case("qwen3", {"target_modules": r".*\.(up_proj|down_proj)|lm_head"}),
    "head of conv1d": Case("gpt2", {"target_modules": ["c_attn", "lm_head"]}),
    "head and a whole module": Case(
        "llama", {"target_modules": ["lm_head"], "modules_to_save": ["norm"]}
    ),
    "layers, head and a whole module": Case(
        "llama", {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}
    ),
}
EXPERTS = {
    "experts": Case("qwen3_moe", {"target_modules": [], "target_parameters": ALL}),
    "gate and up": Case("qwen3_moe", {"target_modules": [], "target_parameters": ALL[:1]}),
    "down": Case("qwen3_moe", {"target_modules": [], "target_parameters": ALL[1:]}),
    "names of their own": Case("mixtral", {"target_modules": ["q_proj"], "target_parameters": ALL}),
    "after a dense layer": Case("deepseek_v3", {"target_modules": [], "target_parameters": ALL}),
    "as wide as the model": Case(
        "olmoe",
        {"target_modules": ["lm_head"], "target_parameters": ALL[:1]},
        {"intermediate_size": 8},
    ),
    "inside a model that sees": Case(
        "qwen3_5_moe", {"target_modules": ["q_proj"], "target_parameters": ALL}
    ),
}
CASES = HEADS | EXPERTS | BIASES


def train(case: Case, place: Path) -> tuple[Any, Tensors]:
    """Save `base` and `adapter`; return what PEFT merges them to, and what PEFT saves of that."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model(case.family, **case.fields)
    base.save_pretrained(place / "base")
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=8, **case.lora))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(place / "adapter"))
    whole = model.merge_and_unload()
    whole.save_pretrained(place / "truth")
    return whole, merged(place / "truth")


def assert_near(found: Tensors, truth: Tensors) -> None:
    """Equal, but for the order of float32 sums."""
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert found[name].dtype == expected.dtype, name
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", CASES)
def test_it_is_fused_as_peft_fuses_it(tmp_path: Path, kind: str) -> None:
    _, truth = train(CASES[kind], tmp_path)
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    report = unshard.merge(adapter, tmp_path / "out", base=tmp_path / "base")
    assert report.names_checked == "base"
    assert_near(merged(tmp_path / "out"), truth)
    model, found = model_class(CASES[kind].family).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    read = unshard.from_pretrained(adapter, base=tmp_path / "base")
    assert_same_model(read, model)


_QUERIES = ["q_proj"]
TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("qwen2", {"target_modules": ["q_proj", "lm_head"]}),
    "head alone": ("gemma2", {"target_modules": ["lm_head"]}),
    "embedding": ("qwen2", {"target_modules": ["q_proj", "embed_tokens"]}),
    "both": ("gemma2", {"target_modules": ["lm_head", "embed_tokens"]}),
    "whole embedding": (
        "qwen2",
        {"target_modules": _QUERIES, "modules_to_save": ["embed_tokens"]},
    ),
    "whole head": ("qwen2", {"target_modules": _QUERIES, "modules_to_save": ["lm_head"]}),
    "inside": ("gemma3", {"target_modules": _QUERIES, "modules_to_save": ["embed_tokens"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_fc"], "modules_to_save": ["wte"]}),
    "kept tie": (
        "qwen2",
        {
            "target_modules": _QUERIES,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
}


@pytest.mark.parametrize("has_layers", [True, False])
@pytest.mark.parametrize("kind", TIED)
def test_of_a_tied_pair_only_what_was_trained_changes(
    tmp_path: Path, kind: str, *, has_layers: bool
) -> None:
    """The model in training is the truth: PEFT's merging changes tied weights twice.

    Trainers may save the trained tensors only, without the `base_layer` that PEFT's files have.
    """
    from peft import LoraConfig, get_peft_model

    family, lora = TIED[kind]
    base = tiny_model(family, tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    model: Any = get_peft_model(base, LoraConfig(r=3, lora_alpha=8, **lora))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(tmp_path / "adapter"))
    checkpoint = tmp_path / "adapter" / "adapter_model.safetensors"
    if not has_layers:
        stored = model.state_dict()
        trained = {n: t for n, t in stored.items() if "lora_" in n or ".modules_to_save." in n}
        checkpoint = save_ranks(tmp_path / "ckpt", trained, 2)
        config = (tmp_path / "adapter" / "adapter_config.json").read_text()
        (checkpoint / "adapter_config.json").write_text(config)
    report = unshard.merge(checkpoint, tmp_path / "out", base=tmp_path / "base")
    assert not any("this output is the base" in warning for warning in report.warnings)
    found, info = model_class(family).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert found.config.tie_word_embeddings is (kind == "kept tie")
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
    torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-4)
    assert unshard.verify(tmp_path / "out", checkpoint, base=tmp_path / "base").equal
    read = unshard.from_pretrained(checkpoint, model_class(family), base=tmp_path / "base")
    assert torch.equal(logits(read), logits(found))


def test_an_adapter_next_to_its_tied_model_parts_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("qwen2", tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "model")
    lora = LoraConfig(r=3, target_modules=["embed_tokens"], init_lora_weights=False)
    model: Any = get_peft_model(base, lora)
    model.save_pretrained(str(tmp_path / "model"))
    unshard.merge(tmp_path / "model", tmp_path / "out", lora="fuse")
    found = model_class("qwen2").from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-4, atol=1e-4)
    assert unshard.verify(tmp_path / "out", tmp_path / "model").equal


def test_names_may_have_the_adapters_own_and_the_files_may_be_sharded(tmp_path: Path) -> None:
    _, truth = train(CASES["layers and head"], tmp_path)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    named = {
        name if "base_layer" in name else name.removesuffix("weight") + "default.weight": one
        for name, one in stored.items()
    }
    save_ranks(tmp_path / "ckpt", named, 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", lora_alpha=8)
    assert_near(merged(tmp_path / "out"), truth)


def test_single_experts_that_were_adapted_stay_single(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe")
    base.save_pretrained(tmp_path / "base")
    module = "model.layers.1.mlp.experts.2.gate_proj"
    weight = merged(tmp_path / "base")[f"{module}.weight"]
    a, b = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    pair = {
        f"base_model.model.{module}.lora_A.weight": a,
        f"base_model.model.{module}.lora_B.weight": b,
    }
    save_ranks(tmp_path / "ckpt", pair, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", lora_alpha=2)
    truth = merged(tmp_path / "base") | {f"{module}.weight": weight + b @ a}
    assert_near(merged(tmp_path / "out"), truth)


def test_a_base_may_have_some_experts_joined(tmp_path: Path) -> None:
    """As models of Qwen3.5 on the hub have them; here in the first layer only."""
    _, truth = train(CASES["inside a model that sees"], tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    start = "model.language_model.layers.0.mlp.experts"

    def joined(stored: Tensors, end: str) -> torch.Tensor:
        return torch.stack([stored[f"{start}.{n}.{end}.weight"] for n in range(4)])

    def fused(stored: Tensors) -> Tensors:
        rest = {name: one for name, one in stored.items() if not name.startswith(start)}
        gate_up = torch.cat([joined(stored, "gate_proj"), joined(stored, "up_proj")], dim=1)
        down = joined(stored, "down_proj")
        return {**rest, f"{start}.gate_up_proj": gate_up, f"{start}.down_proj": down}

    save_file(dict(fused(tensors)), file, {"format": "pt"})
    adapter = tmp_path / "adapter" / "adapter_model.safetensors"
    unshard.merge(adapter, tmp_path / "out", base=tmp_path / "base")
    assert_near(merged(tmp_path / "out"), fused(truth))


def test_an_adapter_with_its_head_needs_a_base(tmp_path: Path) -> None:
    train(CASES["head and a whole module"], tmp_path)
    with pytest.raises(ConversionError, match="has a LoRA adapter only"):
        unshard.merge(tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_lost_a_weight_is_no_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=3, target_modules=["q_proj", "lm_head"])
    state = get_peft_model(base, lora).state_dict()
    lost = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    del state[lost]
    save_ranks(tmp_path / "ckpt", state, 2)
    with pytest.raises(ConversionError, match=r"layers\.1\.self_attn\.q_proj is missing"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", lora_alpha=8)


def test_modules_that_were_trained_whole_are_missed_next_to_a_head(tmp_path: Path) -> None:
    train(CASES["layers, head and a whole module"], tmp_path)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    kept = {name: one for name, one in stored.items() if "embed_tokens" not in name}
    assert any("lm_head.base_layer" in name for name in kept)
    save_ranks(tmp_path / "ckpt", kept, 1)
    config = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert json.loads(config)["modules_to_save"] == ["embed_tokens"]
    (tmp_path / "ckpt" / "adapter_config.json").write_text(config)
    with pytest.raises(ConversionError, match="modules that were trained whole are not in"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("kind", BIASES)
def test_biases_that_were_trained_and_not_saved_are_missed(
    tmp_path: Path, family: str, kind: str
) -> None:
    train(Case(family, BIASES[kind].lora), tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: one for n, one in load_file(file).items() if "lora_" in n}, file)
    if family == "llama":  # has no biases
        unshard.merge(file, tmp_path / "out", base=tmp_path / "base")
    else:
        with pytest.raises(ConversionError, match=r"biases that were trained[\s\S]*q_proj\.bias"):
            unshard.merge(file, tmp_path / "out", base=tmp_path / "base")
