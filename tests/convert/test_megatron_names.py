"""Megatron-core's checkpoints, merged into models of the hub: bit for bit, and by their logits.

The files and the truth are in tests/data (see its README.md).
"""

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from megatron_cases import CASES, hub_truth, truth_of, unpack
from ranks import as_rank, assert_same, merged, save_ranks
from recipe_values import evaluate
from unshard import ConversionError
from unshard.convert.megatron.layout import Heads, by_groups
from unshard.convert.megatron.names import without_megatron_names
from unshard.convert.recipes import Take, take
from unshard.read.format import Choice, ReadOptions
from unshard.read.megatron.reader import read_arguments
from unshard.read.model_config import ModelConfig
from unshard.read.open import open_latest
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

BY_SLIME = [case for case in CASES if case.startswith(("llama", "qwen"))]
WITH_LOGITS = (
    *("deepseek_v3_tp2", "glm4_moe_ep2", "llama_tp1", "mixtral_tp2"),
    *("qwen2_tp2_tied", "qwen3_moe_ep2", "qwen3_tp2"),
)
RECORDED = [case for case in CASES if not case.startswith(("deepseek", "glm"))]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("megatron"))


def config_of(case: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((case / "hf_config" / "config.json").read_text())
    return fields


def saved(directory: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    """Save tensors under Megatron's names in rank files, with a config."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_ranks(directory, dict(tensors), 1)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_are_those_of_the_hub(cases: Path, tmp_path: Path, name: str) -> None:
    case = cases / name
    truth = hub_truth(truth_of(case, "megatron"), config_of(case))
    report = unshard.merge(case, tmp_path / "out", config=str(case / "hf_config"), verify="full")
    assert_same(merged(tmp_path / "out"), truth)
    assert report.names_checked == "config"
    assert report.step == 3


@pytest.mark.parametrize("name", BY_SLIME)
def test_the_truth_is_what_slimes_converter_makes(cases: Path, name: str) -> None:
    case = cases / name
    ours = hub_truth(truth_of(case, "megatron"), config_of(case))
    assert_same(ours, truth_of(case, "hub"))


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_transformers_computes_the_logits_of_the_megatron_model(
    cases: Path, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    case = cases / name
    unshard.merge(case, tmp_path / "out", config=str(case / "hf_config"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with np.load(case / "logits.npz") as known:
        tokens, theirs = torch.from_numpy(known["tokens"]), torch.from_numpy(known["logits"])
    with torch.no_grad():
        ours = model.train(mode=False)(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RECORDED)
def test_without_a_config_one_is_made_of_the_recorded_arguments(
    cases: Path, tmp_path: Path, name: str
) -> None:
    case = cases / name
    report = unshard.merge(case, tmp_path / "out")
    unshard.merge(case, tmp_path / "by_config", config=str(case / "hf_config"))
    assert_same(merged(tmp_path / "out"), merged(tmp_path / "by_config"))
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = config_of(case) | {"hidden_act": "silu"}
    assert {key: made.get(key) for key in {*made, *stated}} == {
        key: stated.get(key) for key in {*made, *stated}
    }
    assert "no config.json: it was made from the arguments in common.pt" in report.notes[0]
    assert "NullTokenizer, which may count a token more than vocab_size 29" in report.notes[1]


def test_megatrons_own_names_get_no_config_that_does_not_fit_them(
    cases: Path, tmp_path: Path
) -> None:
    unshard.merge(cases / "llama_tp1", tmp_path / "out", names="training")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", ["deepseek_v3_tp2", "glm4_moe_ep2"])
def test_arguments_that_leave_the_model_open_make_no_config(cases: Path, name: str) -> None:
    with pytest.raises(ConversionError, match="do not determine it") as error:
        unshard.merge(cases / name, dry_run=True)
    assert "config=…" in error.value.hint
    assert "names='training'" in error.value.hint
    assert "decoder.layers.N.self_attention.linear_proj.weight" in error.value.found
    unshard.merge(cases / name, names="training", dry_run=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rotary_base": 0}, "rotary_base is 0"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon is '<...>'"),
        ({"num_layers": 10**5000}, "num_layers is '<...>'"),
        ({"num_query_groups": None}, "num_query_groups is None"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"window_size": (8, 0)}, "window_size is (8, 0)"),
        ({"use_rope_scaling": True}, "use_rope_scaling is True"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm', not 'RMSNorm'"),
        ({"add_bias_linear": True}, "add_bias_linear is True, not False"),
        ({"untie_embeddings_and_output_weights": 1}, "untie_embeddings_and_output_weights is 1"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "heads with a norm and a bias"),
        ({"num_experts": 4, "moe_ffn_hidden_size": None}, "moe_ffn_hidden_size is None"),
        ({"num_experts": 4, "moe_router_pre_softmax": True}, "moe_router_pre_softmax is True"),
    ],
)
def test_what_leaves_the_model_open_is_named(
    cases: Path, tmp_path: Path, changed: dict[str, object], words: str
) -> None:
    step = Path(shutil.copytree(cases / "llama_tp1" / "iter_0000003", tmp_path / "iter_0000003"))
    experts = {"moe_router_topk": 2, "moe_ffn_hidden_size": 8}
    recorded = {**read_arguments(step / "common.pt"), **experts, **changed}
    torch.save({"args": Namespace(**recorded)}, step / "common.pt")
    with pytest.raises(ConversionError, match=re.escape(words)):
        unshard.merge(step, dry_run=True, config="none")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 8),
        ("num_key_value_heads", 1),
        ("head_dim", 2),
        ("num_hidden_layers", 3),
        ("hidden_size", 8),
        ("vocab_size", 28),
        ("rope_theta", 500000.0),
        ("rms_norm_eps", 1e-5),
        ("num_experts", 8),
        ("num_experts_per_tok", 1),
    ],
)
def test_a_config_that_the_training_contradicts_is_refused(
    cases: Path, tmp_path: Path, field: str, value: float
) -> None:
    case = cases / ("qwen3_moe_ep2" if "experts" in field else "llama_tp1")
    (tmp_path / "config.json").write_text(json.dumps(config_of(case) | {field: value}))
    with pytest.raises(ConversionError, match=f"config.json: {field} is {value}, but the training"):
        unshard.merge(case, config=str(tmp_path), dry_run=True)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
LINEAR = {"type": "linear", "factor": 4.0}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
SCALED = {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
CONTRADICTED: dict[str, list[tuple[str, object]]] = {
    "llama_tp1": [
        ("rotary_interleaved", True),
        ("attention_output_gate", True),
        ("swiglu", False),
        ("qk_layernorm", True),
        ("multi_latent_attention", True),
        ("rotary_percent", 0.5),
        ("window_size", (8, 0)),
        ("no_rope_freq", 4),
        ("softmax_type", "learnable"),
        ("use_rope_scaling", True),
        ("position_embedding_type", "none"),
        ("rotary_seq_len_interpolation_factor", 4),
        ("normalization", "LayerNorm"),
    ],
    "qwen3_tp2": [("qk_layernorm", False), ("quick_geglu", True)],
    "qwen3_moe_ep2": [("moe_mlp_glu_interleave_size", 32), ("moe_router_pre_softmax", True)],
    "mixtral_tp2": [("moe_router_score_function", "sigmoid"), ("moe_apply_probs_on_input", True)],
    "glm4_moe_ep2": [("rotary_percent", 1.0), ("moe_router_topk_scaling_factor", 2.5)],
    "deepseek_v3_tp2": [("qk_head_dim", 2), ("multi_latent_attention", False), ("v_head_dim", 8)],
}


def recording(case: Path, directory: Path, **changed: object) -> Path:
    """Copy a case with other arguments of the training."""
    step = Path(shutil.copytree(case / "iter_0000003", directory / "iter_0000003"))
    recorded = {**read_arguments(step / "common.pt"), **changed}
    torch.save({"args": Namespace(**recorded)}, step / "common.pt")
    return step


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, *one) for name, several in CONTRADICTED.items() for one in several],
)
def test_a_training_that_the_config_contradicts_is_refused(
    cases: Path, tmp_path: Path, name: str, key: str, value: object
) -> None:
    step, config = recording(cases / name, tmp_path), str(cases / name / "hf_config")
    unshard.merge(step, config=config, dry_run=True)
    shutil.rmtree(step)
    recording(cases / name, tmp_path, **{key: value})
    with pytest.raises(ConversionError, match=rf"but the training had .*{key} "):
        unshard.merge(step, config=config, dry_run=True)
    unshard.merge(step, names="training", dry_run=True)


@pytest.mark.parametrize(
    ("name", "fields", "recorded"),
    [
        ("llama_tp1", {"sliding_window": 9}, {"window_size": (8, 0)}),
        ("llama_tp1", {"sliding_window": 8}, {"window_size": (8, 0)}),
        ("llama_tp1", {}, {"window_size": [-1, 0], "window_attn_skip_freq": 1}),
        ("llama_tp1", {"rope_scaling": {"rope_type": "llama3"}}, {"use_rope_scaling": True}),
        ("llama_tp1", {"rope_scaling": LLAMA3}, {"use_rope_scaling": True}),
        ("llama_tp1", {"rope_scaling": LINEAR}, {"rotary_seq_len_interpolation_factor": 4}),
        ("llama_tp1", {}, {"rotary_seq_len_interpolation_factor": 1}),
        ("qwen3_moe_ep2", {}, {"moe_router_topk_scaling_factor": 1.0}),
        ("qwen3_moe_ep2", {}, {"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
        ("llama_tp1", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {"rotary_percent": 0.5}),
        ("qwen3_moe_ep2", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ("qwen3_tp2", {}, {"spec": ["a", "b"], "moe_router_score_function": "sigmoid"}),
        ("deepseek_v3_tp2", {"rope_scaling": YARN}, SCALED),
        ("deepseek_v3_tp2", {}, {"rope_type": "yarn"}),  # by 1
    ],
)
def test_a_training_that_the_config_describes_is_merged(
    cases: Path, tmp_path: Path, name: str, fields: dict[str, Any], recorded: dict[str, object]
) -> None:
    step = recording(cases / name, tmp_path, **recorded)
    (tmp_path / "config.json").write_text(json.dumps(config_of(cases / name) | fields))
    unshard.merge(step, config=str(tmp_path / "config.json"), dry_run=True)


@pytest.mark.parametrize(
    ("name", "fields", "recorded", "what"),
    [
        ("llama_tp1", {"rope_scaling": LLAMA3}, {}, r"plain positions \(use_rope_scaling False\)"),
        (
            "llama_tp1",
            {"rope_scaling": LLAMA3},
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
            "scaled by 32.0, not by 8.0",
        ),
        ("llama_tp1", {"rope_parameters": LINEAR}, {"use_rope_scaling": True}, "type linear"),
        (
            "llama_tp1",
            {"rope_scaling": LINEAR},
            {"rotary_seq_len_interpolation_factor": 2},
            "by 2, not by 4",
        ),
        ("deepseek_v3_tp2", {"rope_scaling": YARN}, {}, "plain positions"),
        (
            "deepseek_v3_tp2",
            {"rope_scaling": YARN},
            SCALED | {"rope_type": "yarn", "mscale": 0.7},
            "mscale 0.7, not 1",
        ),
        ("llama_tp1", {"sliding_window": 4096}, {"window_size": (127, 0)}, "sliding_window 4096"),
        ("llama_tp1", {"hidden_act": "gelu"}, {}, "swiglu True, not the hidden_act gelu"),
        ("llama_tp1", {"rope_theta": None}, {"rotary_base": 500000}, "rotary_base 500000"),
    ],
)
def test_values_that_the_config_has_otherwise_are_refused(  # noqa: PLR0917 (a case has four)
    cases: Path,
    tmp_path: Path,
    name: str,
    fields: dict[str, Any],
    recorded: dict[str, object],
    what: str,
) -> None:
    step = recording(cases / name, tmp_path, **recorded)
    (tmp_path / "config.json").write_text(json.dumps(config_of(cases / name) | fields))
    with pytest.raises(ConversionError, match=rf"but the training had .*{what}"):
        unshard.merge(step, config=str(tmp_path / "config.json"), dry_run=True)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("softmax_scale", 0.125),
        ("moe_expert_order", [1, 0]),
        ("rotary_direction", "left"),
        ("use_mup", True),
        ("final_logit_softcapping", 30.0),
        ("post_mlp_layernorm", True),
    ],
)
def test_an_argument_that_is_not_known_is_named(
    cases: Path, tmp_path: Path, key: str, value: object, *, is_given: bool
) -> None:
    case = cases / "qwen3_moe_ep2"
    config = str(case / "hf_config") if is_given else None
    step = recording(case, tmp_path, moe_of_no_effect=False, **{key: value})
    notes = unshard.merge(step, config=config, dry_run=True).notes
    (note,) = [one for one in notes if "not known here" in one]
    assert f"the training had {key} " in note


@pytest.mark.parametrize("name", CASES)
def test_no_argument_of_a_genuine_training_is_named(cases: Path, name: str) -> None:
    case = cases / name
    notes = unshard.merge(case, config=str(case / "hf_config"), dry_run=True).notes
    assert not [one for one in notes if "the training had" in one]


def test_the_base_of_the_positions_may_be_where_transformers_5_has_it(
    cases: Path, tmp_path: Path
) -> None:
    case = cases / "llama_tp1"
    fields = config_of(case)
    stated = fields.pop("rope_theta")
    fields["rope_parameters"] = {"rope_theta": stated, "rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    unshard.merge(case, config=str(tmp_path), dry_run=True)
    fields["rope_parameters"]["rope_theta"] = 500000
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConversionError, match="rope_theta is 500000, but the training"):
        unshard.merge(case, config=str(tmp_path), dry_run=True)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama_tp1", "intermediate_size"),
        ("mixtral_tp2", "intermediate_size"),
        ("qwen3_moe_ep2", "moe_intermediate_size"),
        ("deepseek_v3_tp2", "intermediate_size"),
        ("deepseek_v3_tp2", "moe_intermediate_size"),
    ],
)
def test_a_config_of_another_width_is_refused_without_recorded_arguments_too(
    cases: Path, tmp_path: Path, name: str, field: str
) -> None:
    step = Path(shutil.copytree(cases / name / "iter_0000003", tmp_path / "iter_0000003"))
    (step / "common.pt").unlink()
    fields = config_of(cases / name)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    unshard.merge(step, config=str(tmp_path), dry_run=True)
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: 24}))
    with pytest.raises(ConversionError, match="does not fit config") as error:
        unshard.merge(step, config=str(tmp_path), dry_run=True)
    assert f"rows of {field} 24" in str(error.value)


def test_the_heads_are_those_of_the_config_where_nothing_is_recorded(
    cases: Path, tmp_path: Path
) -> None:
    tensors = truth_of(cases / "llama_tp1", "megatron")
    config = config_of(cases / "llama_tp1")
    unshard.merge(saved(tmp_path / "own", tensors, **config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config))
    for wrong, words in (
        ({"num_key_value_heads": 4}, "does not have the rows of 4 heads in 4 groups"),
        ({"num_hidden_layers": 3}, "has 2 layers"),
        ({"vocab_size": 33}, "has 32 rows, fewer than the vocabulary"),
        ({"vocab_size": None}, "vocab_size is needed to cut the padding of the .* is missing"),
    ):
        place = saved(tmp_path / str(words), tensors, **config | wrong)
        with pytest.raises(ConversionError, match=words):
            unshard.merge(place, dry_run=True)


def test_a_family_that_is_not_known_is_refused_with_its_names(tmp_path: Path, cases: Path) -> None:
    tensors = truth_of(cases / "llama_tp1", "megatron")
    place = saved(tmp_path / "ckpt", tensors, model_type="gpt_oss")
    with pytest.raises(ConversionError, match="type gpt_oss are unknown") as error:
        unshard.merge(place, dry_run=True)
    assert "one of llama, mistral, qwen2" in error.value.expected
    assert "embedding.word_embeddings.weight" in error.value.found
    assert "convert it with Megatron-Bridge" in error.value.hint
    assert "nothing: Megatron's names for a model" in unshard.inspect(place).would_write


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, cases: Path) -> None:
    tensors = truth_of(cases / "qwen3_pp2_per_layer", "megatron")
    tensors["decoder.layers.1.self_attention.core_attention.softmax_offset"] = torch.ones(4)
    config = config_of(cases / "qwen3_pp2_per_layer")
    with pytest.raises(
        ConversionError, match="no known name for 1 tensor in a qwen3 model"
    ) as error:
        unshard.merge(saved(tmp_path / "ckpt", tensors, **config), dry_run=True)
    assert "decoder.layers.N.self_attention.core_attention.softmax_offset" in error.value.found


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight", "its part 2 is missing"),
        ("decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_v", "its part 1 is missing"),
        ("decoder.layers.0.mlp.experts.experts.3.linear_fc2.weight", "does not fit the experts"),
        ("decoder.layers.1.self_attention.linear_proj.weight", "Missing key"),
    ],
)
def test_a_part_that_is_missing_is_noticed(
    tmp_path: Path, cases: Path, lost: str, words: str
) -> None:
    case = cases / "qwen3_moe_tp2_singleton"
    tensors = truth_of(case, "megatron")
    del tensors[lost]
    with pytest.raises(ConversionError, match=words):
        unshard.merge(saved(tmp_path / "ckpt", tensors, **config_of(case)), dry_run=True)


def test_norms_that_are_stored_less_1_are_refused(tmp_path: Path, cases: Path) -> None:
    shutil.copytree(cases / "llama_tp1" / "iter_0000003", tmp_path / "iter_0000003")
    common = tmp_path / "iter_0000003" / "common.pt"
    recorded = dict(read_arguments(common)) | {"apply_layernorm_1p": True}
    torch.save({"args": Namespace(**recorded)}, common)
    config = str(cases / "llama_tp1" / "hf_config")
    with pytest.raises(ConversionError, match="stored minus 1") as error:
        unshard.merge(tmp_path, config=config, dry_run=True)
    assert "arithmetic" in error.value.expected
    with pytest.raises(ConversionError, match="apply_layernorm_1p is True"):
        unshard.merge(tmp_path, dry_run=True, config="none")


def test_a_base_names_the_family_and_the_tensors(cases: Path, tmp_path: Path) -> None:
    """Also one that was saved with all experts of a layer in one tensor."""
    case = cases / "qwen3_moe_ep2"
    truth = hub_truth(truth_of(case, "megatron"), config_of(case))
    fused = {name: one for name, one in truth.items() if ".experts." not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([truth[f"{block}.{one}.{part}_proj.weight"] for one in range(4)])
            for part in ("gate", "up", "down")
        )
        fused[f"{block}.gate_up_proj"] = torch.cat((gate, up), 1)
        fused[f"{block}.down_proj"] = down
    for kind, tensors in {"each": truth, "fused": fused}.items():
        base = tmp_path / kind
        shutil.copytree(case / "hf_config", base)
        save_file(tensors, base / "model.safetensors")
        unshard.merge(case, tmp_path / f"{kind} out", base=str(base), dtype="base")
        assert_same(merged(tmp_path / f"{kind} out"), tensors)


def test_long_rows_are_copied_from_where_they_are(cases: Path, tmp_path: Path) -> None:
    """The models of the other tests are so small that everything is made in memory."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 160}
    config = config_of(cases / "llama_tp1") | sizes
    rows = {"linear_qkv": 512, "linear_fc1": 320, "linear_proj": 256, "linear_fc2": 256}
    tensors = truth_of(cases / "llama_tp1", "megatron")
    for name, one in tensors.items():
        module = name.split(".")[-2]
        shape = list(one.shape)
        shape[-1] = 160 if module == "linear_fc2" else 256
        if module in rows and name.endswith(".weight"):
            shape[-2] = rows[module]
        tensors[name] = torch.randn(shape)
    report = unshard.merge(saved(tmp_path / "ckpt", tensors, **config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config))
    assert report.bytes_written > 1 << 20


FUSED_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def test_norms_may_be_part_of_the_matrix_behind_them(cases: Path, tmp_path: Path) -> None:
    """As Transformer Engine has those of a latent attention; of MTP layers by their later name."""
    case = cases / "deepseek_v3_tp2"
    tensors, config = truth_of(case, "megatron"), config_of(case)
    renamed: dict[str, torch.Tensor] = {}
    for name, one in tensors.items():
        new = name.replace("0.transformer_layer.", "0.mtp_model_layer.")
        for alone, fused in FUSED_NORMS.items():
            new = new.replace(alone, fused)
        renamed[new] = one
    assert sum(new.endswith("_proj.layer_norm_weight") for new in renamed) == 6
    unshard.merge(saved(tmp_path / "ckpt", renamed, **config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config))


def test_the_module_of_an_mtp_layer_is_only_known_at_the_start_of_a_name(
    cases: Path, tmp_path: Path
) -> None:
    case = cases / "deepseek_v3_tp2"
    known, unknown = "transformer_layer.self_attention.", "self_attention.transformer_layer."
    tensors = truth_of(case, "megatron")
    moved = {name.replace(known, unknown): one for name, one in tensors.items()}
    place = saved(tmp_path / "ckpt", moved, **config_of(case))
    with pytest.raises(ConversionError, match="no known name") as error:
        unshard.merge(place, dry_run=True)
    assert unknown in error.value.found


def test_queries_of_a_latent_attention_may_have_one_matrix(cases: Path, tmp_path: Path) -> None:
    case = cases / "deepseek_v3_tp2"
    tensors, config = truth_of(case, "megatron"), config_of(case) | {"q_lora_rank": None}
    down = [name for name in tensors if re.search(r"\.(linear_q_down_proj|q_layernorm)\.", name)]
    assert len(down) == 6
    kept = {
        name: torch.cat((one, one), 1) if "q_up_proj" in name else one  # as wide as the model
        for name, one in tensors.items()
        if name not in down
    }
    alone = {name.replace("q_up_proj", "q_proj"): one for name, one in kept.items()}
    unshard.merge(saved(tmp_path / "ckpt", alone, **config), tmp_path / "out")
    truth = hub_truth(kept, config)
    assert_same(
        merged(tmp_path / "out"),
        {name.replace("q_b_proj", "q_proj"): one for name, one in truth.items()},
    )


def test_a_layer_of_a_stacked_tensor_has_only_its_own_chunks(cases: Path) -> None:
    """Each of its experts would be looked for among the chunks of all layers otherwise."""
    case = cases / "qwen3_moe_ep2"
    stored = open_latest(case, Choice(), ReadOptions()).catalog.tensors
    config = ModelConfig(config_of(case))
    tensors = {name: take(entry) for name, entry in stored.items()}
    found = without_megatron_names(tensors, config, {}).value
    for layer in range(2):
        recipe = found[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        assert isinstance(recipe, Take)
        assert recipe == take(recipe.entry)
        assert len(recipe.entry.chunks) == 8


@pytest.mark.parametrize("prefix", ["model.", "module.", "model.module."])
def test_the_name_of_a_wrapper_before_all_names_is_taken_off(
    cases: Path, tmp_path: Path, prefix: str
) -> None:
    tensors = truth_of(cases / "qwen3_tp2", "megatron")
    config = config_of(cases / "qwen3_tp2")
    wrapped = {prefix + name: one for name, one in tensors.items()}
    unshard.merge(saved(tmp_path / "ckpt", wrapped, **config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config))


def test_megatron_fsdp_saves_the_same_names_as_dcp(cases: Path, tmp_path: Path) -> None:
    """Under `model`, its experts as in memory and its gated matrices in halves; torch wrote it."""
    case, step = cases / "qwen3_moe_tp2_singleton", tmp_path / "iter_0000003"
    tensors = truth_of(case, "megatron")
    state = {
        "module." + name.replace("experts.experts.", "experts.local_experts."): one
        for name, one in tensors.items()
    }
    with as_rank(0, 1):
        save({"model": state, "optimizer": {"step": torch.ones(1)}}, checkpoint_id=step)
    (step / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    unshard.merge(tmp_path, tmp_path / "out", config=str(case / "hf_config"))
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config_of(case)))
    assert unshard.inspect(step).writer == "Megatron-FSDP"


def test_grouped_experts_may_be_numbered_at_the_end(cases: Path, tmp_path: Path) -> None:
    case = cases / "qwen3_moe_ep2"
    tensors = truth_of(case, "megatron")
    config = config_of(case)
    single: dict[str, torch.Tensor] = {}
    for name, one in tensors.items():
        if ".experts.experts." not in name:
            single[name] = one
            continue
        for layer in range(2):
            for expert in range(4):
                start = name.replace("layers.", f"layers.{layer}.")
                new = start.replace("experts.experts.", "experts.") + str(expert)
                single[new] = one[layer, expert]
    unshard.merge(saved(tmp_path / "ckpt", single, **config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), hub_truth(tensors, config))


@pytest.mark.parametrize("name", ["llama_tp2_pp2", "deepseek_v3_tp2"])
def test_averages_checks_and_reads_are_those_of_any_checkpoint(
    cases: Path, tmp_path: Path, name: str
) -> None:
    case, config = cases / name, str(cases / name / "hf_config")
    truth = hub_truth(truth_of(case, "megatron"), config_of(case))
    unshard.average([case, case], tmp_path / "mean", config=config)
    assert_same(merged(tmp_path / "mean"), truth)
    unshard.merge(case, tmp_path / "out", config=config)
    assert unshard.verify(tmp_path / "out", case).equal
    with unshard.open_checkpoint(case, names="hub", config=config) as opened:
        assert set(opened) == truth.keys()
        for key, one in truth.items():
            np.testing.assert_array_equal(opened[key], one.numpy())
            np.testing.assert_array_equal(opened.get_slice(key)[1:3], one[1:3].numpy())


def test_a_model_in_memory_is_filled_whatever_it_calls_its_experts(cases: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    case = cases / "mixtral_tp2"
    loader: Any = AutoModelForCausalLM
    model = loader.from_config(AutoConfig.from_pretrained(case / "hf_config"))
    with unshard.open_checkpoint(case, config=str(case / "hf_config")) as opened:
        opened.load_into(model)
    with np.load(case / "logits.npz") as known, torch.no_grad():
        ours = model.train(mode=False)(input_ids=torch.from_numpy(known["tokens"])).logits
        torch.testing.assert_close(ours, torch.from_numpy(known["logits"]), rtol=1e-4, atol=1e-4)
    built = unshard.from_pretrained(case, loader)
    assert_same(dict(built.state_dict()), dict(model.state_dict()))


@given(
    groups=st.integers(1, 4),
    each=st.integers(1, 3),
    rows=st.integers(1, 3),
    is_bias=st.booleans(),
)
def test_any_groups_of_heads_are_divided_as_a_view_divides_them(
    groups: int, each: int, rows: int, *, is_bias: bool
) -> None:
    shape = (groups * (each + 2) * rows, *(() if is_bias else (3,)))
    stored = TensorEntry("w", BY_NAME["float32"], shape, ChunkRows(len(shape)).table(()))
    values = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    found = by_groups("w", take(stored), Heads(groups * each, groups, rows))
    grid = values.reshape(groups, each + 2, rows, *shape[1:])
    parts = (grid[:, :each], grid[:, each], grid[:, each + 1])
    for recipe, part in zip(found, parts, strict=True):
        theirs = part.reshape(-1, *shape[1:])
        np.testing.assert_array_equal(evaluate(recipe, {"w": values}), theirs)
