"""What is not a regular file is refused before it is opened: opening alone may act, or wait."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from unshard.errors import IncompleteError, UnknownFormatError
from unshard.read.finding.discover import discover
from unshard.read.format import Choice

# The files of the kernel have a size of 0 and the mode of regular files.
IRREGULAR = ("/proc/kmsg", "/proc/self/environ", "/dev/zero", "pipe")
# Prints of each command whether it opened a file, its exit code, and what it printed.
WATCHED = """
import contextlib, io, json, os, sys

opened = []

def see(event, details):
    if event == "open" and not isinstance(details[0], int):
        opened.append(os.path.realpath(os.fsdecode(details[0])))

from unshard.cli.main import main

sys.addaudithook(see)
for arguments in json.loads(sys.argv[2]):
    opened.clear()
    said, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            main(arguments)
    except SystemExit as end:
        code = end.code
    print(json.dumps([os.path.realpath(sys.argv[1]) in opened, code, said.getvalue()]))
"""


def watched(
    irregular: Path, commands: Sequence[Sequence[str | Path]]
) -> list[tuple[bool, int, str]]:
    """Return of each command whether it opened a file, its exit code, and what it printed."""
    given = json.dumps([[str(one) for one in command] for command in commands])
    command = [sys.executable, "-c", WATCHED, str(irregular), given]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


def alone(irregular: Path, _: Path) -> list[str | Path]:
    return ["inspect", irregular]


def among_weights(irregular: Path, place: Path) -> list[str | Path]:
    (place / "model-00002-of-00002.safetensors").symlink_to(irregular)
    save_file({"weight": torch.zeros(2)}, place / "model-00001-of-00002.safetensors")
    return ["merge", place, place / "out", "--allow-missing", "--config", "none"]


def as_weights(name: str) -> Callable[[Path, Path], list[str | Path]]:
    def arrange(irregular: Path, place: Path) -> list[str | Path]:
        (place / name).symlink_to(irregular)
        return ["inspect", place / name]

    return arrange


def beside(name: str) -> Callable[[Path, Path], list[str | Path]]:
    def arrange(irregular: Path, place: Path) -> list[str | Path]:
        save_file({"weight": torch.zeros(2)}, place / "model.safetensors")
        (place / name).symlink_to(irregular)
        allowed = ["--allow-missing", "--allow-unexpected", "--config", "none"]
        return ["merge", place, place / "out", *allowed]

    return arrange


def as_config(irregular: Path, place: Path) -> list[str | Path]:
    save_file({"weight": torch.zeros(2)}, place / "model.safetensors")
    return ["merge", place, place / "out", "--config", irregular]


PLACES: dict[str, Callable[[Path, Path], list[str | Path]]] = {
    "alone": alone,
    "among weights": among_weights,
    "model.safetensors": as_weights("model.safetensors"),
    "model.pt": as_weights("model.pt"),
    "config.json": beside("config.json"),
    "tokenizer.json": beside("tokenizer.json"),
    "--config": as_config,
}


@pytest.mark.parametrize("irregular", IRREGULAR)
def test_what_is_not_a_regular_file_is_never_opened(tmp_path: Path, irregular: str) -> None:
    path = tmp_path / irregular  # of an absolute path, that
    if irregular == "pipe":
        os.mkfifo(path)
    commands = []
    for number, arrange in enumerate(PLACES.values()):
        (tmp_path / f"place{number}").mkdir()
        commands.append(arrange(path, tmp_path / f"place{number}"))
    for name, (was_opened, code, said) in zip(PLACES, watched(path, commands), strict=True):
        assert not was_opened, name
        # A pipe with the name of a companion is none, and is left out.
        left_out = name == "tokenizer.json" and not path.is_file()
        assert ("error: " in said, code) == ((False, 0) if left_out else (True, code or 3)), name


@pytest.mark.parametrize("irregular", ["/dev/zero", "pipe"])
def test_a_device_does_not_mean_what_is_next_to_it(tmp_path: Path, irregular: str) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    path = tmp_path / irregular
    if irregular == "pipe":
        os.mkfifo(path)
    with pytest.raises(UnknownFormatError, match=rf"{irregular}: is not a regular file$"):
        discover(path, Choice())


def test_an_empty_file_is_still_called_empty(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(IncompleteError, match="is empty"):
        unshard.inspect(tmp_path / "model.pt")
