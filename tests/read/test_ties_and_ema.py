"""Tied embeddings, and EMA sets that lack some tensors."""

import json
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from tiny_models import logits, model_class, tiny_model
from unshard import IncompleteError, NotMergeableError
from unshard.read.model_config import TIED_BY_DEFAULT

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(
    directory: Path, config: dict[str, object], *, equal: bool
) -> dict[str, torch.Tensor]:
    tensors = some_tensors()
    if equal:
        tensors[HEAD] = tensors[EMBED].clone()
    save_ranks(directory, tensors, 3)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return tensors


TIED = [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}]


@pytest.mark.parametrize("config", TIED)
def test_a_tied_head_of_equal_bytes_is_left_out(tmp_path: Path, config: dict[str, object]) -> None:
    tensors = checkpoint(tmp_path / "ckpt", config, equal=True)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    del tensors[HEAD]
    assert_same(merged(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= config.items()


@pytest.mark.parametrize("config", TIED)
def test_a_tied_head_that_differs_stays_and_the_config_says_so(
    tmp_path: Path, config: dict[str, object]
) -> None:
    tensors = checkpoint(tmp_path / "ckpt", config, equal=False)
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(merged(tmp_path / "out"), tensors)
    assert any(f"{HEAD} differs from {EMBED}" in warning for warning in report.warnings)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert written.get("text_config", {}).get("tie_word_embeddings", False) is False


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {}])
def test_equal_heads_that_no_config_ties_both_stay(
    tmp_path: Path, config: dict[str, object]
) -> None:
    tensors = checkpoint(tmp_path / "ckpt", config, equal=True)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(merged(tmp_path / "out"), tensors)


def test_a_head_that_was_not_saved_is_not_missed(tmp_path: Path) -> None:
    tensors = some_tensors()
    del tensors[HEAD]
    save_ranks(tmp_path / "ckpt", tensors, 2)
    (tmp_path / "ckpt" / "config.json").write_text('{"tie_word_embeddings": true}')
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(merged(tmp_path / "out"), tensors)
    assert not any("tied" in warning for warning in report.warnings)


@pytest.fixture
def lmms(tmp_path: Path) -> Path:
    step = tmp_path / "run" / "checkpoint-10"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(0), 2)
    ema = {name: tensor for name, tensor in some_tensors(1).items() if name != EMBED}
    save_ranks(step / "pytorch_ema_model_fsdp_0", ema, 2)
    return step


def test_what_the_ema_set_lacks_is_taken_from_the_regular_weights(
    lmms: Path, tmp_path: Path
) -> None:
    report = unshard.merge(lmms, tmp_path / "out", weights="ema", verify="full", config="none")
    expected = some_tensors(1) | {EMBED: some_tensors(0)[EMBED]}
    assert_same(merged(tmp_path / "out"), expected)
    (warning,) = [one for one in report.warnings if "EMA set" in one]
    assert warning.startswith("the EMA set lacks 1 tensor, taken from the regular weights")
    assert EMBED in warning


def test_regular_weights_ignore_the_ema_set(lmms: Path, tmp_path: Path) -> None:
    report = unshard.merge(lmms, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors(0))
    assert not any("EMA" in warning for warning in report.warnings)


def test_an_ema_set_alone_is_whole_by_itself(lmms: Path, tmp_path: Path) -> None:
    for path in (lmms / "pytorch_model_fsdp_0").iterdir():
        path.unlink()
    (lmms / "pytorch_model_fsdp_0").rmdir()
    unshard.merge(lmms, tmp_path / "out", weights="ema", config="none")
    assert EMBED not in merged(tmp_path / "out")


def test_regular_weights_that_lack_what_is_needed_of_them_are_named(
    lmms: Path, tmp_path: Path
) -> None:
    (lmms / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(IncompleteError, match="pytorch_model_fsdp_0/model_world_size_2_rank_1"):
        unshard.merge(lmms, tmp_path / "out", weights="ema")


def test_every_file_that_was_read_is_in_the_record(lmms: Path, tmp_path: Path) -> None:
    unshard.merge(lmms, tmp_path / "out", weights="ema", config="none")
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert len(record["source"]["files"]) == 4


def test_the_ema_of_torchs_averaged_model_is_the_ema(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-10"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(0), 2)
    averaged = {f"module.{name}": tensor for name, tensor in some_tensors(1).items()}
    plain = [{"n_averaged": torch.tensor(7)}] * 2
    save_ranks(step / "pytorch_ema_model_fsdp_0", averaged, 2, plain=plain)
    unshard.merge(step, tmp_path / "out", weights="ema", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors(1))


def test_an_ema_set_under_other_names_is_refused(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoint-10"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(0), 2)
    other = {f"shadow.{name}": tensor for name, tensor in some_tensors(1).items()}
    save_ranks(step / "pytorch_ema_model_fsdp_0", other, 2)
    with pytest.raises(
        NotMergeableError, match="the EMA set has 3 tensors that the regular weights lack"
    ):
        unshard.merge(step, tmp_path / "out", weights="ema")


def test_a_family_that_is_tied_by_default_needs_no_word_of_it(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path / "ckpt", {"model_type": "gemma2"}, equal=True)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    del tensors[HEAD]
    assert_same(merged(tmp_path / "out"), tensors)


def test_the_families_that_are_tied_by_default_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for model_type in TIED_BY_DEFAULT:
        config = CONFIG_MAPPING[model_type]()
        both = (config, config.get_text_config())
        assert any(getattr(one, "tie_word_embeddings", False) for one in both), model_type


@pytest.mark.parametrize(
    ("repeated", "original"),
    [
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("proj_out.weight", "model.decoder.embed_tokens.weight"),
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_other_ties_are_known_too(tmp_path: Path, repeated: str, original: str) -> None:
    tensor = torch.randn(13, 6)
    save_ranks(tmp_path / "ckpt", {repeated: tensor, original: tensor.clone()}, 2)
    (tmp_path / "ckpt" / "config.json").write_text('{"tie_word_embeddings": true}')
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert list(merged(tmp_path / "out")) == [original]


@pytest.mark.parametrize(
    ("head", "rest", "embedding"),
    [
        ("cls.predictions.decoder", "cls.predictions", "bert.embeddings.word_embeddings"),
        ("lm_head.decoder", "lm_head", "roberta.embeddings.word_embeddings"),
    ],
)
def test_the_bias_of_a_head_that_differs_stays(
    tmp_path: Path, head: str, rest: str, embedding: str
) -> None:
    """transformers unties all of a model at once, and would make up the bias."""
    bias = torch.randn(13)
    tensors = {f"{name}.weight": torch.randn(13, 6) for name in (head, embedding)}
    tensors |= {f"{name}.bias": bias.clone() for name in (head, rest)}
    save_ranks(tmp_path / "ckpt", tensors, 2)
    (tmp_path / "ckpt" / "config.json").write_text('{"tie_word_embeddings": true}')
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert_same(merged(tmp_path / "out"), tensors)


def test_an_encoder_whose_head_was_parted_loads(tmp_path: Path) -> None:
    model = tiny_model("bert", tie_word_embeddings=False)
    model.cls.predictions.decoder.bias = model.cls.predictions.bias
    model.config.tie_word_embeddings = True
    save_ranks(tmp_path / "ckpt", {n: t.clone() for n, t in model.state_dict().items()}, 2)
    model.config.save_pretrained(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    loaded = model_class("bert").from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), logits(model))
