"""Turns: of several processes that want one output, one works and the others wait, or go on."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from commits import age, alone
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import OutputError
from unshard.progress import Chosen, Event, Stage, ignore
from unshard.write.staging.owners import STAGING_PREFIX
from unshard.write.staging.recovery import recover
from unshard.write.staging.stage import Staging
from unshard.write.staging.turns import TURN_PREFIX
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

HERE = Path(__file__).parents[1]
PROCESSES, ROUNDS = 20, 50
TENSORS = 5
OWN = f"process {os.getpid()} on {os.uname().nodename}"


def never() -> bool:
    return False


def turn_of(target: Path) -> Any:
    return Staging(target, 0).turn(never, ignore)


def turns_in(directory: Path) -> list[Path]:
    return list(directory.glob(TURN_PREFIX + "*"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "checkpoint", some_tensors(), 2)


@contextmanager
def merging(checkpoint: Path, output: Path, **options: Any) -> Iterator[list[Event]]:
    """Merge in another thread, which has ended in the end; yield what it tells."""
    heard: list[Event] = []

    def merge() -> None:
        unshard.merge(checkpoint, output, config="none", listener=heard.append, **options)

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        yield heard
    finally:
        thread.join()


@contextmanager
def held_up(checkpoint: Path, output: Path, *, fails: bool) -> Iterator[None]:
    """Have a plain merge go on as far as its commit, and end, or fail, in the end."""
    arrived, may_end = threading.Event(), threading.Event()

    def hear(event: Event) -> None:
        if event == Stage("committing"):
            arrived.set()
            may_end.wait()
            if fails:
                raise OutputError("made to fail")

    def merge() -> None:
        try:
            unshard.merge(checkpoint, output, config="none", listener=hear)
        except OutputError:
            assert fails

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        wait_until(arrived.is_set, "the plain merge commits")
        yield
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("fails", [False, True])
def test_a_plain_merge_is_waited_for(checkpoint: Path, tmp_path: Path, *, fails: bool) -> None:
    out = tmp_path / "out"
    told = Chosen(f"waiting for {OWN}, which makes {out}")
    with ExitStack() as stack:
        stack.enter_context(held_up(checkpoint, out, fails=fails))
        with merging(checkpoint, out, reuse=True) as heard:
            wait_until(lambda: told in heard)
            stack.close()
    assert heard.count(told) == 1
    assert (Stage("committing") in heard) is fails
    assert_same(merged(out), some_tensors())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}


def test_a_plain_merge_to_another_output_is_not_waited_for(
    checkpoint: Path, tmp_path: Path
) -> None:
    with held_up(checkpoint, tmp_path / "other", fails=False):
        unshard.merge(checkpoint, tmp_path / "out", config="none", reuse=True, listener=ignore)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "other", "out"}


def test_who_has_the_turn_is_told_once(checkpoint: Path, tmp_path: Path) -> None:
    told = Chosen(f"waiting for {OWN}, which makes {tmp_path / 'out'}")
    with ExitStack() as stack:
        stack.enter_context(turn_of(tmp_path / "out"))
        with merging(checkpoint, tmp_path / "out", reuse=True) as heard:
            wait_until(lambda: told in heard)
            stack.close()
    assert heard.count(told) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_waiting(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    paths = str(checkpoint), str(tmp_path / "out")
    line = [sys.executable, "-m", "unshard", "merge", *paths, "--reuse", "--config", "none"]
    with turn_of(tmp_path / "out"):
        before = sorted(tmp_path.iterdir())
        process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stderr is not None
            assert any("waiting for" in told for told in process.stderr)
            process.send_signal(number)
        assert process.returncode == 128 + number
        assert sorted(tmp_path.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


@alone
def test_a_fork_of_a_killed_process_does_not_have_its_turn(tmp_path: Path) -> None:
    """As a data loader's workers have, which live on, everything that was open."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with turn_of(tmp_path / "out"):
            child = os.fork()
            if child:
                os.write(writing, f"{child}\n".encode())
            signal.pause()
    child = int(os.read(reading, 20))
    try:
        (left,) = turns_in(tmp_path)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        heard: list[Event] = []
        # The child may not have got as far as to close it.
        with Staging(tmp_path / "out", 0).turn(never, heard.append):
            os.kill(child, 0)
            assert turns_in(tmp_path) == [left]
    finally:
        os.kill(child, signal.SIGKILL)
    assert not turns_in(tmp_path)


@alone
@pytest.mark.parametrize("is_reusing", [False, True])
def test_a_killed_merge_is_not_waited_for_while_its_fork_lives(
    checkpoint: Path, tmp_path: Path, *, is_reusing: bool
) -> None:
    out, (reading, writing) = tmp_path / "out", os.pipe()
    pid = os.fork()
    if not pid:
        arrived = threading.Event()

        def stop(event: Event) -> None:
            if event == Stage("committing"):
                arrived.set()
                signal.pause()

        options: dict[str, Any] = {"config": "none", "listener": stop, "reuse": is_reusing}
        threading.Thread(target=unshard.merge, args=(checkpoint, out), kwargs=options).start()
        arrived.wait()
        if not os.fork():
            os.write(writing, f"{os.getpid()}\n".encode())
        signal.pause()
    child = int(os.read(reading, 20))
    heard: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Chosen):
            heard.append(str(event))
            assert "waiting" not in heard[-1]

    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        unshard.merge(checkpoint, out, config="none", reuse=True, listener=hear)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    assert any("resuming" in told for told in heard)
    assert_same(merged(out), some_tensors())
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "out"}


@alone
def test_a_killed_merge_in_place_locks_nothing_while_its_fork_lives(
    checkpoint: Path,
) -> None:
    """Also not the directory of its output, which other merges into it lock."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        with Staging(checkpoint, 0, sources=[checkpoint], overwrite=True):
            if not os.fork():
                os.write(writing, f"{os.getpid()}\n".encode())
            signal.pause()
    child = int(os.read(reading, 20))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with Staging(checkpoint, 0, sources=[checkpoint], overwrite=True):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


@alone
def test_a_fork_leaves_the_stage_of_its_parent_alone(tmp_path: Path) -> None:
    with Staging(tmp_path / "a/out", 0) as stage:
        (stage.directory / "file").write_text("of the parent")
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            stage.commit()
        else:
            with pytest.raises(RuntimeError, match="by this process"):
                stage.commit()
    if not pid:
        os._exit(len(list((tmp_path / "a").glob("*/output/file"))) - 1)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "a",
        "a/out",
        "a/out/file",
    ]


@alone
def test_a_fork_does_not_end_the_turn(tmp_path: Path) -> None:
    with turn_of(tmp_path / "out"):
        pid = os.fork()
    if not pid:
        os._exit(len(turns_in(tmp_path)))
    os.waitpid(pid, 0)
    with turn_of(tmp_path / "out"):
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert len(turns_in(tmp_path)) == 1
    if not pid:
        os._exit(0)
    assert not turns_in(tmp_path)


def test_what_a_killed_process_left_goes_with_the_next_merge(
    checkpoint: Path, tmp_path: Path
) -> None:
    with turn_of(tmp_path / "one"):
        (held,) = turns_in(tmp_path)
        (tmp_path / f"{TURN_PREFIX}0123456789abcdef").touch()
        unshard.merge(checkpoint, tmp_path / "out", config="none", listener=ignore)
        assert turns_in(tmp_path) == [held]
    assert not turns_in(tmp_path)


def test_directories_that_were_made_for_a_turn_go_again(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no"), turn_of(tmp_path / "a/b/out"):
        assert turns_in(tmp_path / "a/b")
        raise OutputError("no")
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_turn_is_never_a_link(checkpoint: Path, tmp_path: Path) -> None:
    with turn_of(tmp_path / "out"):
        (held,) = turns_in(tmp_path)
    (tmp_path / "precious").write_text("as it was")
    held.symlink_to(tmp_path / "precious")
    with pytest.raises(OutputError, match="cannot be written"):
        unshard.merge(checkpoint, tmp_path / "out", config="none", reuse=True, listener=ignore)
    assert (tmp_path / "precious").read_text() == "as it was"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(_fd: int, _how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(OutputError, match="files cannot be locked there"),
        turn_of(tmp_path / "out"),
    ):
        pass


@pytest.mark.slow
def test_twenty_processes_make_one_output_whoever_is_killed(tmp_path: Path) -> None:
    """In every fourth round none is killed, and the weights are read once."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{number}.w": torch.randn(256, 256, generator=generator)
        for number in range(TENSORS)
    }
    size = sum(one.nbytes for one in tensors.values())
    checkpoint = save_ranks(tmp_path / "checkpoint", tensors, 2)
    child = subprocess.Popen(
        [sys.executable, HERE / "reusing_child.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(output: Path, count: int, kills: int = 0, seed: int = 0) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        output.parent.mkdir()
        places = {"checkpoint": str(checkpoint), "output": str(output)}
        numbers = {"count": count, "kills": kills, "seed": seed}
        child.stdin.write(json.dumps(places | numbers) + "\n")
        child.stdin.flush()
        found = json.loads(child.stdout.readline())
        assert isinstance(found, dict)
        return found

    killed, kept = [0, 0], 0
    with child:
        (start,) = run(tmp_path / "first/out", 0)["reports"]
        for number in range(ROUNDS):
            output = tmp_path / f"round-{number}/out"
            found = run(output, PROCESSES, kills=number % 4, seed=number)
            assert not any(found["statuses"]), number
            killed = [a + b for a, b in zip(killed, found["killed"], strict=True)]
            assert len(found["statuses"]) == PROCESSES - sum(found["killed"])
            made = [one for one in found["reports"] if not one["reused"]]
            used = [one for one in found["reports"] if one["reused"]]
            assert len(made) == 1 - found["killed"][1], number
            assert found["inodes"] == [output.stat().st_ino]
            assert_same(merged(output), tensors)
            # A waiter reads the headers of the output, in blocks of the interpreter's, and no more.
            most = start["read"] + TENSORS * 20_000
            assert most < size / 4
            assert all(one["read"] < most for one in used)
            if not number % 4:
                everything = sum(one["read"] for one in found["reports"])
                assert everything < size + PROCESSES * most
            # What was finished before a kill is what is there now: it was not made again.
            kept += len(found["kept"])
            for name, inode in found["kept"].items():
                assert (output / name).stat().st_ino == inode, number
            age(output.parent)  # of a process that was killed before it had given its name
            recover(output.parent)
            assert {path.name for path in output.parent.iterdir()} == {"out"}
        assert child.stdin is not None
        child.stdin.close()
    assert killed[0] > ROUNDS / 5
    assert kept > 0
    assert not list(tmp_path.glob(f"*/{STAGING_PREFIX}*"))
