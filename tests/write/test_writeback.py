"""What is handed to the system to be written to disk while a file is still being made."""

import os
import sys
from pathlib import Path

import pytest

from unshard.write import writeback
from unshard.write.writeback import Writeback

MEGABYTE = 1024 * 1024


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return descriptor, start and size of every range whose writing was begun."""
    ranges: list[tuple[int, int, int]] = []

    def sync(fd: int, start: int, size: int, _flags: int) -> int:
        ranges.append((fd, start, size))
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", lambda: sync)
    return ranges


def test_adjacent_bytes_are_begun_once_they_are_a_megabyte(
    begun: list[tuple[int, int, int]],
) -> None:
    behind = Writeback()
    for start in range(100, 100 + 5 * MEGABYTE // 2, MEGABYTE // 4):
        behind.wrote(0, 7, start, MEGABYTE // 4)
    assert begun == [(7, 100, MEGABYTE), (7, 100 + MEGABYTE, MEGABYTE)]


def test_scattered_bytes_are_left_to_the_flush_at_the_end(
    begun: list[tuple[int, int, int]],
) -> None:
    behind = Writeback()
    for start in range(0, 8 * MEGABYTE, MEGABYTE):
        behind.wrote(0, 7, start, MEGABYTE // 2)
    behind.wrote(1, 8, 15 * MEGABYTE // 2, MEGABYTE // 2)  # follows on, but in another file
    assert begun == []


@pytest.mark.skipif(sys.platform != "linux", reason="sync_file_range is of Linux")
def test_the_system_accepts_what_it_is_asked_for(tmp_path: Path) -> None:
    function = writeback._sync_file_range()
    assert function is not None
    with (tmp_path / "file").open("wb") as file:
        file.truncate(8 << 30)  # offsets of more than 32 bits
        os.pwrite(file.fileno(), bytes(MEGABYTE), 6 << 30)
        assert function(file.fileno(), 6 << 30, MEGABYTE, 2) == 0
        assert function(-1, 0, MEGABYTE, 2) == -1
