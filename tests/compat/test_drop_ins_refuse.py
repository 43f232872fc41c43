"""What the drop-in commands refuse, as the tools that they replace do, and what they add."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, GenerationConfig

from ranks import merged, save_ranks, snapshot, some_tensors
from tiny_models import tiny_config
from unshard.compat import (
    convert_checkpoint_simple,
    convert_fsdp_to_hf,
    merge_fsdp,
    verl,
    zero_to_fp32,
)
from unshard.errors import UnshardError, UsageError
from unshard.merger import FSDP2Merger
from unshard.merger import __main__ as merger
from unshard.merger.saving import generation_config

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

CAUSAL = ["Qwen2ForCausalLM"]
Run = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command of a module in this process; return whether it fails, as a number."""

    def run(module: object, *arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        try:
            vars(module)["main"]()
        except UnshardError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0

    return run


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step that both lmms-engine and verl could have saved, without a config.json."""
    place = tmp_path / "run" / "checkpoint-10"
    for folder in ("pytorch_model_fsdp_0", "actor"):
        save_ranks(place / folder, some_tensors(), 2)
    return place


EMPTY = {
    "merger": (merger, ["--checkpoint_path", ""]),
    "merger's output": (merger, ["--checkpoint_path", ".", "--output_path", ""]),
    "merge_fsdp": (merge_fsdp, ["--input_dir", ""]),
    "merge_fsdp's output": (merge_fsdp, ["--input_dir", ".", "--output_dir", ""]),
    "simple": (convert_checkpoint_simple, [""]),
    "simple's folder": (convert_checkpoint_simple, [".", "--output", "out", "--actor-dir", ""]),
    "simple's output": (convert_checkpoint_simple, [".", "--output", ""]),
    "fsdp_to_hf": (convert_fsdp_to_hf, ["--checkpoint_path", ""]),
    "fsdp_to_hf's output": (convert_fsdp_to_hf, ["--checkpoint_path", ".", "--output_path", ""]),
    "verl": (verl, ["merge", "--backend", "fsdp", "--local_dir", ".", "--target_dir", ""]),
    "zero_to_fp32": (zero_to_fp32, ["", "out"]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_variable_of_a_shell_is_not_the_current_directory(
    step: Path,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    tiny_config(architectures=CAUSAL).save_pretrained(step)
    monkeypatch.chdir(step)
    before = snapshot(step.parent)
    module, arguments = EMPTY[name]
    with pytest.raises(SystemExit) as ended:
        command(module, *arguments)
    assert ended.value.code == 2
    assert "is an empty path" in capsys.readouterr().err
    for paths in (("", step), (step, "")):
        with pytest.raises(UsageError, match="an empty path"):
            FSDP2Merger().merge(*paths)
    assert snapshot(step.parent) == before


def lines(step: Path, out: Path) -> dict[str, tuple[object, list[str | Path]]]:
    return {
        "merger": (merger, ["--checkpoint_path", step / "pytorch_model_fsdp_0" / "..", *o(out)]),
        "merge_fsdp": (
            merge_fsdp,
            ["--input_dir", step / "pytorch_model_fsdp_0", "--output_dir", out],
        ),
        "simple": (convert_checkpoint_simple, [step, "--output", out]),
        "fsdp_to_hf": (convert_fsdp_to_hf, ["--checkpoint_path", step, *o(out)]),
        "verl": (
            verl,
            ["merge", "--backend", "fsdp", "--local_dir", step / "actor", "--target_dir", out],
        ),
    }


def o(out: Path) -> list[str | Path]:
    return ["--output_path", out]


@pytest.mark.parametrize("which", ["merge_fsdp", "simple", "fsdp_to_hf", "verl"])
def test_without_a_config_nothing_is_written(
    step: Path, tmp_path: Path, command: Run, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    before = snapshot(tmp_path)
    module, arguments = lines(step, tmp_path / "out")[which]
    assert command(module, *arguments) == 1
    said = capsys.readouterr()
    assert "there is no config.json, without which the output is not a model" in said.err
    assert str(step) in said.err
    assert "✓ Merged" not in said.out
    assert "successfully" not in said.out
    assert snapshot(tmp_path) == before


def lmms(step: Path) -> Path:
    """Make the step one of lmms-engine, with a config."""
    (step / "actor").rename(step.parent / "away")
    tiny_config(architectures=CAUSAL).save_pretrained(step)
    return step


def test_the_merger_needs_a_config_too(step: Path, command: Run) -> None:
    (step / "actor").rename(step.parent / "away")
    before = snapshot(step)
    assert command(merger, "--checkpoint_path", step) == 1
    assert snapshot(step) == before


@pytest.mark.parametrize("inner", ["optimizer", "pytorch_model_fsdp_0", "logs", "config.json"])
def test_the_merger_does_not_write_into_a_part_of_a_checkpoint(
    step: Path, command: Run, capsys: pytest.CaptureFixture[str], inner: str
) -> None:
    lmms(step)
    allow_names(step)
    for folder in ("optimizer", "logs"):
        (step / folder).mkdir()
    before = snapshot(step)
    assert command(merger, "--checkpoint_path", step / inner) == 1
    assert f"pass the checkpoint itself: {step}" in capsys.readouterr().err
    assert snapshot(step) == before


def test_a_shard_folder_of_any_name_has_the_config_of_its_step(step: Path, command: Run) -> None:
    lmms(step)
    (step / "pytorch_model_fsdp_0").rename(step / "my_shards")
    out = step.parent.parent / "out"
    arguments = ("--input_dir", step.parent, "--type", "fsdp2", "--state_dict_dirname", "my_shards")
    allow_names(step)
    assert command(merge_fsdp, *arguments, "--output_dir", out) == 0
    assert json.loads((out / "config.json").read_text())["mine"] is True


def test_the_output_of_an_average_is_checked_before_anything_is_read(
    step: Path, command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = step.parent.parent / "model.safetensors"
    assert command(merge_fsdp, "--input_dir", step.parent, "--merge", "--output_dir", out) == 1
    assert "the output is a directory, and this is the name of a file" in capsys.readouterr().err
    assert not out.exists()


def allow_names(step: Path) -> None:
    """Make the config one of a family whose names are not known: three tensors are not Qwen2."""
    config = {"model_type": "mine", "mine": True, "architectures": ["MyForCausalLM"]}
    (step / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))


def test_an_auto_class_is_not_an_architecture(
    step: Path, command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    lmms(step)
    allow_names(step)
    out = step.parent.parent / "out"
    for name, written in (("AutoModelForCausalLM", "MyForCausalLM"), ("OtherModel", "OtherModel")):
        arguments = ("--input_dir", step.parent, "--output_dir", out)
        assert command(merge_fsdp, *arguments, "--model_name_or_class", name) == 0
        assert json.loads((out / "config.json").read_text())["architectures"] == [written]
        changed = "architectures changed from ['MyForCausalLM'] to ['OtherModel']"
        assert (changed in capsys.readouterr().err) is (written == "OtherModel")


def test_the_advice_to_give_a_config_works_with_a_file_and_a_directory(
    step: Path, command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (step / "actor").rename(step.parent / "away")
    out, config = step.parent.parent / "out", step.parent.parent / "config"
    config.mkdir()
    allow_names(config)
    arguments = ("--input_dir", step.parent, "--output_dir", out)
    assert command(merge_fsdp, *arguments) == 1
    assert "give it with --model_name_or_class FILE|DIR" in capsys.readouterr().err
    for given in (config / "config.json", config):
        assert command(merge_fsdp, *arguments, "--model_name_or_class", given) == 0
        assert json.loads((out / "config.json").read_text())["model_type"] == "mine"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0},
        {"use_cache": False, "eos_token_id": 5},
    ],
)
def test_the_generation_config_is_the_one_that_transformers_writes(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    tiny_config(architectures=CAUSAL, **fields).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    expected = GenerationConfig.from_model_config(config).to_json_string()
    found = generation_config(json.loads((tmp_path / "config.json").read_text()))
    assert found is not None
    assert found.decode() == expected
    assert generation_config({"architectures": ["Qwen2ForTokenClassification"]}) is None


def test_the_class_writes_a_generation_config_unless_there_is_one(step: Path) -> None:
    lmms(step)
    allow_names(step)
    out = step.parent.parent / "out"
    FSDP2Merger().merge(step, out)
    written = json.loads((out / "generation_config.json").read_text())
    assert (written["_from_model_config"], written["eos_token_id"]) == (True, 2)
    (step / "generation_config.json").write_text('{"temperature": 0.5}')
    FSDP2Merger().merge(step, out)
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_merged_is_reported_after_the_merge(
    step: Path, command: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (step / "actor" / "config.json").write_text('{"model_type": "mine"}')
    out = step.parent.parent / "o'ut"
    out.write_text("a file is in the way")
    assert command(convert_checkpoint_simple, step, "--output", out) == 1
    assert "✓ Merged" not in capsys.readouterr().out
    out.unlink()
    assert command(convert_checkpoint_simple, step, "--output", out) == 0
    said = capsys.readouterr().out
    assert "✓ Merged 3 parameters:" in said
    assert f'from_pretrained("{out}")' in said
    assert len(merged(out)) == 3
