"""The table of names against transformers: what it saves, and what it loads again.

Every family that the table was measured on is built with tiny sizes and random values; every other
type with rules without values, to compare names and shapes.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import unshard
from oracle.writers.saving import truth_file
from oracle.writers.workers import WorkerPool
from ranks import assert_same, merged, save_ranks
from recipe_values import evaluate
from tiny_models import TINY_FAMILIES, assert_same_model, logits, tiny_model
from unshard.convert.families import FAMILIES
from unshard.convert.names import Renamed, hub_names, names_of_base
from unshard.convert.recipes import Recipe, shape_of, take
from unshard.read.model_config import ModelConfig, read_config
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

pytestmark = [
    pytest.mark.xdist_group("families"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

Array = NDArray[np.generic]
Tensors = Mapping[str, torch.Tensor]

MEASURED = (
    "llama qwen3 gemma2 phi3 qwen3_moe mixtral gpt_oss deepseek_v3 glm4_moe olmoe llama4_text "
    "qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe gemma3 llava llava_onevision "
    "internvl"
).split()
TOWERS = ("gemma3", "llava", "llava_onevision")
TEXT_ONLY = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_omni_moe_text"}
INSIDE = {"qwen3_omni_moe_talker_text", "qwen3_vl_moe_text", "pp_chart2table"}
WITH_RULES = sorted(
    {
        model_type
        for family in FAMILIES
        if family.renames or family.experts
        for model_type in family.model_types.split()
    }
    - TEXT_ONLY
    - INSIDE
)


@pytest.fixture(scope="module")
def tiny(models: Any) -> Callable[[str], Any]:
    assert models is not None  # has set the environment
    return cache(tiny_model)


@pytest.fixture(scope="module")
def saved(
    tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return `saved(model_type)`: where transformers saved the model."""

    def save(model_type: str) -> Path:
        directory = tmp_path_factory.mktemp(model_type) / "saved"
        tiny(model_type).save_pretrained(directory)
        return directory

    return cache(save)


def recipes(tensors: Tensors) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for name, tensor in tensors.items():
        rows = ChunkRows(tensor.ndim).table((Path("f"),))
        found[name] = take(TensorEntry(name, BY_NAME["float32"], tuple(tensor.shape), rows))
    return found


def made(renamed: Renamed, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Evaluate what tensors are renamed to."""
    values: dict[str, Array] = {name: one.detach().numpy() for name, one in tensors.items()}
    return {
        name: torch.from_numpy(np.ascontiguousarray(evaluate(recipe, values)))
        for name, recipe in renamed.value.items()
    }


def config_of(directory: Path) -> ModelConfig:
    return read_config(directory / "config.json")


def untied(model: Any) -> Tensors:
    """Return the state dict without the heads that are embeddings."""
    tied = model.all_tied_weights_keys
    return {name: one for name, one in model.state_dict().items() if name not in tied}


def test_every_family_is_built() -> None:
    without_rules = {"bert", "gpt2", "qwen2"}
    assert set(TINY_FAMILIES) - without_rules == set(MEASURED)


@pytest.mark.parametrize("model_type", MEASURED)
def test_names_shapes_and_values_are_those_that_transformers_saves(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], model_type: str
) -> None:
    state, directory = untied(tiny(model_type)), saved(model_type)
    renamed = hub_names(recipes(state), config_of(directory))
    theirs = load_file(directory / "model.safetensors")
    assert_same(made(renamed, state), theirs)
    again = hub_names(recipes(theirs), config_of(directory))
    assert list(again.value) == list(theirs)


@pytest.mark.parametrize("model_type", MEASURED)
def test_a_merge_loads_and_gives_the_same_logits(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model, directory = tiny(model_type), saved(model_type)
    checkpoint = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    unshard.merge(checkpoint, tmp_path / "out", config=directory, names="hub", verify="full")
    assert_same(merged(tmp_path / "out"), load_file(directory / "model.safetensors"))
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("model_type", TINY_FAMILIES)
def test_a_model_from_the_shards_is_the_one_from_the_merge(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model, directory = tiny(model_type), saved(model_type)
    checkpoint = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    unshard.merge(checkpoint, tmp_path / "out", config=directory)
    found = unshard.from_pretrained(checkpoint, config=directory)
    assert_same_model(found, type(model).from_pretrained(tmp_path / "out"))
    assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma3"])
def test_names_of_training_stay_if_they_are_asked_for(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    model = tiny(model_type)
    checkpoint = save_ranks(tmp_path / "ckpt", model.state_dict(), 2)
    out = tmp_path / "out"
    unshard.merge(checkpoint, out, config=saved(model_type), names="training")
    assert_same(merged(out), untied(model))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma3"])
def test_a_model_sharded_by_real_ranks_is_saved_as_by_transformers(
    models: Any,
    saved: Callable[[str], Path],
    worker_pool: WorkerPool,
    tmp_path: Path,
    model_type: str,
) -> None:
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    worker_pool.run(getattr(models, f"save_{model_type}"), 2, checkpoint)
    truth_file(checkpoint).unlink()
    unshard.merge(checkpoint, tmp_path / "out", config=saved(model_type))
    assert_same(merged(tmp_path / "out"), load_file(saved(model_type) / "model.safetensors"))
    found = unshard.from_pretrained(checkpoint, config=saved(model_type))
    assert_same_model(found, type(found).from_pretrained(tmp_path / "out"))


def test_a_model_sharded_by_fsdp1_is_loaded_from_its_sharded_tensors(
    models: Any,
    tiny: Callable[[str], Any],
    saved: Callable[[str], Path],
    worker_pool: WorkerPool,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    worker_pool.run(models.save_qwen2_fsdp1, 3, checkpoint)
    found = unshard.from_pretrained(checkpoint, config=saved("qwen2"))
    unshard.merge(checkpoint, tmp_path / "out", config=saved("qwen2"))
    assert_same_model(found, type(found).from_pretrained(tmp_path / "out"))
    assert torch.equal(logits(found), logits(tiny("qwen2")))


@pytest.mark.parametrize("model_type", MEASURED)
def test_a_base_decides_in_both_directions(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], model_type: str
) -> None:
    """Whatever the checkpoint's names are, and whichever of them the base has."""
    config, training = config_of(saved(model_type)), untied(tiny(model_type))
    hub = load_file(saved(model_type) / "model.safetensors")
    for tensors in (training, hub):
        for base in (training, hub):
            renamed = names_of_base(recipes(tensors), set(base), config)
            assert_same(made(renamed, tensors), base)
            assert renamed.notes == ()


@pytest.mark.parametrize("model_type", [*TOWERS, "qwen3_5_moe", "qwen3_vl_moe"])
def test_a_base_of_the_hub_is_followed_as_transformers_follows_it(
    tiny: Callable[[str], Any], saved: Callable[[str], Path], tmp_path: Path, model_type: str
) -> None:
    """transformers undoes what it did when it loaded: towers and experts are as they were."""
    model, config = tiny(model_type), config_of(saved(model_type))
    training = untied(model)
    on_hub = as_on_the_hub(model_type, load_file(saved(model_type) / "model.safetensors"), training)
    save_file(on_hub, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config.fields))
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    theirs = load_file(tmp_path / "again" / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in on_hub.items()}
    renamed = names_of_base(recipes(training), set(on_hub), config, shapes)
    assert set(theirs) == set(on_hub)
    assert_same(made(renamed, training), on_hub)


def as_on_the_hub(model_type: str, hub: Tensors, training: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors as the models on the hub have them, which no transformers 5 wrote."""
    if model_type == "qwen3_5_moe":
        return dict(training)
    if model_type == "qwen3_vl_moe":
        return {
            name: one.transpose(1, 2).contiguous() if ".experts." in name else one
            for name, one in hub.items()
        }
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): one
        for name, one in hub.items()
    }


@pytest.mark.parametrize("model_type", WITH_RULES)
def test_every_type_with_rules_is_named_as_by_transformers(models: Any, model_type: str) -> None:
    revert = import_module("transformers.core_model_loading").revert_weight_conversion
    model = models.hollow_model(model_type)
    state = model.state_dict()
    theirs = {name: tuple(tensor.shape) for name, tensor in revert(model, state).items()}
    ours = hub_names(recipes(state), ModelConfig(model.config.to_dict())).value
    assert {name: shape_of(recipe) for name, recipe in ours.items()} == theirs


def test_types_without_rules_have_none_in_transformers(models: Any) -> None:
    assert models is not None  # has set the environment
    mapping = import_module("transformers.conversion_mapping")
    plain = (one for one in FAMILIES if not one.renames and not one.experts)
    for model_type in " ".join(one.model_types for one in plain).split():
        rules = mapping.get_checkpoint_conversion_mapping(model_type) or []
        assert all(type(rule).__name__ == "PrefixChange" for rule in rules), model_type
