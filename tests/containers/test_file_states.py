"""The states of files: what is taken for the same file, and what for another one."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unshard.cli.running import error_fields
from unshard.containers.file_states import FileState, FileStates, noting
from unshard.containers.open_files import LentFiles, opened, read_whole
from unshard.errors import CorruptError
from unshard.stores import changed

CHANGED = "has changed while it was being read"


def write(path: Path, text: bytes) -> None:
    with path.open("r+b") as file:
        file.write(text)


def write_with_old_time(path: Path) -> None:
    status = path.stat()
    write(path, b"B")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_with_old_time(path: Path) -> None:
    """As rsync --times: a draft that gets the time, and then the name."""
    draft = path.with_name("draft")
    shutil.copyfile(path, draft)
    shutil.copystat(path, draft)
    draft.replace(path)


def replace_what_is_pinned(path: Path) -> None:
    path.with_name("pin").hardlink_to(path)
    replace_with_old_time(path)


OTHERS: dict[str, Callable[[Path], object]] = {
    "written": lambda path: write(path, b"B"),
    "written, with its old time": write_with_old_time,
    "replaced, with the old time": replace_with_old_time,
    "longer": lambda path: path.write_bytes(b"AA"),
    "replaced, and pinned before": replace_what_is_pinned,
}


@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_another_file_is_noticed_at_the_next_open_and_in_the_end(
    tmp_path: Path, how: Callable[[Path], object]
) -> None:
    path, states = tmp_path / "rank_0.pt", FileStates()
    path.write_bytes(b"A")
    with noting(states):
        assert read_whole(path) == b"A"
        states.check()
        how(path)
        with pytest.raises(CorruptError, match=CHANGED):
            read_whole(path)
    with pytest.raises(CorruptError, match=CHANGED):
        states.check()
    assert len(read_whole(path)) in (1, 2)  # nobody asks for it any more


def test_a_pin_is_no_change(tmp_path: Path) -> None:
    path, pin, states = tmp_path / "rank_0.pt", tmp_path / "pin", FileStates()
    path.write_bytes(b"A")
    states.add(path)
    pin.hardlink_to(path)
    states.check()
    later = FileStates()
    later.add(pin)
    path.unlink()  # by its trainer
    later.check()
    assert read_whole(pin) == b"A"


def test_a_file_system_may_number_a_file_anew() -> None:
    """As those in user space do: all else is equal then."""
    first = FileState(1, 2, 3, 4, 1, 6)
    assert first.is_same(first._replace(inode=7))
    assert not first.is_same(first._replace(inode=7, changed_ns=8))
    assert not first.is_same(first._replace(inode=7, links=2))
    assert first.is_same(first._replace(links=2, changed_ns=8))
    assert not first.is_same(first._replace(device=7))


@pytest.mark.parametrize("tick_ns", [10_000_000, 2_000_000_000])
def test_a_second_write_within_a_tick_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tick_ns: int
) -> None:
    """Times of files are those of the last tick: a first look waits until it is over."""
    path, states = tmp_path / "rank_0.pt", FileStates()

    def rounded(status: os.stat_result) -> os.stat_result:
        names = [f"st_{of}time_ns" for of in "amc"]
        times = {name: getattr(status, name) // tick_ns * tick_ns for name in names}
        return os.stat_result(status[:10], times)

    status = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: rounded(status(fd)))
    path.write_bytes(b"A")
    with noting(states), opened(path):
        write(path, b"B")
        with pytest.raises(CorruptError, match=CHANGED):
            states.check()


def test_what_is_written_again_and_again_is_not_waited_for(tmp_path: Path) -> None:
    path, states, begun = tmp_path / "rank_0.pt", FileStates(), time.monotonic()
    path.write_bytes(b"A")

    def look() -> os.stat_result:
        write(path, b"B")
        return path.stat()

    states.see(path, look)
    assert time.monotonic() - begun < 30


def test_a_loan_ends_with_a_look(tmp_path: Path) -> None:
    path, states = tmp_path / "rank_0.pt", FileStates()
    path.write_bytes(b"A")
    states.add(path)
    files = LentFiles("closed", states=states)
    with files.borrow() as own:
        fd = own.fd(path)
    with pytest.raises(CorruptError, match=CHANGED), files.borrow() as own:
        assert own.fd(path) == fd
        write(path, b"B")
    path.unlink()
    with files.borrow():
        pass
    with pytest.raises(CorruptError, match="no longer exists"):
        states.check()
    files.close()


def test_scripts_know_it() -> None:
    assert error_fields(changed("rank_0.pt"))["type"] == "ChangedError"
