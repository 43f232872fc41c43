"""Scheduler and random state of a checkpoint, read from the files of all ranks into plain values.

| writer | of a rank | of all |
|---|---|---|
| verl | `extra_state_world_size_W_rank_R.pt` next to the weights | |
| lmms-engine | the same in `extra_state/` of the step | |
| accelerate | `random_states_R.pkl` | `scheduler.bin`, `scheduler_1.bin`, … |
| HF Trainer | `rng_state_R.pth`; of a single process `rng_state.pth` | `scheduler.pt` |

The weights do not need any of it: a damaged file is named and left out. A file whose pickle was
made to run commands is an error all the same.

Sources: verl 0.9.1's FSDPCheckpointManager, lmms-engine 0.1.4's FSDP2 trainer, accelerate 1.15's
`save_accelerator_state`, transformers 5.23's `Trainer._save_rng_state`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CheckpointError, UnsafeError
from unshard.fronts import Text
from unshard.read.format import Location
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.rng_states import RankState, StateWriter, rank_state, unite
from unshard.showing import listed

# Five digits at most: a name must not make lists as long as it likes.
_EXTRA_STATE = re.compile(r"extra_state_world_size_(\d{1,5})_rank_(\d{1,5})\.pt")
_RANDOM_STATES = re.compile(r"random_states_(\d{1,5})\.pkl")
_RNG_STATE = re.compile(r"rng_state_(\d{1,5})\.pth")
_SINGLE = "rng_state.pth"
_SCHEDULER_BIN = re.compile(r"scheduler(?:_(\d{1,5}))?\.bin")
_SCHEDULER = "scheduler.pt"
_SHOWN = 3


class TrainingState(NamedTuple):
    """What a checkpoint has besides the model, except the optimizer.

    Attributes:
        values: by the names that `rng_states` lists; empty where there is nothing. Of several
            schedulers `lr_scheduler` is the first, `lr_schedulers` all.
        warnings: what is missing, damaged or was left out.
        size: of the files it was read from, bytes.
    """

    values: Mapping[str, Plain] = {}
    warnings: tuple[str, ...] = ()
    size: int = 0


def read_training_state(location: Location, world_size: int) -> TrainingState:
    """Read scheduler and random state of a checkpoint; its weights state the `world_size`.

    Raises:
        UnsafeError: a file was made to run commands when it is loaded.
    """
    try:
        files = find_state_files(location, world_size)
    except OSError as error:
        why = f"{error.filename} cannot be listed: {error.strerror or error}"
        return TrainingState(warnings=(f"training state: {why}",))
    if files is None:
        return TrainingState()
    reader = _Reader()
    schedulers = [reader.fields(path) for path in files.schedulers]
    states: list[RankState | None] = [None] * files.world_size
    for rank, path in files.ranks.items():
        states[rank] = reader.rank(files.writer, path)
    values, notes = unite(states)
    missing = [f"{listed(files.missing)}: missing"] if files.missing else []
    all_notes = (*files.notes, *missing, *reader.warnings(), *notes)
    warnings = tuple(f"training state: {one}" for one in all_notes)
    if any(state is not None for state in schedulers):
        several = {"lr_schedulers": schedulers} if len(schedulers) > 1 else {}
        values = {"lr_scheduler": schedulers[0], **several, **values}
    return TrainingState(values, warnings, reader.size)


class _Reader:
    """Reads file by file, and gathers what is wrong with them."""

    def __init__(self) -> None:
        self.size = 0
        self._damaged: list[str] = []
        self._left_out: dict[tuple[str, ...], list[str]] = {}

    def rank(self, writer: StateWriter, path: Path) -> RankState | None:
        """Return what a rank's file contains; None if it cannot be read."""
        value = self.fields(path)
        state = None if value is None else rank_state(writer, value)
        if value is not None and state is None:
            self._damaged.append(f"{path}: has unexpected contents")
        return state

    def fields(self, path: Path) -> Plain | None:
        """Return the dict in a file; None if it cannot be read."""
        try:
            file = read_torch_file(path)
            found = plain_values(file)
            self.size += path.stat().st_size
        except UnsafeError as error:
            without = Text("; to merge the weights without reading it: ⟦+--no-extra-state⟧")
            hint = error.hint + without
            raise UnsafeError(error.subject, hint=hint) from error
        except CheckpointError as error:
            self._damaged.append(error.subject)
            return None
        except OSError as error:
            self._damaged.append(f"{path}: cannot be read: {error.strerror or error}")
            return None
        if found.notes:
            self._left_out.setdefault(found.notes, []).append(path.name)
        if isinstance(found.value, dict):
            return found.value
        self._damaged.append(f"{path}: has unexpected contents")
        return None

    def warnings(self) -> list[str]:
        """Return what is wrong with the files, and which of their values were left out."""
        found = self._damaged[:_SHOWN]
        if len(self._damaged) > _SHOWN:
            found.append(f"and {len(self._damaged) - _SHOWN} more files cannot be read")
        if found:
            found[-1] += "; left out: the model is complete without it"
        for values, names in self._left_out.items():
            found.append(f"{listed(names)}: left out {listed(values)}")
        return found


class StateFiles(NamedTuple):
    """The files of one writer.

    Attributes:
        writer: the tool that wrote them.
        world_size: how many ranks should have one.
        ranks: the file of each rank that has one, ascending.
        schedulers: files of schedulers, in their order.
        missing: names of files that should be there.
        notes: which others were left out, for the user.
    """

    writer: StateWriter
    world_size: int = 0
    ranks: Mapping[int, Path] = {}
    schedulers: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
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
    found = [files for files in layouts if files.paths or files.notes]
    if not found:
        return None
    first, *others = found
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


def step_dirs(location: Location) -> tuple[Path, ...]:
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
