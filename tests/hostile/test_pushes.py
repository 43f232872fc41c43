"""Pushes that are killed, or whose network fails: the hub has the old files, or all of the new.

`make torture` takes many of these moments; `make test-all` takes some of them.
"""

import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from commits import age, staged
from hostile.faults import CALLS, KILL, SOCKETS, Fault, Faults, compiler
from hub_server import TOKEN, Hub, Repo, serving
from ranks import contents, save_ranks, some_tensors

pytestmark = pytest.mark.slow

SAMPLE = int(os.environ.get("UNSHARD_FAULTS", "1"))  # of each command; `make torture`: 0, all
KILLS = int(os.environ.get("UNSHARD_KILLS", "1"))  # of each kind; `make torture`: 30

REPO = "someone/model"
OLD = {"model-00001-of-00009.safetensors": b"old", "notes.txt": b"theirs"}
NETWORK = "send recv"


@dataclass(frozen=True, eq=False)
class Place:
    """Where commands run, and the hub that they push to."""

    faults: Faults
    directory: Path
    hub: Hub

    @property
    def world(self) -> Path:
        return self.directory / "world"

    @property
    def repo(self) -> Repo:
        return self.hub.repos[REPO]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if sys.platform != "linux" or compiler() is None:
        assert "CI" not in os.environ, "no C compiler"
        pytest.skip("needs Linux and a C compiler")
    directory = tmp_path_factory.mktemp("pushes")
    checkpoint = save_ranks(directory / "ckpt", some_tensors(), 2)
    (checkpoint / "config.json").write_text('{"model_type": "unknown"}')
    with serving() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_HUB_DISABLE_XET", "1")
        patch.setenv("HF_HOME", str(directory / "home"))
        with Faults.started(directory) as faults:
            yield Place(faults, directory, hub)


Line = Callable[[Place], Sequence[str | Path]]


def push(place: Place) -> Sequence[str | Path]:
    return "push", place.directory / "ckpt", REPO, "--dtype", "float16"


def merge(place: Place) -> Sequence[str | Path]:
    out = place.world / "out"
    return "merge", place.directory / "ckpt", out, "--push-to-hub", REPO, "--dtype", "float16"


COMMANDS: dict[str, Line] = {"push": push, "merge": merge}


def begin(place: Place) -> None:
    shutil.rmtree(place.world, ignore_errors=True)
    place.world.mkdir()
    place.hub.repos[REPO], place.hub.blobs = Repo(private=False, files=dict(OLD)), {}


def written(place: Place) -> dict[str, bytes]:
    """Return all files but those of a staging directory; of a record only that it is there."""
    return {
        name: b"" if name.endswith("unshard.json") else text
        for name, text in contents(place.world).items()
        if not name.startswith("_unshard-partial-")
    }


def told(place: Place) -> dict[str, bytes]:
    """Return the files of the repository; of a record only that it is there."""
    files = place.repo.files
    return {name: b"" if name == "unshard.json" else text for name, text in files.items()}


@dataclass(frozen=True)
class Whole:
    """What a push makes that nothing disturbs, and how many calls it takes."""

    repo: dict[str, bytes]
    local: dict[str, bytes]
    network: int
    disk: int


@functools.cache
def whole(place: Place, name: str) -> Whole:
    begin(place)
    result = place.faults.run(COMMANDS[name](place), Fault(calls=NETWORK, under=SOCKETS))
    assert result.code == 0, result.message
    made = Whole(told(place), written(place), result.seen, 0)
    assert made.repo.keys() >= {"model.safetensors", "config.json", "README.md", "notes.txt"}
    assert place.repo.commits == ["Upload model merged by unshard"]
    begin(place)
    result = place.faults.run(COMMANDS[name](place))
    assert (told(place), written(place)) == (made.repo, made.local)
    return Whole(made.repo, made.local, made.network, result.seen)


def tried(place: Place, name: str, fault: Fault, made: Whole) -> tuple[str, list[str]]:
    """Push with a fault, and again without; return the repository's state, and what is wrong."""
    begin(place)
    arguments = COMMANDS[name](place)
    result = place.faults.run(arguments, fault)
    problems, killed = [], result.code == -9
    commits, files = list(place.repo.commits), told(place)  # the hub may still be at the last one
    state = "new" if files == made.repo else "old"
    if state == "old" and (files != OLD or commits):
        problems.append(f"half a repository: {sorted(files)}")
    if result.code == 0 and state == "old":
        problems.append("called pushed")
    if written(place) not in ({}, made.local):
        problems.append(f"half an output: {sorted(written(place))}")
    if not killed and result.code:
        errors = [line for line in result.message.splitlines() if line.startswith("error: ")]
        problems += ["no clear error"] * ("Traceback" in result.message or len(errors) != 1)
        problems += ["left behind"] * bool(staged(place.world))
    age(place.world)
    again = place.faults.run([*arguments, *["--overwrite"] * (written(place) != {})])
    if again.code or (told(place), written(place)) != (made.repo, made.local):
        problems.append(f"not right the next time: {again.code} {again.message}")
    problems += ["left behind in the end"] * bool(staged(place.world))
    return state, [f"{fault}: {one}: {result}" for one in problems]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_push_killed_at_a_random_call_leaves_the_old_or_the_new(place: Place, name: str) -> None:
    made, random = whole(place, name), Random(f"{name} {KILLS}")
    network = [random.randrange(made.network) for _ in range(KILLS)]
    faults = [Fault(KILL, at, NETWORK, under=SOCKETS) for at in [0, *network, made.network - 1]]
    faults += [Fault(KILL, random.randrange(made.disk), CALLS) for _ in range(KILLS)]
    tries = [tried(place, name, fault, made) for fault in faults]
    found = [one for _, problems in tries for one in problems]
    assert not found, f"{len(found)}:\n" + "\n".join(found[:50])
    assert {state for state, _ in tries} == {"old", "new"}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_push_whose_network_fails_ends_in_an_error_or_is_whole(place: Place, name: str) -> None:
    made = whole(place, name)
    faults = [
        Fault(error, at, NETWORK, under=SOCKETS, lasting=lasting)
        for error in (errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT)
        for at in range(made.network)
        for lasting in (False, True)
    ]
    faults = Random(name).sample(faults, SAMPLE) if SAMPLE else faults
    found = [one for fault in faults for one in tried(place, name, fault, made)[1]]
    assert not found, f"{len(found)}:\n" + "\n".join(found[:50])
