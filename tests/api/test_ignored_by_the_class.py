"""`--base` whose files have what the class ignores; transformers' own loading is the judge."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unshard
from ranks import Tensors, assert_same, merged, save_ranks
from tiny_models import TINY_FAMILIES, model_class, tiny_config, tiny_model
from unshard import ConversionError
from unshard.convert.expected.ignored import ignored
from unshard.read.model_config import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

GLM = {"num_hidden_layers": 46, "num_key_value_heads": 2}
QWEN = {"text_config": {**TINY_FAMILIES["qwen3_5"][1]["text_config"], "mtp_num_hidden_layers": 1}}
MORE = "model.layers.46."


@dataclass(frozen=True)
class Case:
    """A family, other fields of its config, and what its base has besides its tensors."""

    family: str
    shapes: dict[str, tuple[int, ...]]
    fields: dict[str, Any] = field(default_factory=dict)


def of_mtp(start: str, *, projection: str) -> dict[str, tuple[int, ...]]:
    ends = ("enorm.weight", "hnorm.weight", "self_attn.q_norm.weight", "shared_head.norm.weight")
    return {f"{start}{end}": (16,) for end in ends} | {f"{start}{projection}.weight": (16, 32)}


MTP = {
    "qwen3_5": Case("qwen3_5", of_mtp("mtp.layers.0.", projection="fc"), QWEN),
    "glm4_moe": Case("glm4_moe", of_mtp(MORE, projection="eh_proj"), GLM),
    "deepseek_v3": Case(
        "deepseek_v3",
        of_mtp("model.layers.61.", projection="eh_proj"),
        {"num_hidden_layers": 61, "n_routed_experts": 2, "num_experts_per_tok": 1},
    ),
}
OTHERS = {
    "rotary": Case(
        "llama", {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": (2,) for n in range(2)}
    ),
    "position ids": Case(
        "bert", {"bert.embeddings.position_ids": (1, 512)}, {"tie_word_embeddings": False}
    ),
    "next sentence": Case(
        "bert",
        {
            "cls.seq_relationship.weight": (2, 16),
            "cls.seq_relationship.bias": (2,),
            "bert.pooler.dense.weight": (16, 16),
            "bert.pooler.dense.bias": (16,),
        },
        {"tie_word_embeddings": False},
    ),
    "causal masks": Case(
        "gpt2", {f"transformer.h.{n}.attn.bias": (1, 1, 64, 64) for n in range(2)}
    ),
    "vision towers": Case("llava", {"vision_tower.vision_model.embeddings.position_ids": (1, 4)}),
    "unannounced": Case("qwen3_5", of_mtp("mtp.layers.0.", projection="fc")),
}


def save_case(case: Case, place: Path) -> tuple[Tensors, Tensors]:
    """Save `base` and the checkpoint `ckpt` of another model; return its tensors, and the rest."""
    model = tiny_model(case.family, **case.fields)
    model.save_pretrained(place / "base")
    file = place / "base" / "model.safetensors"
    torch.manual_seed(2)
    rest = {name: torch.randn(shape).bfloat16() for name, shape in case.shapes.items()}
    trained = load_file(file)
    save_file({**trained, **rest}, file, {"format": "pt"})
    state = {name: one + 1 for name, one in trained.items()}
    save_ranks(place / "ckpt", state, 1)
    model.config.save_pretrained(place / "ckpt")
    return state, rest


def assert_loads(family: str, directory: Path) -> None:
    """Neither missing nor unexpected, as transformers judges."""
    _, found = model_class(family).from_pretrained(directory, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def fields_of(directory: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return {**found, **found.get("text_config", {})}


def count_of(directory: Path) -> int:
    found = fields_of(directory)
    keys = found.keys() & {"num_nextn_predict_layers", "mtp_num_hidden_layers"}
    return int(found[keys.pop()])


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_class_ignores_is_not_missed(tmp_path: Path, kind: str) -> None:
    case = OTHERS[kind]
    state, _ = save_case(case, tmp_path)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")
    assert report.names_checked == "base"
    assert_same(merged(tmp_path / "out"), state)
    assert_loads(case.family, tmp_path / "out")


@pytest.mark.parametrize("kind", MTP)
def test_mtp_layers_are_copied_from_the_base(tmp_path: Path, kind: str) -> None:
    case = MTP[kind]
    state, rest = save_case(case, tmp_path)
    report = unshard.merge(
        tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", verify="full"
    )
    assert_same(merged(tmp_path / "out"), {**state, **rest})
    said = [one for one in report.warnings if "MTP layers" in one]
    assert [f"{len(rest)} tensors of" in one and str(tmp_path / "base") in one for one in said] == [
        True
    ]
    assert count_of(tmp_path / "out") == 1
    assert_loads(case.family, tmp_path / "out")
    again = unshard.verify(tmp_path / "out", tmp_path / "ckpt", base=tmp_path / "base")
    assert again.equal


@pytest.mark.parametrize("kind", MTP)
def test_mtp_layers_that_are_left_out_are_not_announced(tmp_path: Path, kind: str) -> None:
    case = MTP[kind]
    state, rest = save_case(case, tmp_path)
    start = re.escape(next(iter(rest)).rpartition("enorm")[0])
    report = unshard.merge(
        tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", exclude=f"^{start}"
    )
    assert_same(merged(tmp_path / "out"), state)
    assert any(
        "MTP layers are left out, and config.json is changed" in one for one in report.warnings
    )
    assert count_of(tmp_path / "out") == 0
    assert_loads(case.family, tmp_path / "out")
    again = unshard.verify(tmp_path / "out", tmp_path / "ckpt", base=tmp_path / "base")
    assert again.equal


def test_those_of_the_checkpoint_are_its_own(tmp_path: Path) -> None:
    state, rest = save_case(MTP["glm4_moe"], tmp_path)
    own = {**state, **{name: one + 1 for name, one in rest.items()}}
    save_ranks(tmp_path / "ckpt", own, 1)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")
    assert_same(merged(tmp_path / "out"), own)
    assert not any("MTP" in one for one in report.warnings)
    del own[f"{MORE}eh_proj.weight"]
    save_ranks(tmp_path / "less", own, 2)
    with pytest.raises(ConversionError, match=r"Missing.*layers\.46\.eh_proj"):
        unshard.merge(tmp_path / "less", tmp_path / "two", base=tmp_path / "base")
    out = tmp_path / "without"
    unshard.merge(tmp_path / "ckpt", out, exclude=r"^model\.layers\.46\.")  # no base
    assert count_of(out) == 0


def test_they_are_cast_as_the_rest_is(tmp_path: Path) -> None:
    _, rest = save_case(MTP["qwen3_5"], tmp_path)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base", dtype="float16")
    found = merged(tmp_path / "out")
    assert_same({name: found[name] for name in rest}, {n: one.half() for n, one in rest.items()})


def test_a_base_in_block_fp8_gives_its_layers_as_numbers(tmp_path: Path) -> None:
    state, rest = save_case(MTP["glm4_moe"], tmp_path)
    name = f"{MORE}eh_proj.weight"
    file = tmp_path / "base" / "model.safetensors"
    weight, scale = rest[name].to(torch.float8_e4m3fn), torch.tensor([[0.5]])
    stored = {**load_file(file), name: weight, f"{name}_scale_inv": scale}
    save_file(stored, file, {"format": "pt"})
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")
    assert_same(merged(tmp_path / "out"), {**state, **rest, name: weight.float() * 0.5})
    assert_loads("glm4_moe", tmp_path / "out")


def test_what_a_class_has_is_missed(tmp_path: Path) -> None:
    save_case(OTHERS["next sentence"], tmp_path)
    config = json.loads((tmp_path / "ckpt" / "config.json").read_text())
    (tmp_path / "ckpt" / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertForPreTraining"]})
    )
    with pytest.raises(ConversionError, match=r'"cls\.seq_relationship') as raised:
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "base")
    assert "pooler" in str(raised.value)


def test_another_layer_is_missed(tmp_path: Path) -> None:
    state, _ = save_case(MTP["glm4_moe"], tmp_path)
    lost = "model.layers.45.input_layernorm.weight"
    save_ranks(tmp_path / "less", {name: one for name, one in state.items() if name != lost}, 1)
    with pytest.raises(ConversionError, match=re.escape(lost)):
        unshard.merge(tmp_path / "less", tmp_path / "out", base=tmp_path / "base")


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_nothing_that_a_model_has_counts_as_ignored(family: str) -> None:
    with torch.device("meta"):
        model = model_class(family)(tiny_config(family))
    names = {name for name, _ in model.named_parameters()}
    config = ModelConfig({"architectures": [type(model).__name__]})
    assert not ignored(config, (), names)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("mtp.fc.weight", "qwen3_next"),
        ("mtp.layers.0.mlp.experts.gate_up_proj", "qwen3_5_moe"),
        ("model.mtp.layers.0.enorm.weight", "longcat_flash"),
        ("model.mtp_block.0.mlp.up_proj.weight", "ernie4_5_moe"),
        ("mtp.layers.0.hnorm.weight", "nemotron_h"),
        ("model.layers.92.eh_proj.weight", "glm4_moe"),
        ("model.layers.80.eh_proj.weight", "hy_v3"),
        ("h.0.attn.bias", "gpt2"),
        ("gpt_neox.layers.0.attention.masked_bias", "gpt_neox"),
    ],
)
def test_transformers_ignores_it_too(name: str, model_type: str) -> None:
    from transformers import AutoConfig, AutoModel

    loader: Any = AutoModel
    model = loader._model_mapping[type(AutoConfig.for_model(model_type))]
    patterns = model._keys_to_ignore_on_load_unexpected or []
    assert any(re.search(one, name) for one in patterns)
    assert ignored(None, (), [name])
