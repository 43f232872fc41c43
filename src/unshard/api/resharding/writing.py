"""What a reshard writes: laid out before anything is read, and what is added in the end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unshard.containers.torch_files.writer import Plain, write_torch_file
from unshard.plan.resharding import Resharded
from unshard.showing import counted

Added = tuple[list[str], list[str]]
"""Notes for the user, and the paths of the files that were added."""


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """What a reshard writes.

    Attributes:
        made: the files with tensors.
        small_bytes: what all other files take, about.
        add: writes them into the directory of the output.
    """

    made: Resharded
    small_bytes: int
    add: Callable[[Path], Added]


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
    def size(self) -> int:
        """Bytes of the files whose size is known."""
        known: Mapping[str, int] = {name: one.stat().st_size for name, one in self.copied.items()}
        return sum(known.values()) + sum(map(len, self.data.values()))


def write_additions(files: Addition, directory: Path) -> Added:
    """Write files without tensors of the model; return notes and paths."""
    names = [*files.copied, *files.data, *files.saved]
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in files.saved:
            write_torch_file(path, files.saved[name])
        else:
            path.write_bytes(
                files.data[name] if name in files.data else files.copied[name].read_bytes()
            )
    return files.notes, names


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
