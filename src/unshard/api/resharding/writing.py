"""What a reshard writes: laid out before anything is read, and what is added in the end."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.containers.file_states import FileStates
from unshard.containers.torch_files.writer import Plain, write_torch_file
from unshard.plan.resharding import Resharded
from unshard.read.open import Checkpoint
from unshard.showing import counted


@dataclass(slots=True)
class Addition:
    """Files without tensors of the model, by their paths inside the output.

    Attributes:
        copied: copies of other files.
        data: what they contain.
        saved: values, to be written as `torch.save` does.
        notes: what a user should know.
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
        """Return the bytes of the files whose size is known; `states` has those to copy."""
        copied = sum(states[one].size for one in self.copied.values())
        return copied + sum(map(len, self.data.values()))

    def files(self, scratch: Path) -> Iterator[tuple[str, bytes | Path]]:
        """Yield the path of each, and its bytes or a file to copy; values are written to `scratch`.

        torch writes the name of a file into it, so there it has the name that it will have.
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
    """What a reshard writes: the files with tensors, and all others; `ema` is read for it, too."""

    made: Resharded
    others: Addition
    ema: tuple[Checkpoint, ...] = ()


def trainer_rng(rank: int, world: int) -> str:
    """Return where the HF Trainer looks for the random state of a rank."""
    return "rng_state.pth" if world == 1 else f"rng_state_{rank}.pth"


def random_note(before: int, world: int) -> str:
    """Return what a user should know of random state on another number of ranks."""
    return (
        f"the random state of {counted(before, 'rank')} has no equivalent on {world}: rank R gets "
        f"that of rank R modulo {before}, so random numbers will not be those of the same run on "
        f"{counted(before, 'rank')}"
    )
