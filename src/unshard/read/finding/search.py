"""Search a directory for weights of any format, whatever its folders are called.

Only names and places count; no file is opened. The search ends at the step directories of a run,
which are searched one by one, and at a bound that keeps a mistaken path (a home directory) cheap.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.read.dcp.reader import DCP
from unshard.read.finding.step_names import (
    STATE_FOLDER,
    is_unfinished,
    loose_step_of,
    step_of,
    step_of_parents,
)
from unshard.read.format import DEEPSPEED, MEGATRON, Format
from unshard.read.hub_files import RECORD_NAME
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
from unshard.read.torch_checkpointing.reader import TORCH_CHECKPOINTING
from unshard.read.whole_files.reader import WHOLE_FILES

__all__ = [
    "DEPTH",
    "ENTRIES",
    "FORMATS",
    "WEIGHT_SUFFIXES",
    "Below",
    "format_in",
    "is_state",
    "search",
    "steps_in",
]

FORMATS = (
    RANK_FILES,
    SAFETENSORS_SHARDS,
    MEGATRON,
    DCP,
    TORCH_CHECKPOINTING,
    WHOLE_FILES,
    DEEPSPEED,
)
"""All formats, in the order in which a directory is searched for them."""
WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
"""Of files that may be a checkpoint of their own, which may also have none."""
DEPTH = 4
"""How many levels of folders are searched."""
ENTRIES = 10_000
"""How many directory entries are looked at, but for those of step directories."""

_STATE = re.compile(
    r"(?:(?:lr_|train_)?(?:optim(?:izer)?s?|scheduler|sampler|scaler|data(?:loader)?|rng|random"
    r"|extra|trainer|training|client)(?:_states?|_args)?)(?:_\d+|_merged)?"
)
_TRAINER = "trainer"  # where prime-rl has the model; files of this name are training state


@dataclass(slots=True)
class Below:
    """What a search found.

    Attributes:
        sets: directories that hold weights, each with its format; those nearer to the top first.
        runs: directories that hold step directories, each with its steps, the highest first.
        folders: all that were searched, in order.
        stopped: what the search did not look at; empty if it saw all.
        is_cut: whether there may be others next to what was found: there are too many entries.
    """

    sets: list[tuple[Path, Format]] = field(default_factory=list)
    runs: dict[Path, list[tuple[int, Path]]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
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
            if not os.access(folder, os.R_OK | os.X_OK):
                continue
            names = {one.name for one in folder.iterdir()}
            entries += len(names)
            if entries > ENTRIES:
                below.stopped = f"the search ended after {ENTRIES:,} directory entries"
                below.is_cut = True
                return below
            below.folders.append(folder)
            form = _format_of(folder)
            is_made_by_us = folder != place and RECORD_NAME in names
            if form is not None and not is_made_by_us:
                below.sets.append((folder, form))
            if is_made_by_us or (form is not None and form.sharded):
                continue  # what is deeper belongs to these weights
            steps = steps_in(folder)
            if folder != place:
                steps = [one for one in steps if not (one[1] / RECORD_NAME).is_file()]
            if steps:
                below.runs[folder] = steps
            taken = {path for _, path in steps}
            following += [one for one in _folders_to_search(folder, place) if one not in taken]
        if depth == DEPTH and following:
            below.stopped = f"the search ended {DEPTH} levels below {place}"
        level = following
    return below


def _format_of(folder: Path) -> Format | None:
    return format_in(folder, sharded=True) or format_in(folder, sharded=False)


def format_in(directory: Path, *, sharded: bool) -> Format | None:
    """Return the format of the files that are directly in a directory, or None."""
    if not directory.is_dir():
        return None
    return next((one for one in FORMATS if one.sharded is sharded and one.holds(directory)), None)


def is_state(name: str) -> bool:
    """Return whether a folder of this name, or a file without its suffix, is training state."""
    return bool(_STATE.fullmatch(name))


def _folders_to_search(folder: Path, place: Path) -> Iterator[Path]:
    """Yield the folders of a directory that may hold weights, in the order of their names.

    Links to what is below the place already (`last`, `latest`), or to another step of its run,
    would be found twice.
    """
    whole = place.parent if step_of(place.name) is not None else place
    for child in sorted(folder.iterdir()):
        if is_unfinished(child.name) or child.name == STATE_FOLDER:
            continue
        if is_state(child.name) and child.name != _TRAINER:
            continue
        if child.is_dir() and not (child.is_symlink() and child.resolve().is_relative_to(whole)):
            yield child


def steps_in(run: Path) -> list[tuple[int, Path]]:
    """Return the step directories of a run, the highest step first.

    Without directories whose names count training, those of an in-house name that hold sharded
    weights are its steps.
    """
    if not run.is_dir():
        return []
    folders = [child for child in run.iterdir() if child.is_dir()]
    found = [(step, one) for one in folders if (step := step_of(one.name)) is not None]
    if not found and step_of_parents(run, sharded=False) is None:  # else a step's own parts
        loose = [(step, one) for one in folders if (step := loose_step_of(one.name)) is not None]
        found = [(step, one) for step, one in loose if _holds_shards(one)]
    return sorted(found, reverse=True)


def _holds_shards(folder: Path) -> bool:
    """Return whether there are sharded weights in a folder, or one level below it."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return False
    inner = [one for one in _folders_to_search(folder, folder) if step_of(one.name) is None]
    places = [one for one in (folder, *inner) if os.access(one, os.R_OK | os.X_OK)]
    return any(format_in(place, sharded=True) is not None for place in places)
