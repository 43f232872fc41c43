"""Which files next to a checkpoint hold scheduler and random state, by the names of their writers.

| writer | of a rank | of all |
|---|---|---|
| verl | `extra_state_world_size_W_rank_R.pt` next to the weights | |
| lmms-engine | the same in `extra_state/` of the step | |
| accelerate | `random_states_R.pkl` | `scheduler.bin`, `scheduler_1.bin`, … |
| HF Trainer | `rng_state_R.pth`; of a single process `rng_state.pth` | `scheduler.pt` |

Sources: verl 0.9.1's FSDPCheckpointManager, lmms-engine 0.1.4's FSDP2 trainer, accelerate 1.15's
`save_accelerator_state`, transformers 5.23's `Trainer._save_rng_state`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from unshard.read.format import Location

__all__ = ["StateFiles", "StateWriter", "find_state_files", "listed"]

# Five digits at most: a name must not make lists as long as it likes.
_EXTRA_STATE = re.compile(r"extra_state_world_size_(\d{1,5})_rank_(\d{1,5})\.pt")
_RANDOM_STATES = re.compile(r"random_states_(\d{1,5})\.pkl")
_RNG_STATE = re.compile(r"rng_state_(\d{1,5})\.pth")
_SINGLE = "rng_state.pth"
_SCHEDULER_BIN = re.compile(r"scheduler(?:_(\d{1,5}))?\.bin")
_SCHEDULER = "scheduler.pt"
_SHOWN = 3


class StateWriter(Enum):
    """Who wrote the files, and so what is in them."""

    EXTRA_STATE = "extra_state files"
    ACCELERATE = "accelerate's files"
    TRAINER = "HF Trainer's files"


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files of one writer.

    Attributes:
        writer: who wrote them.
        world_size: how many ranks should have one.
        ranks: the file of each rank that has one, ascending.
        schedulers: files of schedulers, in their order.
        missing: names of files that should be there.
        notes: what to say of others that were left out.
    """

    writer: StateWriter
    world_size: int = 0
    ranks: Mapping[int, Path] = field(default_factory=dict)
    schedulers: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (*self.schedulers, *self.ranks.values())


def find_state_files(location: Location, world_size: int) -> StateFiles | None:
    """Return the files of scheduler and random state of a checkpoint; None if there are none.

    Args:
        location: where the weights are.
        world_size: how many ranks wrote them, as far as they say.
    """
    steps = _step_dirs(location)
    beside = _files_in((*location.roots, *(step / "extra_state" for step in steps)))
    in_step = _files_in(steps)
    layouts = (
        _extra_state(beside, world_size),
        _accelerate(in_step, world_size),
        _trainer(in_step, world_size),
    )
    found = [files for files in layouts if files.paths or files.notes]
    if not found:
        return None
    first, *others = found
    notes = [
        f"{listed([path.name for path in other.paths])}: left out, {first.writer.value} are used"
        for other in others
    ]
    return replace(first, notes=(*first.notes, *notes))


def listed(names: Sequence[str]) -> str:
    """Return a few of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _extra_state(files: Mapping[str, Path], world_size: int) -> StateFiles:
    worlds: dict[int, dict[int, Path]] = {}
    for match, path in _matching(_EXTRA_STATE, files):
        worlds.setdefault(int(match[1]), {})[int(match[2])] = path
    stale = sorted(world for world in worlds if world != world_size)
    own = {rank: path for rank, path in worlds.get(world_size, {}).items() if rank < world_size}
    notes = []
    if stale and not own:
        sizes = ", ".join(map(str, stale))
        notes.append(f"left out the extra_state files of world size {sizes}: expected {world_size}")
    name = f"extra_state_world_size_{world_size}_rank_{{}}.pt"
    ranks = _of_ranks(StateWriter.EXTRA_STATE, own, world_size, name)
    return replace(ranks, notes=tuple(notes))


def _accelerate(files: Mapping[str, Path], world_size: int) -> StateFiles:
    numbered = {int(match[1] or 0): path for match, path in _matching(_SCHEDULER_BIN, files)}
    own = {int(match[1]): path for match, path in _matching(_RANDOM_STATES, files)}
    ranks = _of_ranks(StateWriter.ACCELERATE, own, world_size, "random_states_{}.pkl")
    schedulers = tuple(numbered[number] for number in sorted(numbered))
    gaps = (number for number in range(max(numbered, default=0)) if number not in numbered)
    missing = tuple(f"scheduler_{number}.bin" if number else "scheduler.bin" for number in gaps)
    return replace(ranks, schedulers=schedulers, missing=(*missing, *ranks.missing))


def _trainer(files: Mapping[str, Path], world_size: int) -> StateFiles:
    own = {int(match[1]): path for match, path in _matching(_RNG_STATE, files)}
    if not own and _SINGLE in files:
        own, world_size = {0: files[_SINGLE]}, 1
    schedulers = (files[_SCHEDULER],) if _SCHEDULER in files else ()
    ranks = _of_ranks(StateWriter.TRAINER, own, world_size, "rng_state_{}.pth")
    return replace(ranks, schedulers=schedulers)


def _of_ranks(writer: StateWriter, own: dict[int, Path], world_size: int, name: str) -> StateFiles:
    """Return the files of ranks; there are more than the weights say if replicas saved nothing."""
    if not own:
        return StateFiles(writer)
    world = max(world_size, *(rank + 1 for rank in own))
    missing = tuple(name.format(rank) for rank in range(world) if rank not in own)
    return StateFiles(writer, world, dict(sorted(own.items())), (), missing)


def _matching(
    pattern: re.Pattern[str], files: Mapping[str, Path]
) -> Iterator[tuple[re.Match[str], Path]]:
    for name, path in files.items():
        if match := pattern.fullmatch(name):
            yield match, path


def _step_dirs(location: Location) -> tuple[Path, ...]:
    """Return the directory of the step, on every node."""
    if not location.weights_dir.is_relative_to(location.step_dir):
        return (location.step_dir,)
    depth = len(location.weights_dir.relative_to(location.step_dir).parts)
    others = (root.parents[depth - 1] if depth else root for root in location.also)
    return location.step_dir, *others


def _files_in(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of some directories by name; the first that has a name counts."""
    found: dict[str, Path] = {}
    for folder in dict.fromkeys(folders):
        if folder.is_dir():
            for path in folder.iterdir():
                found.setdefault(path.name, path)
    return found
