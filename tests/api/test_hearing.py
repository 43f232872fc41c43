"""Who hears what: the caller of the API, the first line of a command, the report and the record."""

import json
import logging
import os
import pty
import shutil
import sys
import warnings
from pathlib import Path

import pytest

import unshard
from ranks import rank_path, save_ranks, some_tensors
from unshard import IncompleteError, UnshardWarning
from unshard.cli.main import main
from unshard.merger import FSDP2Merger
from unshard.progress import Chosen, Event, Warned

MISSING = "pytorch_model_fsdp_0: Missing checkpoint for rank 1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of lmms-engine whose newest step lacks a rank."""
    for step in (500, 1000):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        save_ranks(checkpoint / "pytorch_model_fsdp_0", some_tensors(step), 2)
        (checkpoint / "config.json").write_text('{"model_type": "x"}')
    rank_path(tmp_path / "run" / "checkpoint-1000" / "pytorch_model_fsdp_0", 2, 1).unlink()
    return tmp_path / "run"


def warned(run: Path, output: Path) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        unshard.merge(run, output)
    return heard


def test_a_caller_is_warned_at_the_line_of_the_call(run: Path, tmp_path: Path) -> None:
    heard = warned(run, tmp_path / "out")
    (passed,) = [one for one in heard if "passed over" in str(one.message)]
    assert passed.category is UnshardWarning
    assert passed.filename == __file__
    assert MISSING in str(passed.message)


def test_a_listener_gets_warnings_and_none_is_given_twice(run: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    report = unshard.merge(run, tmp_path / "out", listener=events.append)
    told = [event.message for event in events if isinstance(event, Warned)]
    assert report.warnings == tuple(told)
    (chosen,) = [event.message for event in events if isinstance(event, Chosen)]
    assert chosen.startswith(f"merging {run / 'checkpoint-500' / 'pytorch_model_fsdp_0'} (step 500")


def test_report_and_record_say_which_step_was_passed_over(run: Path, tmp_path: Path) -> None:
    report = unshard.merge(run, tmp_path / "out", listener=lambda _event: None)
    assert report.step == 500
    (passed,) = report.passed_over
    assert (passed.step, passed.reason.startswith(MISSING)) == (1000, True)
    source = json.loads((tmp_path / "out" / "unshard.json").read_text())["source"]
    assert source["step"] == 500
    assert source["passed_over"] == [{"step": 1000, "reason": passed.reason}]
    assert str(tmp_path) not in json.dumps(source)
    alone = unshard.merge(run / "checkpoint-500", tmp_path / "alone", listener=lambda _event: None)
    assert alone.passed_over == ()


def test_an_average_says_which_steps_it_left_out(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "checkpoint-500", run / "checkpoint-600")
    (run / "checkpoint-2000").mkdir()
    events: list[Event] = []
    report = unshard.average(run, tmp_path / "out", listener=events.append)
    assert [one.step for one in report.passed_over] == [2000, 1000]
    assert any(MISSING in one for one in report.warnings)
    (chosen,) = [event.message for event in events if isinstance(event, Chosen)]
    for step in (500, 600):
        assert f"checkpoint-{step}/pytorch_model_fsdp_0 (step {step}, model weights)" in chosen


@pytest.mark.parametrize("command", ["merge", "average", "verify"])
def test_the_first_line_of_a_command_says_what_it_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shutil.copytree(run / "checkpoint-500", run / "checkpoint-600")
    out = str(tmp_path / "out")
    words = {
        "merge": (["merge", str(run), out], "merging "),
        "average": (["average", str(run), "-o", out], "averaging 2 checkpoints: "),
        "verify": (["verify", out, "--against", str(run)], f"comparing {out} with "),
    }
    if command == "verify":
        unshard.merge(run, out, listener=lambda _event: None)
    arguments, begin = words[command]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(begin)
    assert f"{run}/checkpoint-600/pytorch_model_fsdp_0 (step 600, model weights)" in first
    assert f"; passed over step 1000: {MISSING}" in first


def test_a_checkpoint_that_is_opened_warns_too(run: Path) -> None:
    with (
        pytest.warns(UnshardWarning, match="passed over an incomplete step"),
        unshard.open_checkpoint(run) as opened,
    ):
        assert opened.keys()


def test_a_terminal_gets_a_bar_by_default(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replaced merger shows one, too."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.warns(UnshardWarning):
            unshard.merge(run / "checkpoint-500", tmp_path / "out")
        monkeypatch.undo()
        shown = os.read(master, 65536)
    os.close(master)
    assert b"\rreading\r" in shown


def test_without_a_terminal_a_caller_sees_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UnshardWarning):
        unshard.merge(run / "checkpoint-500", tmp_path / "out")
    assert capsys.readouterr() == ("", "")


# the merger of lmms-engine


@pytest.mark.parametrize("newest", ["incomplete", "empty"])
def test_the_merger_refuses_an_incomplete_newest_step(
    run: Path, tmp_path: Path, newest: str
) -> None:
    if newest == "empty":
        shutil.rmtree(run / "checkpoint-1000")
        (run / "checkpoint-1000").mkdir()
    with pytest.raises(IncompleteError) as refused:
        FSDP2Merger().merge(run, tmp_path / "out")
    error = refused.value
    assert error.subject.startswith(f"the newest checkpoint, {run / 'checkpoint-1000'}, is not c")
    assert ("rank 1" if newest == "incomplete" else "no weights") in error.subject
    assert error.hint == f"to merge an older step, pass its directory: {run / 'checkpoint-500'}"
    assert not (tmp_path / "out").exists()


def test_the_merger_logs_what_it_merges_and_what_it_warns_of(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "unshard.merger"), pytest.warns(UnshardWarning):
        FSDP2Merger().merge(run / "checkpoint-500", tmp_path / "out")
    levels = {record.levelname: record.getMessage() for record in caplog.records}
    place = run / "checkpoint-500" / "pytorch_model_fsdp_0"
    assert levels["INFO"] == f"merging {place} (step 500, model weights)"
    assert "WARNING" in levels
