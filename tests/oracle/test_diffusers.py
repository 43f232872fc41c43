"""Models of diffusers, trained under FSDP2: merged, they are what diffusers itself saves and loads.

Each is compared with the live model of the training: the same tensors, the same output.
"""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import unshard
from oracle.writers.libraries import ADAPTED, files_in, truth_of
from ranks import assert_same, bits
from tiny_diffusers import (
    TINY_DIFFUSERS,
    TINY_PIPELINES,
    diffusers_class,
    diffusers_output,
    load_pipeline,
    pipeline_images,
    tiny_diffusers,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),
]

WEIGHTS = "diffusion_pytorch_model.safetensors"


def loaded(name: str, place: Path) -> Any:
    """Load by the class itself, which must find all its tensors and nothing else."""
    model, told = diffusers_class(name).from_pretrained(place, output_loading_info=True)
    assert not any(told.values()), told
    return model


def assert_trained(name: str, model: Any, folder: Path) -> None:
    """A model is the live one: the same tensors, the same output, bit for bit."""
    assert_same(model.state_dict(), truth_of(folder))
    with torch.no_grad():
        found = diffusers_output(name, model)
    assert bits(found) == bits(torch.load(folder / "output"))


@pytest.mark.parametrize("name", TINY_DIFFUSERS)
def test_rank_files_become_what_the_class_saves(libraries: Path, tmp_path: Path, name: str) -> None:
    folder = libraries / name
    unshard.merge(folder / "ranks", tmp_path / "out")
    assert files_in(tmp_path / "out") == {*files_in(folder / "saved"), "unshard.json"}
    for file in files_in(folder / "saved"):
        assert filecmp.cmp(tmp_path / "out" / file, folder / "saved" / file, shallow=False), file
    assert_trained(name, loaded(name, tmp_path / "out"), folder)


@pytest.mark.parametrize("name", sorted(TINY_DIFFUSERS.keys() - TINY_PIPELINES))
def test_dcp_and_a_base_become_what_the_class_saves(
    libraries: Path, tmp_path: Path, name: str
) -> None:
    folder = libraries / name
    unshard.merge(folder / "dcp", tmp_path / "out", base=folder / "base")
    assert_trained(name, loaded(name, tmp_path / "out"), folder)


@pytest.mark.parametrize("form", ["ranks", "dcp"])
@pytest.mark.parametrize("name", TINY_PIPELINES)
def test_a_pipeline_as_base_becomes_a_whole_one_with_the_trained_component(
    libraries: Path, tmp_path: Path, name: str, form: str
) -> None:
    folder, component = libraries / name, TINY_PIPELINES[name][0]
    unshard.merge(folder / form, tmp_path / "out", base=folder / "base")
    assert files_in(tmp_path / "out") == {*files_in(folder / "base"), "unshard.json"}
    changed = {
        file
        for file in files_in(folder / "base")
        if not filecmp.cmp(tmp_path / "out" / file, folder / "base" / file, shallow=False)
    }
    assert changed == {f"{component}/{WEIGHTS}"}
    assert_trained(name, loaded(name, tmp_path / "out" / component), folder)
    expected = load_pipeline(folder / "base")
    before = pipeline_images(name, expected)
    expected.register_modules(**{component: loaded(name, folder / "saved")})
    images = pipeline_images(name, load_pipeline(tmp_path / "out"))
    assert bits(images) == bits(pipeline_images(name, expected)) != bits(before)


def test_shards_are_those_that_the_class_saves(libraries: Path, tmp_path: Path) -> None:
    folder = libraries / "wan"
    unshard.merge(folder / "ranks", tmp_path / "out", max_shard_size=20_000)
    model = loaded("wan", tmp_path / "out")
    assert_trained("wan", model, folder)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    assert len(files_in(tmp_path / "theirs")) > 3
    assert files_in(tmp_path / "out") == {*files_in(tmp_path / "theirs"), "unshard.json"}
    ours, theirs = (
        json.loads((tmp_path / side / f"{WEIGHTS}.index.json").read_text())
        for side in ("out", "theirs")
    )
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


def test_bfloat16_is_loaded_as_it_was_written(libraries: Path, tmp_path: Path) -> None:
    """It keeps no dtype in its config: diffusers loads float32 unless it is asked."""
    folder = libraries / "sd3"
    unshard.merge(folder / "ranks", tmp_path / "out", dtype="bfloat16")
    config = (tmp_path / "out" / "config.json").read_bytes()
    assert config == (folder / "saved" / "config.json").read_bytes()
    model = diffusers_class("sd3").from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    expected = {name: value.bfloat16() for name, value in truth_of(folder).items()}
    assert_same(model.state_dict(), expected)


def test_an_adapter_is_loaded_by_its_pipeline(libraries: Path, tmp_path: Path) -> None:
    folder = libraries / ADAPTED
    unshard.merge(folder / "ranks", tmp_path / "out", lora="adapter")
    assert files_in(tmp_path / "out") == {"pytorch_lora_weights.safetensors", "unshard.json"}
    with (
        safe_open(tmp_path / "out" / "pytorch_lora_weights.safetensors", "pt") as ours,
        safe_open(folder / "saved" / "pytorch_lora_weights.safetensors", "pt") as theirs,
    ):
        assert_same(
            {name: ours.get_tensor(name) for name in ours.keys()},  # noqa: SIM118 (no mapping)
            {name: theirs.get_tensor(name) for name in theirs.keys()},  # noqa: SIM118
        )
    pipeline = load_pipeline(folder / "base")
    pipeline.load_lora_weights(tmp_path / "out")
    (adapter,) = pipeline.transformer.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (4, 32)
    with torch.no_grad():
        found = diffusers_output("sd3", pipeline.transformer)
    assert bits(found) == bits(torch.load(folder / "output"))


def test_an_adapter_is_fused_as_its_pipeline_fuses_it(libraries: Path, tmp_path: Path) -> None:
    folder = libraries / ADAPTED
    unshard.merge(folder / "ranks", tmp_path / "out", lora="fuse", base=folder / "base")
    fused = loaded("sd3", tmp_path / "out" / "transformer").state_dict()
    pipeline = load_pipeline(folder / "base")
    pipeline.load_lora_weights(folder / "saved")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    expected = pipeline.transformer.state_dict()
    assert fused.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(fused[name], value) for name, value in base_state().items())


def base_state() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = tiny_diffusers("sd3").state_dict()
    return found


def test_shards_are_loaded_without_a_merge(libraries: Path) -> None:
    folder = libraries / "wan"
    assert_trained("wan", unshard.from_pretrained(folder / "ranks"), folder)
    expected = diffusers_class("wan").from_pretrained(folder / "saved", torch_dtype=torch.bfloat16)
    found = unshard.from_pretrained(folder / "ranks", dtype="bfloat16")
    assert_same(found.state_dict(), expected.state_dict())
    loading = unshard.verify(folder / "saved", folder / "ranks", load=True).loading
    assert loading is not None
    assert loading.complete


def test_what_the_class_keeps_in_float32_is_not_cast(libraries: Path, tmp_path: Path) -> None:
    folder = libraries / "wan"
    unshard.merge(folder / "ranks", tmp_path / "out", dtype="bfloat16")
    cast, whole = (
        diffusers_class("wan").from_pretrained(place, torch_dtype=torch.bfloat16)
        for place in (tmp_path / "out", folder / "saved")
    )
    assert_same(cast.state_dict(), whole.state_dict())
