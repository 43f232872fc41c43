"""What recovery believes: only what this user's own run left, in the directory where it left it."""

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import unshard
from commits import (
    IN_PLACE,
    OLD,
    age,
    checkpoint,
    kill,
    killed_with_a_journal,
    merge_into,
    read,
    staged,
    write,
)
from ranks import assert_same, merged, save_ranks, snapshot, some_tensors
from unshard.errors import OutputError
from unshard.write.staging.journal import Journal, Mode, read_journal, write_journal
from unshard.write.staging.owners import Owner, StagingDirectory, claim, staging_name
from unshard.write.staging.recovery import recover
from unshard.write.staging.stage import Staging

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

SHARD = {"ckpt/model_world_size_1_rank_0.pt": "shard"}


def in_child(action: Callable[[], None]) -> None:
    """Run an action in a child that dies by it, or is killed after it."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            kill()
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


@pytest.fixture
def strangers_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a staging directory as unshard does, with another key."""

    def forge(parent: Path, target: str, place: tuple[str, ...], old: int) -> None:
        with monkeypatch.context() as patched:
            patched.setenv("XDG_STATE_HOME", str(tmp_path / "stranger"))
            (tmp_path / "stranger").mkdir(exist_ok=True)
            fd = os.open(parent, os.O_RDONLY)
            path = parent / staging_name(fd, None)
            path.mkdir(mode=0o700)
            inside = os.open(path, os.O_RDONLY)
            claim(StagingDirectory(path, fd, inside), Owner((Path("/"),))).close()
            (path / "output").mkdir()
            for name in place:
                (path / "output" / Path(name).name).write_text("theirs")
            goes = {"config": (1, 2, 3), "known_hosts": (1, 2, 3)}
            journal = Journal(Mode.IN_PLACE, target, old, 0, goes, {}, place, 0)
            write_journal(StagingDirectory(path, fd, inside), journal)
            os.close(inside)
            os.close(fd)

    return forge


@pytest.mark.parametrize(
    "target", ["link", "../../../victim", "{tmp}/victim", "in/ner", "plain", "."]
)
def test_a_staging_that_was_shipped_with_a_checkpoint_is_named_and_left_alone(
    tmp_path: Path,
    strangers_key: Callable[..., None],
    target: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its author knew the host, the user and every inode, and used unshard itself."""
    victim = tmp_path / "victim"
    write(victim, {"config": "mine", "known_hosts": "mine"})
    parent = save_ranks(tmp_path / "run" / "global_step_1", some_tensors(), 2) / "merged"
    write(parent / "plain", {"config": "mine"})
    write(parent / "in" / "ner", {"config": "mine"})
    (parent / "link").symlink_to(victim)
    named = target.format(tmp=tmp_path)
    strangers_key(parent, named, ("authorized_keys",), (parent / named).stat().st_ino)
    before = snapshot(tmp_path)
    unshard.merge(parent.parent, parent / "out", config="none")
    assert_same(merged(parent / "out"), some_tensors())
    shutil.rmtree(parent / "out")
    assert snapshot(tmp_path) == before
    assert str(staged(parent)[0]) in caplog.text


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a key of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "unshard" / "key"


def test_a_key_that_was_lost_once_the_directory_had_its_name_ends_the_merge(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that is not sealed would never be believed, and the directory never removed."""

    def named_then_lost(parent: int, mtime_ns: int | None) -> str:
        name = staging_name(parent, mtime_ns)
        key.write_bytes(b"cut")
        return name

    monkeypatch.setattr("unshard.write.staging.stage.staging_name", named_then_lost)
    source = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    with pytest.raises(OutputError, match=r"out: cannot be written: .*key of this user"):
        unshard.merge(source, tmp_path / "out", config="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "state"]


def test_a_key_that_was_lost_before_the_journal_ends_the_merge_with_the_old_output(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal that is not sealed would never be followed, and half the output never moved."""
    source, out = save_ranks(tmp_path / "ckpt", some_tensors(), 2), tmp_path / "out"
    unshard.merge(source, out, dtype="float16", config="none")
    before = snapshot(out)

    def lost_then_written(place: StagingDirectory, journal: Journal) -> None:
        key.write_bytes(b"cut")
        write_journal(place, journal)

    monkeypatch.setattr("unshard.write.staging.stage.write_journal", lost_then_written)
    with pytest.raises(OutputError, match=r"out: cannot be written: .*key of this user"):
        unshard.merge(source, out, overwrite=True, config="none")
    assert snapshot(out) == before
    assert staged(tmp_path) == []


def test_a_real_staging_that_was_copied_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The original, in its own place, is finished."""
    write(tmp_path / "run" / "out", OLD)
    sources = (checkpoint(tmp_path / "run" / "out"),)
    killed_with_a_journal(tmp_path / "run" / "out", sources)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True)
    (copied,) = staged(tmp_path / "copy")
    beside = tmp_path / "run" / copied.name.replace("partial-", "partial-0")
    shutil.copytree(copied, beside)
    before = snapshot(tmp_path / "copy"), snapshot(beside)
    recover(tmp_path / "copy")
    recover(tmp_path / "run")
    assert (snapshot(tmp_path / "copy"), snapshot(beside)) == before
    assert str(copied) in caplog.text
    assert str(beside) in caplog.text
    assert read(tmp_path / "run" / "out") == IN_PLACE | SHARD
    assert staged(tmp_path / "run") == [beside]


def test_a_copy_in_the_place_of_the_original_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "out", OLD)
    killed_with_a_journal(tmp_path / "out", (checkpoint(tmp_path / "out"),))
    (original,) = staged(tmp_path)
    original.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", original)
    before = snapshot(tmp_path)
    recover(tmp_path)
    assert snapshot(tmp_path) == before
    assert f"left alone: {original}: its owner.json" in caplog.text


@pytest.mark.parametrize(
    "journal",
    [
        Journal(Mode.IN_PLACE, "../out", 1),
        Journal(Mode.IN_PLACE, "/etc", 1),
        Journal(Mode.IN_PLACE, "out", 1, place=("../../a",)),
        Journal(Mode.IN_PLACE, "out", 1, place=("/etc/passwd",)),
        Journal(Mode.REPLACE, "out", 1, goes={"a/../../b": (1, 2, 3)}),
        Journal(Mode.REPLACE, "out", 1, carried={"": (1, 2, 3)}),
    ],
)
def test_a_journal_that_leads_elsewhere_is_not_believed_even_if_sealed(
    tmp_path: Path, journal: Journal
) -> None:
    with Staging(tmp_path / "out", 10) as stage:
        write_journal(stage._staging, journal)
        with pytest.raises(PermissionError, match=r"journal\.json is not valid"):
            read_journal(stage._staging)


def other_target(staging: Path, target: Path) -> None:
    target.rename(target.with_name("was"))
    target.symlink_to("was")
    _ = staging


def other_directory(staging: Path, target: Path) -> None:
    shutil.copytree(target, target.with_name("copy"))
    target.rename(target.with_name("was"))
    target.with_name("copy").rename(target)
    _ = staging


def open_to_others(staging: Path, _target: Path) -> None:
    staging.chmod(0o770)


def other_journal(staging: Path, _target: Path) -> None:
    whole = json.loads((staging / "journal.json").read_text())
    whole["journal"]["goes"]["notes.txt"] = [1, 2, 3]
    (staging / "journal.json").write_text(json.dumps(whole))


def linked_journal(staging: Path, _target: Path) -> None:
    (staging / "journal.json").rename(staging.parent / "journal.json")
    (staging / "journal.json").symlink_to("../journal.json")


def no_journal(staging: Path, _target: Path) -> None:
    (staging / "journal.json").write_text("[" * 100_000)


def linked_owner(staging: Path, _target: Path) -> None:
    (staging / "owner.json").rename(staging.parent / "owner.json")
    (staging / "owner.json").symlink_to("../owner.json")


def fifo_owner(staging: Path, _target: Path) -> None:
    (staging / "owner.json").unlink()
    os.mkfifo(staging / "owner.json")


def other_owner(staging: Path, target: Path) -> None:
    fields = json.loads((staging / "owner.json").read_text())
    (staging / "owner.json").write_text(json.dumps(fields | {"made": [str(target.parent)]}))


@pytest.mark.parametrize(
    "change",
    [
        other_target,
        other_directory,
        open_to_others,
        other_journal,
        linked_journal,
        no_journal,
        linked_owner,
        fifo_owner,
        other_owner,
    ],
)
def test_what_was_changed_since_is_left_alone(
    tmp_path: Path, change: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out"
    write(target, OLD)
    killed_with_a_journal(target, (checkpoint(target),))
    (staging,) = staged(tmp_path)
    change(staging, target)
    before = snapshot(tmp_path)
    recover(tmp_path)
    assert snapshot(tmp_path) == before
    assert f"left alone: {staging}" in caplog.text


def test_what_others_can_only_read_is_finished(tmp_path: Path) -> None:
    """Some file systems give every directory the mode that they were mounted with."""
    target = tmp_path / "out"
    write(target, OLD)
    killed_with_a_journal(target, (checkpoint(target),))
    staged(tmp_path)[0].chmod(0o755)
    recover(tmp_path)
    assert staged(tmp_path) == []
    assert read(target) == IN_PLACE | SHARD


# Runs the command line, and prints the removed files of staging directories that are still open
# when the directory is removed: NFS and FUSE keep them under other names there.
REMOVALS = """
import os, resource, sys
from contextlib import suppress

def hook(event, arguments):
    if event == "os.rmdir" and "_unshard-partial-" in str(arguments[0]):
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        print("open:", [one for one in links if "_unshard" in one and one.endswith("(deleted)")])

sys.addaudithook(hook)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from unshard.__main__ import main
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("before", ["nothing", "an output", "a dead merge", "a limit"])
def test_no_file_of_a_staging_directory_is_open_when_that_is_removed(
    tmp_path: Path, before: str
) -> None:
    source, out = save_ranks(tmp_path / "ckpt", some_tensors(), 2), tmp_path / "out"
    limit, options = 1 << 20, ["--workers", "1", "--config", "none"]
    if before == "an output":
        unshard.merge(source, out, config="none")
        options = ["--overwrite", "--config", "none"]
    if before == "a dead merge":
        in_child(lambda: setattr(Staging(tmp_path / "other", 10).__enter__(), "kept", True))
    if before == "a limit":
        limit = 900  # of a file: the model has more
    ran = subprocess.run(
        [sys.executable, "-c", REMOVALS, str(limit), "merge", str(source), str(out), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    removals = [line for line in ran.stdout.splitlines() if line.startswith("open: ")]
    assert removals == ["open: []"] * (2 if before == "a dead merge" else 1), ran
    assert (ran.returncode == 0) == (before != "a limit"), ran
    assert staged(tmp_path) == []


def test_a_file_or_link_of_that_name_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {"mine/notes": "mine", "_unshard-partial-file": "mine"})
    (tmp_path / "_unshard-partial-link").symlink_to("mine")
    before = snapshot(tmp_path)
    recover(tmp_path)
    assert snapshot(tmp_path) == before
    assert "_unshard-partial-link" in caplog.text
    assert "_unshard-partial-file" in caplog.text


def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Take the place of the key away."""
    home = tmp_path / "home"
    if kind == "file":
        home.write_text("")
    elif kind == "others":
        (home / "unshard").mkdir(parents=True)
        (home / "unshard").chmod(0o777)
    else:
        (home / "unshard").mkdir(mode=0o700, parents=True)
        (home / "unshard" / "key").write_bytes(bytes(32))
        (home / "unshard" / "key").chmod(0o644)
    monkeypatch.setenv("XDG_STATE_HOME", str(home))


@pytest.mark.parametrize("kind", ["file", "others", "open"])
def test_without_a_place_for_a_key_all_works_but_for_the_recovery(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    homeless(tmp_path, monkeypatch, kind)
    world = tmp_path / "world"
    write(world / "out", OLD)
    sources = (checkpoint(world / "out"),)
    merge_into(world / "out", sources)
    assert read(world / "out") == IN_PLACE | SHARD
    killed_with_a_journal(world / "out", sources)
    before = snapshot(world)
    recover(world)
    assert snapshot(world) == before
    assert f"left alone: {staged(world)[0]}" in caplog.text


def test_a_home_without_hard_links_has_a_key(
    tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    target = tmp_path / "out"
    write(target, OLD)
    killed_with_a_journal(target, (checkpoint(target),))
    recover(tmp_path)
    assert staged(tmp_path) == []
    assert read(target) == IN_PLACE | SHARD
    assert [*key.parent.iterdir()] == [key]


def test_what_was_killed_before_it_had_a_name_is_removed_in_its_own_place_only(
    tmp_path: Path,
) -> None:
    def begin() -> None:
        pytest.MonkeyPatch().setattr("unshard.write.staging.stage.claim", lambda *_: kill())
        Staging(tmp_path / "run" / "out", 10).__enter__()

    (tmp_path / "run").mkdir()
    in_child(begin)
    (tmp_path / "copy").mkdir()
    shutil.copytree(
        staged(tmp_path / "run")[0], tmp_path / "copy" / staged(tmp_path / "run")[0].name
    )
    for folder in ("run", "copy"):
        age(tmp_path / folder)
        recover(tmp_path / folder)
    assert staged(tmp_path / "run") == []
    assert len(staged(tmp_path / "copy")) == 1


def test_a_staging_is_private(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", 10):
        assert staged(tmp_path)[0].stat().st_mode & 0o777 == 0o700
        owner = json.loads((staged(tmp_path)[0] / "owner.json").read_text())
        assert owner["host"] == socket.gethostname()


def test_nothing_is_reported_of_what_others_may_be_writing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with Staging(tmp_path / "one", 10), Staging(tmp_path / "two", 10) as stage:
        stage.commit()
    assert caplog.text == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_dead_owner_made_above_is_removed_if_it_is_empty(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from unshard.write.staging.stage import Staging\n"
        "with Staging(Path(sys.argv[1]), 0): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert [path.name[:17] for path in target.parent.iterdir()] == ["_unshard-partial-"]
    recover(target.parent)
    assert list(tmp_path.iterdir()) == []
