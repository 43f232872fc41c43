"""Commits into a target, and children that die or are ended at any step that touches the disk."""

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import unshard.write.dirfd
import unshard.write.staging.commit
import unshard.write.staging.stage
from unshard.write.record import is_weight_file
from unshard.write.staging.stage import Staging

OLD = {
    "model-00001-of-00002.safetensors": "old 1",
    "model-00002-of-00002.safetensors": "old 2",
    "model.safetensors.index.json": "old index",
    "pytorch_model.bin": "older",
    "unshard.json": "old",
    "config.json": "old config",
    "notes.txt": "mine",
    "sub/deep.txt": "mine too",
}


FRESH = {
    "model.safetensors": "new weights",
    "unshard.json": "new",
    "config.json": "new config",
    "tokenizer.json": "new tokenizer",
    "additional_chat_templates/a.jinja": "new template",
}


KEPT = {"notes.txt": "mine", "sub/deep.txt": "mine too"}


REPLACED = KEPT | FRESH


IN_PLACE = KEPT | FRESH | {"config.json": "old config"}


Texts = dict[str, str]


def write(directory: Path, texts: Texts, *, is_placed: bool = True) -> None:
    """Write files; `unshard.json` becomes the record that lists all but KEPT as ours.

    Before an output is placed, its record lists weights alone.
    """
    own = {name: len(text) for name, text in texts.items() if name not in KEPT}
    weights = {name: size for name, size in own.items() if is_weight_file(name)}
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        listed = {"files": weights} | ({"companions": own} if is_placed else {})
        record = {"unshard": text, "output": listed}
        path.write_text(json.dumps(record) if name == "unshard.json" else text)


def read(directory: Path) -> Texts:
    """Return all files; of a record, its version."""
    return {
        str(path.relative_to(directory)): json.loads(path.read_bytes())["unshard"]
        if path.name == "unshard.json"
        else path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def checkpoint(target: Path) -> Path:
    """Put a checkpoint into the target, so that merging there is in place."""
    write(target, {"ckpt/model_world_size_1_rank_0.pt": "shard"})
    return target / "ckpt"


def merge_into(target: Path, sources: tuple[Path, ...] = (), texts: Texts = FRESH) -> None:
    with Staging(target, 100, sources=sources, overwrite=True) as stage:
        write(stage.directory, texts, is_placed=False)
        stage.commit()


def staged(*parents: Path) -> list[Path]:
    return [path for parent in parents for path in parent.glob("_unshard-partial-*")]


STEPS = (
    "open", "write", "pwrite", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir",
    "fsync", "utime", "chmod", "copy_file_range", "fchmod",
)  # fmt: skip


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own: this one is large, and takes long to fork so often."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        if "monkeypatch" in given:
            given["monkeypatch"] = pytest.MonkeyPatch()
        code = (
            "import importlib, pickle, sys\n"
            "sys.path[:], module, name, given = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "getattr(importlib.import_module(module), name).__wrapped__(**given)"
        )
        packed = pickle.dumps((sys.path, test.__module__, test.__name__, given)).hex()
        done = subprocess.run(
            [sys.executable, "-c", code, packed],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return run


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int, monkeypatch: pytest.MonkeyPatch, die: Callable[[], None] = kill) -> None:
    """Kill this process just before the n-th call that touches the disk."""
    left = number

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == -1:
                die()
            return function(*args, **kwargs)

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    real = unshard.write.dirfd.exchange
    if unshard.write.staging.commit.__dict__["exchange"] is real:
        monkeypatch.setattr(unshard.write.staging.commit, "exchange", counted(real))


def survives(number: int, action: Callable[[], None], die: Callable[[], None] = kill) -> bool:
    """Run an action in a forked child that dies at its n-th step; return whether it survived."""
    pid = os.fork()
    if pid == 0:
        try:
            die_at(number, pytest.MonkeyPatch(), die)
            action()
            os._exit(0)
        except BaseException:  # noqa: BLE001 (the child must not return into pytest)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def worlds(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A fresh directory for every step to die at."""
    for number in range(1000):
        yield number, tmp_path / str(number)
    pytest.fail("the action never comes through")


def age(directory: Path) -> None:
    """Make what died before it had a name look old enough to be abandoned."""
    hour_ago = time.time() - 3600
    for staging in staged(directory):
        if not (staging / "owner.json").exists():
            os.utime(staging, (hour_ago, hour_ago))


def killed_with_a_journal(target: Path, sources: tuple[Path, ...]) -> None:
    """Leave an in-place commit that died right after its journal was written."""
    pid = os.fork()
    if pid == 0:
        try:
            pytest.MonkeyPatch().setattr(unshard.write.staging.stage, "finish", lambda *_: kill())
            merge_into(target, sources)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
