"""Search a directory for weights of any format, whatever its folders are called.

Only names and places count; no file is opened. The search ends at the step directories of a run,
which are searched one by one, and at a bound that keeps a mistaken path (a home directory) cheap.
It follows no links: they lead to what is found anyway (`last`), or to what belongs to another run.
A trainer may remove directories meanwhile: one that is gone has nothing in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.read.dcp.reader import DCP
from unshard.read.format import FAIRSEQ2, Format
from unshard.read.hub_files import RECORD_NAME
from unshard.read.megatron.reader import MEGATRON
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
from unshard.read.step_names import (
    STATE_FOLDER,
    children,
    family,
    is_state,
    is_unfinished,
    loose_step_of,
    step_of,
    step_of_parents,
    version_of,
    without_converted,
)
from unshard.read.torch_checkpointing.reader import TORCH_CHECKPOINTING
from unshard.read.whole_files.reader import WHOLE_FILES
from unshard.read.zero.reader import ZERO

FORMATS = (
    RANK_FILES,
    SAFETENSORS_SHARDS,
    MEGATRON,
    FAIRSEQ2,
    DCP,
    TORCH_CHECKPOINTING,
    ZERO,
    WHOLE_FILES,
)
"""All formats, in the order in which a directory is searched for them."""
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
"""Of files that may be a checkpoint of their own, which may also have none."""
DEPTH = 4
"""How many levels of folders are searched."""
ENTRIES = 10_000
"""How many directory entries are looked at, but for those of step directories."""

_TRAINER = "trainer"  # where prime-rl has the model; files of this name are training state


@dataclass(slots=True)
class Below:
    """What a search found.

    Attributes:
        sets: directories that hold weights, each with its format; those nearer to the top first.
        runs: directories that hold step directories, each with its steps, the highest first.
        folders: all that were searched, in order.
        closed: the errors of those that may not be read.
        stopped: what the search did not look at; empty if it saw all.
        is_cut: whether there may be others next to what was found: there are too many entries.
    """

    sets: list[tuple[Path, Format]] = field(default_factory=list)
    runs: dict[Path, list[tuple[int, Path]]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    closed: list[PermissionError] = field(default_factory=list)
    stopped: str = ""
    is_cut: bool = False


def search(place: Path) -> Below:
    """Return the weights and the step directories at and below a directory."""
    below = Below()
    entries = 0
    level = [place]
    for depth in range(DEPTH + 1):
        following: list[Path] = []
        for folder in level:
            try:
                entries += len(children(folder))
                if entries > ENTRIES:
                    below.stopped = f"the search ended after {ENTRIES:,} directory entries"
                    below.is_cut = True
                    return below
                following += _look_into(folder, below, is_top=folder == place)
            except PermissionError as error:
                below.closed.append(error)
        if depth == DEPTH and following:
            below.stopped = f"the search ended {DEPTH} levels below {place}"
        level = following
    return below


def _look_into(folder: Path, below: Below, *, is_top: bool) -> list[Path]:
    """Add what is in a folder to what was found; return the folders in it to be searched."""
    inner = list(_folders_to_search(folder))
    form = format_in(folder, sharded=True) or format_in(folder, sharded=False)
    below.folders.append(folder)
    is_made_by_us = not is_top and (folder / RECORD_NAME).exists()
    if form is not None and not is_made_by_us:
        below.sets.append((folder, form))
    if is_made_by_us or (form is not None and form.sharded):
        return []  # what is deeper belongs to these weights
    steps = steps_in(folder)
    if not is_top:
        steps = [one for one in steps if not (one[1] / RECORD_NAME).is_file()]
    if steps:
        below.runs[folder] = steps
    taken = {path for _, path in steps}
    return [one for one in inner if one not in taken]


def format_in(directory: Path, *, sharded: bool) -> Format | None:
    """Return the format of the files that are directly in a directory, or None."""
    if not directory.is_dir():
        return None
    try:
        return next((at for at in FORMATS if at.sharded is sharded and at.holds(directory)), None)
    except FileNotFoundError:  # it was removed since the line above
        return None


def _folders_to_search(folder: Path) -> Iterator[Path]:
    """Yield the folders of a directory that may hold weights, in the order of their names."""
    for child in children(folder):
        if is_unfinished(child.name) or child.name == STATE_FOLDER:
            continue
        if is_state(child.name) and child.name != _TRAINER:
            continue
        if child.is_dir() and not child.is_symlink():
            yield child


def steps_in(run: Path) -> list[tuple[int, Path]]:
    """Return the step directories of a run, the highest step first; of one step, the last save.

    Without directories whose names count training, those of an in-house name that hold sharded
    weights are its steps, and those of the same name that may not be read.
    """
    folders = without_converted(child for child in children(run) if child.is_dir())
    found = [(step, one) for one in folders if (step := step_of(one.name)) is not None]
    if not found and step_of_parents(run, sharded=False) is None:  # else a step's own parts
        loose = [(step, one) for one in folders if (step := loose_step_of(one.name)) is not None]
        held = {one: _holds_shards(one) for _, one in loose}
        names = {family(one.name) for one in held if held[one]}
        found = [
            (step, one)
            for step, one in loose
            if held[one] or (held[one] is None and family(one.name) in names)
        ]
    return sorted(found, key=lambda one: (one[0], version_of(one[1].name), one[1]), reverse=True)


def _holds_shards(folder: Path) -> bool | None:
    """Return whether there are sharded weights in a folder, or one level below it.

    None of one that may not be read.
    """
    try:
        inner = [one for one in _folders_to_search(folder) if step_of(one.name) is None]
        return any(format_in(place, sharded=True) is not None for place in (folder, *inner))
    except PermissionError:
        return None
