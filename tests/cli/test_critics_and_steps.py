"""Critics and value heads; selections; every step of a run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, bits, merged, rank_path, save_ranks, snapshot, some_tensors
from tiny_models import tiny_config, tiny_model
from unshard import CheckpointError, MergeOptions, OutputError, UnknownFormatError, UsageError
from unshard.cli.main import main

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


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("^model", None, ["model.embed_tokens.weight", "model.norm.weight"]),
        (None, "norm|head", ["model.embed_tokens.weight"]),
        ("weight", "embed", ["lm_head.weight", "model.norm.weight"]),
    ],
)
def test_tensors_are_selected_by_name(
    tmp_path: Path, include: str | None, exclude: str | None, expected: list[str]
) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", include=include, exclude=exclude)
    assert sorted(merged(tmp_path / "out")) == expected


@pytest.mark.parametrize(
    ("include", "words"), [("nothing", "leaves no tensor"), ("(", "not a reg")]
)
def test_a_selection_of_nothing_is_refused(tmp_path: Path, include: str, words: str) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 1)
    with pytest.raises(UsageError, match=words):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", include=include)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10, 20):
        save_ranks(tmp_path / "run" / f"global_step_{step}" / "actor", some_tensors(step), 2)
    (tmp_path / "run/global_step_20/actor/model_world_size_2_rank_1.pt").unlink()
    return tmp_path / "run"


def test_all_complete_steps_are_merged_each_by_itself(run: Path, tmp_path: Path) -> None:
    heard: list[object] = []
    reports = unshard.merge_all(run, tmp_path / "out", MergeOptions(), heard.append)
    assert [report.step for report in reports] == [5, 10]
    for step in (5, 10):
        assert_same(merged(tmp_path / "out" / f"global_step_{step}"), some_tensors(step))
    assert not (tmp_path / "out" / "global_step_20").exists()
    assert any("global_step_20" in str(event) for event in heard)


def test_all_steps_go_next_to_the_steps_by_default(run: Path) -> None:
    unshard.merge_all(run)
    assert {path.name for path in (run / "merged").iterdir()} == {"global_step_5", "global_step_10"}


def test_one_checkpoint_is_not_a_run(run: Path) -> None:
    with pytest.raises(UnknownFormatError, match="is one checkpoint"):
        unshard.merge_all(run / "global_step_5")


def test_the_command_merges_all_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), "--all-steps", "--json"])
    assert not ended.value.code
    reports = json.loads(capsys.readouterr().out)
    assert [report["step"] for report in reports] == [5, 10, 20]
    assert "rank 1" in reports[2]["passed_over"]
    assert [Path(report["output"]).is_dir() for report in reports] == [True, True, False]


def test_a_step_that_fails_keeps_back_no_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_path(run / "global_step_5" / "actor", 2, 0).write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="global_step_5"):
        unshard.merge_all(run, tmp_path / "first")
    assert_same(merged(tmp_path / "first" / "global_step_10"), some_tensors(10))
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(tmp_path / "second"), "--all-steps"])
    assert ended.value.code == CheckpointError.exit_code
    told = capsys.readouterr().out.splitlines()
    assert f"saved to {tmp_path / 'second' / 'global_step_10'}" in told
    assert any(line.startswith("step 5: failed: ") for line in told)
    assert any(line.startswith("step 20: passed over: ") for line in told)
    assert told[-1] == "1 of 3 steps merged, 1 failed"


def test_steps_that_were_merged_already_can_be_skipped(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unshard.merge_all(run, out)
    save_ranks(run / "global_step_15" / "actor", some_tensors(15), 2)
    before = snapshot(out / "global_step_5")
    reports = unshard.merge_all(run, out, skip_existing=True)
    assert [report.step for report in reports] == [15]
    assert snapshot(out / "global_step_5") == before
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(out), "--all-steps", "--skip-existing"])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert f"step 5: skipped, {out / 'global_step_5'} was made from it already\n" in told
    assert told.endswith("\n0 of 4 steps merged\n")


@pytest.mark.parametrize("change", ["options", "another step", "cut short", "no record"])
def test_only_what_was_made_from_a_step_counts_as_it(
    run: Path, tmp_path: Path, change: str
) -> None:
    out, options = tmp_path / "out", MergeOptions()
    unshard.merge_all(run, out)
    if change == "options":
        options = MergeOptions(dtype="float16")
    elif change == "another step":
        (out / "global_step_5").rename(tmp_path / "away")
        shutil.copytree(out / "global_step_10", out / "global_step_5")
    elif change == "cut short":
        os.truncate(out / "global_step_5" / "model.safetensors", 10)
    else:
        (out / "global_step_5" / "unshard.json").unlink()
    with pytest.raises(OutputError, match="global_step_5"):
        unshard.merge_all(run, out, options, skip_existing=True)


def test_skipping_goes_with_all_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), "--skip-existing"])
    assert ended.value.code == UsageError.exit_code
    assert "--skip-existing needs --all-steps" in capsys.readouterr().err


@pytest.mark.parametrize("option", [{"push_to_hub": "a/b"}, {"step": 5}])
def test_options_that_contradict_all_steps_are_refused(
    run: Path, option: dict[str, str | int]
) -> None:
    with pytest.raises(UsageError, match="merge_all with"):
        unshard.merge_all(run, options=MergeOptions(**option))  # type: ignore[arg-type]
