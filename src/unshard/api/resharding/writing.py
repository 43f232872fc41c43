"""The output of a reshard: laid-out files with tensors, and other files that are added last."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.api.resharding.target import ReshardTarget
from unshard.console import counted
from unshard.containers.file_states import FileStates
from unshard.containers.torch_files.writer import Plain, write_torch_file
from unshard.plan.resharding import Resharded
from unshard.read.open import Checkpoint


@dataclass(slots=True)
class Addition:
    """Files without tensors of the model, by their paths inside the output.

    Attributes:
        copied: files to copy.
        data: contents of files.
        saved: values to write in the format of `torch.save`.
        notes: messages for the user.
    """

    copied: dict[str, Path] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    saved: dict[str, Plain] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all of them."""
        return (*self.copied, *self.data, *self.saved)

    def size(self, states: FileStates) -> int:
        """Return the size of `copied`, from their `states`, and of `data`, bytes."""
        copied = sum(states[path].size for path in self.copied.values())
        return copied + sum(map(len, self.data.values()))

    def files(self, scratch: Path) -> Iterator[tuple[str, bytes | Path]]:
        """Yield the path of each, and its bytes or a file to copy; values are written to `scratch`.

        Files in `scratch` have their final names, because torch writes the name into the file.
        """
        yield from self.copied.items()
        yield from self.data.items()
        for name, value in self.saved.items():
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_torch_file(path, value)
            yield name, path


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """A reshard before its first byte is written.

    Attributes:
        source: the checkpoint, with its optimizer's state.
        target: the format and the ranks.
        resharded: the layout of files with tensors.
        others: all other files.
        ema: EMA weights that are resharded, too.
    """

    source: Checkpoint
    target: ReshardTarget
    resharded: Resharded
    others: Addition
    ema: tuple[Checkpoint, ...] = ()


def trainer_rng(rank: int, world: int) -> str:
    """Return the file in which the HF Trainer looks for the random state of a rank."""
    return "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"


def random_note(before: int, world: int) -> str:
    """Return the note about random state on another number of ranks."""
    return (
        f"the random state of {counted(before, 'rank')} has no equivalent on {world}: rank R gets "
        f"that of rank R modulo {before}, so random numbers will not be those of the same run on "
        f"{counted(before, 'rank')}"
    )
