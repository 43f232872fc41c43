"""Scheduler and random state of a checkpoint, read from the files of all ranks into plain values.

Weights need none of it: a file that is damaged is named and left out. A file whose pickle was made
to run commands is an error all the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.containers.pickles.writer import Plain
from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CheckpointError, UnsafeError
from unshard.read.format import Location
from unshard.read.training_state.files import StateWriter, find_state_files, listed
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.rng_states import RankState, rank_state, unite

__all__ = ["TrainingState", "read_training_state"]

_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """What a checkpoint has besides the model, except the optimizer.

    Attributes:
        values: by the names that `rng_states` lists; empty where there is nothing. Of several
            schedulers `lr_scheduler` is the first, `lr_schedulers` all.
        warnings: what is missing, damaged or was left out.
        size: of the files it was read from, bytes.
    """

    values: Mapping[str, Plain] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    size: int = 0


def read_training_state(location: Location, world_size: int) -> TrainingState:
    """Read scheduler and random state of a checkpoint.

    Args:
        location: where the weights are.
        world_size: how many ranks wrote them, as far as they say.

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
    told = (*files.notes, *missing, *reader.warnings(), *notes)
    warnings = tuple(f"training state: {one}" for one in told)
    return TrainingState({**_of_schedulers(schedulers), **values}, warnings, reader.size)


def _of_schedulers(states: Sequence[Plain | None]) -> dict[str, Plain]:
    """Return the states of schedulers by name, as accelerate numbers them."""
    if not any(state is not None for state in states):
        return {}
    several = {"lr_schedulers": list(states)} if len(states) > 1 else {}
    return {"lr_scheduler": states[0], **several}


class _Reader:
    """Reads file by file, and gathers what is wrong with them."""

    def __init__(self) -> None:
        self.size = 0
        self._damaged: list[str] = []
        self._left_out: dict[tuple[str, ...], list[str]] = {}

    def rank(self, writer: StateWriter, path: Path) -> RankState | None:
        """Return what a rank's file holds; None if it cannot be read."""
        value = self.fields(path)
        state = None if value is None else rank_state(writer, value)
        if value is not None and state is None:
            self._damaged.append(f"{path}: has unexpected contents")
        return state

    def fields(self, path: Path) -> Plain | None:
        """Return the dict that a file holds; None if it cannot be read."""
        try:
            file = read_torch_file(path)
            found = plain_values(file)
            self.size += path.stat().st_size
        except UnsafeError as error:
            hint = f"{error.hint}; to merge the weights without reading it: --no-extra-state"
            raise UnsafeError(error.subject, hint=hint) from error
        except CheckpointError as error:
            self._damaged.append(error.subject)
            return None
        except OSError as error:
            self._damaged.append(f"{path}: cannot be read: {error.strerror or error}")
            return None
        if found.left_out:
            self._left_out.setdefault(found.left_out, []).append(path.name)
        if isinstance(found.value, dict):
            return found.value
        self._damaged.append(f"{path}: has unexpected contents")
        return None

    def warnings(self) -> list[str]:
        """Return what is wrong with the files, and which of their values were left out."""
        told = self._damaged[:_SHOWN]
        if len(self._damaged) > _SHOWN:
            told.append(f"and {len(self._damaged) - _SHOWN} more files cannot be read")
        if told:
            told[-1] += "; left out: the model is complete without it"
        for values, names in self._left_out.items():
            told.append(f"{listed(names)}: left out {listed(values)}")
        return told
