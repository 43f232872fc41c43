import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.evaluate.server.processes import bounded_log
from unshard.evaluate.server.processes.bounded_log import BoundedLog, last_lines, read_log


@pytest.fixture(autouse=True, scope="module")
def small_logs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounded_log, "LOG_BYTES", 1000)
        yield


def read_all(path: Path) -> str:
    text, offset = "", 0
    while True:
        part, offset = read_log(path, offset)
        if not part:
            return text
        text += part


def test_a_short_log_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with BoundedLog(path) as log:
        log.write(b"one\n")
        log.write("zwei ä\n".encode())
    assert path.read_text() == "one\nzwei ä\n"
    assert read_log(path, 0) == ("one\nzwei ä\n", 12)
    assert read_log(path, 12) == ("", 12)
    assert last_lines(path, 1) == "zwei ä"


def test_a_log_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none", 0) == ("", 0)
    assert last_lines(tmp_path / "none", 3) == ""


@given(sizes=st.lists(st.integers(1, 3000), max_size=20))
def test_of_a_long_log_the_first_and_the_last_parts_stay(
    sizes: list[int],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"
        written = b""
        with BoundedLog(path) as log:
            for number, size in enumerate(sizes):
                data = bytes([65 + number % 26]) * size
                written += data
                log.write(data)
                assert path.stat().st_size <= 1000 + 60
        kept = path.read_bytes()
        shown = read_all(path)
    assert kept[:500] == written[:500]
    assert kept[-250:] == written[-250:] if len(written) > 500 else kept == written
    assert shown == kept.decode()


def test_a_reader_that_follows_knows_where_it_is_after_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with BoundedLog(path) as log:
        log.write(b"a" * 900)
        text, offset = read_log(path, 0)
        assert (len(text), offset) == (900, 900)
        log.write(b"b" * 600)  # 1,500 in all, of which some are left out
        text, offset = read_log(path, offset)
        if "left out" in text:
            text, offset = read_log(path, offset)
        assert set(text) == {"b"}
        assert offset == 1500


def test_what_is_left_out_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread = tmp_path / "log.txt", os.pread
    with BoundedLog(path) as log:
        log.write(b"a" * 900)
        more = [b"b" * 600]

        def meanwhile(fd: int, count: int, where: int) -> bytes:
            if where == 800 and more:  # the part itself, after the bounds
                log.write(more.pop())
            return pread(fd, count, where)

        monkeypatch.setattr(os, "pread", meanwhile)
        text, offset = read_log(path, 800)
        if "left out" in text:
            text, offset = read_log(path, offset)
    assert (set(text), offset) == ({"b"}, 1500)


def test_a_follower_of_an_earlier_attempts_log_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"short\n")
    assert read_log(path, 900) == ("short\n", 6)


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    for path in (tmp_path / "whole", tmp_path / "short"):
        with BoundedLog(path) as log:
            log.write(b"a" * 900 + b"b" * 600)
        monkeypatch.setattr(os, "pwrite", lambda fd, data, where: pwrite(fd, data[:7], where))
    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_character_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with BoundedLog(path) as log:
        log.write(b"a\xc3")
        assert read_log(path, 0) == ("a", 1)
        log.write(b"\xa4")
        assert read_log(path, 1) == ("ä", 3)
        log.write(b"\xff\xff")
        assert read_log(path, 3)[0] == "\ufffd\ufffd"
