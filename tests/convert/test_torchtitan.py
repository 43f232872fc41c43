"""torchtitan's own names, against what its adapters made of them (`data/README.md`)."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import as_rank, assert_same, merged, save_ranks
from unshard import ConversionError

DATA = Path(__file__).parent.parent / "data" / "torchtitan"
SIZES: Mapping[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 5,
    "tie_word_embeddings": False,
}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama3": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3_moe", "num_experts": 3, "mlp_only_layers": [0]},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
    },
}
VERSIONS = ("0.2.1", "0.3.0")


def of(family: str, version: str, kind: str) -> dict[str, torch.Tensor]:
    found = load_file(DATA / f"{family}-{version}.safetensors")
    start = f"{kind}:"
    return {name.removeprefix(start): one for name, one in found.items() if name.startswith(start)}


def configured(directory: Path, family: str, **more: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {**SIZES, **CONFIGS[family], **more}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_names_and_rows_are_those_that_its_adapter_makes(
    tmp_path: Path, family: str, version: str
) -> None:
    """Shards end in the middle of a head; what is only moved is compared bit for bit."""
    ckpt = configured(tmp_path / "ckpt", family)
    save_ranks(ckpt, of(family, version, "titan"), 3)
    report = unshard.merge(ckpt, tmp_path / "out", verify="full")
    assert_same(merged(tmp_path / "out"), of(family, version, "hub"))
    assert report.names_checked == "config"
    assert not report.warnings


def test_a_step_as_torchtitan_saves_it(tmp_path: Path) -> None:
    """DCP: the model at the top level, without a prefix."""
    step = configured(tmp_path / "step-10", "llama3")
    state = {**of("llama3", "0.3.0", "titan"), "freqs_cis": torch.ones(4, 2)}
    with as_rank(0, 1):
        save(state, checkpoint_id=step)
    unshard.merge(step, tmp_path / "out", verify="full")
    assert_same(merged(tmp_path / "out"), of("llama3", "0.3.0", "hub"))
    found = unshard.verify(tmp_path / "out", step)
    assert found.equal
    assert found.by_config is not None


def test_a_layer_that_predicts_further_tokens_follows_the_last(tmp_path: Path) -> None:
    state = of("deepseek_v3", "0.3.0", "titan")
    more = {
        name.replace("layers.1.", "mtp_layers.0."): one
        for name, one in state.items()
        if name.startswith("layers.1.")
    }
    more |= {f"mtp_layers.0.{end}.weight": torch.ones(16) for end in ("enorm", "mtp_norm")}
    ckpt = configured(tmp_path / "ckpt", "deepseek_v3")
    save_ranks(ckpt, {**state, **more}, 2)
    unshard.merge(ckpt, tmp_path / "out")
    names = merged(tmp_path / "out").keys()
    assert "model.layers.2.mlp.experts.2.up_proj.weight" in names
    assert {"model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"} <= names


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_attention_heads": 3}, "does not have the rows of 3 heads"),
        ({"num_attention_heads": None}, "num_attention_heads is needed"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tmp_path: Path, more: Mapping[str, object], words: str
) -> None:
    ckpt = configured(tmp_path / "ckpt", "llama3", **more)
    save_ranks(ckpt, of("llama3", "0.3.0", "titan"), 2)
    with pytest.raises(ConversionError, match=words):
        unshard.merge(ckpt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_names_next_to_a_config_are_refused_with_the_names_that_do_not_fit(
    tmp_path: Path,
) -> None:
    """torchtune's: nothing in transformers loads them."""
    state = {"tok_embeddings.weight": torch.ones(4, 4), "layers.0.sa_norm.scale": torch.ones(4)}
    ckpt = configured(tmp_path / "ckpt", "llama3")
    save_ranks(ckpt, state, 2)
    with pytest.raises(ConversionError, match=r'Unexpected key\(s\) .*"layers.0.sa_norm.scale"'):
        unshard.merge(ckpt, tmp_path / "out")


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_names_stay_where_training_names_are_asked_for_or_no_config_is_there(
    tmp_path: Path,
) -> None:
    state = of("llama3", "0.3.0", "titan")
    ckpt = configured(tmp_path / "ckpt", "llama3")
    save_ranks(ckpt, state, 2)
    unshard.merge(ckpt, tmp_path / "training", names="training")
    assert_same(merged(tmp_path / "training"), state)
    (ckpt / "config.json").unlink()
    report = unshard.merge(ckpt, tmp_path / "bare", config="none")
    assert_same(merged(tmp_path / "bare"), state)
    assert not report.loadable


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_moments_change_places_as_those_of_their_parameters(
    tmp_path: Path, version: str
) -> None:
    """The oracle is a merge of a model whose weights are the moments."""
    weights = of("llama3", version, "titan")
    moments = {name: torch.randn_like(one) for name, one in weights.items()}
    state = {f"state.{name}.exp_avg": one for name, one in moments.items()}
    groups = {f"param_groups.{name}.lr": 0.1 for name in weights}
    optimizer = {"optimizer": {**state, **groups}}
    for kind, saved in {"run": {**weights, **optimizer}, "moments": moments}.items():
        with as_rank(0, 1):
            save(saved, checkpoint_id=tmp_path / kind / "step-7")
        configured(tmp_path / kind / "step-7", "llama3")
        unshard.merge(tmp_path / kind, tmp_path / f"{kind}-out", optimizer=kind == "run")
    truth = merged(tmp_path / "moments-out")
    found = load_file(tmp_path / "run-out" / "optimizer.safetensors")
    assert_same(found, {f"state.{name}.exp_avg": one for name, one in truth.items()})
