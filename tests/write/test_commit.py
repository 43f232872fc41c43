"""Replacing an output and merging in place: after any crash and recovery, the old or the new.

A forked child kills itself at the n-th step that touches the disk, for every n there is; then the
next run recovers, and what stands there must be one of the two.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest

import unshard.write.dirfd
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
    kill,
    killed_with_a_journal,
    merge_into,
    read,
    staged,
    survives,
    worlds,
    write,
)
from unshard.errors import OutputError
from unshard.write.staging.journal import Mode
from unshard.write.staging.recovery import recover
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import choose_mode


@pytest.fixture(params=["exchange", "aside"])
def replacing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the exchange rename, and as on a system that has none."""
    if request.param == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    return str(request.param)


def test_without_overwrite_an_output_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "out", OLD)
    with (
        pytest.raises(OutputError, match=r"exists already[\s\S]*overwrite=True"),
        Staging(tmp_path / "out", 10),
    ):
        pass
    assert read(tmp_path / "out") == OLD


def test_the_mode_follows_from_where_the_checkpoint_lies(tmp_path: Path) -> None:
    write(tmp_path / "out", OLD)
    source = checkpoint(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert choose_mode(tmp_path / "none", [source], overwrite=False) is Mode.NEW
    assert choose_mode(tmp_path / "out", [source], overwrite=True) is Mode.REPLACE
    for inside in (source, source.parent, tmp_path):
        assert choose_mode(inside, [source], overwrite=True) is Mode.IN_PLACE
    with pytest.raises(OutputError, match="not a directory"):
        choose_mode(tmp_path / "file", [source], overwrite=True)


def test_replacing_removes_weights_and_keeps_everything_else(
    tmp_path: Path, replacing: str
) -> None:
    write(tmp_path / "out", OLD)
    (tmp_path / "out").chmod(0o750)
    (tmp_path / "out" / "link").symlink_to("notes.txt")
    before = (tmp_path / "out" / "notes.txt").stat().st_ino
    merge_into(tmp_path / "out")
    assert read(tmp_path / "out") == REPLACED | {"link": "mine"}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "notes.txt").stat().st_ino == before  # linked, not copied
    assert (tmp_path / "out" / "link").is_symlink()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"], replacing


def test_an_error_while_replacing_leaves_the_old(tmp_path: Path) -> None:
    write(tmp_path / "out", OLD)
    with pytest.raises(RuntimeError), Staging(tmp_path / "out", 10, overwrite=True) as stage:
        write(stage.directory, FRESH)
        raise RuntimeError
    assert read(tmp_path / "out") == OLD
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_link_to_an_output_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", OLD)
    (tmp_path / "out").symlink_to("real")
    merge_into(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert read(tmp_path / "real") == REPLACED


def test_in_place_companions_stay_and_the_modification_time_too(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-5"
    write(target, OLD)
    source = checkpoint(target)
    os.utime(target, ns=(1_000_000_000, 2_000_000_000))
    merge_into(target, (source,))
    assert read(target) == IN_PLACE | {"ckpt/model_world_size_1_rank_0.pt": "shard"}
    assert target.stat().st_mtime_ns == 2_000_000_000
    assert staged(tmp_path, target) == []


def test_in_place_twice_is_the_same_as_once(tmp_path: Path) -> None:
    write(tmp_path / "run", OLD)
    source = checkpoint(tmp_path / "run")
    merge_into(tmp_path / "run", (source,))
    once = read(tmp_path / "run")
    merge_into(tmp_path / "run", (source,))
    assert read(tmp_path / "run") == once


def test_an_output_inside_a_checkpoint_leaves_its_modification_time(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run")
    os.utime(source, ns=(1_000_000_000, 2_000_000_000))
    merge_into(source / "hf", (source,))
    assert source.stat().st_mtime_ns == 2_000_000_000
    assert read(source / "hf") == FRESH


def test_two_merges_into_one_checkpoint_do_not_mix(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "run")
    with Staging(tmp_path / "run", 10, sources=(source,), overwrite=True) as first:
        with pytest.raises(OutputError, match="another merge into it is under way"):
            merge_into(tmp_path / "run", (source,))
        write(first.directory, FRESH)
        first.commit()
    assert read(tmp_path / "run")["model.safetensors"] == "new weights"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exchange", "aside"])
@pytest.mark.parametrize("end", ["goes on", "is killed"])
@alone
def test_another_merge_at_any_step_leaves_one_output_and_no_staging(
    tmp_path: Path, mode: str, end: str
) -> None:
    """At the n-th step of one merge another one is made as a whole; then the first goes on."""
    if mode == "aside":
        pytest.MonkeyPatch().setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    other = FRESH | {"model.safetensors": "other weights"}
    seen: set[str] = set()
    for number, world in worlds(tmp_path):
        target, has_met = world / "out", False
        write(target, OLD)

        def meet(target: Path = target) -> None:
            nonlocal has_met
            has_met = True
            merge_into(target, texts=other)
            if end == "is killed":
                kill()

        def merge(target: Path = target) -> None:
            merge_into(target)

        if end == "is killed":
            has_met = not survives(number, merge, meet)
        else:
            with pytest.MonkeyPatch.context() as patch, suppress(OutputError):
                die_at(number, patch, meet)
                merge()
        age(world)
        recover(world)
        assert staged(world) == [], number
        found = read(target)
        assert found in (REPLACED, REPLACED | other), number
        seen.add(found["model.safetensors"])
        if not has_met:
            break
    assert number > 15
    assert seen == {"new weights", "other weights"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new", "exchange", "aside", "in place", "here"])
@alone
def test_killed_at_any_step_the_target_is_old_or_new_after_recovery(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    seen: set[str] = set()
    for number, world in worlds(tmp_path):
        target = world / "out"
        world.mkdir()
        old: Texts = {}
        sources: tuple[Path, ...] = ()
        if mode != "new":
            write(target, OLD)
        if mode == "in place":
            sources = (checkpoint(target),)
        if target.exists():
            old, inode = read(target), target.stat().st_ino
            os.utime(target, ns=(1_000_000_000, 2_000_000_000))

        def merge(target: Path = target, sources: tuple[Path, ...] = sources) -> None:
            os.chdir(target if mode == "here" else world)  # noqa: B023
            merge_into(target, sources)

        alive = survives(number, merge)
        seen.add(recovered(world, target, old, mode))
        if mode == "here":
            assert target.stat().st_ino == inode
        if alive:
            break
    assert number > 15
    assert seen == {"old", "new"}


def recovered(world: Path, target: Path, old: Texts, mode: str) -> str:
    """Recover as the next run does; return which state is there, "old" or "new"."""
    age(world)
    recover(world)
    assert staged(world) == []
    found = read(target) if target.is_dir() else {}
    shard = {name: text for name, text in old.items() if name.startswith("ckpt/")}
    fresh = {"new": FRESH, "in place": IN_PLACE | shard}.get(mode, REPLACED)
    assert found in (old, fresh)
    if mode == "in place":
        assert target.stat().st_mtime_ns == 2_000_000_000
    return "new" if found == fresh else "old"


def terminated(number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM as many programs do."""
    raise SystemExit(128 + number)


def interrupted_at(number: int, sent: signal.Signals, action: Callable[[], None]) -> bool:
    """Run an action in a child that gets a signal at its n-th step; return whether it came."""
    pid = os.fork()
    if pid == 0:
        came = False

        def send() -> None:
            nonlocal came
            came = True
            signal.raise_signal(sent)

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, terminated)
            die_at(number, pytest.MonkeyPatch(), send)
            action()
        except (KeyboardInterrupt, SystemExit):
            pass
        except BaseException:  # noqa: BLE001 (the child must not return into pytest)
            os._exit(1)
        os._exit(3 if came else 0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, 3}
    return code == 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new", "exchange", "aside", "in place"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@alone
def test_interrupted_at_any_step_the_target_is_old_or_new_at_once(
    tmp_path: Path, mode: str, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a next run that recovers: Ctrl-C waits for a commit that has begun."""
    if mode == "aside":
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", lambda *_: False)
    fresh = {"new": FRESH, "in place": IN_PLACE}.get(mode, REPLACED)
    for number, world in worlds(tmp_path):
        target = world / "out"
        world.mkdir()
        sources: tuple[Path, ...] = ()
        if mode != "new":
            write(target, OLD)
        if mode == "in place":
            sources = (checkpoint(target),)
        old = read(target) if target.is_dir() else {}
        came = interrupted_at(number, sent, lambda: merge_into(target, sources))  # noqa: B023
        found = read(target) if target.is_dir() else {}
        shard = {name: text for name, text in old.items() if name.startswith("ckpt/")}
        assert found in (old, fresh | shard), number
        assert staged(world) == []
        if not came:
            break
    assert number > 15


def test_a_commit_that_fails_half_way_is_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    write(target, OLD)
    sources = (checkpoint(target),)
    real = os.replace

    def full(name: str, to: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if name == "unshard.json":
            raise OSError(errno.ENOSPC, "no space")
        real(name, to, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match=r"not all new files could be moved[\s\S]*next merge"):
        merge_into(target, sources)
    monkeypatch.undo()
    assert len(staged(tmp_path)) == 1
    recover(tmp_path)
    expected = IN_PLACE | {"ckpt/model_world_size_1_rank_0.pt": "shard"}
    assert read(target) == expected
    assert staged(tmp_path) == []


@pytest.mark.slow
@alone
def test_killed_while_recovering_the_next_recovery_finishes(tmp_path: Path) -> None:
    for number, world in worlds(tmp_path):
        target = world / "out"
        write(target, OLD)
        sources = (checkpoint(target),)
        killed_with_a_journal(target, sources)
        alive = survives(number, lambda: recover(world))  # noqa: B023
        age(world)
        recover(world)
        expected = IN_PLACE | {"ckpt/model_world_size_1_rank_0.pt": "shard"}
        assert read(target) == expected
        if alive:
            break
    assert number > 5


@alone
def test_random_kills_leave_the_old_or_the_new(tmp_path: Path) -> None:
    for round_number in range(25):
        target = tmp_path / str(round_number) / "out"
        write(target, OLD)
        sources = (checkpoint(target),)
        old = read(target)
        pid = os.fork()
        if pid == 0:
            while True:
                merge_into(target, sources)
        time.sleep(0.002 * (round_number % 12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        age(target.parent)
        recover(target.parent)
        fresh = IN_PLACE | {"ckpt/model_world_size_1_rank_0.pt": "shard"}
        assert read(target) in (old, fresh)


def test_the_staging_of_another_user_is_never_acted_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.fork()
    if pid == 0:
        Staging(tmp_path / "out", 10).__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    recover(tmp_path)
    assert len(staged(tmp_path)) == 1
