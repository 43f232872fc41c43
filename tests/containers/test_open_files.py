"""The cache of descriptors: never more than allowed, reused, and closed at the end."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.containers.open_files import OpenFiles
from unshard.errors import CorruptError

COUNT = 6


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return files that each hold their own name."""
    folder = tmp_path_factory.mktemp("files")
    made = [folder / str(number) for number in range(COUNT)]
    for path in made:
        path.write_text(path.name)
    return made


def is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def open_now(paths: list[Path]) -> list[Path]:
    """Return which of these files this process has open, once per descriptor."""
    fds = [int(entry.name) for entry in Path("/dev/fd").iterdir()]
    return [path for fd in fds for path in paths if is_file(fd, path)]


@given(limit=st.integers(1, COUNT + 1), asked=st.lists(st.integers(0, COUNT - 1), max_size=30))
def test_never_more_than_the_limit_are_open_and_each_reads_its_own_file(
    paths: list[Path], limit: int, asked: list[int]
) -> None:
    with OpenFiles(os.O_RDONLY, limit=limit) as files:
        for number in asked:
            fd = files.fd(paths[number])
            assert os.pread(fd, 9, 0) == str(number).encode()
            found = open_now(paths)
            assert len(found) == len(set(found)) <= limit
    assert open_now(paths) == []


@given(
    limit=st.integers(1, COUNT), asked=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=30)
)
def test_the_files_asked_for_last_are_the_ones_that_stay_open(
    paths: list[Path], limit: int, asked: list[int]
) -> None:
    latest = list(dict.fromkeys(reversed(asked)))[:limit]
    with OpenFiles(os.O_RDONLY, limit=limit) as files:
        for number in asked:
            files.fd(paths[number])
        assert sorted(open_now(paths)) == sorted(paths[number] for number in latest)


def test_a_descriptor_stays_valid_until_limit_other_files_were_asked_for(paths: list[Path]) -> None:
    with OpenFiles(os.O_RDONLY, limit=3) as files:
        first = files.fd(paths[0])
        files.fd(paths[1])
        files.fd(paths[2])
        assert is_file(first, paths[0])
        assert files.fd(paths[0]) == first
        files.fd(paths[3])
        assert files.fd(paths[0]) == first


def test_all_are_closed_when_an_error_leaves_the_block(paths: list[Path]) -> None:
    with pytest.raises(KeyError), OpenFiles(os.O_RDONLY, limit=3) as files:
        files.fd(paths[0])
        raise KeyError
    assert open_now(paths) == []


def test_closing_twice_is_harmless_and_files_can_be_opened_again(paths: list[Path]) -> None:
    files = OpenFiles(os.O_RDONLY, limit=3)
    files.fd(paths[0])
    files.close()
    files.close()
    assert open_now(paths) == []
    assert os.pread(files.fd(paths[1]), 9, 0) == b"1"
    files.close()


def test_a_file_that_is_gone_is_corrupt_and_named_and_the_others_go_on(
    paths: list[Path], tmp_path: Path
) -> None:
    gone = tmp_path / "rank_3.pt"
    with OpenFiles(os.O_RDONLY, limit=1) as files:
        files.fd(paths[0])
        with pytest.raises(CorruptError, match=r"rank_3\.pt: no longer exists"):
            files.fd(gone)
        gone.write_text("back")
        assert os.pread(files.fd(gone), 9, 0) == b"back"
        assert os.pread(files.fd(paths[0]), 9, 0) == b"0"


def test_flags_decide_what_may_be_done(tmp_path: Path) -> None:
    path = tmp_path / "target"
    path.write_bytes(b"....")
    with OpenFiles(os.O_WRONLY, limit=1) as files:
        os.pwrite(files.fd(path), b"ab", 1)
    assert path.read_bytes() == b".ab."
