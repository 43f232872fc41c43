"""Critics and value heads: which model a checkpoint becomes."""

import json
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, bits, merged, save_ranks
from tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


def tiny_tensors() -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = tiny_model().state_dict()
    return state


def save_config(directory: Path) -> None:
    tiny_config(architectures=["Qwen2ForCausalLM"]).save_pretrained(directory)


def test_a_critic_saved_under_its_language_models_config_loads_with_its_head(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    actor = tmp_path / "global_step_1" / "critic"
    actor.mkdir(parents=True)
    save_config(actor)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(actor, num_labels=1)
    critic = AutoModelForTokenClassification.from_config(config)  # type: ignore[no-untyped-call]
    save_ranks(actor, critic.state_dict(), 2)
    unshard.merge(actor, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForTokenClassification"]
    loaded, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    for name, tensor in critic.state_dict().items():
        assert bits(loaded.state_dict()[name]) == bits(tensor), name


def test_trls_wrapper_is_taken_off_and_its_value_head_stays(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    wrapped = {f"pretrained_model.{name}": tensor for name, tensor in tensors.items()}
    head = {"v_head.summary.weight": torch.randn(1, 6), "v_head.summary.bias": torch.randn(1)}
    save_ranks(tmp_path / "ckpt", wrapped | head, 2)
    save_config(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(merged(tmp_path / "out"), tensors | head)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]


def test_a_language_model_that_also_has_a_score_is_left_alone(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"score.weight": torch.randn(2, 16)}
    save_ranks(tmp_path / "ckpt", tensors, 2)
    save_config(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llava"])
def test_a_vocabulary_that_was_resized_after_the_config_was_saved_loads(
    tmp_path: Path, family: str
) -> None:
    trained, actor = tiny_model(family), tmp_path / "global_step_1" / "actor"
    trained.config.architectures = [type(trained).__name__]
    trained.config.save_pretrained(actor)
    trained.resize_token_embeddings(41, mean_resizing=False)
    save_ranks(actor, trained.state_dict(), 2)
    report = unshard.merge(actor, tmp_path / "out")
    assert any("2 tensors have another vocabulary" in warning for warning in report.warnings)
    loaded = type(trained).from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), trained.state_dict())
    assert loaded.config.get_text_config().vocab_size == 41


def test_a_config_of_a_wider_model_is_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", tiny_tensors(), 2)
    tiny_config(architectures=["Qwen2ForCausalLM"], hidden_size=32).save_pretrained(
        tmp_path / "ckpt"
    )
    with pytest.raises(unshard.ConversionError, match="21 tensors have another shape than in"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
