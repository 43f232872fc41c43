"""An adapter in a file next to weights that have no LoRA names: transformers applies it."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import Tensors, assert_same, merged, save_ranks
from tiny_models import tiny_model
from unshard import ConversionError, CorruptError, UsageError
from unshard.cli.main import main
from unshard.keywords import Lora

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of transformers, by peft
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]

IDS = torch.arange(16).reshape(2, 8)
Truth = tuple[Path, Tensors]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """Return a model's directory with an adapter in `adapter/`, and what PEFT merges them to."""
    from peft import LoraConfig, get_peft_model

    place = tmp_path_factory.mktemp("beside")
    base: Any = tiny_model("llama")
    base.save_pretrained(place / "base")
    whole = ["lm_head"]
    model = get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], modules_to_save=whole),
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(place / "adapter"))
    return place, dict(model.merge_and_unload().state_dict())


def put_whole(place: Path, step: Path) -> None:
    shutil.copytree(place / "base", step)
    shutil.copytree(place / "adapter", step, dirs_exist_ok=True)


def put_below(place: Path, step: Path) -> None:
    """What verl's merger writes: the base, and the adapter in a folder."""
    shutil.copytree(place / "base", step)
    shutil.copytree(place / "adapter", step / "lora_adapter")


def put_fsdp_file(place: Path, step: Path) -> None:
    put_whole(place, step)
    (step / "model.safetensors").unlink()
    torch.save(load_file(place / "base" / "model.safetensors"), step / "pytorch_model_fsdp.bin")


def put_dcp(place: Path, step: Path) -> None:
    put_whole(place, step)
    (step / "model.safetensors").unlink()
    state = {"model": load_file(place / "base" / "model.safetensors")}
    save(state, checkpoint_id=step / "pytorch_model_fsdp_0", no_dist=True)


def put_ranks(place: Path, step: Path) -> None:
    save_ranks(step / "actor", load_file(place / "base" / "model.safetensors"), 2)
    shutil.copytree(place / "adapter", step / "actor" / "lora_adapter")
    shutil.copy(place / "base" / "config.json", step / "actor")


def put_pickled_adapter(place: Path, step: Path) -> None:
    put_whole(place, step)
    (step / "adapter_model.safetensors").unlink()
    torch.save(
        load_file(place / "adapter" / "adapter_model.safetensors"), step / "adapter_model.bin"
    )


FORMS = [put_whole, put_below, put_fsdp_file, put_dcp, put_ranks, put_pickled_adapter]
Put = Callable[[Path, Path], None]
each_form = pytest.mark.parametrize("put", FORMS)


def assert_fused(found: Tensors, truth: Tensors) -> None:
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert torch.allclose(found[name], expected, rtol=1e-6, atol=1e-5), name


@each_form
def test_it_is_an_error_that_names_both_and_nothing_is_written(
    trained: Truth, tmp_path: Path, put: Put
) -> None:
    step = tmp_path / "checkpoint-5"
    put(trained[0], step)
    with pytest.raises(ConversionError) as error:
        unshard.merge(step, tmp_path / "out")
    (adapter,) = step.rglob("adapter_model.*")
    assert str(adapter) in error.value.subject
    assert str(step) in error.value.subject
    assert "lora='fuse'" in str(error.value)
    assert "lora='ignore'" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "PROMPT_TUNING"])
def test_an_adapter_of_another_kind_is_not_to_be_fused(
    trained: Truth, tmp_path: Path, kind: str
) -> None:
    put_whole(trained[0], tmp_path / "run")
    (tmp_path / "run/adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    with pytest.raises(ConversionError, match=f"it is {kind}, which PEFT itself merges") as error:
        unshard.merge(tmp_path / "run", tmp_path / "out")
    assert "lora='fuse'" not in str(error.value)
    unshard.merge(tmp_path / "run", tmp_path / "out", lora="ignore")


def test_it_is_resharded_with_the_weights(trained: Truth, tmp_path: Path) -> None:
    step = tmp_path / "global_step_5"
    put_ranks(trained[0], step)
    report = unshard.reshard(step / "actor", tmp_path / "out", world_size=3)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*report.others}
    with pytest.raises(ConversionError, match=r"adapter_model\.safetensors is next to"):
        unshard.merge(tmp_path / "out", tmp_path / "bare")
    unshard.merge(tmp_path / "out", tmp_path / "fused", lora="fuse")
    assert_fused(merged(tmp_path / "fused"), trained[1])


@each_form
def test_it_is_fused(trained: Truth, tmp_path: Path, put: Put) -> None:
    place, truth = trained
    step = tmp_path / "checkpoint-5"
    put(place, step)
    report = unshard.merge(step, tmp_path / "out", lora="fuse", verify="full")
    assert_fused(merged(tmp_path / "out"), truth)
    assert any("LoRA pairs were fused" in warning for warning in report.warnings)
    assert unshard.verify(tmp_path / "out", step).equal
    unshard.merge(step, tmp_path / "again", lora="both")
    assert_same(merged(tmp_path / "again"), merged(tmp_path / "out"))
    assert unshard.verify(tmp_path / "again", step).equal
    assert (tmp_path / "again" / "lora_adapter" / "adapter_model.safetensors").is_file()


@each_form
def test_it_is_ignored_or_written_by_itself(trained: Truth, tmp_path: Path, put: Put) -> None:
    place, _ = trained
    step = tmp_path / "checkpoint-5"
    put(place, step)
    unshard.merge(step, tmp_path / "out", lora="ignore")
    assert_same(merged(tmp_path / "out"), load_file(place / "base" / "model.safetensors"))
    assert unshard.verify(tmp_path / "out", step).equal
    unshard.merge(step, tmp_path / "adapter", lora="adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same(written, load_file(place / "adapter" / "adapter_model.safetensors"))


def test_transformers_applies_it_too(trained: Truth, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    put_whole(trained[0], tmp_path / "run")
    unshard.merge(tmp_path / "run", tmp_path / "out", lora="fuse")
    load = AutoModelForCausalLM.from_pretrained
    both, fused, base = (
        load(one)(input_ids=IDS).logits
        for one in (tmp_path / "run", tmp_path / "out", trained[0] / "base")
    )
    assert (both - base).abs().max() > 0.01
    assert torch.allclose(both, fused, rtol=1e-4, atol=1e-4)


@each_form
def test_inspect_shows_it(trained: Truth, tmp_path: Path, put: Put) -> None:
    step = tmp_path / "checkpoint-5"
    put(trained[0], step)
    (adapter,) = step.rglob("adapter_model.*")
    would_write = unshard.inspect(step).would_write
    assert would_write.startswith("nothing: ")
    assert str(adapter) in would_write


def test_what_is_used_without_merging_it_is_an_error_too(trained: Truth, tmp_path: Path) -> None:
    put_ranks(trained[0], tmp_path / "run")
    for call in (unshard.from_pretrained, partial(unshard.open_checkpoint, names="hub")):
        with pytest.raises(ConversionError, match=r"adapter_model\.safetensors is next to"):
            call(tmp_path / "run")


def test_tensors_as_they_are_stored_come_with_a_warning(trained: Truth, tmp_path: Path) -> None:
    put_ranks(trained[0], tmp_path / "run")
    with pytest.warns(unshard.UnshardWarning, match=r"adapter_model\.safetensors, is not applied"):
        tensors = unshard.load_state_dict(tmp_path / "run")
    assert_same(tensors, load_file(trained[0] / "base" / "model.safetensors"))


def test_the_lines_to_paste_work(
    trained: Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_ranks(trained[0], tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["merge", str(tmp_path / "run"), str(tmp_path / "out")])
    printed = capsys.readouterr().err
    for choice in ("fuse", "ignore"):
        assert f"--lora {choice}" in printed
        arguments = ["merge", str(tmp_path / "run"), str(tmp_path / choice), "--lora", choice]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code


# not meant


def test_an_output_that_has_its_adapter_fused(trained: Truth, tmp_path: Path) -> None:
    put_ranks(trained[0], tmp_path / "run")
    unshard.merge(tmp_path / "run", tmp_path / "both", lora="both")
    unshard.merge(tmp_path / "both", tmp_path / "again")
    assert_same(merged(tmp_path / "again"), merged(tmp_path / "both"))
    with pytest.raises(UsageError, match="has no LoRA adapter"):
        unshard.merge(tmp_path / "both", tmp_path / "other", lora="both")
    # A training that went on from there has an adapter of its own.
    shutil.copytree(trained[0] / "adapter", tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(ConversionError, match=r"both/adapter_model\.safetensors is next to"):
        unshard.merge(tmp_path / "both", tmp_path / "other")


def test_an_output_of_another_choice_is_not_trusted(trained: Truth, tmp_path: Path) -> None:
    put_ranks(trained[0], tmp_path / "run")
    unshard.merge(tmp_path / "run", tmp_path / "base", lora="ignore")
    shutil.copytree(trained[0] / "adapter", tmp_path / "base" / "lora_adapter")
    with pytest.raises(
        ConversionError, match=r"lora_adapter/adapter_model\.safetensors is next to"
    ):
        unshard.merge(tmp_path / "base", tmp_path / "out")


def test_a_base_in_the_cache_of_the_hub(
    trained: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--base"
    put_whole(trained[0], repository / "snapshots" / "1")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    tensors = load_file(trained[0] / "base" / "model.safetensors")
    save_ranks(tmp_path / "run", tensors, 2)
    unshard.merge(tmp_path / "run", tmp_path / "out", base=repository / "snapshots" / "1")
    assert_same(merged(tmp_path / "out"), tensors)
    (alone := tmp_path / "alone").mkdir()
    adapter = load_file(trained[0] / "adapter" / "adapter_model.safetensors")
    save_ranks(alone, adapter, 2)
    shutil.copy(trained[0] / "adapter" / "adapter_config.json", alone)
    unshard.merge(alone, tmp_path / "fused", base=repository / "snapshots" / "1")
    assert_fused(merged(tmp_path / "fused"), trained[1])


@pytest.mark.parametrize("folder", ["old", "adapters/default", "critic", "checkpoint-4"])
def test_a_folder_that_neither_transformers_nor_the_trainer_reads(
    trained: Truth, tmp_path: Path, folder: str
) -> None:
    shutil.copytree(trained[0] / "base", tmp_path / "run" / "checkpoint-5")
    shutil.copytree(trained[0] / "adapter", tmp_path / "run" / "checkpoint-5" / folder)
    unshard.merge(tmp_path / "run" / "checkpoint-5", tmp_path / "out")
    base = load_file(trained[0] / "base" / "model.safetensors")
    assert_same(merged(tmp_path / "out"), base)


def test_the_adapter_of_another_role(trained: Truth, tmp_path: Path) -> None:
    step = tmp_path / "global_step_1"
    put_ranks(trained[0], step)
    tensors = load_file(trained[0] / "base" / "model.safetensors")
    save_ranks(step / "critic", tensors, 2)
    unshard.merge(step, tmp_path / "out", role="critic", config="none")
    assert_same(merged(tmp_path / "out"), tensors)


def test_the_adapter_file_itself(trained: Truth, tmp_path: Path) -> None:
    put_whole(trained[0], tmp_path / "run")
    file = tmp_path / "run" / "adapter_model.safetensors"
    unshard.merge(file, tmp_path / "out", base=trained[0] / "base")
    assert_fused(merged(tmp_path / "out"), trained[1])


def test_an_adapter_among_the_weights_cannot_be_ignored(trained: Truth, tmp_path: Path) -> None:
    file = trained[0] / "adapter" / "adapter_model.safetensors"
    with pytest.raises(UsageError, match="lora='ignore'"):
        unshard.merge(file, tmp_path / "out", lora="ignore", base=trained[0] / "base")


def test_a_record_that_is_damaged_is_only_read_next_to_an_adapter(
    trained: Truth, tmp_path: Path
) -> None:
    shutil.copytree(trained[0] / "base", tmp_path / "run")
    (tmp_path / "run" / "unshard.json").write_text("{")
    unshard.merge(tmp_path / "run", tmp_path / "out")
    shutil.copytree(trained[0] / "adapter", tmp_path / "run" / "lora_adapter")
    with pytest.raises(CorruptError, match=r"unshard\.json"):
        unshard.merge(tmp_path / "run", tmp_path / "other")


@pytest.mark.parametrize("lora", ["fuse", "both", "adapter"])
def test_a_file_that_is_not_an_adapter_is_not_taken_for_the_model(
    trained: Truth, tmp_path: Path, lora: Lora
) -> None:
    shutil.copytree(trained[0] / "base", tmp_path / "run")
    save_file(
        {"prompt_embeddings": torch.zeros(2, 2)}, tmp_path / "run" / "adapter_model.safetensors"
    )
    with pytest.raises(UsageError, match="has no LoRA adapter"):
        unshard.merge(tmp_path / "run", tmp_path / "out", lora=lora)
