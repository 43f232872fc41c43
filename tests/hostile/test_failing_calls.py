"""Calls of the system that fail: one clear error, nothing lost or left, right bytes the next time.

`make torture` lets every call fail in every way; `make test-all` takes some of them.
"""

import errno
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from commits import age, staged
from hostile.faults import KILL, REWRITE, TRUNCATE, UNLINK, Fault, Faults, Result, compiler
from ranks import assert_same, contents, merged, save_ranks, some_tensors

pytestmark = pytest.mark.slow

SAMPLE = int(os.environ.get("UNSHARD_FAULTS", "5"))  # of every command; `make torture`: 0, all
KILLS = int(os.environ.get("UNSHARD_KILLS", "2"))  # of every command; `make torture`: 30

WRITING = "write pwrite copy_file_range fsync rename exchange link truncate mkdir create"
READING = "read open"
ERRORS = {
    WRITING: (
        errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EXDEV, errno.ENOSYS, errno.EMFILE,
    ),
    READING: (errno.EIO, errno.EMFILE, errno.ESTALE),
}  # fmt: skip
CONFIG = '{"model_type": "unknown"}'


@dataclass(frozen=True)
class Place:
    """Where commands run: the process that runs them, and the checkpoints that they read."""

    faults: Faults
    directory: Path

    @property
    def first(self) -> Path:
        return self.directory / "first"

    @property
    def second(self) -> Path:
        return self.directory / "second"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("faults")
    for name, seed in (("first", 0), ("second", 1)):
        checkpoint = save_ranks(directory / name, some_tensors(seed), 2)
        (checkpoint / "config.json").write_text(CONFIG)
        (checkpoint / "tokenizer.json").write_text("{}")
    if sys.platform != "linux" or compiler() is None:
        assert "CI" not in os.environ, "no C compiler"
        pytest.skip("needs Linux and a C compiler")
    with Faults.started(directory) as faults:
        yield Place(faults, directory)


Prepare = Callable[[Place, Path], Sequence[str | Path]]
CUT = ("--dtype", "float16", "--max-shard-size", "100B", "--workers", "1")


def merge(place: Place, world: Path) -> Sequence[str | Path]:
    return "merge", place.first, world / "out", *CUT


def copy(place: Place, world: Path) -> Sequence[str | Path]:
    return "merge", place.first, world / "out", "--workers", "1"


def average(place: Place, world: Path) -> Sequence[str | Path]:
    return "average", place.first, place.second, world / "out", "--workers", "1"


def reshard(place: Place, world: Path) -> Sequence[str | Path]:
    return "reshard", place.first, world / "out", "--world-size", "3", "--workers", "1"


def overwrite(place: Place, world: Path) -> Sequence[str | Path]:
    assert place.faults.run(["merge", place.second, world / "out"]).code == 0
    (world / "out" / "notes.txt").write_text("mine")
    return "merge", place.first, world / "out", "--overwrite", *CUT


def in_place(place: Place, world: Path) -> Sequence[str | Path]:
    shutil.copytree(place.first, world / "ckpt")
    return "merge", world / "ckpt", world / "ckpt", "--overwrite", *CUT


def resume(place: Place, world: Path) -> Sequence[str | Path]:
    arguments = (*merge(place, world), "--resume")
    # One file is finished then: its line is the second that is written after the owner's.
    killed = place.faults.run(arguments, Fault(KILL, 6, "fsync"))
    assert killed.code == -9
    assert staged(world)
    return arguments


COMMANDS: dict[str, Prepare] = {
    one.__name__: one for one in (merge, copy, average, reshard, overwrite, in_place, resume)
}


def seen(world: Path) -> dict[str, bytes]:
    """Return all files but those of a staging directory; of a record only that it is there."""
    found = contents(world)
    return {
        name: b"" if name.endswith("unshard.json") else text
        for name, text in found.items()
        if not name.startswith("_unshard-partial-")
    }


@functools.cache
def whole(place: Place, name: str) -> tuple[dict[str, bytes], dict[str, int]]:
    """Run a command without a fault; return what it makes, and how many calls of each kind."""
    calls = {}
    for kind in ERRORS:
        world = place.directory / f"{name} whole"
        world.mkdir()
        result = place.faults.run(COMMANDS[name](place, world), Fault(calls=kind))
        assert result.code == 0, result.message
        calls[kind] = result.seen
        made = seen(world)
        assert staged(world) == []
        assert "out/tokenizer.json" in made or name in {"reshard", "in_place"}
        if name not in {"average", "reshard"}:
            dtype = "float()" if name == "copy" else "half()"
            truth = {n: t if dtype == "float()" else t.half() for n, t in some_tensors().items()}
            assert_same(merged(world / ("ckpt" if name == "in_place" else "out")), truth)
        shutil.rmtree(world)
    return made, calls


def tried(
    place: Place, name: str, fault: Fault, expected: dict[str, bytes]
) -> tuple[Result, list[str]]:
    """Run a command with a fault, and again without; return what is wrong."""
    world = place.directory / "world"
    world.mkdir()
    arguments = COMMANDS[name](place, world)
    before = seen(world)
    result = place.faults.run(arguments, fault)
    problems = []
    left, after = staged(world), seen(world)
    reported = "is left for the next run" in result.message
    if result.code == 0:
        problems += ["left behind"] * (bool(left) != reported)
        problems += ["other bytes"] * (after != expected)
        if left:  # what could not be removed
            place.faults.run(arguments)
            problems += ["left for ever"] * bool(staged(world))
    else:
        errors = [line for line in result.message.splitlines() if line.startswith("error: ")]
        killed = result.code == -9
        if not killed and ("Traceback" in result.message or len(errors) != 1):
            problems.append("no clear error")
        # A commit that has begun is finished by the next command, and the message says so.
        unfinished = killed or "the next merge" in result.message
        if left and not (unfinished or reported or name == "resume"):
            problems.append("left behind")
        if after != before and not unfinished:
            problems.append("not as before")
        age(world)
        again = place.faults.run(arguments)
        if killed and again.code and name not in {"overwrite", "in_place"} and after == expected:
            again = Result(0, "it was complete", 0)
        if again.code or seen(world) != expected or staged(world):
            problems.append(f"not right the next time: {again.code} {again.message}")
    shutil.rmtree(world)
    return result, problems


def drawn(name: str, calls: dict[str, int]) -> Iterator[Fault]:
    """Yield the faults to try: all of them, or some."""
    every = [
        Fault(error, at, kind, lasting)
        for kind, errors in ERRORS.items()
        for error in errors
        for at in range(calls[kind])
        for lasting in (False, True)
    ]
    yield from Random(name).sample(every, SAMPLE) if SAMPLE else every


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_fails_loses_nothing_and_leaves_nothing(place: Place, name: str) -> None:
    expected, calls = whole(place, name)
    assert min(calls.values()) > 10
    found = []
    for fault in drawn(name, calls):
        result, problems = tried(place, name, fault, expected)
        lines = [f"{errno.errorcode[fault.action]} {fault}: {one}: {result}" for one in problems]
        if lines and not SAMPLE:  # hours: what has been found is there before the end
            print(*lines, sep="\n")  # noqa: T201
        found += lines
    assert not found, f"{len(found)}:\n" + "\n".join(found[:50])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_killed_at_a_random_call_loses_nothing(place: Place, name: str) -> None:
    expected, calls = whole(place, name)
    random, found = Random(f"{name} {KILLS}"), []
    for _ in range(KILLS):
        fault = Fault(KILL, random.randrange(sum(calls.values())))
        result, problems = tried(place, name, fault, expected)
        found += [f"{fault}: {one}: {result}" for one in problems]
    assert not found, f"{len(found)}:\n" + "\n".join(found[:50])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(errno.ENOSYS, 0, "copy_file_range exchange link", lasting=True),
        Fault(errno.EXDEV, 0, "copy_file_range", lasting=True),
        Fault(errno.EPERM, 0, "link", lasting=True),
        Fault(files=32),
        Fault(jumps=365 * 24 * 3600),
    ],
    ids=["no fast calls", "other disks", "no links", "32 open files", "the clock jumps"],
)
def test_what_a_system_lacks_is_done_without(place: Place, fault: Fault) -> None:
    for name in ("copy", "overwrite"):
        expected, _ = whole(place, name)
        result, problems = tried(place, name, fault, expected)
        assert (result.code, problems) == (0, []), result


@pytest.mark.parametrize("action", [TRUNCATE, UNLINK, REWRITE], ids=["cut", "gone", "rewritten"])
def test_a_source_that_changes_under_a_merge_is_refused_or_was_read(
    place: Place, action: int
) -> None:
    expected, calls = whole(place, "copy")
    world, random = place.directory / "world", Random(action)
    for _ in range(SAMPLE or 100):
        source = shutil.copytree(place.first, world / "ckpt")
        fault = Fault(action, random.randrange(calls[READING]), READING, under=str(source))
        result = place.faults.run(
            ["merge", source, world / "out", "--workers", "1", "--verify", "full"], fault
        )
        found = {name: text for name, text in seen(world).items() if name.startswith("out/")}
        assert "Traceback" not in result.message
        assert found == (expected if result.code == 0 else {}), (fault, result)
        assert staged(world) == []
        shutil.rmtree(world)


def test_of_two_merges_into_one_output_one_makes_it(place: Place) -> None:
    expected, _ = whole(place, "merge")
    world = place.directory / "world"
    world.mkdir()
    command = [sys.executable, "-m", "unshard", *map(str, merge(place, world))]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    messages = [one.communicate()[1] for one in both]
    codes = sorted(one.returncode for one in both)
    assert codes == [0, 5], messages
    assert re.search("exists already|another process made it in the meantime", "".join(messages))
    assert seen(world) == expected
    assert staged(world) == []
    shutil.rmtree(world)
