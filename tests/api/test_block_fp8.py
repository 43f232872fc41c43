"""Models in block FP8: merged, compared, loaded by transformers, cast back, and refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unshard
from block_fp8 import dequantised, quantised
from ranks import assert_same, merged, save_ranks
from tiny_models import tiny_model
from unshard.errors import ConversionError, UsageError

KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "bias")
SIZES: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
}

Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::unshard.errors.UnshardWarning", "ignore:.*FP8.*")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, as FSDP shards it: float32, experts in one tensor."""
    folder = tmp_path_factory.mktemp("run") / "actor"
    model = tiny_model("qwen3_moe", **SIZES)
    save_ranks(folder, model.state_dict(), 3)
    model.config.save_pretrained(folder / "huggingface")
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("plain") / "model"
    unshard.merge(checkpoint, output)
    return output


@pytest.fixture(scope="module")
def output(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fp8") / "model"
    unshard.merge(checkpoint, made, quantize="fp8-block", dtype="bfloat16", verify="full")
    return made


def in_fp8(tensors: Tensors) -> Tensors:
    """Return a model's tensors in block FP8, what is kept in bfloat16."""
    made: Tensors = {}
    for name, one in tensors.items():
        if any(part in name for part in KEPT):
            made[name] = one.bfloat16()
        else:
            made[name], made[f"{name}_scale_inv"] = quantised(one)
    return made


def out_of_fp8(tensors: Tensors) -> Tensors:
    scales = {name for name in tensors if name.endswith("_scale_inv")}
    return {
        name: dequantised(one, tensors[f"{name}_scale_inv"]).bfloat16()
        if f"{name}_scale_inv" in scales
        else one
        for name, one in tensors.items()
        if name not in scales
    }


def config(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "config.json").read_text())
    return found


def test_matrices_are_quantised_and_all_else_is_kept(plain: Path, output: Path) -> None:
    assert_same(merged(output), in_fp8(merged(plain)))


def test_config_names_the_form_and_what_is_kept(output: Path) -> None:
    found = config(output)
    assert found["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert found.get("dtype", found.get("torch_dtype")) == "bfloat16"


def test_an_output_is_compared_with_its_checkpoint_exactly(
    checkpoint: Path, plain: Path, output: Path, tmp_path: Path
) -> None:
    assert unshard.verify(output, checkpoint).equal
    assert unshard.verify(output, plain).equal
    damaged = tmp_path / "damaged"
    unshard.merge(output, damaged)
    file = damaged / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] ^= 1
    tensors[f"{name}_scale_inv"][1, 1] *= 2
    save_file(tensors, file, {"format": "pt"})
    found = unshard.verify(damaged, checkpoint, quantize="fp8-block")
    assert {one.name for one in found.different} == {name, f"{name}_scale_inv"}


def test_virtual_files_have_the_bytes_of_the_merge(checkpoint: Path, output: Path) -> None:
    with unshard.virtual(checkpoint, quantize="fp8-block", dtype="bfloat16") as files:
        for name in files:
            if name.endswith((".safetensors", "config.json")):
                assert files[name].read() == (output / name).read_bytes()


def test_transformers_dequantises_to_what_a_cast_gives(output: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    cast = tmp_path / "cast"
    unshard.merge(output, cast, dtype="bfloat16")
    assert "quantization_config" not in config(cast)
    assert_same(merged(cast), out_of_fp8(merged(output)))
    assert unshard.verify(cast, output).equal
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (cast, output)
    )
    assert_same(theirs.state_dict(), ours.state_dict())


@pytest.mark.parametrize("is_nested", [False, True])
def test_blocks_of_another_size_are_those_of_the_checkpoint_and_not_of_the_output(
    output: Path, tmp_path: Path, *, is_nested: bool
) -> None:
    model, cast = tmp_path / "model", tmp_path / "cast"
    model.mkdir()
    tensors = merged(output)
    matrices = [name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")]
    for name in matrices:
        scales = tensors[f"{name}_scale_inv"].repeat_interleave(2, 0)
        tensors[f"{name}_scale_inv"] = scales[: -(-tensors[name].shape[0] // 64)] * 3
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    fields = config(output)
    fields["quantization_config"]["weight_block_size"] = [64, 128]
    if is_nested:  # as the text models of Kimi have it
        fields["text_config"] = {"quantization_config": fields.pop("quantization_config")}
    (model / "config.json").write_text(json.dumps(fields))
    unshard.merge(model, cast, dtype="bfloat16")
    for name in matrices:
        values = dequantised(tensors[name], tensors[f"{name}_scale_inv"], (64, 128))
        assert torch.equal(merged(cast)[name], values.bfloat16())
    assert "quantization_config" not in json.dumps(config(cast))
    assert unshard.verify(cast, model).equal
    again = tmp_path / "again"
    unshard.merge(model, again, dtype="bfloat16", config=cast / "config.json")
    assert_same(merged(again), merged(cast))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_the_config_says_fp8_of_elements_of_another_kind(
    output: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tensors = {
        name: one.float().to(dtype) if one.dtype is torch.float8_e4m3fn else one
        for name, one in merged(output).items()
    }
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(config(output)))
    unshard.merge(model, tmp_path / "copy")
    assert config(tmp_path / "copy")["quantization_config"]["quant_method"] == "fp8"
    assert_same(merged(tmp_path / "copy"), tensors)


def test_block_fp8_is_copied_as_it_is_without_a_dtype(output: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    report = unshard.merge(output, copy)
    assert not {"Quantize", "Dequantize", "Cast"} & report.operations.keys()
    assert_same(merged(copy), merged(output))
    assert config(copy) == config(output)


def test_a_mean_is_quantised(checkpoint: Path, plain: Path, tmp_path: Path) -> None:
    made = tmp_path / "mean"
    unshard.average([checkpoint, plain], made, quantize="fp8-block", dtype="bfloat16")
    assert_same(merged(made), in_fp8(merged(plain)))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_fused_adapter_is_quantised(checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3_moe", **SIZES), lora)
    run = save_ranks(tmp_path / "run", model.state_dict(), 2)
    given: dict[str, Any] = {"config": checkpoint / "huggingface", "lora_alpha": 8}
    fused, made = tmp_path / "fused", tmp_path / "fp8"
    unshard.merge(run, fused, **given)
    report = unshard.merge(run, made, **given, quantize="fp8-block", dtype="bfloat16")
    assert report.operations["Quantize"] == 16
    assert_same(merged(made), in_fp8(merged(fused)))


def test_a_base_in_block_fp8_gives_names_but_takes_no_adapter(
    checkpoint: Path, plain: Path, output: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    report = unshard.merge(checkpoint, made, base=output, config=checkpoint / "huggingface")
    assert report.names_checked == "base"
    assert_same(merged(made), merged(plain))
    again = tmp_path / "again"
    unshard.merge(checkpoint, again, base=output)
    assert "quantization_config" not in config(again)


def test_an_adapter_is_not_fused_into_block_fp8(output: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    pair = {name.format("A"): torch.ones(4, 256), name.format("B"): torch.ones(256, 4)}
    adapter = save_ranks(tmp_path / "adapter", pair, 2)
    with pytest.raises(ConversionError, match=r"is quantised[\s\S]*a base in block FP8"):
        unshard.merge(adapter, tmp_path / "out", base=output, lora_alpha=4)


def test_what_cannot_be_quantised_is_refused(
    checkpoint: Path, output: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    with pytest.raises(UsageError, match="names of the hub"):
        unshard.merge(checkpoint, target, quantize="fp8-block", names="training")
    with pytest.raises(UsageError, match="unknown"):
        unshard.merge(checkpoint, target, quantize="int4")  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="float8_e4m3fn already"):
        unshard.merge(output, target, quantize="fp8-block")
    with pytest.raises(ConversionError, match="no matrix"):
        unshard.merge(checkpoint, target, quantize="fp8-block", include="norm")
    with pytest.raises(ConversionError, match="block FP8, which averaging does not cast"):
        unshard.average([output, output], target, dtype="bfloat16")
    assert not target.exists()


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    folder = save_ranks(tmp_path / "run", {"model.layers.0.experts.down": torch.ones(4, 8, 8)}, 2)
    with pytest.raises(ConversionError, match="has all experts in one tensor"):
        unshard.merge(folder, tmp_path / "out", quantize="fp8-block", config="none")


def test_a_scale_that_is_missing_or_does_not_fit_is_named(output: Path, tmp_path: Path) -> None:
    whole = merged(output)
    name = "model.layers.0.self_attn.q_proj.weight"
    lost = {key: one for key, one in whole.items() if key != f"{name}_scale_inv"}
    for number, tensors in enumerate((lost, {**whole, f"{name}_scale_inv": torch.ones(1, 2)})):
        model = tmp_path / f"model{number}"
        model.mkdir()
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        (model / "config.json").write_bytes((output / "config.json").read_bytes())
        with pytest.raises(ConversionError, match=rf"tensor {name}: is block FP8"):
            unshard.merge(model, tmp_path / "out", dtype="bfloat16")
