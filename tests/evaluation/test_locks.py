"""One process at a time, and the next as soon as that has given up."""

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from unshard.evaluate.run_folder import RunFolder, unlock


def test_a_lock_is_given_up_although_a_forked_process_still_has_it_open(tmp_path: Path) -> None:
    held = RunFolder(tmp_path).lock("x.lock")
    assert held is not None
    assert RunFolder(tmp_path).lock("x.lock") is None
    forked = os.dup(held)
    unlock(held)
    again = RunFolder(tmp_path).lock("x.lock")
    assert again is not None
    unlock(again)
    os.close(forked)


def test_where_the_file_system_has_no_locks_every_process_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = (RunFolder(tmp_path).lock("x.lock") for _ in range(2))
    assert first is not None
    assert second is not None
    unlock(first)
    unlock(second)


def test_the_mtime_of_the_run_stays(tmp_path: Path) -> None:
    then = time.time_ns() - 10**11
    os.utime(tmp_path, ns=(then, then))
    held = RunFolder(tmp_path).lock("x.lock")
    assert held is not None
    unlock(held)
    assert tmp_path.stat().st_mtime_ns == then
