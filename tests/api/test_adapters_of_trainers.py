"""Adapters as VeOmni and verl's Megatron engine leave them, apart from their weights.

Sources: VeOmni d9774494 (trainer/callbacks/checkpoint_callback.py, lora/moe_layers.py), verl
1dda039b9 (utils/checkpoint/megatron_checkpoint_manager.py).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import unshard
from ranks import assert_same, merged
from tiny_models import logits, tiny_model, with_adapter
from trainers import dcp_under
from unshard.cli.main import main
from unshard.errors import ConversionError

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
ALPHA, RANK = 6.0, 2
Tensors = dict[str, torch.Tensor]


def veomni(run: Path, base: Path, adapter: Tensors, config: dict[str, object]) -> Path:
    """Leave a step as VeOmni does when it trains LoRA; return the adapter's directory."""
    step = run / "checkpoints" / "global_step_5"
    dcp_under("model")(
        step, {name.replace("weight", "default.weight"): one for name, one in adapter.items()}
    )
    (step / "extra_state").mkdir()
    torch.save({"global_step": 5}, step / "extra_state" / "extra_state_rank_0.pt")
    (run / "model_assets").mkdir()
    shutil.copy(base / "config.json", run / "model_assets")
    exported = run / "global_step_5"
    exported.mkdir()
    torch.save(adapter, exported / "adapter_model.bin")
    (exported / "adapter_config.json").write_text(json.dumps(config))
    return exported


def plain(tmp_path: Path) -> tuple[Any, Tensors]:
    """Save a base model; return it with an adapter, and the adapter as PEFT would save it."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = with_adapter(tiny_model())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    found = get_peft_model_state_dict(model)
    return model, {name: one.contiguous() for name, one in found.items()}


def of_experts(*, is_shared: bool) -> Tensors:
    """Return VeOmni's adapter of a tiny Qwen3-MoE's experts."""
    generator = torch.Generator().manual_seed(7)
    stack = () if is_shared else (4,)
    tensors: Tensors = {}
    for layer in range(2):
        for name, (inputs, outputs) in {"gate": (16, 12), "up": (16, 12), "down": (12, 16)}.items():
            start = f"base_model.model.model.layers.{layer}.mlp.experts.{name}_proj"
            for half, sizes in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                matrix = torch.randn(*stack, *sizes, generator=generator)
                tensors[f"{start}.lora_{half}.weight"] = matrix
    return tensors


def config_of_experts(**more: object) -> dict[str, object]:
    targets = [f"model.layers.*.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    own = {"schema_version": 1, "moe_two_lora_gate_up": True}
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_parameters": targets}
    return {**fields, "target_modules": ["q_proj"], "veomni_lora": own, **more}


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/global_step_5"])
def test_the_alpha_is_that_of_the_adapter_next_to_checkpoints(tmp_path: Path, path: str) -> None:
    model, adapter = plain(tmp_path)
    config = json.loads((tmp_path / "config" / "adapter_config.json").read_text())
    veomni(tmp_path / "run", tmp_path / "base", adapter, config)
    unshard.merge(tmp_path / "run" / path, tmp_path / "out", base=tmp_path / "base")
    unshard.merge(tmp_path / "run" / path, tmp_path / "adapter", lora="adapter")
    assert_same(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), adapter)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), logits(model.merge_and_unload()))


@pytest.mark.parametrize("is_shared", [False, True])
def test_adapters_of_single_experts_are_fused(tmp_path: Path, *, is_shared: bool) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    adapter, base = of_experts(is_shared=is_shared), load_file(tmp_path / "base/model.safetensors")
    exported = veomni(tmp_path / "run", tmp_path / "base", adapter, config_of_experts())
    unshard.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    unshard.merge(exported / "adapter_model.bin", tmp_path / "again", base=tmp_path / "base")
    for name, weight in base.items():
        block, _, tail = name.removesuffix(".weight").partition(".experts.")
        if tail:
            expert, _, which = tail.partition(".")
            start = f"base_model.model.{block}.experts.{which}.lora_"
            a, b = (adapter[f"{start}{half}.weight"] for half in "AB")
            a, b = (a, b) if is_shared else (a[int(expert)], b[int(expert)])
            base[name] = weight + ALPHA / RANK * (b @ a)
    found = merged(tmp_path / "out")
    torch.testing.assert_close(found, base)
    assert_same(merged(tmp_path / "again"), found)
    tiny_model("qwen3_moe", num_experts=3).save_pretrained(tmp_path / "base of 3")
    if not is_shared:
        with pytest.raises(ConversionError, match="do not fit the number of the model's experts"):
            unshard.merge(tmp_path / "run", tmp_path / "other", base=tmp_path / "base of 3")


@pytest.mark.parametrize("kind", ["alpha_pattern", "rank_pattern"])
def test_patterns_of_veomni_are_not_read_as_those_of_peft(tmp_path: Path, kind: str) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    config = config_of_experts(**{kind: {"experts": 32}})
    veomni(tmp_path / "run", tmp_path / "base", of_experts(is_shared=False), config)
    with pytest.raises(ConversionError, match="patterns match any part of a name"):
        unshard.merge(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")


def verl_on_megatron(top: Path) -> Path:
    """Leave a step as verl does when it trains LoRA with Megatron-Bridge; return the run."""
    _, adapter = plain(top)
    model = top / "run" / "global_step_5" / "actor" / "model"
    exported = model / "huggingface" / "adapter"
    shutil.copytree(top / "config", exported)
    save_file(adapter, exported / "adapter_model.safetensors")
    shutil.copy(top / "base" / "config.json", model / "huggingface")
    start = "decoder.layers.self_attention.linear_qkv.adapter.linear_"
    shapes = {f"{start}in.weight": (2, 2, 16), f"{start}out.weight": (2, 32, 2)}
    dcp_under()(model / "dist_ckpt", {name: torch.ones(shape) for name, shape in shapes.items()})
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (model / "dist_ckpt" / "metadata.json").write_text(json.dumps(backend))
    return top / "run"


@pytest.mark.parametrize("command", ["merge", "inspect"])
def test_the_exported_adapter_of_megatron_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    run = verl_on_megatron(tmp_path)
    to = [str(tmp_path / "out")] if command == "merge" else []
    with pytest.raises(SystemExit):
        main([command, str(run), *to])
    text = "".join(capfd.readouterr())
    file = run / "global_step_5/actor/model/huggingface/adapter/adapter_model.safetensors"
    assert "a LoRA adapter under Megatron's names" in text
    assert f"give {file} as the checkpoint, and for fused weights --base MODEL" in text
    assert "--allow-missing" not in text
    unshard.merge(run, tmp_path / "kept", names="training")  # as it is
    with pytest.raises(ConversionError, match="exported it for PEFT"):
        unshard.merge(run, tmp_path / "adapter", lora="adapter")
    file.unlink()
    with pytest.raises(ConversionError, match="save_hf_adapter"):
        unshard.merge(run, tmp_path / "out")


def test_no_line_gives_the_directory_of_an_adapter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = verl_on_megatron(tmp_path)
    with pytest.raises(SystemExit):
        main(["inspect", str(run / "global_step_5/actor/model/huggingface/adapter")])
    text = capfd.readouterr().err
    assert "adapter_model.safetensors: a LoRA adapter without its model; pass this file" in text
    assert "use:" not in text
