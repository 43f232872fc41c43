"""A run is followed: each step is merged once, as soon as it is complete."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import unshard
from hub_server import Hub, standing_in
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard import OutputError, UnshardError, UsageError
from unshard.api.following.options import seconds_of
from unshard.cli.main import main
from unshard.progress import Event, Stage, Warned
from unshard.write import discarding
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings(
    "ignore::unshard.UnshardWarning", "ignore:Use 'content=:DeprecationWarning"
)
CLOSELY: dict[str, Any] = {"idle": 0.3, "interval": 0.05, "config": "none"}
LATEST = "latest_checkpointed_iteration.txt"


def save(run: Path, *steps: int, seed: int = 0) -> None:
    """Save steps as verl does: the ranks, and then which step is the latest."""
    for step in steps:
        save_ranks(run / f"global_step_{step}" / "actor", some_tensors(step + seed), 2)
        (run / LATEST).write_text(str(step))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    save(place, 5, 10, 20)
    return place


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def follow(run: Path, out: Path, **options: Any) -> list[unshard.Report]:
    """Follow a run until nothing new comes."""
    options = {**CLOSELY, **options}
    return list(unshard.follow(run, out, **options))


def outputs(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name != "_unshard")


def told(heard: list[Event]) -> list[str]:
    """Return what was told of steps, without what each merge tells of itself."""
    texts = [one.message for one in heard if isinstance(one, Warned)]
    return [one for one in texts if "config.json" not in one]


def appending(file: Path) -> list[str]:
    """Return a command that appends its arguments to a file."""
    code = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"
    return [sys.executable, "-c", code, str(file)]


def test_every_step_is_merged_once_the_lowest_first(run: Path, out: Path) -> None:
    assert [one.step for one in follow(run, out)] == [5, 10, 20]
    assert outputs(out) == ["global_step_10", "global_step_20", "global_step_5"]
    for step in (5, 10, 20):
        assert_same(merged(out / f"global_step_{step}"), some_tensors(step))
    before = snapshot(out)
    assert follow(run, out) == []
    assert snapshot(out) == before


def test_the_newest_comes_first_if_it_is_asked_for(run: Path, out: Path) -> None:
    assert [one.step for one in follow(run, out, newest=True)] == [20, 10, 5]


def test_a_step_that_comes_meanwhile_is_merged_before_lower_ones_end(run: Path, out: Path) -> None:
    following = unshard.follow(run, out, newest=True, interval=0.05, config="none")
    assert next(following).step == 20
    save(run, 30)
    assert {one.step for one in islice(following, 3)} == {5, 10, 30}
    following.close()  # type: ignore[attr-defined]
    assert follow(run, out) == []


def test_it_waits_for_a_run_and_ends_with_the_step_that_is_named(out: Path, tmp_path: Path) -> None:
    run, found = tmp_path / "later", list[unshard.Report]()
    options = {"until": 7, "idle": None}
    thread = threading.Thread(target=lambda: found.extend(follow(run, out, **options)))
    thread.start()
    wait_until((out / "_unshard").exists, "it follows")
    save(run, 5)
    wait_until((out / "global_step_5").exists, "the step is merged")
    assert thread.is_alive()
    save(run, 8)
    thread.join()
    assert [one.step for one in found] == [5, 8]


def test_a_step_that_is_not_complete_is_waited_for(run: Path, out: Path) -> None:
    file = run / "global_step_20" / "actor" / "model_world_size_2_rank_1.pt"
    file.rename(run / "kept")
    (run / LATEST).write_text("10")
    assert [one.step for one in follow(run, out)] == [5, 10]
    (run / "kept").rename(file)
    (run / LATEST).write_text("20")
    assert [one.step for one in follow(run, out)] == [20]


def test_a_step_that_is_saved_again_is_told_or_replaced(run: Path, out: Path) -> None:
    follow(run, out)
    save(run, 10, seed=1)
    with pytest.raises(OutputError, match="global_step_10: exists already"):
        follow(run, out)
    assert_same(merged(out / "global_step_10"), some_tensors(10))
    assert [one.step for one in follow(run, out, overwrite=True)] == [10]
    assert_same(merged(out / "global_step_10"), some_tensors(11))


def test_outputs_of_other_options_are_told_and_left(run: Path, out: Path) -> None:
    follow(run, out)
    save(run, 30)
    heard: list[Event] = []
    (report,) = follow(run, out, dtype="bfloat16", listener=heard.append)
    assert report.step == 30
    (said,) = told(heard)
    assert said.startswith("outputs that were made with other options are kept; ")
    again = follow(run, out, dtype="bfloat16", overwrite=True)
    assert [(one.step, *one.dtypes) for one in again] == [
        (step, "bfloat16") for step in (5, 10, 20)
    ]


def test_the_outputs_of_the_last_steps_are_kept(run: Path, out: Path) -> None:
    assert [one.step for one in follow(run, out, keep=2)] == [5, 10, 20]
    assert outputs(out) == ["global_step_10", "global_step_20"]
    assert follow(run, out, keep=2) == []  # what was removed is not made again
    save(run, 30)
    assert [one.step for one in follow(run, out, keep=2)] == [30]
    assert outputs(out) == ["global_step_20", "global_step_30"]


def test_earlier_steps_than_are_kept_are_not_merged(run: Path, out: Path) -> None:
    heard: list[Event] = []
    reports = follow(run, out, keep=1, newest=True, listener=heard.append)
    assert [one.step for one in reports] == [20]
    said = [one.split(":")[0] for one in told(heard)]
    assert said == [f"step {step} is passed over" for step in (5, 10)]


def test_a_trainer_that_goes_back_is_followed_back(run: Path, out: Path) -> None:
    """What it saves then is what comes last, although its steps are lower."""
    follow(run, out, keep=2)
    save(run, 7)
    (run / LATEST).write_text("20")
    assert [one.step for one in follow(run, out, keep=2)] == [7]
    assert outputs(out) == ["global_step_20", "global_step_7"]


@pytest.mark.parametrize("kind", ["added", "changed", "link"])
def test_nothing_is_removed_that_others_wrote(run: Path, out: Path, kind: str) -> None:
    follow(run, out)
    place = out / "global_step_5"
    match kind:
        case "added":
            (place / "eval").mkdir()
            (place / "eval" / "results.json").write_text("{}")
        case "changed":
            (place / "model.safetensors").write_bytes(b"short")
        case "link":
            place.rename(out.parent / "elsewhere")
            place.symlink_to(out.parent / "elsewhere")
    before, heard = snapshot(place), list[Event]()
    save(run, 30)
    follow(run, out, keep=1, listener=heard.append)
    assert snapshot(place) == before
    assert outputs(out) == ["global_step_30", "global_step_5"]
    (said,) = [one for one in told(heard) if "global_step_5" in one]
    assert "is not removed" in said


def test_a_command_is_run_for_each_output(run: Path, out: Path, tmp_path: Path) -> None:
    exec_ = [*appending(tmp_path / "ran"), "{output}", "--step={step}", "{other} $HOME;"]
    follow(run, out, exec=exec_)
    lines = (tmp_path / "ran").read_text().splitlines()
    wanted = [f"{out}/global_step_{n} --step={n} {{other}} $HOME;" for n in (5, 10, 20)]
    assert lines == wanted
    assert follow(run, out, exec=exec_) == []
    assert len((tmp_path / "ran").read_text().splitlines()) == 3


def test_a_text_is_split_into_arguments_and_no_shell_reads_it(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out {step} 'it'"
    follow(run, out, exec=f"touch '{tmp_path}/a b {{step}}' ; $(nothing)")
    names = {path.name for path in Path.cwd().iterdir()} & {";", "$(nothing)"}
    for name in names:
        (Path.cwd() / name).unlink()
    assert names == {";", "$(nothing)"}
    assert {"a b 5", "a b 10", "a b 20"} <= {path.name for path in tmp_path.iterdir()}


def test_a_command_that_fails_is_told_and_keeps_back_no_other(
    run: Path, out: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    code = (
        "import sys; open(sys.argv[1], 'a').write(sys.argv[2] + ' '); sys.exit(sys.argv[2] == '10')"
    )
    exec_, heard = [sys.executable, "-c", code, str(ran), "{step}"], list[Event]()
    with pytest.raises(UnshardError, match="exit code 1 of the command for step 10"):
        follow(run, out, exec=exec_, listener=heard.append)
    assert ran.read_text().split() == ["5", "10", "20"]
    assert len(outputs(out)) == 3
    (said,) = told(heard)
    assert said.startswith("step 10: exit code 1 of the command for step 10: ")
    assert [one.step for one in follow(run, out)] == [10]  # it is not done


def test_a_step_that_fails_is_tried_again(run: Path, out: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; at = Path(sys.argv[1]); "
        "at.open('a').write(sys.argv[2] + ' '); "
        "sys.exit(sys.argv[2] == '5' and at.read_text().split().count('5') < 3)"
    )
    exec_ = [sys.executable, "-c", code, str(tmp_path / "ran"), "{step}"]
    assert sorted(one.step or 0 for one in follow(run, out, exec=exec_, retry=2)) == [5, 10, 20]
    assert sorted((tmp_path / "ran").read_text().split()) == ["10", "20", "5", "5", "5"]


@pytest.mark.parametrize("given", ["no-such-program {output}", "'unfinished", ""])
def test_a_command_that_cannot_be_run_is_refused_at_once(run: Path, out: Path, given: str) -> None:
    with pytest.raises(UsageError, match="exec"):
        follow(run, out, exec=given)
    assert not out.exists()


def test_a_step_that_is_removed_while_it_is_merged_is_passed_over(run: Path, out: Path) -> None:
    heard: list[Event] = []

    def rotate(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Stage) and event.name == "writing":
            shutil.rmtree(run / "global_step_5", ignore_errors=True)

    assert [one.step for one in follow(run, out, listener=rotate)] == [10, 20]
    (said,) = told(heard)
    assert said.startswith(f"step 5: {run}/global_step_5 was removed or saved again before it")
    assert outputs(out) == ["global_step_10", "global_step_20"]


def test_two_processes_do_not_follow_into_one_directory(run: Path, out: Path) -> None:
    following = unshard.follow(run, out, interval=0.05, config="none")
    next(following)
    with pytest.raises(UsageError, match="another process follows a run into this directory"):
        follow(run, out)
    following.close()  # type: ignore[attr-defined]
    assert [one.step for one in follow(run, out)] == [10, 20]


def test_one_checkpoint_is_not_a_run(run: Path, out: Path) -> None:
    with pytest.raises(UsageError, match="is a checkpoint"):
        follow(run / "global_step_5", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": "all"}, "role"),
        ({"step": 5}, "step"),
        ({"dry_run": True}, "dry"),
        ({"keep": 0}, "keep"),
        ({"retry": -1}, "retry"),
        ({"interval": 0}, "interval"),
        ({"interval": float("nan")}, "interval"),
        ({"idle": "soon"}, "idle"),
        ({"idle": "5 minutes"}, "idle"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Path, out: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        follow(run, out, **options)
    assert not out.exists()


def test_times_are_numbers_with_a_unit() -> None:
    given: list[float | str] = ["90", "90s", "1.5m", "2h", "1d", 0.25]
    assert [seconds_of(one) for one in given] == [90, 90, 90, 7200, 86400, 0.25]


def test_a_record_of_what_was_done_that_is_damaged_is_named(run: Path, out: Path) -> None:
    follow(run, out)
    for damage in ("{", "{}", '{"steps": []}', '{"steps": {"global_step_5": {"step": 5}}}'):
        (out / "_unshard" / "followed.json").write_text(damage)
        with pytest.raises(UnshardError, match=r"followed\.json"):
            follow(run, out)
    (out / "_unshard" / "followed.json").unlink()
    assert all(one.reused for one in follow(run, out))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path) as made:
        yield made


def test_each_step_becomes_a_revision_of_a_repository(run: Path, out: Path, hub: Hub) -> None:
    follow(run, out, push_to_hub="someone/model", private=True)
    for step in (5, 10, 20):
        files = hub.repos[f"someone/model@step-{step}"].files
        place = out / f"global_step_{step}"
        own = {path.name: path.read_bytes() for path in place.iterdir()}
        assert {name: files[name] for name in own} == own
    assert hub.repos["someone/model"].files == {}
    assert hub.repos["someone/model"].private
    sent = len(hub.requests)
    assert follow(run, out, push_to_hub="someone/model") == []
    assert not [one for one in hub.requests[sent:] if "commit" in one]


def test_a_path_that_is_no_run_is_refused_before_the_hub_is_asked(
    run: Path, out: Path, hub: Hub
) -> None:
    with pytest.raises(UsageError):
        follow(run / "global_step_10", out, push_to_hub="someone/model")
    assert not hub.requests


def test_an_upload_that_fails_is_made_up_for(run: Path, out: Path, hub: Hub) -> None:
    hub.failing["/commit/step-10"] = 503
    with pytest.raises(OutputError, match="was not pushed") as caught:
        follow(run, out, push_to_hub="someone/model")
    assert "--revision step-10" in caught.value.hint
    hub.failing.clear()
    (report,) = follow(run, out, push_to_hub="someone/model")
    assert (report.step, report.reused) == (10, True)


def test_the_command_prints_a_line_of_json_for_each_step(
    run: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "global_step_10/actor/model_world_size_2_rank_1.pt").write_bytes(b"PK\x03\x04")
    (run / "latest_checkpointed_iteration.txt").touch()  # the last that verl writes
    options = ["--config", "none", "--idle", "1s", "--interval", "0.05", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(out), "--follow", *options])
    assert ended.value.code == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in lines] == [5, 10, 20]
    assert [("failed" in one, "tensors" in one) for one in lines] == [
        (False, True),
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keep", "3"], "--keep needs --follow"),
        (["--exec", "true"], "--exec needs --follow"),
        (["--interval", "1"], "--interval needs --follow"),
        (["--follow", "--all-steps"], "--follow and --all-steps exclude each other"),
        (["--follow", "--role", "all"], "--follow and --role all exclude each other"),
    ],
)
def test_options_that_need_or_exclude_following(
    run: Path, out: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(out), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_killed_removal_is_ended_by_the_next_one(run: Path, out: Path) -> None:
    follow(run, out)
    pid = os.fork()
    if pid == 0:
        discarding.__dict__["remove_staging"] = lambda *_: os._exit(0)  # killed there
        discarding.discard(out / "global_step_5")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(out.glob("_unshard-partial-*"))) == 1
    save(run, 30)
    follow(run, out)
    assert not list(out.glob("_unshard-partial-*"))
    assert outputs(out) == ["global_step_10", "global_step_20", "global_step_30"]


def test_an_output_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/_unshard/followed\.json: cannot be written"):
        follow(run, tmp_path / "file")


def test_other_models_and_runs_keep_their_outputs(run: Path, out: Path, tmp_path: Path) -> None:
    for step in (5, 10):
        save_ranks(run / f"global_step_{step}" / "critic", some_tensors(step + 100), 2)
    follow(run, out, role="actor")
    assert [one.step for one in follow(run, out, role="critic", keep=1)] == [5, 10]
    actors = [f"global_step_{step}" for step in (10, 20, 5)]
    assert outputs(out) == sorted([*actors, "global_step_10-critic"])
    other = tmp_path / "other"
    save(other, 40)
    follow(other, out, keep=1)
    assert set(actors) < set(outputs(out))


def test_what_a_user_puts_in_the_place_of_a_removed_output_stays(run: Path, out: Path) -> None:
    follow(run, out, keep=2)
    unshard.merge(run / "global_step_5", out / "global_step_5", config="none")
    save(run, 30)
    follow(run, out, keep=1)
    assert outputs(out) == ["global_step_30", "global_step_5"]


@pytest.mark.parametrize("kind", ["same size", "empty folder"])
def test_what_was_changed_or_added_is_not_removed(run: Path, out: Path, kind: str) -> None:
    follow(run, out)
    place = out / "global_step_5"
    if kind == "same size":
        file = place / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-1] + b"x")
        os.utime(file, (2_000_000_000, 2_000_000_000))  # times are of whole ticks
    else:
        (place / "results").mkdir()
    save(run, 30)
    follow(run, out, keep=1)
    assert outputs(out) == ["global_step_30", "global_step_5"]


def test_room_is_made_before_the_first_merge(run: Path, out: Path) -> None:
    follow(run, out)
    assert follow(run, out, keep=1) == []
    assert outputs(out) == ["global_step_20"]


def test_the_end_is_a_step_of_this_run(run: Path, out: Path) -> None:
    follow(run, out)
    shutil.rmtree(run / "global_step_20")
    save(run, 10, seed=1)
    options = {"until": 20, "idle": None, "overwrite": True}
    following = unshard.follow(run, out, **{**CLOSELY, **options})
    assert next(following).step == 10
    save(run, 20, seed=1)
    assert [one.step for one in following] == [20]


def test_what_fails_or_goes_leaves_nothing_that_takes_room(run: Path, out: Path) -> None:
    """Finished files are kept for another process; not those of a step that is given up."""

    def rotate(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "verifying":
            shutil.rmtree(run / "global_step_5", ignore_errors=True)

    follow(run, out, listener=rotate, max_shard_size="300B")
    assert not list(out.glob("_unshard-*"))
    assert outputs(out) == ["global_step_10", "global_step_20"]


def test_a_command_that_is_given_later_is_not_for_earlier_steps(
    run: Path, out: Path, tmp_path: Path
) -> None:
    follow(run, out)
    shutil.rmtree(out / "global_step_5")
    heard: list[Event] = []
    exec_ = [*appending(tmp_path / "ran"), "{step}"]
    assert follow(run, out, exec=exec_, listener=heard.append) == []
    texts = sorted(one.partition(";")[0] for one in told(heard))
    assert texts == [
        "outputs that were made with other options are kept",
        "step 5, whose output was removed, is not done again",
    ]
    assert [one.step for one in follow(run, out, exec=exec_, overwrite=True)] == [5, 10, 20]
    assert (tmp_path / "ran").read_text().split() == ["5", "10", "20"]


def test_a_command_that_succeeded_is_not_repeated(run: Path, out: Path, tmp_path: Path) -> None:
    code = "import sys, shutil; open(sys.argv[1], 'a').write('x'); shutil.rmtree(sys.argv[2])"
    exec_ = [sys.executable, "-c", code, str(tmp_path / "ran"), str(out / "_unshard")]
    with pytest.raises(OutputError, match=r"followed\.json: cannot be written"):
        follow(run, out, exec=exec_, retry=2)
    assert (tmp_path / "ran").read_text() == "x"  # and it is not followed any more


def test_outputs_whose_command_failed_are_removed_and_tried_again(run: Path, out: Path) -> None:
    with pytest.raises(UnshardError):
        follow(run, out, keep=1, exec=["false"])
    assert outputs(out) == ["global_step_20"]
    assert [one.step for one in follow(run, out, keep=1, exec=["true"])] == [20]


def test_a_run_gets_no_folder_before_its_first_step(tmp_path: Path) -> None:
    """Trainers refuse to write into a directory that has something in it."""
    run = tmp_path / "run"
    run.mkdir()
    assert follow(run, None) == []  # type: ignore[arg-type]
    assert not list(run.iterdir())
    save(run / "ckpt", 5)
    assert [one.step for one in follow(run, None)] == [5]  # type: ignore[arg-type]
    assert outputs(run / "ckpt" / "merged") == ["global_step_5"]


def test_a_fork_does_not_hold_the_lock(run: Path, out: Path) -> None:
    following = unshard.follow(run, out, interval=0.05, config="none")
    next(following)
    (begun, began), (reading, writing) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.write(began, b"1")
        os.read(reading, 1)
        os._exit(0)
    assert os.read(begun, 1) == b"1"
    following.close()  # type: ignore[attr-defined]
    assert [one.step for one in follow(run, out)] == [10, 20]
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    "options", [{"keep": "3"}, {"retry": None}, {"interval": "5"}, {"exec": ["echo", 3]}]
)
def test_values_of_other_types_are_refused(run: Path, out: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        follow(run, out, **options)


def test_a_command_may_have_paths_and_no_stderr_of_python(
    run: Path, out: Path, tmp_path: Path
) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        follow(run, out, exec=[Path(shutil.which("touch") or ""), tmp_path / "a{step}"])
    assert {"a5", "a10", "a20"} <= {path.name for path in tmp_path.iterdir()}


def test_quiet_prints_errors(run: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--config", "none", "--idle", "0.3s", "--interval", "0.05", "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(run), str(out), "--follow", "--exec", "false", *options])
    assert ended.value.code == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert "error: step 10: exit code 1 of the command for step 10: false" in said.err


def test_what_a_command_has_started_ends_with_it(run: Path, out: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(f"sleep 1000 & echo $! > {tmp_path}/pid; wait\n")
    line = [sys.executable, "-m", "unshard", "merge", str(run), str(out), "--follow", "--quiet"]
    line += ["--config", "none", "--interval", "0.05", "--exec", f"sh {script}"]
    with subprocess.Popen(line, stderr=subprocess.PIPE) as process:
        wait_until(
            lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it runs"
        )
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:  # two at once may be one
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.returncode == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert b"and so was the command for step 5: sh " in process.stderr.read()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not is_alive(pid), "it ended")


def is_alive(pid: int) -> bool:
    try:
        return "sleep" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
