"""Staging and commit: whole or not at all."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unshard.errors import OutputError
from unshard.write.staging.stage import Staging
from unshard.write.staging.targets import check_space
from waiting import LIMIT_S


def staged(parent: Path) -> list[Path]:
    return list(parent.glob("_unshard-partial-*"))


def test_a_commit_makes_the_target_whole_and_leaves_nothing_next_to_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with Staging(target, 10) as stage:
        (stage.directory / "a").write_text("1")
        assert not target.exists()
        stage.commit()
    assert (target / "a").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]


def test_without_a_commit_nothing_is_left_not_even_parents(tmp_path: Path) -> None:
    with Staging(tmp_path / "deep" / "er" / "out", 10) as stage:
        (stage.directory / "a").write_text("1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_by_name_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OutputError) as caught, Staging(tmp_path / "deep" / "out", 10):
        pass
    reason = f"{tmp_path / 'deep'}: files cannot be locked there: {os.strerror(code)}"
    assert caught.value.subject == reason
    assert "write the output to another file system" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Staging(tmp_path / "out", 10) as stage:
        (stage.directory / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists already"), Staging(tmp_path, 10):
        pass
    assert (tmp_path / "keep.txt").read_text() == "mine"
    assert staged(tmp_path.parent) == []


def test_a_file_or_a_dangling_link_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(OutputError, match="exists already"), Staging(tmp_path / name, 10):
            pass


def test_an_empty_directory_may_become_the_output(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with Staging(tmp_path / "out", 10) as stage:
        (stage.directory / "a").write_text("1")
        stage.commit()
    assert (tmp_path / "out" / "a").exists()


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(OutputError, match="another process made it"), Staging(target, 10) as stage:
        (stage.directory / "a").write_text("ours")
        target.mkdir()
        (target / "b").write_text("theirs")
        stage.commit()
    assert [path.name for path in target.iterdir()] == ["b"]
    assert staged(tmp_path) == []


def test_too_little_space_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(OutputError, match="not enough free space") as error:
        check_space(tmp_path, 2 * free)
    assert "bytes" in error.value.found
    with pytest.raises(OutputError, match="free space"), Staging(tmp_path / "a" / "out", 2 * free):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_in_the_middle_is_an_output_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), Staging(tmp_path / "out", 10) as stage:
        (stage.directory / "a").write_text("1")
        with Path("/dev/full").open("w") as full:
            full.write("x")
    assert list(tmp_path.iterdir()) == []


def test_the_umask_is_honoured(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with Staging(tmp_path / "out", 10) as stage:
            stage.commit()
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


HOLD = """
import sys, time
from pathlib import Path
from unshard.write.staging.stage import Staging
with Staging(Path(sys.argv[1]), 10) as stage:
    (stage.directory / "half").write_text("x" * 1000)
    print("ready", flush=True)
    time.sleep(600)
"""


def holder(target: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def stop(child: subprocess.Popen[str], number: int) -> None:
    child.send_signal(number)
    child.wait(LIMIT_S)
    assert child.stdout is not None
    child.stdout.close()


def test_the_staging_of_a_killed_process_is_removed_by_the_next_run(tmp_path: Path) -> None:
    child = holder(tmp_path / "first")
    stop(child, signal.SIGKILL)
    assert len(staged(tmp_path)) == 1
    with Staging(tmp_path / "second", 10) as stage:
        assert len(staged(tmp_path)) == 1  # our own
        stage.commit()
    assert staged(tmp_path) == []


def test_the_staging_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    child = holder(tmp_path / "first")
    try:
        with Staging(tmp_path / "second", 10) as stage:
            stage.commit()
        assert len(staged(tmp_path)) == 1
    finally:
        stop(child, signal.SIGKILL)


def test_the_staging_of_another_host_is_left_alone(tmp_path: Path) -> None:
    child = holder(tmp_path / "first")
    stop(child, signal.SIGKILL)
    owner = staged(tmp_path)[0] / "owner.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"host": "elsewhere"}))
    with Staging(tmp_path / "second", 10) as stage:
        stage.commit()
    assert len(staged(tmp_path)) == 1


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    child = holder(tmp_path / "first")
    stop(child, signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
