"""Scales of elements that no cast changes: a merge with a cast must not round them.

Each format is quantised here as its library does it, with what it writes next to the elements.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import assert_same, merged, save_ranks

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = dict[str, torch.Tensor]
MODULE = "model.layers.0.self_attn.q_proj"
ROWS, COLUMNS, GROUP = 64, 128, 32


def weights() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


def fp8(dtype: torch.dtype, largest: float, *, by_row: bool) -> Tensors:
    """compressed-tensors and ModelOpt: a scale of a tensor or of each row, one of activations."""
    matrix = weights()
    scale = (matrix.abs().amax(1, keepdim=True) if by_row else matrix.abs().max()) / largest
    return {
        f"{MODULE}.weight": (matrix / scale).to(dtype),
        f"{MODULE}.weight_scale": scale,
        f"{MODULE}.input_scale": torch.tensor(0.0123456789),
        f"{MODULE}.bias": torch.randn(ROWS),
    }


def groups(name: str, dtype: torch.dtype) -> Tensors:
    """GPTQ and AWQ: eight elements of 4 bits in an integer, a scale of each group of inputs."""
    scale = torch.rand(COLUMNS // GROUP, ROWS).to(dtype)
    packed = torch.randint(-(2**31), 2**31 - 1, (COLUMNS, ROWS // 8), dtype=torch.int32)
    zeros = torch.randint(0, 2**31 - 1, (COLUMNS // GROUP, ROWS // 8), dtype=torch.int32)
    made = {"qweight": packed, "qzeros": zeros, "scales": scale, "bias": torch.randn(ROWS)}
    made |= {"g_idx": torch.arange(COLUMNS, dtype=torch.int32)} if name == "gptq" else {}
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def nvfp4() -> Tensors:
    made = {
        "weight": torch.randint(0, 255, (ROWS, COLUMNS // 2), dtype=torch.uint8),
        "weight_scale": torch.rand(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.000123456789),
        "input_scale": torch.tensor(0.0123456789),
        "k_scale": torch.tensor(0.0123456789),
    }
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def bitsandbytes_4() -> Tensors:
    """Its scales are under the name of the weight, quantised themselves."""
    made = {
        "": torch.randint(0, 255, (ROWS * COLUMNS // 2, 1), dtype=torch.uint8),
        ".absmax": torch.randint(0, 255, (ROWS * COLUMNS // 64,), dtype=torch.uint8),
        ".nested_absmax": torch.rand(1),
        ".nested_quant_map": torch.rand(256),
        ".quant_map": torch.rand(16),
        ".quant_state.bitsandbytes__nf4": torch.randint(0, 255, (90,), dtype=torch.uint8),
    }
    return {f"{MODULE}.weight{key}": one for key, one in made.items()}


def bitsandbytes_8() -> Tensors:
    matrix = weights()
    scale = matrix.abs().amax(1)
    elements = (matrix / scale[:, None] * 127).round().to(torch.int8)
    return {f"{MODULE}.weight": elements, f"{MODULE}.SCB": scale}


def mlx() -> Tensors:
    """Its biases are zero points of groups, and no bias."""
    made = {
        "weight": torch.randint(0, 2**31, (ROWS, COLUMNS // 8)).to(torch.uint32),
        "scales": torch.rand(ROWS, COLUMNS // GROUP),
        "biases": torch.rand(ROWS, COLUMNS // GROUP),
    }
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def experts() -> Tensors:
    """All experts of a layer in one tensor, as Llama 4 and gpt-oss have them."""
    start = "model.layers.0.mlp.experts.gate_up_proj"
    return {
        start: torch.randn(4, 32, 48).to(torch.float8_e5m2),
        f"{start}_scale": torch.rand(4, 1, 48),
        f"{start}_bias": torch.rand(4, 48),
    }


def quanto() -> Tensors:
    """Its elements are two levels below the weight that is scaled."""
    made = {
        "weight._data._data": torch.randint(0, 255, (ROWS, COLUMNS // 2), dtype=torch.uint8),
        "weight._scale": torch.rand(ROWS, 1),
        "weight._shift": torch.rand(ROWS, 1),
        "input_scale": torch.rand(()),
        "bias": torch.rand(ROWS),
    }
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def codebooks(*, is_module: bool) -> Tensors:
    """AQLM and VPTQ: more values in the codebook than there are codes."""
    values = torch.rand(1, 256 * 8)
    codes = torch.randint(-30000, 30000, (8, 16, 1), dtype=torch.int16)
    made = {"indices": codes, "centroids.weight": values, "weight_scale": torch.rand(8)}
    if not is_module:
        made = {"codes": codes, "codebooks": values, "scales": torch.rand(8, 1, 1, 1)}
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def small(name: str) -> Tensors:
    """Scales that are as many as the elements, or more."""
    packed, one = torch.randint(0, 9, (8, ROWS), dtype=torch.int32), torch.rand(1)
    made = {
        "gptq of 2 bits": {"qweight": packed, "scales": torch.rand(8, ROWS)},
        "hqq of 1 bit": {
            "W_q": torch.randint(0, 255, (8, ROWS), dtype=torch.uint8),
            "scale": torch.rand(1, 8 * ROWS),
            "zero": torch.rand(1, 8 * ROWS),
        },
        "one element": {"weight": torch.rand(1, 1).to(torch.float8_e4m3fn), "weight_scale": one},
    }[name]
    return {f"{MODULE}.{key}": one for key, one in made.items()}


def caches() -> Tensors:
    """Quark's and older vLLM's scales of what is made while a model runs."""
    names = ("prob_output_scale", "k_proj.output_scale", "kv_scale", "attn_output_scale")
    return {f"model.layers.0.self_attn.{name}": torch.rand(()) for name in names}


FORMATS: dict[str, Callable[[], Tensors]] = {
    "quanto": quanto,
    "aqlm": lambda: codebooks(is_module=False),
    "vptq": lambda: codebooks(is_module=True),
    **{n: partial(small, n) for n in ("gptq of 2 bits", "hqq of 1 bit", "one element")},
    "fp8 by tensor": lambda: fp8(torch.float8_e4m3fn, 448, by_row=False),
    "fp8 by row": lambda: fp8(torch.float8_e5m2, 57344, by_row=True),
    "int8 by row": lambda: fp8(torch.int8, 127, by_row=True),
    "gptq": lambda: groups("gptq", torch.float16),
    "gptq in float32": lambda: groups("gptq", torch.float32),
    "awq": lambda: groups("awq", torch.float32),
    "nvfp4": nvfp4,
    "bitsandbytes 4 bit": bitsandbytes_4,
    "bitsandbytes 8 bit": bitsandbytes_8,
    "mlx": mlx,
    "experts": experts,
}


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMATS)
def test_scales_are_as_they_were_and_biases_are_cast(
    tmp_path: Path, form: str, cast: torch.dtype
) -> None:
    quantised = FORMATS[form]()
    plain = {"model.norm.weight": torch.rand(COLUMNS), "lm_head.weight": torch.randn(40, COLUMNS)}
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    save_file({**quantised, **plain}, place / "model.safetensors", {"format": "pt"})
    unshard.merge(place, tmp_path / "out", dtype=cast, verify="full")
    scales = r"scale|absmax|SCB|map|biases|codebooks|centroids|shift|zero"
    unshard.merge(place, tmp_path / "scales", dtype=cast, include=scales)
    found = merged(tmp_path / "out")
    kept = {name: one for name, one in quantised.items() if not name.endswith("bias")}
    cast_too = {name: one.to(cast) for name, one in quantised.items() if name not in kept}
    assert_same(found, {**kept, **cast_too, **{n: one.to(cast) for n, one in plain.items()}})
    assert_same(merged(tmp_path / "scales"), {n: kept[n] for n in merged(tmp_path / "scales")})


def test_scales_of_caches_are_kept_under_a_cast_to_16_bits(tmp_path: Path) -> None:
    scales = caches()
    save_ranks(tmp_path / "ckpt", scales | {"lm_head.weight": torch.randn(8, 8)}, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16", config="none")
    found = merged(tmp_path / "out")
    assert found.pop("lm_head.weight").dtype is torch.bfloat16
    assert_same(found, scales)


def test_the_config_names_the_dtype_of_what_is_not_quantised(tmp_path: Path) -> None:
    """Scales in float32 may be most of the floating point bytes."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "unknown", "dtype": "bfloat16"}')
    tensors = groups("awq", torch.float32) | {"norm.weight": torch.rand(8).bfloat16()}
    tensors.pop(f"{MODULE}.bias")
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    for dtype in ("keep", "bfloat16", "config"):
        report = unshard.merge(place, tmp_path / dtype, dtype=dtype)
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == "bfloat16"
        assert not [note for note in report.notes if "float32" in note]


@pytest.mark.parametrize("form", ["gptq", "awq", "bitsandbytes 8 bit", "quanto"])
def test_quantised_models_that_differ_have_no_mean(tmp_path: Path, form: str) -> None:
    for step in (1, 2):
        torch.manual_seed(step)
        tensors = FORMATS[form]() | {"norm.num": torch.tensor(step), "norm.weight": torch.rand(8)}
        if form == "bitsandbytes 8 bit":
            tensors[f"{MODULE}.weight"] += step
        (tmp_path / f"{step}").mkdir()
        save_file(tensors, tmp_path / f"{step}" / "model.safetensors", {"format": "pt"})
    with pytest.raises(unshard.ConversionError, match=r"int\d+ values cannot be averaged"):
        unshard.average([tmp_path / "1", tmp_path / "2"], tmp_path / "out", config="none")
    unshard.average(
        [tmp_path / "1", tmp_path / "1"], tmp_path / "same", config="none"
    )  # frozen: nothing differs
    assert torch.equal(merged(tmp_path / "same")["norm.num"], torch.tensor(1))


def test_experts_in_one_tensor_are_not_split_from_their_scales(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    place, start = tmp_path / "model", "model.layers.0.mlp.experts"
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2}
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1)  # type: ignore[arg-type]
    config.save_pretrained(place)
    tensors = {
        f"{start}.gate_up_proj": torch.randn(2, 256, 128).to(torch.float8_e4m3fn),
        f"{start}.gate_up_proj_scale_inv": torch.rand(2, 2, 1),
        f"{start}.down_proj": torch.randn(2, 128, 128).to(torch.float8_e4m3fn),
        f"{start}.down_proj_scale_inv": torch.rand(2, 1, 1),
    }
    torch.save(tensors, place / "pytorch_model_fsdp.bin")
    for dtype in ("keep", "bfloat16"):
        with pytest.raises(unshard.ConversionError, match="all experts in one tensor of float8"):
            unshard.merge(place, tmp_path / "out", dtype=dtype)
    unshard.merge(place, tmp_path / "out", names="training", dtype="bfloat16")
    assert_same(merged(tmp_path / "out"), tensors)


def test_ordinary_weights_next_to_integers_are_cast(tmp_path: Path) -> None:
    """TransformerEngine's extra state, buffers of positions, a mask of the whole model."""
    ordinary = {
        "cls_token": torch.rand(1, 1, 32),
        "l.0.qkv.layer_norm_weight": torch.rand(32),
        "l.0.qkv.layer_norm_bias": torch.rand(32),
        "l.0.attn.relative_position_bias_table": torch.rand(225, 4),
        "l.0.attn.gamma": torch.rand(32),
    }
    integers = {
        "mask": torch.ones(64, 64, dtype=torch.uint8),
        "l.0.qkv.weight": torch.randint(-9, 9, (64, 32), dtype=torch.int8),
        "l.0.qkv._extra_state": torch.zeros(2000, dtype=torch.uint8),
        "l.0.attn.relative_position_index": torch.zeros(64, 64, dtype=torch.int32),
    }
    save_ranks(tmp_path / "ckpt", ordinary | integers, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16", config="none")
    truth = integers | {name: one.bfloat16() for name, one in ordinary.items()}
    assert_same(merged(tmp_path / "out"), truth)


def test_integers_that_count_are_no_elements(tmp_path: Path) -> None:
    """Those of BatchNorm, of positions and of relative positions are 64 bits."""
    tensors = {
        "norm.weight": torch.rand(8),
        "norm.bias": torch.rand(8),
        "norm.running_mean": torch.rand(8),
        "norm.num_batches_tracked": torch.tensor(7),
        "embeddings.class_embedding": torch.rand(8),
        "embeddings.position_ids": torch.arange(50)[None],
        "attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
        "attn.masked_bias": torch.tensor(-1e4),
    }
    save_ranks(tmp_path / "ckpt", tensors, 1)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16", config="none")
    truth = {n: one.bfloat16() if one.is_floating_point() else one for n, one in tensors.items()}
    assert_same(merged(tmp_path / "out"), truth)


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h", "jamba"])
def test_recurrences_of_real_models_stay_float32_and_load(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
    own: dict[str, dict[str, Any]] = {
        "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
        "nemotron_h": {
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        "jamba": {
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "num_experts": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "pad_token_id": 0,
        },
    }
    config = AutoConfig.for_model(family, **common, **own[family])
    build: Any = AutoModelForCausalLM.from_config
    model = build(config)
    save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    model.config.save_pretrained(tmp_path / "ckpt" / "huggingface")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16")
    kept = re.compile(r"\.(A_log|D|dt_bias)$")
    found = merged(tmp_path / "out")
    ours = {name: one.dtype for name, one in found.items()}
    assert set(map(kept.search, ours)) != {None}
    assert ours == {n: torch.float32 if kept.search(n) else torch.bfloat16 for n in ours}
    unshard.merge(tmp_path / "ckpt", tmp_path / "plain")
    plain = merged(tmp_path / "plain")
    assert_same(found, {n: one.to(ours[n]) for n, one in plain.items()})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, one in loaded.state_dict().items():
        if kept.search(name):
            assert torch.equal(one, model.state_dict()[name])
