"""Loading into models: names, ties, dtypes, the meta device, and what does not fit."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import unshard
from adapters import adapted
from ranks import as_rank, bits, rank_path, save_ranks, some_tensors
from tiny_models import logits, tiny_model
from unshard import ConversionError, CorruptError, Loaded, UsageError

pytestmark = [
    pytest.mark.xdist_group("families"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]
COMPLETE = Loaded((), (), ())
FAMILIES = ["gemma2", "qwen3_moe", "mixtral", "qwen2_5_vl", "qwen3_vl_moe", "gemma3"]
Build = Callable[[str], Any]


class Plain(nn.Module):
    """A model with the names of `some_tensors`, and a buffer that is not saved."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(13, 6, dtype=dtype)
        self.model.norm = nn.LayerNorm(6, bias=False, dtype=dtype)
        self.lm_head = nn.Linear(6, 13, bias=False, dtype=dtype)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("hidden", torch.ones(2), persistent=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", some_tensors(), 2)


def same(model: nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return all(
        bits(state[name]) == bits(one.to(state[name].dtype)) for name, one in tensors.items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_are_cast_to_the_models_dtypes(checkpoint: Path, dtype: torch.dtype) -> None:
    model = Plain(dtype=dtype)
    before = dict(model.named_parameters())
    assert unshard.load_into(model, checkpoint) == COMPLETE
    assert same(model, some_tensors())
    assert all(after is before[name] for name, after in model.named_parameters())
    theirs = Plain(dtype=dtype)
    theirs.load_state_dict(some_tensors())
    assert same(model, dict(theirs.state_dict()))


@pytest.mark.parametrize("strict", [True, False])
def test_fractions_are_not_cast_to_integers(checkpoint: Path, *, strict: bool) -> None:
    model = Plain()
    whole = torch.ones(13, 6, dtype=torch.int8)
    model.lm_head.weight = nn.Parameter(whole, requires_grad=False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(ConversionError, match="is int8 in the model"):
        unshard.load_into(model, checkpoint, strict=strict)
    assert same(model, before)
    tensors = some_tensors() | {"lm_head.weight": whole}
    as_stored = save_ranks(checkpoint.parent / "int8", tensors, 2)
    assert unshard.load_into(model, as_stored) == COMPLETE


def test_on_the_meta_device_the_checkpoints_dtypes_are_taken(checkpoint: Path) -> None:
    with torch.device("meta"):
        model = Plain(dtype=torch.bfloat16)
    assert unshard.load_into(model, checkpoint) == Loaded((), (), ("hidden",))
    assert same(model, some_tensors())
    assert {one.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_an_open_checkpoint_loads_as_well(checkpoint: Path, framework: Any) -> None:
    model = Plain()
    with unshard.open_checkpoint(checkpoint, framework=framework) as opened:
        assert opened.load_into(model) == COMPLETE
        assert opened.load_into(Plain().to("meta")) == Loaded((), (), ("hidden",))
    assert same(model, some_tensors())
    with pytest.raises(UsageError, match="was closed"):
        opened.load_into(model)


# ties


def tied_checkpoint(directory: Path, *left_out: str) -> Path:
    tensors = some_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name in left_out:
        del tensors[name]
    return save_ranks(directory, tensors, 2)


@pytest.mark.parametrize("left_out", [[], ["lm_head.weight"], ["model.embed_tokens.weight"]])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_of_tied_weights_one_name_is_enough_and_they_stay_tied(
    tmp_path: Path, left_out: list[str], device: str
) -> None:
    with torch.device(device):
        model: Any = Plain(tied=True)
    loaded = unshard.load_into(model, tied_checkpoint(tmp_path / "ckpt", *left_out))
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(model, {"lm_head.weight": some_tensors()["model.embed_tokens.weight"]})


def test_tied_weights_that_differ_are_refused(checkpoint: Path) -> None:
    model = Plain(tied=True)
    before = bits(model.lm_head.weight)
    with pytest.raises(ConversionError, match=r"model\.embed_tokens\.weight and lm_head\.weight"):
        unshard.load_into(model, checkpoint)
    with pytest.raises(ConversionError, match="tie_word_embeddings=False"):
        unshard.load_into(model, checkpoint, strict=False)
    assert bits(model.lm_head.weight) == before


def test_a_head_that_the_model_makes_of_its_embedding_is_not_unexpected(tmp_path: Path) -> None:
    checkpoint = tied_checkpoint(tmp_path / "ckpt")
    model = Plain()
    del model.lm_head
    with pytest.raises(ConversionError, match=r"1 unexpected: lm_head\.weight"):
        unshard.load_into(model, checkpoint)
    config = {"model_type": "qwen2", "tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert unshard.load_into(model, checkpoint) == COMPLETE


# what does not fit


def test_names_on_one_side_only_are_listed_and_nothing_is_copied(checkpoint: Path) -> None:
    model = Plain()
    model.extra = nn.Linear(2, 2)
    del model.lm_head
    before = bits(model.state_dict()["model.norm.weight"])
    with pytest.raises(ConversionError, match="its names are not those of the model") as caught:
        unshard.load_into(model, checkpoint)
    assert caught.value.found == (
        "2 missing: extra.weight, extra.bias; 1 unexpected: lm_head.weight"
    )
    assert "Plain" in caught.value.expected
    assert bits(model.state_dict()["model.norm.weight"]) == before
    loaded = unshard.load_into(model, checkpoint, strict=False)
    assert loaded == Loaded(("extra.weight", "extra.bias"), ("lm_head.weight",), ())
    assert same(model, {"model.norm.weight": some_tensors()["model.norm.weight"]})


def test_very_many_names_are_counted(checkpoint: Path) -> None:
    with pytest.raises(ConversionError, match=r"60 missing: 0\.weight, .*, …; 3 unexpected"):
        unshard.load_into(nn.Sequential(*(nn.Linear(1, 1) for _ in range(30))), checkpoint)


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_refused_always(checkpoint: Path, *, strict: bool) -> None:
    model = Plain()
    model.model.norm = nn.LayerNorm(5, bias=False)
    model.lm_head = nn.Linear(13, 6, bias=False)
    with pytest.raises(ConversionError, match=r"does not fit the model \(2 problems\)") as caught:
        unshard.load_into(model, checkpoint, strict=strict)
    assert "tensor model.norm.weight has another shape than in the model" in str(caught.value)
    assert "[6, 13], as in the model" in str(caught.value)


def test_nothing_is_copied_if_a_sharded_parameter_has_no_memory(checkpoint: Path) -> None:
    with as_rank(0, 2):
        model = Plain()
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.empty(13, 6, device="meta")
        model.lm_head.weight = nn.Parameter(
            distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        )
        before = bits(model.state_dict()["model.norm.weight"])
        with pytest.raises(ConversionError, match=r"parameter lm_head\.weight: .* meta device"):
            unshard.load_into(model, checkpoint)
        assert bits(model.state_dict()["model.norm.weight"]) == before


def test_a_file_that_is_gone_is_named(checkpoint: Path) -> None:
    with unshard.open_checkpoint(checkpoint) as opened:
        rank_path(checkpoint, 2, 1).unlink()
        with pytest.raises(CorruptError, match=r"rank_1\.pt: no longer exists"):
            opened.load_into(Plain())


# adapters


def test_an_adapter_is_fused_for_a_model_without_one(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    model = Plain()
    assert unshard.load_into(model, tmp_path / "ckpt") == COMPLETE
    assert same(model, load_file(tmp_path / "out" / "model.safetensors"))


def test_an_adapter_without_its_alpha_is_refused_as_in_a_merge(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt", alpha=None)
    with pytest.raises(ConversionError, match=r"lora_alpha=…"):
        unshard.load_into(Plain(), tmp_path / "ckpt")
    assert unshard.load_into(Plain(), tmp_path / "ckpt", lora_alpha=2.0) == COMPLETE


class Holder(nn.Module):
    """A model with any names: those of a state dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            inner: nn.Module = self
            for part in path:
                if not hasattr(inner, part):
                    inner.add_module(part, nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, nn.Parameter(torch.zeros_like(tensor)))


def test_a_model_with_the_adapter_gets_it_as_it_is(tmp_path: Path) -> None:
    adapted(tmp_path / "ckpt", alpha=None)
    tensors = unshard.load_state_dict(tmp_path / "ckpt")
    model = Holder(tensors)
    assert unshard.load_into(model, tmp_path / "ckpt") == COMPLETE
    assert same(model, tensors)
    tensors["base_model.model.more.weight"] = torch.zeros(2)
    loaded = unshard.load_into(Holder(tensors), tmp_path / "ckpt", strict=False)
    assert loaded == Loaded(("base_model.model.more.weight",), (), ())


# models of transformers


@pytest.fixture(scope="module")
def tiny() -> Build:
    return cache(tiny_model)


@pytest.fixture(scope="module")
def saved(tiny: Build, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return `saved(model_type)`: where transformers saved the model, with the hub's names."""

    def save(model_type: str) -> Path:
        directory = tmp_path_factory.mktemp(model_type) / "saved"
        tiny(model_type).save_pretrained(directory)
        return directory

    return cache(save)


def empty(model: Any) -> Any:
    """Return another model of this one's class and config, its parameters on the meta device."""
    with init_empty_weights(include_buffers=False):
        return type(model)(model.config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_shards_with_names_of_training_make_the_model_that_a_merge_makes(
    tiny: Build, saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model = tiny(model_type)
    checkpoint = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    unshard.merge(checkpoint, tmp_path / "out", config=saved(model_type))
    theirs = type(model).from_pretrained(tmp_path / "out")
    for config in (None, saved(model_type)):
        ours = empty(model)
        assert unshard.load_into(ours, checkpoint, config=config) == COMPLETE
        assert torch.equal(logits(ours), logits(theirs))
        assert torch.equal(logits(ours), logits(model))
        tied = set(ours.all_tied_weights_keys)
        assert all(one is ours.get_parameter(name) for name, one in ours.named_parameters())
        for name in tied:
            twin = ours.get_parameter(ours.all_tied_weights_keys[name])
            assert ours.get_parameter(name) is twin


@pytest.mark.parametrize("model_type", FAMILIES)
def test_shards_with_names_of_the_hub_make_it_too(
    tiny: Build, saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    """As version 4 of transformers trained: experts one by one, language models not nested."""
    model = tiny(model_type)
    hub = load_file(saved(model_type) / "model.safetensors")
    checkpoint = save_ranks(tmp_path / "ckpt", hub, 2)
    for ours in (empty(model), type(model)(model.config)):
        assert unshard.load_into(ours, checkpoint) == COMPLETE
        assert torch.equal(logits(ours), logits(model))
    with unshard.open_checkpoint(checkpoint, names="hub", config=saved(model_type)) as opened:
        ours = empty(model)
        assert opened.load_into(ours) == COMPLETE
    assert torch.equal(logits(ours), logits(model))


def test_experts_that_are_stored_turned_are_turned(tiny: Build, tmp_path: Path) -> None:
    """Version 4 of transformers held the experts of Qwen3-VL as [E, H, 2I]."""
    model = tiny("qwen3_vl_moe")
    old = {
        name: one.transpose(1, 2).contiguous() if ".experts." in name else one
        for name, one in model.state_dict().items()
    }
    checkpoint = save_ranks(tmp_path / "ckpt", old, 2)
    ours = empty(model)
    assert unshard.load_into(ours, checkpoint) == COMPLETE
    assert torch.equal(logits(ours), logits(model))


def test_a_language_model_gets_that_of_a_model_without_its_head(
    tiny: Build, tmp_path: Path
) -> None:
    model = tiny("llama")
    state = {name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}
    short = {name.removeprefix("model."): one.contiguous() for name, one in state.items()}
    (tmp_path / "whole").mkdir()
    save_file(short, tmp_path / "whole" / "model.safetensors")
    ours = type(model)(model.config)
    with pytest.raises(ConversionError, match=r"1 missing: lm_head\.weight"):
        unshard.load_into(ours, tmp_path / "whole")
    assert unshard.load_into(ours, tmp_path / "whole", strict=False).missing == ("lm_head.weight",)
    assert same(ours, state)
