"""Targets that cannot be written to: one error before anything is made, and nothing is left."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import unshard
from another_user import another_user, open_directory
from ranks import save_ranks, snapshot, some_tensors
from unshard.errors import OutputError
from unshard.progress import ignore

COMMANDS = {
    "new": ("merge", "ckpt", "out"),
    "overwrite": ("merge", "ckpt", "old", "--overwrite"),
    "in place": ("merge", "ckpt", "ckpt", "--overwrite"),
    "average": ("average", "ckpt", "ckpt2", "out"),
    "reshard": ("reshard", "ckpt", "out", "--world-size", "3"),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Checkpoints and an earlier output, in a directory that others may read."""
    with open_directory() as place:
        save_ranks(place / "ckpt", some_tensors(), 2)
        save_ranks(place / "ckpt2", some_tensors(1), 2)
        unshard.merge(place / "ckpt", place / "old", dtype="float16", listener=ignore)
        yield place


def everything(place: Path) -> object:
    return sorted(place.rglob("*")), snapshot(place)


def refusals(place: Path, target: Path) -> list[OutputError]:
    """Return what a merge, an average and a reshard raise."""
    first, second, new = place / "ckpt", place / "ckpt2", place / "new"
    found = []
    for made in (
        lambda: unshard.merge(first, target, overwrite=True, listener=ignore),
        lambda: unshard.average([first, second], target, overwrite=True, listener=ignore),
        lambda: unshard.reshard(first, new, world_size=3, listener=ignore),
    ):
        with pytest.raises(OutputError) as caught:
            made()
        found.append(caught.value)
    return found


@pytest.mark.parametrize("target", ["out", "old"])
def test_a_directory_without_write_permission_is_one_error(place: Path, target: str) -> None:
    before = everything(place)
    with another_user():
        errors = refusals(place, place / target)
    for error in errors:
        assert "Permission denied" in str(error)
        assert str(place) in str(error)
    assert everything(place) == before


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_read_only_file_system_is_one_error(place: Path) -> None:
    def command(line: tuple[str, ...]) -> str:
        """Mount the directory on itself, read-only, for this process alone."""
        return (
            f"mount --bind {place} {place} && mount -o remount,bind,ro {place} && cd {place} && "
            f"exec {sys.executable} -m unshard {' '.join(line)}"
        )

    isolated = ("unshare", "--mount", "--map-root-user", "sh", "-c")
    allowed = subprocess.run(
        [*isolated, f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"],
        capture_output=True,
        check=False,
    )
    if allowed.returncode:
        pytest.skip(f"needs user namespaces: {allowed.stderr.decode()}")
    before = everything(place)
    for name, line in COMMANDS.items():
        done = subprocess.run(
            [*isolated, command(line)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 5, (name, done.stderr)
        assert "Read-only file system" in done.stderr, (name, done.stderr)
        assert sum(one.startswith("error: ") for one in done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr
        assert everything(place) == before
