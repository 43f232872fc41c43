"""Names checked against config.json: what is missing, what is unexpected, what cannot be known.

That the table is transformers' own is shown in `oracle/test_config_names.py`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, save_ranks
from unshard import ConversionError, MergeOptions
from unshard.cli.reports import print_comparison, print_report
from unshard.convert.expected.config_names import expected_by_config
from unshard.merger import FSDP2Merger
from unshard.write.verification.comparison import ByConfig

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

HEAD, STRANGER = "lm_head.weight", "foo.bar.weight"
LLAMA: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


def everything(names: Iterable[str]) -> list[str]:
    return list(names)


def names_of(config: Mapping[str, object]) -> list[str]:
    expected = expected_by_config(config, [], everything, tied=False)
    assert expected is not None
    return list(expected.names)


def llama(**changes: object) -> dict[str, object]:
    return {**LLAMA, **changes}


def tensors_of(names: Iterable[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=generator) for name in names}


def checkpoint(directory: Path, names: Iterable[str], config: Mapping[str, object] = LLAMA) -> Path:
    save_ranks(directory, tensors_of(names), 2)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without(*left_out: str) -> list[str]:
    return [name for name in names_of(LLAMA) if not name.startswith(left_out)]


def unknown(config: Mapping[str, object], names: Iterable[str] = ()) -> bool:
    return expected_by_config(config, list(names), everything, tied=False) is None


# what is refused


def test_a_whole_model_passes_and_the_report_says_what_its_names_were_checked_by(
    tmp_path: Path,
) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", names_of(LLAMA))
    report = unshard.merge(ckpt, tmp_path / "out")
    assert report.names_checked == "config"
    assert not report.warnings
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert record["output"]["names_checked"] == "config"
    assert record["output"]["loadable"] is True


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (without(HEAD), [f'Missing key(s) in state_dict: "{HEAD}"', "allow_missing=True"]),
        (without("model.layers.1."), ['"model.layers.1.mlp.up_proj.weight"', "(9 in all)"]),
        (
            [*names_of(LLAMA), STRANGER],
            [f'Unexpected key(s) in state_dict: "{STRANGER}"', "allow_unexpected=True"],
        ),
        ([*without(HEAD), STRANGER], [f'"{HEAD}"', f'"{STRANGER}"', "2 problems"]),
    ],
)
def test_missing_and_unexpected_tensors_are_refused(
    tmp_path: Path, names: list[str], words: list[str]
) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", names)
    with pytest.raises(ConversionError) as raised:
        unshard.merge(ckpt, tmp_path / "out")
    for word in (*words, str(ckpt / "config.json")):
        assert word in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_merger_refuses_as_the_original_does(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-1"
    checkpoint(step / "pytorch_model_fsdp_0", [*without(HEAD), STRANGER])
    (step / "pytorch_model_fsdp_0" / "config.json").rename(step / "config.json")
    with pytest.raises(ConversionError, match=r"Missing key\(s\) in state_dict") as raised:
        FSDP2Merger().merge(step, tmp_path / "out")
    assert f'Unexpected key(s) in state_dict: "{STRANGER}"' in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_average_is_checked_too(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint(tmp_path / f"global_step_{step}" / "actor", without(HEAD))
    with pytest.raises(ConversionError, match=f'Missing key.s. in state_dict: "{HEAD}"'):
        unshard.average(tmp_path, tmp_path / "out")
    options = MergeOptions(allow_missing=True)
    report = unshard.average(tmp_path, tmp_path / "out", options=options)
    assert report.names_checked == "config"


def test_what_is_allowed_is_written_and_named(tmp_path: Path) -> None:
    names = [*without(HEAD), STRANGER]
    ckpt = checkpoint(tmp_path / "ckpt", names)
    report = unshard.merge(ckpt, tmp_path / "out", allow_missing=True, allow_unexpected=True)
    assert_same(merged(tmp_path / "out"), tensors_of(names))
    said = " ".join(report.warnings)
    assert f'1 missing tensor compared with {ckpt / "config.json"}: "{HEAD}"' in said
    assert f'1 unexpected tensor compared with {ckpt / "config.json"}: "{STRANGER}"' in said


def test_what_the_user_left_out_is_not_missed(tmp_path: Path) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", names_of(LLAMA))
    unshard.merge(ckpt, tmp_path / "layer", include=r"layers\.1\.")
    unshard.merge(ckpt, tmp_path / "body", exclude="^lm_head")
    lost = checkpoint(tmp_path / "lost", without("model.layers.1.mlp.up_proj"))
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.up_proj"):
        unshard.merge(lost, tmp_path / "out", include=r"layers\.1\.")


# what is known to be right


def test_a_tied_head_may_be_missing_and_may_be_there(tmp_path: Path) -> None:
    tied = llama(tie_word_embeddings=True)
    bare = checkpoint(tmp_path / "bare", without(HEAD), tied)
    assert unshard.merge(bare, tmp_path / "one").names_checked == "config"
    whole = checkpoint(tmp_path / "whole", names_of(LLAMA), tied)
    assert unshard.merge(whole, tmp_path / "two").names_checked == "config"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "v_head.summary.weight",
        "score.weight",
    ],
)
def test_old_buffers_and_heads_of_critics_are_known(tmp_path: Path, name: str) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", [*names_of(LLAMA), name])
    assert unshard.merge(ckpt, tmp_path / "out").names_checked == "config"


def test_layers_that_predict_further_tokens_are_known() -> None:
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "q_lora_rank": None,
        "num_nextn_predict_layers": 1,
    }
    names = [*names_of(config), "model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"]
    expected = expected_by_config(config, names, everything, tied=False)
    assert expected is not None
    assert "model.layers.2.eh_proj.weight" in expected.excused
    assert "model.layers.3.eh_proj.weight" not in expected.excused
    more = {**config, "num_nextn_predict_layers": 0}
    expected = expected_by_config(more, names, everything, tied=False)
    assert expected is not None
    assert "model.layers.2.eh_proj.weight" not in expected.excused


def test_towers_are_known_under_the_names_of_transformers_4_too() -> None:
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "num_hidden_layers": 1},
        "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1},
    }
    old = [name.replace("_tower.", "_tower.vision_model.") for name in names_of(config)]
    expected = expected_by_config(config, old, everything, tied=False)
    assert expected is not None
    assert set(expected.names) == set(old)


def test_a_model_without_its_head_is_known_and_named(tmp_path: Path) -> None:
    names = [name.removeprefix("model.") for name in without(HEAD)]
    report = unshard.merge(checkpoint(tmp_path / "ckpt", names), tmp_path / "out")
    assert report.names_checked == "config"
    assert any(HEAD in warning for warning in report.warnings)
    tied = checkpoint(tmp_path / "tied", names, llama(tie_word_embeddings=True))
    assert not unshard.merge(tied, tmp_path / "two").warnings


# what is not known


@pytest.mark.parametrize(
    "config",
    [
        llama(model_type="of-our-own"),
        llama(architectures=["LlamaForCausalLMEagle3"]),
        llama(architectures=["MyLlama", "LlamaForCausalLM"]),
        llama(architectures="LlamaForCausalLM"),
        llama(num_hidden_layers=None),
        llama(num_hidden_layers="2"),
        llama(num_hidden_layers=10**12),
        llama(num_hidden_layers=True),
        llama(attention_bias="yes"),
        llama(quantization_config={"quant_method": "fp8"}),
        llama(model_type=["llama"]),
        {"model_type": "mixtral", "num_hidden_layers": 900_000, "num_local_experts": 900_000},
        {"model_type": "mixtral", "num_hidden_layers": 2},
        {"model_type": "llava", "text_config": {"model_type": "llama", "num_hidden_layers": 1}},
        {"model_type": "deepseek_v3", "num_hidden_layers": 2, "moe_layer_freq": 2},
    ],
)
def test_a_config_that_leaves_something_open_says_nothing(config: dict[str, object]) -> None:
    assert unknown(config)


def test_names_that_were_not_checked_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", [STRANGER], llama(model_type="of-our-own"))
    report = unshard.merge(ckpt, tmp_path / "out")
    assert report.names_checked == "none"
    print_report(report, as_json=False, quiet=False)
    assert "names not checked" in capsys.readouterr().out.splitlines()[-1]
    trained = checkpoint(tmp_path / "trained", without(HEAD))
    assert unshard.merge(trained, tmp_path / "two", names="training").names_checked == "none"


def test_verify_compares_the_outputs_names_with_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", [*without(HEAD), STRANGER])
    unshard.merge(ckpt, tmp_path / "out", allow_missing=True, allow_unexpected=True)
    found = unshard.verify(tmp_path / "out", ckpt)
    assert found.by_config == ByConfig((HEAD,), (STRANGER,))
    assert not found.equal
    print_comparison(found)
    said = capsys.readouterr().out
    assert f"{HEAD}: missing" in said
    assert f"{STRANGER}: unexpected" in said

    whole = checkpoint(tmp_path / "whole", names_of(LLAMA))
    unshard.merge(whole, tmp_path / "two", exclude="^lm_head")
    assert unshard.verify(tmp_path / "two", whole).equal
    unshard.merge(ckpt, tmp_path / "three", names="training")
    assert unshard.verify(tmp_path / "three", ckpt).by_config is None


def test_reading_a_checkpoint_that_is_not_whole_is_not_refused(tmp_path: Path) -> None:
    ckpt = checkpoint(tmp_path / "ckpt", without(HEAD))
    with unshard.open_checkpoint(ckpt, names="hub") as opened:
        assert set(opened.keys()) == set(without(HEAD))
