"""Damage to checkpoints, and the one judgement of what a merge makes of it.

A damaged checkpoint ends in an error of `unshard.errors` with nothing written, or, where the damage
does not matter, in the truth. Everything else is a bug: other bytes, another exception, a hang, a
gigabyte of memory, a changed source.
"""

import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from stat import S_ISREG
from types import FrameType
from typing import Any

import pytest

import unshard
from ranks import Tensors, assert_same, bits, merged
from unshard import UnshardError
from unshard.progress import ignore
from waiting import LIMIT_S

__all__ = [
    "Findings",
    "Spare",
    "assert_refused",
    "assert_same_bits",
    "in_time",
    "judge",
    "places_to_flip",
]

PROCESSOR_SECONDS = 10.0  # which do not pass faster where other processes keep the cores busy
LONGEST_MESSAGE = 300_000
MEBIBYTES = 450  # a pickle may take 300 (see `unshard.containers.pickles.unpickle`)

Compare = Callable[[Tensors, Tensors], None]


def judge(
    source: Path,
    truth: Tensors | None,
    output: Path,
    *,
    compare: Compare = assert_same,
    **options: Any,
) -> UnshardError | None:
    """Merge, and return the error; None if the output is the truth.

    Args:
        source: what to merge; must be as it was afterwards.
        truth: the tensors; None where no output can be right.
        output: a directory that does not exist, in one that nothing else uses.
        compare: raises unless two sets of tensors are the same.
        options: of `unshard.merge`.
    """
    shutil.rmtree(output.parent, ignore_errors=True)
    output.parent.mkdir(parents=True)
    before = state(source)
    error = _error_of_merge(source, output, options)
    assert state(source) == before, "the source has changed"
    if error is not None:
        assert list(output.parent.iterdir()) == [], "something of the output is left"
        assert len(str(error)) < LONGEST_MESSAGE, f"a message of {len(str(error))} characters"
        return error
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    assert truth is not None, f"merged: {list(merged(output))}"
    compare(merged(output), truth)
    shutil.rmtree(output)
    return None


def _error_of_merge(source: Path, output: Path, options: Mapping[str, Any]) -> UnshardError | None:
    try:
        with in_time(), in_bounds():
            unshard.merge(source, output, listener=ignore, **{"config": "none", **options})
    except UnshardError as error:
        return error
    return None


def assert_refused(
    source: Path, output: Path, kind: type[UnshardError], *words: str, **options: Any
) -> None:
    """Merge, and make sure that it is refused in these words."""
    error = judge(source, None, output, **options)
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


def assert_same_bits(found: Tensors, truth: Tensors) -> None:
    """Same values, whatever they are called: for names that no checksum guards."""
    assert sorted(map(bits, found.values())) == sorted(map(bits, truth.values()))


def bomb(depth: int = 22) -> Any:
    """Return few lists whose text is long: 30 MB, or 2 GB of depth 28."""
    value: Any = ["x"]
    for _ in range(depth):
        value = [value, value]
    return value


def cycle() -> Any:
    """Return a list that holds itself."""
    value: list[Any] = []
    value.append(value)
    return value


def state(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything under a directory, also what is not a file, or may not be read."""
    found = {}
    for path in sorted(directory.rglob("*")):
        about = path.lstat()
        readable = S_ISREG(about.st_mode) and os.access(path, os.R_OK)
        content = path.read_bytes() if readable else b""
        found[str(path)] = (about.st_size, about.st_mtime_ns, content)
    return found


class Findings:
    """What went wrong in many attempts; all of it is reported at the end."""

    def __init__(self) -> None:
        self.attempts = 0
        self._found: list[str] = []

    @contextmanager
    def attempt(self, *what: object) -> Iterator[None]:
        """Note what goes wrong inside."""
        self.attempts += 1
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported)
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            self._found.append(f"{what}: {where}: {type(error).__name__}: {str(error)[:300]}")

    def tell(self) -> None:
        """Fail if anything was found."""
        assert self.attempts
        assert not self._found, f"{len(self._found)} of {self.attempts}:\n" + "\n".join(self._found)


@contextmanager
def in_time() -> Iterator[None]:
    """Fail what hangs, even if it waits for a file, and what keeps the processor busy for long."""

    def fail(signum: int, frame: FrameType | None) -> None:
        del frame
        pytest.fail(f"took too long: {signal.Signals(signum).name}")

    timers = (
        (signal.ITIMER_REAL, signal.SIGALRM, LIMIT_S),
        (signal.ITIMER_PROF, signal.SIGPROF, PROCESSOR_SECONDS),
    )
    before = [signal.signal(number, fail) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@contextmanager
def in_bounds(mebibytes: int = MEBIBYTES) -> Iterator[None]:
    """Fail what makes this process grow by more than that."""
    before = _peak()
    yield
    grown = (_peak() - before) >> 20
    assert grown < mebibytes, f"took {grown} MiB"


def _peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Spare:
    """A copy of a checkpoint that can be damaged and mended, again and again."""

    def __init__(self, original: Path, copy: Path) -> None:
        shutil.copytree(original, copy, symlinks=True)
        self.original = original
        self.directory = copy

    @contextmanager
    def damaged(self, name: str, damage: Callable[[Path], None]) -> Iterator[Path]:
        """Damage one file, by its name below the directory, and mend it afterwards."""
        path = self.directory / name
        damage(path)
        try:
            yield path
        finally:
            _remove(path)
            shutil.copy2(self.original / name, path)

    def files(self) -> list[str]:
        """Return all files, by their names below the directory."""
        found = (path for path in self.original.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.original)) for path in found)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def places_to_flip(
    size: int, besides: Sequence[tuple[int, int]], count: int, random: Random
) -> list[int]:
    """Choose bytes of a file, none of them inside these ranges (start, end)."""
    free: list[tuple[int, int]] = []
    at = 0
    for start, end in sorted(besides):
        if start > at:
            free.append((at, start))
        at = max(at, end)
    free.append((at, size))
    total = sum(end - start for start, end in free)
    chosen = sorted(random.sample(range(total), min(count, total)))
    places: list[int] = []
    passed = 0
    for start, end in free:
        inside = [start + n - passed for n in chosen if passed <= n < passed + end - start]
        places += inside
        passed += end - start
    return places


def change_byte(path: Path, place: int, random: Random) -> None:
    """Change one byte of a file: one bit of it, or all."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        mask = 1 << random.randrange(8) if random.random() < 0.5 else random.randrange(1, 256)
        file.write(bytes([byte ^ mask]))
