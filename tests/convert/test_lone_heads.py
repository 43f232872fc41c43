"""A tied pair of which only the head is stored: the output has the embedding, as on the hub."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from optimizers import KEYS, like, save_optimizer
from ranks import assert_same, merged, save_ranks
from tiny_models import logits, model_class, tiny_model
from unshard import ConversionError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FAMILIES = ["gemma2", "gpt2", "llama", "qwen2", "qwen2_vl", "gemma3"]
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def tied(family: str) -> Any:
    """Return a model of this family with one matrix at both ends."""
    model = tiny_model(family, tie_word_embeddings=True)
    model.tie_weights()
    return model


def save(directory: Path, model: Any) -> dict[str, torch.Tensor]:
    """Save everything but the embedding as ranks do; return what is saved."""
    names = {name: one for name, one in model.state_dict().items() if not name.endswith(EMBEDDINGS)}
    stored = {name: one.detach().clone() for name, one in names.items()}
    save_ranks(directory, stored, 2)
    model.config.save_pretrained(directory)
    return stored


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_what_save_pretrained_writes(tmp_path: Path, family: str) -> None:
    model = tied(family)
    model.save_pretrained(tmp_path / "hub")
    assert "lm_head.weight" in save(tmp_path / "ckpt", tied(family))
    for number, base in enumerate((None, tmp_path / "hub")):
        output = tmp_path / f"out-{number}"
        unshard.merge(tmp_path / "ckpt", output, base=base)
        assert_same(merged(output), merged(tmp_path / "hub"))
        loaded, info = model_class(family).from_pretrained(output, output_loading_info=True)
        assert not any(info.values())
        assert torch.equal(logits(loaded), logits(model))


def test_a_base_names_it_where_no_family_is_known(tmp_path: Path) -> None:
    model = tied("bert")
    model.save_pretrained(tmp_path / "hub")
    stored = save(tmp_path / "ckpt", model)
    assert "cls.predictions.decoder.weight" in stored
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "hub")
    assert_same(merged(tmp_path / "out"), merged(tmp_path / "hub"))


def test_its_moments_are_the_embeddings(tmp_path: Path) -> None:
    stored = save(tmp_path / "ckpt", tied("qwen2"))
    moments = {key: like(stored, seed) for seed, key in enumerate(KEYS)}
    save_optimizer(tmp_path / "ckpt", moments, 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", optimizer=True)
    found = merged(tmp_path / "out")
    name = "state.model.embed_tokens.weight.exp_avg"
    assert torch.equal(found[name], moments["exp_avg"]["lm_head.weight"])


def test_it_is_left_out_by_the_name_of_the_embedding(tmp_path: Path) -> None:
    stored = save(tmp_path / "ckpt", tied("qwen2"))
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", include="embed_tokens")
    expected = {"model.embed_tokens.weight": stored["lm_head.weight"]}
    assert_same(merged(tmp_path / "out"), expected)


def test_an_engine_and_transformers_get_the_embedding(tmp_path: Path) -> None:
    model = tied("gemma2")
    save(tmp_path / "ckpt", model)
    loaded = unshard.from_pretrained(tmp_path / "ckpt")
    assert torch.equal(logits(loaded), logits(model))
    with unshard.open_checkpoint(tmp_path / "ckpt", names="hub") as opened:
        assert "model.embed_tokens.weight" in opened
        assert "lm_head.weight" not in opened


def test_an_embedding_that_is_not_tied_stays_missing(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", tied("qwen2"))
    path = tmp_path / "ckpt" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "tie_word_embeddings": False}))
    with pytest.raises(ConversionError, match=r'Missing key.*"model.embed_tokens.weight"'):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


def test_a_head_of_another_vocabulary_is_resized_as_the_embedding_would_be(tmp_path: Path) -> None:
    model = tied("qwen2")
    model.resize_token_embeddings(40)
    stored = save(tmp_path / "ckpt", model)
    path = tmp_path / "ckpt" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 37}))
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 40
    assert torch.equal(
        merged(tmp_path / "out")["model.embed_tokens.weight"], stored["lm_head.weight"]
    )


_SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_XLNET = {"vocab_size": 37, "d_model": 16, "n_layer": 1, "n_head": 4, "d_inner": 24}
_BART = {
    "d_model": 16,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")},
}
HEADS: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {**_SMALL, "embedding_size": 8},
    "BertForMaskedLM": _SMALL,
    "RobertaForMaskedLM": _SMALL,
    "ElectraForMaskedLM": {**_SMALL, "embedding_size": 8},
    "DistilBertForMaskedLM": {
        "vocab_size": 37,
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 1,
        "n_heads": 4,
    },
    "ModernBertForMaskedLM": {**_SMALL, **_ENDS, "cls_token_id": 1, "sep_token_id": 2},
    "XLNetLMHeadModel": _XLNET,
    "MambaForCausalLM": {**_SMALL, "state_size": 4},
    "MPNetForMaskedLM": _SMALL,
}


def other_model(name: str, fields: dict[str, Any]) -> Any:
    model_class = getattr(import_module("transformers"), name)
    model = model_class(model_class.config_class(**fields)).train(mode=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("is_lone", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_a_base_has_tied_heads_of_many_names(tmp_path: Path, name: str, *, is_lone: bool) -> None:
    model = other_model(name, HEADS[name])
    model.save_pretrained(tmp_path / "hub")
    (embedding,) = (
        one for head, one in model.all_tied_weights_keys.items() if head.endswith("weight")
    )
    stored = {
        name: one.detach().clone()
        for name, one in model.state_dict().items()
        if name != embedding or not is_lone
    }
    save_ranks(tmp_path / "ckpt", stored, 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "hub")
    assert_same(merged(tmp_path / "out"), merged(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, HEADS[name]) for name in ("BertForMaskedLM", "XLNetLMHeadModel")),
        ("MPNetForMaskedLM", _SMALL),
        ("BartForConditionalGeneration", {**_SMALL, **_BART, **_ENDS}),
    ],
)
def test_a_resized_vocabulary_has_resized_biases(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    model = other_model(name, fields)
    model.save_pretrained(tmp_path / "hub")
    model.resize_token_embeddings(44)
    model.save_pretrained(tmp_path / "resized")
    save_ranks(tmp_path / "ckpt", {n: t.clone() for n, t in model.state_dict().items()}, 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "hub")
    assert_same(merged(tmp_path / "out"), merged(tmp_path / "resized"))
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


def test_a_bias_of_another_size_is_refused_next_to_a_resized_vocabulary(tmp_path: Path) -> None:
    model = other_model("BertForMaskedLM", _SMALL)
    model.save_pretrained(tmp_path / "hub")
    model.resize_token_embeddings(44)
    stored = {n: t.clone() for n, t in model.state_dict().items()}
    for bias in ("cls.predictions.bias", "cls.predictions.decoder.bias"):
        stored[bias] = stored[bias][:40].clone()
    save_ranks(tmp_path / "ckpt", stored, 2)
    with pytest.raises(ConversionError, match=r"cls.predictions.bias \[37\] -> \[40\]"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", base=tmp_path / "hub")
