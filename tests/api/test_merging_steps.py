"""Every step of a run, each merged by itself."""

import json
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, snapshot, some_tensors
from unshard import CheckpointError, UnknownFormatError, UsageError
from unshard.cli.main import main
from unshard.keywords import MergeKeywords

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (5, 10, 20):
        save_ranks(tmp_path / "run" / f"global_step_{step}" / "actor", some_tensors(step), 2)
    (tmp_path / "run/global_step_20/actor/model_world_size_2_rank_1.pt").unlink()
    return tmp_path / "run"


def test_all_complete_steps_are_merged_each_by_itself(run: Path, tmp_path: Path) -> None:
    heard: list[object] = []
    reports = unshard.merge_all(run, tmp_path / "out", listener=heard.append, config="none")
    assert [report.step for report in reports] == [5, 10]
    for step in (5, 10):
        assert_same(merged(tmp_path / "out" / f"global_step_{step}"), some_tensors(step))
    assert not (tmp_path / "out" / "global_step_20").exists()
    assert any("global_step_20" in str(event) for event in heard)


def test_all_steps_go_next_to_the_steps_by_default(run: Path) -> None:
    unshard.merge_all(run, config="none")
    assert {path.name for path in (run / "merged").iterdir()} == {"global_step_5", "global_step_10"}


def test_one_checkpoint_is_not_a_run(run: Path) -> None:
    with pytest.raises(UnknownFormatError, match="is one checkpoint"):
        unshard.merge_all(run / "global_step_5")


def test_the_command_merges_all_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), "--all-steps", "--json", "--config", "none"])
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
        unshard.merge_all(run, tmp_path / "first", config="none")
    assert_same(merged(tmp_path / "first" / "global_step_10"), some_tensors(10))
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(tmp_path / "second"), "--all-steps", "--config", "none"])
    assert ended.value.code == CheckpointError.exit_code
    told = capsys.readouterr().out.splitlines()
    assert f"saved to {tmp_path / 'second' / 'global_step_10'}" in told
    assert any(line.startswith("step 5: failed: ") for line in told)
    assert any(line.startswith("step 20: passed over: ") for line in told)
    assert told[-1] == "1 of 3 steps merged, 1 failed"


def test_steps_that_were_merged_already_are_used(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unshard.merge_all(run, out, config="none")
    save_ranks(run / "global_step_15" / "actor", some_tensors(15), 2)
    before = snapshot(out / "global_step_5")
    reports = unshard.merge_all(run, out, reuse=True, config="none")
    assert [(one.step, one.reused) for one in reports] == [(5, True), (10, True), (15, False)]
    assert snapshot(out / "global_step_5") == before
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(out), "--all-steps", "--reuse", "--config", "none"])
    assert not ended.value.code
    told = capsys.readouterr().out
    assert f"used {out / 'global_step_5'}, which was made from " in told
    assert told.endswith("\n0 of 4 steps merged, 3 used\n")


@pytest.mark.parametrize("option", [MergeKeywords(push_to_hub="a/b"), MergeKeywords(step=5)])
def test_options_that_contradict_all_steps_are_refused(run: Path, option: MergeKeywords) -> None:
    with pytest.raises(UsageError, match=r"merge_all (with|and)"):
        unshard.merge_all(run, **option)


@pytest.mark.filterwarnings("ignore:.*the weights were taken from:unshard.UnshardWarning")
def test_files_that_are_steps_are_merged_each_under_its_own_name(tmp_path: Path) -> None:
    """MMEngine writes one file a step."""
    for step in (100, 200):
        torch.save({"state_dict": some_tensors(step)}, tmp_path / f"iter_{step}.pth")
    reports = unshard.merge_all(tmp_path, tmp_path / "out", config="none")
    assert [report.step for report in reports] == [100, 200]
    for step in (100, 200):
        assert_same(merged(tmp_path / "out" / f"iter_{step}"), some_tensors(step))
