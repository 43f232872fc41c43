"""Scheduler and random state of a checkpoint, read from the files of all ranks into plain values.

| writer | of a rank | of all |
|---|---|---|
| verl | `extra_state_world_size_W_rank_R.pt` next to the weights | |
| lmms-engine | the same in `extra_state/` of the step | |
| accelerate | `random_states_R.pkl` | `scheduler.bin`, `scheduler_1.bin`, … |
| HF Trainer | `rng_state_R.pth`; of a single process `rng_state.pth` | `scheduler.pt` |

The weights do not need any of it: a damaged file is left out with a warning. A file whose pickle
was made to run commands is still an error.

Sources: verl 0.9.1's FSDPCheckpointManager, lmms-engine 0.1.4's FSDP2 trainer, accelerate 1.15's
`save_accelerator_state`, transformers 5.23's `Trainer._save_rng_state`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unshard.console import listed
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CheckpointError, UnsafeError
from unshard.fronts import Text
from unshard.read.format import Location
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.rng_states import RankState, StateWriter, rank_state, unite

# Five digits at most: a number in a hostile name must not make lists of any length.
_EXTRA_STATE = re.compile(r"extra_state_world_size_(\d{1,5})_rank_(\d{1,5})\.pt")
_RANDOM_STATES = re.compile(r"random_states_(\d{1,5})\.pkl")
_RNG_STATE = re.compile(r"rng_state_(\d{1,5})\.pth")
_SINGLE = "rng_state.pth"
_SCHEDULER_BIN = re.compile(r"scheduler(?:_(\d{1,5}))?\.bin")
_SCHEDULER = "scheduler.pt"
_MOST_SHOWN = 3


class TrainingState(NamedTuple):
    """The state of a training except model and optimizer.

    Attributes:
        values: by the names in `rng_states`; if there are several schedulers, `lr_scheduler` is the
            first, and `lr_schedulers` has all.
        warnings: about missing or damaged files, and values that were left out.
        size: of its files, bytes.
    """

    values: Mapping[str, Plain] = {}
    warnings: tuple[str, ...] = ()
    size: int = 0


def read_training_state(location: Location, world_size: int) -> TrainingState:
    """Read scheduler and random state of a checkpoint; the `world_size` is that of its weights.

    Raises:
        UnsafeError: a file would run commands when it is loaded.
    """
    try:
        files = find_state_files(location, world_size)
    except OSError as error:
        problem = f"{error.filename} cannot be listed: {error.strerror or error}"
        return TrainingState(warnings=(f"training state: {problem}",))
    if files is None:
        return TrainingState()
    reader = _StateReader()
    schedulers = [reader.fields(path) for path in files.schedulers]
    states: list[RankState | None] = [None] * files.world_size
    for rank, path in files.ranks.items():
        states[rank] = reader.rank(files.writer, path)
    values, notes = unite(states)
    missing = [f"{listed(files.missing)}: missing"] if files.missing else []
    all_notes = (*files.notes, *missing, *reader.warnings(), *notes)
    warnings = tuple(f"training state: {note}" for note in all_notes)
    if any(state is not None for state in schedulers):
        several = {"lr_schedulers": schedulers} if len(schedulers) > 1 else {}
        values = {"lr_scheduler": schedulers[0], **several, **values}
    return TrainingState(values, warnings, reader.size)


class _StateReader:
    """Reads file by file, and gathers their problems."""

    def __init__(self) -> None:
        self.size = 0
        self._damaged: list[str] = []
        self._left_out: dict[tuple[str, ...], list[str]] = {}

    def rank(self, writer: StateWriter, path: Path) -> RankState | None:
        """Return the state in a rank's file; None if it cannot be read."""
        value = self.fields(path)
        state = None if value is None else rank_state(writer, value)
        if value is not None and state is None:
            self._damaged.append(f"{path}: has unexpected contents")
        return state

    def fields(self, path: Path) -> Plain | None:
        """Return the dict in a file; None if it cannot be read."""
        try:
            value, left_out = plain_values(read_torch_file(path))
            self.size += path.stat().st_size
        except UnsafeError as error:
            without = Text("; to merge the weights without reading it: ⟦+--no-extra-state⟧")
            raise UnsafeError(error.subject, hint=error.hint + without) from error
        except CheckpointError as error:
            self._damaged.append(error.subject)
            return None
        except OSError as error:
            self._damaged.append(f"{path}: cannot be read: {error.strerror or error}")
            return None
        if left_out:
            self._left_out.setdefault(left_out, []).append(path.name)
        if isinstance(value, dict):
            return value
        self._damaged.append(f"{path}: has unexpected contents")
        return None

    def warnings(self) -> list[str]:
        """Return warnings about damaged files, and values that were left out."""
        warnings = self._damaged[:_MOST_SHOWN]
        if len(self._damaged) > _MOST_SHOWN:
            warnings.append(f"and {len(self._damaged) - _MOST_SHOWN} more files cannot be read")
        if warnings:
            warnings[-1] += "; left out: the model is complete without it"
        for values, names in self._left_out.items():
            warnings.append(f"{listed(names)}: left out {listed(values)}")
        return warnings


class StateFiles(NamedTuple):
    """The files of one writer.

    Attributes:
        writer: the tool that wrote them.
        world_size: the number of ranks that should have a file.
        ranks: the file of each rank that has one, ascending.
        schedulers: files of schedulers, in their order.
        missing: names of expected files that do not exist.
        notes: for the user, about files that were left out.
    """

    writer: StateWriter
    world_size: int = 0
    ranks: Mapping[int, Path] = {}
    schedulers: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return (*self.schedulers, *self.ranks.values())


def find_state_files(location: Location, world_size: int) -> StateFiles | None:
    """Return the files of scheduler and random state of a checkpoint; None if there are none."""
    steps = step_dirs(location)
    near = _files_in((*location.roots, *(step / "extra_state" for step in steps)))
    in_step = _files_in(steps)
    layouts = (
        _extra_state(near, world_size),
        _accelerate(in_step, world_size),
        _trainer(in_step, world_size),
    )
    present = [files for files in layouts if files.paths or files.notes]
    if not present:
        return None
    first, *others = present
    notes = [
        f"{listed([path.name for path in other.paths])}: left out, {first.writer.value} are used"
        for other in others
    ]
    return first._replace(notes=(*first.notes, *notes))


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
    return ranks._replace(notes=tuple(notes))


def _accelerate(files: Mapping[str, Path], world_size: int) -> StateFiles:
    numbered = {int(match[1] or 0): path for match, path in _matching(_SCHEDULER_BIN, files)}
    own = {int(match[1]): path for match, path in _matching(_RANDOM_STATES, files)}
    ranks = _of_ranks(StateWriter.ACCELERATE, own, world_size, "random_states_{}.pkl")
    schedulers = tuple(numbered[number] for number in sorted(numbered))
    gaps = (number for number in range(max(numbered, default=0)) if number not in numbered)
    missing = tuple(f"scheduler_{number}.bin" if number else "scheduler.bin" for number in gaps)
    return ranks._replace(schedulers=schedulers, missing=(*missing, *ranks.missing))


def _trainer(files: Mapping[str, Path], world_size: int) -> StateFiles:
    own = {int(match[1]): path for match, path in _matching(_RNG_STATE, files)}
    if not own and _SINGLE in files:
        own, world_size = {0: files[_SINGLE]}, 1
    schedulers = (files[_SCHEDULER],) if _SCHEDULER in files else ()
    ranks = _of_ranks(StateWriter.TRAINER, own, world_size, "rng_state_{}.pth")
    return ranks._replace(schedulers=schedulers)


def _of_ranks(writer: StateWriter, own: dict[int, Path], world_size: int, name: str) -> StateFiles:
    """Return the files of ranks; more than the weights have, if replicas saved no weights."""
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


def step_dirs(location: Location) -> tuple[Path, ...]:
    """Return the directory of the step, on every node."""
    if not location.weights_dir.is_relative_to(location.step_dir):
        return (location.step_dir,)
    depth = len(location.weights_dir.relative_to(location.step_dir).parts)
    others = (root.parents[depth - 1] if depth else root for root in location.also)
    return location.step_dir, *others


def _files_in(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of some directories by name; the first directory with a name counts."""
    by_name: dict[str, Path] = {}
    for folder in reversed(folders):
        by_name |= {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    return by_name
