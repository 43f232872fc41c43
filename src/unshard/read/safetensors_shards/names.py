"""The names of sharded safetensors: `shard-<rank + 1>-model-<index>-of-<count>.safetensors`.

Finds the files of one save, the missing ones, and the right save if a directory holds several.

Source: `torch.distributed.checkpoint._hf_utils._gen_file_name`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.read.format import Location, files_in
from unshard.with_notes import WithNotes

_NAME = re.compile(r"shard-([0-9]{5})-model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_LISTED = 1000
"""The most missing files that are listed: counts in names go up to a hundred thousand."""


@dataclass(frozen=True, slots=True)
class ShardSet:
    """The files of one save.

    Attributes:
        count: the number of files into which each rank split its tensors.
        files: by index (from 1) and rank (from 0), ascending.
    """

    count: int
    files: Mapping[tuple[int, int], Path]

    @property
    def ranks(self) -> int:
        """One more than the highest rank that has a file."""
        return max(rank for _, rank in self.files) + 1

    @property
    def is_complete(self) -> bool:
        """Whether every rank up to the highest has every file."""
        return len(self.files) == self.ranks * self.count

    def missing(self) -> dict[Path, int]:
        """Return the first files that ranks lack, and the rank of each.

        A rank without tensors for a file does not write it.
        """
        places = (
            (index, rank)
            for rank in range(self.ranks)
            for index in range(1, self.count + 1)
            if (index, rank) not in self.files
        )
        return {self.path(index, rank): rank for index, rank in islice(places, _LISTED)}

    def path(self, index: int, rank: int) -> Path:
        """Return the probable path of a missing file."""
        return next(iter(self.files.values())).parent / _shard_name(index, rank, self.count)

    def __str__(self) -> str:
        return f"{len(self.files)} files of {self.ranks} ranks, numbered 1 to {self.count}"


def is_shard_name(name: str) -> bool:
    """Return whether a file's name is that of a shard."""
    return bool(_NAME.fullmatch(name))


def choose_shards(location: Location) -> WithNotes[ShardSet]:
    """Return the files of the save to read, with notes about the others.

    An earlier save into the same directory may have left files of another count. The file that the
    user passed decides, else the only set in which every rank has every file. Names do not show the
    files that an earlier save of more ranks left: their pieces overlap those of this save.

    Raises:
        IncompleteError: no rank has a file of some index.
        NotMergeableError: there are several sets, and none is the only complete one.
        CorruptError: a name is not valid.
    """
    sets = list(_sets(location))
    named = [shards for shards in sets if location.file in shards.files.values()]
    whole = [shards for shards in sets if shards.is_complete]
    candidates = sets if len(sets) == 1 else named or whole
    if len(candidates) != 1:
        raise NotMergeableError(
            f"{location.weights_dir}: shards of several saves; it is unclear which are meant",
            expected="one set of files, or only one that is complete",
            found="; ".join(map(str, sets)),
            hint="move the stale files elsewhere, or pass one file of the right set",
        )
    (chosen,) = candidates
    present = {index for index, _ in chosen.files}
    absent = (index for index in range(1, chosen.count + 1) if index not in present)
    if lost := list(islice(absent, 4)):
        raise IncompleteError(
            f"{location.weights_dir}: no rank has file {', '.join(map(str, lost))} of "
            f"{chosen.count}",
            expected=", ".join(_shard_name(index, 0, chosen.count) for index in lost) + " …",
            found=str(chosen),
            hint="copy the files here from where they were written, or take another checkpoint",
        )
    stale = [shards for shards in sets if shards is not chosen]
    notes = (f"{location.weights_dir}: left out stale shards: {shards}" for shards in stale)
    return WithNotes(chosen, tuple(notes))


def _shard_name(index: int, rank: int, count: int) -> str:
    return f"shard-{rank + 1:05d}-model-{index:05d}-of-{count:05d}.safetensors"


def _sets(location: Location) -> Iterator[ShardSet]:
    by_count: dict[int, dict[tuple[int, int], Path]] = {}
    for path in files_in(location.roots, is_shard_name):
        shard, index, count = map(int, re.findall("[0-9]{5}", path.name))
        if shard < 1 or not 1 <= index <= count:
            raise CorruptError(
                f"{path}: not a name that any writer gives",
                expected="shards numbered from 1, and an index from 1 to the number of files",
            )
        by_count.setdefault(count, {})[index, shard - 1] = path
    if not by_count:
        raise IncompleteError(f"{location.weights_dir}: has no shards")
    for count, files in sorted(by_count.items()):
        yield ShardSet(count, dict(sorted(files.items())))
