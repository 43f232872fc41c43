"""Targets that cannot be written to: one error before anything is made, and nothing is left."""

import functools
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
from unshard.keywords import MergeKeywords
from unshard.progress import ignore

pytestmark = pytest.mark.slow

BARE = ("--config", "none")
COMMANDS = {
    "new": ("merge", "ckpt", "out", *BARE),
    "overwrite": ("merge", "ckpt", "old", "--overwrite", *BARE),
    "in place": ("merge", "ckpt", "ckpt", "--overwrite", *BARE),
    "average": ("average", "ckpt", "ckpt2", "out", *BARE),
    "reshard": ("reshard", "ckpt", "out", "--world-size", "3"),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """Checkpoints and an earlier output, in a directory that others may read."""
    with open_directory() as place:
        save_ranks(place / "ckpt", some_tensors(), 2)
        save_ranks(place / "ckpt2", some_tensors(1), 2)
        unshard.merge(
            place / "ckpt", place / "old", dtype="float16", config="none", listener=ignore
        )
        yield place


def everything(place: Path) -> object:
    return sorted(place.rglob("*")), snapshot(place)


def refusals(place: Path, target: Path) -> list[OutputError]:
    """Return what a merge, an average and a reshard raise."""
    first, second, new = place / "ckpt", place / "ckpt2", place / "new"
    options: MergeKeywords = {"overwrite": True, "config": "none"}
    found = []
    for made in (
        lambda: unshard.merge(first, target, listener=ignore, **options),
        lambda: unshard.average([first, second], target, listener=ignore, **options),
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


ISOLATED = ("unshare", "--mount", "--map-root-user", "sh", "-c")


@functools.cache
def refusal(mount: str) -> str:
    """Return why a process cannot have such a mount for itself; "" if it can."""
    if shutil.which("unshare") is None:
        return "needs util-linux"
    tried = subprocess.run([*ISOLATED, mount], capture_output=True, text=True, check=False)
    return f"needs user namespaces: {tried.stderr}" if tried.returncode else ""


def run_mounted(
    place: Path, mount: str, line: tuple[str, ...]
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a directory, with mounts for this process alone."""
    if why := refusal(mount):
        pytest.skip(why)
    program = f"{mount} && cd {place} && exec {sys.executable} -m unshard {' '.join(line)}"
    return subprocess.run([*ISOLATED, program], capture_output=True, text=True, check=False)


def test_a_read_only_file_system_is_one_error(place: Path) -> None:
    before = everything(place)
    for name, line in COMMANDS.items():
        mount = f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
        done = run_mounted(place, mount, line)
        assert done.returncode == 5, (name, done.stderr)
        assert "Read-only file system" in done.stderr, (name, done.stderr)
        assert sum(one.startswith("error: ") for one in done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr
        assert everything(place) == before


def test_a_checkpoint_by_another_path_is_still_the_checkpoint(place: Path) -> None:
    """A directory that is mounted twice has two paths, as one has where case is ignored."""
    (place / "again").mkdir()
    mount = f"mount --bind {place / 'ckpt'} {place / 'again'}"
    done = run_mounted(place, mount, ("merge", "again", "ckpt", "--overwrite", *BARE))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (place / "ckpt").glob("model*")} == {
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
        "model.safetensors",
    }
    before = everything(place)
    mount = f"mount --bind {place / 'old'} {place / 'again'}"
    for overwrite in ("--overwrite", "--overwrite=all"):
        done = run_mounted(place, mount, ("merge", "again", "old", overwrite, *BARE))
        assert done.returncode == 5, done.stderr
        assert "contains the weights that are merged" in done.stderr
    assert everything(place) == before
