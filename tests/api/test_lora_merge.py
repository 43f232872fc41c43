"""`unshard merge --lora …`: what is written, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unshard
from adapters import HEAD, adapted
from ranks import assert_same, merged, save_ranks, some_tensors
from tiny_models import tiny_model
from unshard import ConversionError, UsageError
from unshard.keywords import Lora

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


def fused(adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    tensors = some_tensors()
    update = adapter["lora_B.default.weight"] @ adapter["lora_A.default.weight"]
    return tensors | {f"{HEAD}.weight": tensors[f"{HEAD}.weight"] + scale * update}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-5), name


def test_an_adapter_is_fused_by_default(tmp_path: Path) -> None:
    adapter = adapted(tmp_path / "ckpt")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", verify="full")
    assert_close(merged(tmp_path / "out"), fused(adapter, 4.0))
    assert any("1 LoRA pair was fused" in warning for warning in report.warnings)


def test_the_users_alpha_is_taken_where_none_is_known(tmp_path: Path) -> None:
    adapter = adapted(tmp_path / "ckpt", alpha=None)
    with pytest.raises(ConversionError, match="lora_alpha=…"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora_alpha=1.0)
    assert_close(merged(tmp_path / "out"), fused(adapter, 0.5))
    unshard.merge(tmp_path / "ckpt", tmp_path / "both", lora="both", lora_alpha=1)
    config = json.loads((tmp_path / "both" / "lora_adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 1


def test_an_adapter_by_itself_is_a_peft_directory(tmp_path: Path) -> None:
    adapter = adapted(tmp_path / "ckpt")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", verify="full")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"adapter_model.safetensors", "adapter_config.json", "unshard.json"}
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = f"base_model.model.{HEAD}."
    assert_same(found, {name + key.replace(".default", ""): one for key, one in adapter.items()})
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 8, "LORA")
    assert report.tensors == 2


def test_both_are_in_one_directory(tmp_path: Path) -> None:
    adapter = adapted(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="both")
    assert_close(merged(tmp_path / "out"), fused(adapter, 4.0))
    inner = {path.name for path in (tmp_path / "out" / "lora_adapter").iterdir()}
    assert inner == {"adapter_model.safetensors", "adapter_config.json"}


def test_an_adapter_replaces_an_earlier_one(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt")
    for _ in range(2):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", overwrite=True)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("lora", ["adapter", "both"])
def test_what_has_no_adapter_cannot_give_one(tmp_path: Path, lora: Lora) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    with pytest.raises(UsageError, match="has no LoRA adapter"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora=lora, config="none")
    assert not (tmp_path / "out").exists()


def test_a_head_that_was_tied_and_got_an_adapter_is_written(tmp_path: Path) -> None:
    adapter = adapted(tmp_path / "ckpt", tie_word_embeddings=True)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_close(merged(tmp_path / "out"), fused(adapter, 4.0))


def test_a_fused_merge_verifies_against_its_checkpoint(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16")
    assert unshard.verify(tmp_path / "out", tmp_path / "ckpt").equal


@pytest.mark.parametrize(
    "option", [{"dtype": "bfloat16"}, {"include": "lora_A"}, {"max_shard_size": "1GB"}]
)
def test_options_that_cannot_apply_to_an_adapter_are_refused(
    tmp_path: Path, option: dict[str, str]
) -> None:
    adapted(tmp_path / "ckpt")
    with pytest.raises(UsageError, match="lora='adapter' writes the adapter as it is"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora="adapter", **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_a_tie_that_training_undid_is_undone_in_the_config(tmp_path: Path, module: str) -> None:
    tensors = some_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    named = {f"base_model.model.{name}": one for name, one in tensors.items()}
    base = named.pop(f"base_model.model.{module}.weight")
    named |= {
        f"base_model.model.{module}.original_module.weight": base,
        f"base_model.model.{module}.modules_to_save.default.weight": base + 1,
        "base_model.model.q.base_layer.weight": torch.randn(4, 4),
        "base_model.model.q.lora_A.default.weight": torch.randn(2, 4),
        "base_model.model.q.lora_B.default.weight": torch.randn(4, 2),
    }
    save_ranks(tmp_path / "ckpt", named, 2)
    config = {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora_alpha=2.0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert any("lm_head.weight differs from" in warning for warning in report.warnings)
    assert torch.equal(merged(tmp_path / "out")[f"{module}.weight"], base + 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_an_embedding_that_was_resized_and_trained_whole_is_thrice_in_pefts_files(
    tmp_path: Path,
) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    base = tiny_model("qwen2")
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(41, mean_resizing=False)
    whole = ["embed_tokens", "lm_head"]
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], modules_to_save=whole)
    model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=True)
    assert sum("lm_head" in name for name in tensors) == 3
    save_ranks(tmp_path / "ckpt", tensors, 2)
    config.save_pretrained(str(tmp_path / "ckpt"))
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")
    assert_close(merged(tmp_path / "out"), model.merge_and_unload().state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 41
    unshard.merge(tmp_path / "ckpt", tmp_path / "adapter", lora="adapter")
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(tensors) - 4


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_patterns_that_peft_sorted_when_it_saved_them(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    both: dict[str, Any] = {"q_proj": 3, "model.layers.0.self_attn.q_proj": 5}
    config = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], rank_pattern=both)
    model = get_peft_model(tiny_model("llama"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    config.save_pretrained(str(tmp_path / "ckpt"))
    saved = json.loads((tmp_path / "ckpt" / "adapter_config.json").read_text())
    assert [*saved["rank_pattern"]] == [*both][::-1]
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    names = [name for name in model.state_dict() if ".lora_" in name]
    trained = {name: model.state_dict()[name].clone() for name in names}
    assert_close(merged(tmp_path / "out"), dict(model.merge_and_unload().state_dict()))
    unshard.merge(tmp_path / "ckpt", tmp_path / "adapter", lora="adapter")
    loaded = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
    assert_same({name: loaded.state_dict()[name] for name in names}, trained)
    config.alpha_pattern = both
    config.save_pretrained(str(tmp_path / "ckpt"))
    choices: tuple[Lora, ...] = ("fuse", "adapter", "both")
    for lora in choices:
        with pytest.raises(ConversionError, match=r"layers\.0\.self_attn\.q_proj: 5, q_proj: 3"):
            unshard.merge(tmp_path / "ckpt", tmp_path / "other", lora=lora, config="none")
