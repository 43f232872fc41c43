"""A step of a commit that fails: the message, the files and what the next run does agree."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import unshard.write.staging.commit
import unshard.write.staging.stage
from commits import (
    FRESH,
    IN_PLACE,
    OLD,
    REPLACED,
    Texts,
    age,
    alone,
    checkpoint,
    die_at,
    merge_into,
    read,
    staged,
    worlds,
    write,
)
from unshard.errors import OutputError
from unshard.signals import Interrupted
from unshard.write.staging.recovery import recover
from unshard.write.staging.stage import Staging

MODES = ["new", "exchange", "aside", "in place"]
SHARD = {"ckpt/model_world_size_1_rank_0.pt": "shard"}


def fail() -> None:
    raise OSError(errno.EIO, "injected")


def prepared(world: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Texts, Texts]:
    """Make what a merge finds; return the target as it is, and as it will be."""
    target = world / "out"
    world.mkdir(exist_ok=True)
    if mode == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    if mode == "new":
        return {}, FRESH
    write(target, OLD)
    if mode != "in place":
        return OLD, REPLACED
    checkpoint(target)
    return OLD | SHARD, IN_PLACE | SHARD


def merge(world: Path, mode: str) -> None:
    merge_into(world / "out", (world / "out" / "ckpt",) if mode == "in place" else ())


def told(world: Path, mode: str, number: int) -> tuple[str, bool]:
    """Merge in a child whose n-th step fails; return its error, and whether a step did fail."""
    pid = os.fork()
    if pid == 0:
        failed = False

        def once() -> None:
            nonlocal failed
            failed = True
            fail()

        try:
            die_at(number, pytest.MonkeyPatch(), once)
            merge(world, mode)
        except OutputError as error:
            (world / "said").write_text(str(error))
        except BaseException as error:  # noqa: BLE001 (the child must not return into pytest)
            (world / "said").write_text(f"unexpected: {error!r}")
        os._exit(3 if failed else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, 3}
    said = world / "said"
    text = said.read_text() if said.exists() else ""
    said.unlink(missing_ok=True)
    return text, code == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@alone
def test_a_step_that_fails_leaves_what_the_message_says(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for number, world in worlds(tmp_path):
        old, fresh = prepared(world, mode, monkeypatch)
        said, failed = told(world, mode, number)
        assert "unexpected" not in said, (number, said)
        expected = old if said else fresh
        if "the next merge" in said:
            assert len(staged(world)) == 1
            expected = fresh
        else:
            found = read(world / "out")
            assert found == expected, (number, said)
        age(world)
        recover(world)
        assert staged(world) == []
        assert read(world / "out") == expected, (number, said)
        seen.add(bool(said))
        if not failed:
            break
    assert seen == {True, False}


def lines_until(number: int, send: Callable[[], None]) -> Callable[..., object]:
    """Return a trace function that calls `send` before the n-th line of the code of staging."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., object] | None:
        nonlocal left
        if f"{os.sep}unshard{os.sep}write{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == -1:
                send()
        return trace

    return trace


def interrupted(world: Path, mode: str, number: int) -> tuple[int, str]:
    """Merge in a child that is told to end at its n-th line; return its exit code and message."""
    pid = os.fork()
    if pid == 0:
        came = False

        def send() -> None:
            nonlocal came
            came = True
            signal.raise_signal(signal.SIGTERM)

        def handle(number: int, _frame: FrameType | None) -> None:
            raise Interrupted(number)

        signal.signal(signal.SIGTERM, handle)
        code = 1
        try:
            sys.settrace(lines_until(number, send))  # type: ignore[arg-type]  # typeshed: Any
            merge(world, mode)
            code = 0
        except Interrupted as error:
            sys.settrace(None)
            (world / "said").write_text(str(error) or "nothing")
            code = 2
        finally:
            sys.settrace(None)
            os._exit(code if came else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = world / "said"
    text = said.read_text() if said.exists() else ""
    said.unlink(missing_ok=True)
    return code, text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new", "in place"])
@alone
def test_a_signal_at_any_line_leaves_nothing_and_the_message_is_true(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    number = 0
    while True:
        world = tmp_path / str(number)
        old, fresh = prepared(world, mode, monkeypatch)
        code, said = interrupted(world, mode, number)
        assert code in {0, 2, 3}, number
        assert staged(world) == [], number
        found = read(world / "out") if (world / "out").exists() else {}
        if "complete" in said or not said:
            assert found == fresh, number
        else:
            assert found == old, number
        seen.add(said.partition(",")[0])
        if code == 3:
            break
        number += 7
    assert seen >= {"nothing", "interrupted"}


def test_what_cannot_be_flushed_after_the_rename_is_committed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    target = tmp_path / "out"

    def fsync(fd: int) -> None:
        if target.exists():
            fail()
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with Staging(target, 10) as stage:
        write(stage.directory, FRESH)
        (said,) = stage.commit()
    assert "may not survive a power failure" in said
    assert read(target) == FRESH
    assert staged(tmp_path) == []
