"""What an actor on a node reads: files below its root, and nothing that a link leads out to."""

import errno
import os
from pathlib import Path

import pytest

from unshard.stores.nodes.files import Handshake, NodeFile, NodeFiles, read_here


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory with files and links, next to one that nobody gave."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "file").write_text("0123456789")
    (root / "within").symlink_to("inner/file")
    (root / "way").symlink_to("inner")
    (root / "out").symlink_to("../secret/key")
    (root / "away").symlink_to("../secret")
    (root / "nowhere").symlink_to("nothing")
    os.mkfifo(root / "pipe")
    return root


FILES = NodeFiles()


def listing(root: Path, path: Path) -> dict[str, NodeFile | None]:
    found = FILES.listing(str(root), str(path))
    assert isinstance(found, dict)
    return found


def stamp(root: Path, path: Path) -> str:
    found = listing(root, path.parent)[path.name]
    assert found is not None
    return found.stamp


def test_files_below_the_root_are_listed_and_read_by_ranges(root: Path) -> None:
    found = listing(root, root)
    assert {name for name, one in found.items() if one is None} == {"inner", "way"}
    assert found.keys() == {"inner", "way", "within", "out", "away"}
    assert found["within"] == listing(root, root / "inner")["file"]
    for path in (root / "within", root / "inner" / "file", root / "way" / "file"):
        assert FILES.read(str(root), str(path), stamp(root, path), 3, 4) == b"3456"
        assert FILES.read(str(root), str(path), stamp(root, path), 8, 4) == b"89"
    assert listing(root, root / "nothing") == {}
    assert listing(root, root / "inner" / "file") == {}


@pytest.mark.parametrize("name", ["out", "away", "away/key", "../secret/key", "inner/../../secret"])
def test_what_is_outside_of_the_root_is_neither_listed_nor_read(root: Path, name: str) -> None:
    for answer in (
        FILES.read(str(root), f"{root}/{name}", "", 0, 4),
        FILES.digest(str(root), f"{root}/{name}", ""),
        FILES.listing(str(root), f"{root}/{name}"),
    ):
        assert isinstance(answer, PermissionError)
        assert "leads out of" in str(answer)


def test_a_file_that_was_replaced_is_not_read(root: Path) -> None:
    path, link = str(root / "inner" / "file"), str(root / "within")
    before = stamp(root, Path(path))
    assert FILES.digest(str(root), path, before) == FILES.digest(str(root), link, before)
    (root / "new").write_text("0123456789")
    (root / "new").rename(path)
    for answer in (
        FILES.read(str(root), path, before, 0, 4),
        FILES.digest(str(root), path, before),
    ):
        assert isinstance(answer, OSError)
        assert answer.errno == errno.ESTALE
    Path(path).unlink()
    assert isinstance(FILES.read(str(root), path, before, 0, 4), FileNotFoundError)


def test_a_process_reads_itself_only_the_file_that_was_listed(root: Path) -> None:
    path = root / "inner" / "file"
    known = {stamp(root, path)}
    assert read_here(str(path), known, 2, 3) == b"234"
    assert read_here(str(path), {"other"}, 2, 3) is None
    assert read_here(str(root / "nothing"), known, 2, 3) is None


def test_an_actor_says_what_it_was_given(root: Path) -> None:
    kinds = [FILES.hello(str(root / name)) for name in ("inner", "within", "nothing")]
    assert [hello.kind for hello in kinds] == ["directory", "file", ""]
    assert isinstance(kinds[0], Handshake)
