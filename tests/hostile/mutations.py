"""Damage to good checkpoints: bytes and files that are flipped, cut, swapped, repeated, moved.

What no checksum guards is left alone where a change could not be known: see docs/security.md.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from damage import Spare, places_to_flip
from oracle.writers.samples import weight_ranges

__all__ = ["Mutator"]

_Change = Callable[[bytearray, int, Random], object]
_LONGEST = 64  # bytes that are changed together

# Formats whose files of equal size could be exchanged: an item does not say whose it is.
_ANONYMOUS = ("DCP", "Megatron", "shards")
# Of these, the files that state where their pieces start: a copy in place of another is noticed.
_STATED = "shards"


def _flip(data: bytearray, at: int, random: Random) -> None:
    data[at] ^= 1 << random.randrange(8)


def _replace(data: bytearray, at: int, random: Random) -> None:
    data[at] ^= random.randrange(1, 256)


def _remove(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.randint(1, _LONGEST)]


def _repeat(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = data[at : at + random.randint(1, _LONGEST)]


def _insert(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = random.randbytes(random.randint(1, _LONGEST))


def _cut(data: bytearray, at: int, random: Random) -> None:
    del random
    del data[at:]


def _move(data: bytearray, at: int, random: Random) -> None:
    part = data[at : at + random.randint(1, _LONGEST)]
    del data[at : at + len(part)]
    to = random.randrange(len(data) + 1)
    data[to:to] = part


def _exchange(data: bytearray, at: int, random: Random) -> None:
    size = random.randint(1, _LONGEST)
    other = random.randrange(len(data))
    size = min(size, abs(at - other), len(data) - max(at, other))
    data[at : at + size], data[other : other + size] = (
        data[other : other + size],
        data[at : at + size],
    )


# These keep a file's size: among weights without checksums they cannot be noticed.
_IN_PLACE: tuple[_Change, ...] = (_flip, _replace)
_WITHIN: tuple[_Change, ...] = (_move, _exchange)
_RESIZING: tuple[_Change, ...] = (_remove, _repeat, _insert, _cut)


class Mutator:
    """Damages a copy of a good checkpoint, again and again.

    Args:
        name: the sample's.
        spare: the copy.
        checked: all weights and their descriptions have checksums.
        random: decides.
    """

    def __init__(self, name: str, spare: Spare, random: Random, *, checked: bool) -> None:
        self._spare = spare
        self._checked = checked
        self._random = random
        self._files = [name for name in spare.files() if (spare.original / name).stat().st_size]
        self._weights = weight_ranges(spare.directory.resolve())
        self._anonymous = name.startswith(_ANONYMOUS)
        self._stated = name.startswith(_STATED)

    @contextmanager
    def mutated(self) -> Iterator[tuple[str, str]]:
        """Damage the copy in one way, which is yielded with the name of a file, and mend it."""
        random = self._random
        pair = random.sample(self._files, 2) if len(self._files) > 1 else []
        kinds = self._exchanges(pair) if pair and random.random() < 0.15 else ()
        if kinds:
            kind = random.choice(kinds)
            with self._spare.damaged(pair[0], _nothing), self._spare.damaged(pair[1], _nothing):
                kind(self._spare.directory, pair)
                yield kind.__name__, " ".join(pair)
            return
        file = random.choice(self._files)
        change = random.choice(_IN_PLACE + _RESIZING + (_WITHIN if self._checked else ()))
        at = self._place(file, anywhere=self._checked or change in _RESIZING)

        def damage(path: Path) -> None:
            data = bytearray(path.read_bytes())
            change(data, at, random)
            path.write_bytes(data)

        with self._spare.damaged(file, damage):
            yield change.__name__, f"{file} at {at}"

    def _place(self, file: str, *, anywhere: bool) -> int:
        path = self._spare.directory / file
        taken = [] if anywhere else self._weights.get(path.resolve(), [])
        return places_to_flip(path.stat().st_size, taken, 1, self._random)[0]

    def _exchanges(self, pair: Sequence[str]) -> Sequence[Callable[[Path, Sequence[str]], None]]:
        """Return what can be done with two files, and be noticed."""
        sizes = {(self._spare.original / name).stat().st_size for name in pair}
        if not self._anonymous or len(sizes) > 1:
            return _swap_files, _copy_file
        return (_copy_file,) if self._stated else ()


def _nothing(path: Path) -> None:
    del path


def _swap_files(directory: Path, pair: Sequence[str]) -> None:
    first, second = (directory / name for name in pair)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _copy_file(directory: Path, pair: Sequence[str]) -> None:
    shutil.copyfile(directory / pair[0], directory / pair[1])
