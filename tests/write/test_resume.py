"""`--resume`: a merge that was killed goes on with its finished files, and only with those."""

import errno
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Unpack

import pytest
import torch

import unshard
from adapters import adapted
from commits import age, alone, die_at, staged
from ranks import contents as all_contents
from ranks import rank_path, save_ranks
from unshard.api.options import MergeOptions
from unshard.keywords import MergeKeywords
from unshard.progress import Chosen, Event, Warned, ignore
from unshard.write.staging.finished import FINISHED_NAME
from unshard.write.staging.recovery import recover

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FILES = 5
KILLS = 200
SHARD_BYTES = 100_000

Statuses = dict[str, tuple[int, int]]
"""The inode of each file, and when it was written last."""


def tensors() -> dict[str, torch.Tensor]:
    """As many long tensors as files, and a short one next to each; one becomes infinite."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number in range(FILES):
        found[f"l.{number}.a"] = torch.randn(2, 150, 150, generator=generator)
        found[f"l.{number}.b"] = torch.full((7, 5), 1e6 if number == 3 else 1.0)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 2)


def merge(
    checkpoint: Path,
    target: Path,
    listener: Callable[[Event], None] = ignore,
    **more: Unpack[MergeKeywords],
) -> None:
    chosen: MergeKeywords = {
        "config": "none",
        "dtype": "float16",
        "max_shard_size": SHARD_BYTES,
        "workers": 1,
    }
    chosen.update(more)
    unshard.merge(checkpoint, target, listener=listener, **chosen)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def statuses(directory: Path, names: set[str]) -> Statuses:
    found = ((name, (directory / name).stat()) for name in names)
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found}


def finished(staging: Path) -> Statuses:
    """Return the files of a staging directory that its record calls finished."""
    record = staging / FINISHED_NAME
    lines = record.read_bytes().splitlines() if record.exists() else []
    names = {json.loads(line)["finished"]["name"] for line in lines}
    return statuses(staging / "output", names)


def in_child(action: Callable[[], None], kill_after_s: float | None = None) -> bool:
    """Run an action in a forked child, which may be killed; return whether it survived."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 (the child must not return into pytest)
            os._exit(1)
    if kill_after_s is not None:
        timer = threading.Timer(kill_after_s, os.kill, (pid, signal.SIGKILL))
        timer.start()
    _, status = os.waitpid(pid, 0)
    if kill_after_s is not None:
        timer.cancel()
    if os.WIFSIGNALED(status):
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def left_by_a_kill(
    checkpoint: Path, target: Path, *, files: int = 3, **more: Unpack[MergeKeywords]
) -> Path:
    """Kill a merge when so many files are finished; return the staging directory that it leaves."""

    def killed() -> None:
        from unshard.write.staging import finished

        add, left = finished.Ledger.add, [files]

        def count(*args: object) -> None:
            add(*args)  # type: ignore[arg-type]
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        pytest.MonkeyPatch().setattr(finished.Ledger, "add", count)
        merge(checkpoint, target, **more)

    assert not in_child(killed)
    (staging,) = staged(target.parent)
    assert len(finished(staging)) == files
    return staging


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "keep"])
@alone
def test_a_merge_that_is_killed_again_and_again_writes_no_finished_file_twice(
    tmp_path: Path, dtype: Literal["float16", "keep"]
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", tensors(), 2)
    merge(checkpoint, tmp_path / "whole", dtype=dtype)
    expected = contents(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    draw, kills, gone_on = random.Random(dtype), 0, 0
    target = tmp_path / "out"
    while kills < KILLS // 2 or gone_on <= KILLS // 20:  # few go on where a machine is slow
        assert kills < 10 * KILLS
        seen: Statuses = {}
        survived = False
        while not survived:
            steps = draw.randrange(30, 400)

            def attempt(steps: int = steps) -> None:
                if steps % 2:
                    die_at(steps, pytest.MonkeyPatch())
                merge(checkpoint, target, dtype=dtype, resume=True, workers=2)

            survived = in_child(attempt, None if steps % 2 else steps / 4000)
            kills += not survived
            if target.exists():
                break
            age(tmp_path)
            for staging in staged(tmp_path):
                now = finished(staging)
                gone_on += bool(seen)
                assert seen.items() <= now.items()
                seen = now
        assert contents(target).keys() == expected.keys()
        assert contents(target) == expected
        assert seen.items() <= statuses(target, set(expected)).items()
        age(tmp_path)  # it may have died when its owner file was gone already
        recover(tmp_path)
        shutil.rmtree(target)
        assert staged(tmp_path) == []


def test_a_killed_merge_is_resumed_also_if_it_was_not_asked_for_then(
    checkpoint: Path, tmp_path: Path
) -> None:
    staging = left_by_a_kill(checkpoint, tmp_path / "out")
    before, events = finished(staging), list[Event]()
    merge(checkpoint, tmp_path / "out", events.append, resume=True)
    assert Chosen(f"resuming: 3 of {FILES} files were finished by an earlier merge") in events
    assert before.items() <= statuses(tmp_path / "out", set(before)).items()
    merge(checkpoint, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert staged(tmp_path) == []


def test_what_became_infinite_before_the_kill_is_reported_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    left_by_a_kill(checkpoint, tmp_path / "out", files=4)
    events: list[Event] = []
    merge(checkpoint, tmp_path / "out", events.append, resume=True)
    (warned,) = (one.text for one in events if isinstance(one, Warned) and "too large" in one.text)
    assert "l.3.b (35)" in warned


def test_without_resume_the_next_merge_removes_what_was_left(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = finished(left_by_a_kill(checkpoint, tmp_path / "out"))
    merge(checkpoint, tmp_path / "other")
    assert staged(tmp_path) == []
    left_by_a_kill(checkpoint, tmp_path / "out", resume=True)
    merge(checkpoint, tmp_path / "out")
    assert staged(tmp_path) == []
    assert not before.items() & statuses(tmp_path / "out", set(before)).items()


def test_what_could_not_be_taken_over_is_removed_when_the_merge_is_complete(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(checkpoint, tmp_path / "out", resume=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("unshard.write.staging.recovery.claim", full)
    merge(checkpoint, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "unshard.json").is_file()
    assert staged(tmp_path) == []


def test_what_is_to_be_resumed_is_left_by_merges_to_other_places(
    checkpoint: Path, tmp_path: Path
) -> None:
    staging = left_by_a_kill(checkpoint, tmp_path / "out", resume=True)
    before = finished(staging)
    merge(checkpoint, tmp_path / "one")
    merge(checkpoint, tmp_path / "two", resume=True)
    recover(tmp_path)
    assert finished(staging) == before
    merge(checkpoint, tmp_path / "out", resume=True)
    assert before.items() <= statuses(tmp_path / "out", set(before)).items()


@pytest.mark.parametrize("change", ["source", "source, with its old time", "option"])
def test_another_checkpoint_or_other_options_begin_anew(
    checkpoint: Path, tmp_path: Path, change: str
) -> None:
    before = finished(left_by_a_kill(checkpoint, tmp_path / "out"))
    exclude: str | None = "l.4.b"
    expected = "other options"
    if change != "option":
        exclude, expected = None, "files of the checkpoint have changed"
        path = rank_path(checkpoint, 2, 1)
        status = path.stat()
        later = 1 if change == "source" else 0
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + later))
    events: list[Event] = []
    merge(checkpoint, tmp_path / "out", events.append, resume=True, exclude=exclude)
    assert any(expected in one.text for one in events if isinstance(one, Warned))
    assert not before.items() & statuses(tmp_path / "out", set(before)).items()
    merge(checkpoint, tmp_path / "whole", exclude=exclude)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["written to", "cut", "replaced", "gone"])
def test_a_finished_file_that_was_damaged_is_written_again(
    checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    staging = left_by_a_kill(checkpoint, tmp_path / "out")
    before = finished(staging)
    name = sorted(before)[1]
    path = staging / "output" / name
    status, data = path.stat(), path.read_bytes()
    if damage == "cut":
        os.truncate(path, len(data) - 1)
    else:
        if damage != "written to":
            path.unlink()
        if damage != "gone":
            path.write_bytes(data[:-1] + b"?")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    events: list[Event] = []
    merge(checkpoint, tmp_path / "out", events.append, resume=True)
    what = "1 finished file was changed since, and is written again"
    assert Warned(what) in events
    after = statuses(tmp_path / "out", set(before))
    assert {one for one in before if after[one] == before[one]} == set(before) - {name}
    merge(checkpoint, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_record_of_another_user_proves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a whole staging directory made with another key, nor one line in an own one."""
    with monkeypatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))
        (tmp_path / "stranger").mkdir()
        foreign = left_by_a_kill(checkpoint, tmp_path / "out", resume=True)
    before = finished(foreign)
    line = (foreign / FINISHED_NAME).read_bytes()
    merge(checkpoint, tmp_path / "out", resume=True)
    assert finished(foreign) == before
    assert not before.items() & statuses(tmp_path / "out", set(before)).items()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(foreign)
    own = left_by_a_kill(checkpoint, tmp_path / "out")
    (own / FINISHED_NAME).write_bytes(line + b"{torn")
    events: list[Event] = []
    merge(checkpoint, tmp_path / "out", events.append, resume=True)
    assert not [one for one in events if isinstance(one, Chosen) and "resuming" in one.message]


@pytest.mark.parametrize("end", ["signal", "error", "wrong output"])
def test_an_end_by_a_signal_or_an_error_leaves_what_is_finished(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    ends = {
        "signal": (KeyboardInterrupt(), r"^interrupted: finished files are kept in .*--resume"),
        "error": (OSError(28, "No space left on device"), r"free some space[\s\S]*are kept in"),
        "wrong output": (unshard.OutputError("it differs"), "it differs"),
    }
    raised, said = ends[end]

    def fail(*_: object) -> None:
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr("unshard.api.completing.verify_output", fail)
        with pytest.raises((KeyboardInterrupt, unshard.OutputError), match=said):
            merge(checkpoint, tmp_path / "deep" / "out", resume=True)
    if end == "wrong output":
        assert not (tmp_path / "deep").exists()
        return
    (staging,) = staged(tmp_path / "deep")
    before = finished(staging)
    assert len(before) == FILES
    merge(checkpoint, tmp_path / "deep" / "out", resume=True)
    assert before.items() <= statuses(tmp_path / "deep" / "out", set(before)).items()
    assert staged(tmp_path / "deep") == []


def test_a_resumed_merge_that_fails_for_good_removes_the_directories_it_made(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_kill(checkpoint, tmp_path / "deep" / "out")

    def fail(*_: object) -> None:
        raise unshard.OutputError("it differs")

    monkeypatch.setattr("unshard.api.completing.verify_output", fail)
    with pytest.raises(unshard.OutputError, match="it differs"):
        merge(checkpoint, tmp_path / "deep" / "out", resume=True)
    assert not (tmp_path / "deep").exists()


def test_an_adapter_by_itself_is_resumed_too(tmp_path: Path) -> None:
    source, out = tmp_path / "adapted", tmp_path / "deep" / "out"
    adapted(source)

    def ended() -> None:
        pytest.MonkeyPatch().setattr(
            "unshard.api.completing.small_files", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        unshard.merge(source, out, lora="both", listener=ignore)

    assert not in_child(ended)
    before = finished(staged(tmp_path / "deep")[0])
    assert before.keys() == {"model.safetensors", "lora_adapter/adapter_model.safetensors"}
    unshard.merge(source, out, lora="both", resume=True, verify="full", listener=ignore)
    assert before.items() <= statuses(out, set(before)).items()
    unshard.merge(source, tmp_path / "whole", lora="both", listener=ignore)
    assert all_contents(out) == all_contents(tmp_path / "whole")
    shutil.rmtree(out)
    assert not in_child(ended)
    unshard.merge(source, out, resume=True, listener=ignore)  # another output, without a folder
    assert not (out / "lora_adapter").exists()


def test_an_average_is_resumed_too(tmp_path: Path) -> None:
    paths = [save_ranks(tmp_path / str(n), {"a": torch.randn(40, 40), "b": torch.randn(40, 40)}, 2)
             for n in range(2)]  # fmt: skip
    options = MergeOptions(max_shard_size=6400, resume=True)
    out = tmp_path / "mean" / "out"

    def ended() -> None:
        pytest.MonkeyPatch().setattr(
            "unshard.api.completing.small_files", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        unshard.average(paths, out, options=options, config="none")

    assert not in_child(ended)
    before = finished(staged(tmp_path / "mean")[0])
    assert len(before) == 2
    unshard.average(paths, out, coefficients=[1, 1], options=options, config="none")
    assert before.items() <= statuses(out, set(before)).items()
    shutil.rmtree(out)
    assert not in_child(ended)
    before = finished(staged(tmp_path / "mean")[0])
    unshard.average(paths, out, coefficients=[1, 2], options=options, config="none")
    assert not before.items() & statuses(out, set(before)).items()


@pytest.mark.parametrize("place", ["out", "ckpt"])
def test_a_replacement_and_a_merge_in_place_are_resumed(
    checkpoint: Path, tmp_path: Path, place: str
) -> None:
    target = tmp_path / place
    if target != checkpoint:
        merge(checkpoint, target, dtype="float32")
    before = finished(left_by_a_kill(checkpoint, target, overwrite=True))
    merge(checkpoint, target, resume=True, overwrite=True)
    assert before.items() <= statuses(target, set(before)).items()
    merge(checkpoint, tmp_path / "whole")
    new = contents(tmp_path / "whole")
    assert {name: contents(target)[name] for name in new} == new
