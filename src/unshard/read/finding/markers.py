"""The files in which trainers write the latest step, for people and to be compared with the steps.

A marker is believed only where it agrees with what is there: it may be left by an earlier run, or
name a step that was removed.

Sources: the trainers in `tests/trainers`.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unshard.read.format import Location
from unshard.read.step_names import UNIVERSAL, step_of, without_converted
from unshard.read.zero.files import is_zero_file

_NAMES = (
    "latest_checkpointed_iteration.txt",  # verl, Megatron
    "latest_ckpt_global_step.txt",  # SkyRL
    "latest",  # DeepSpeed
    "latest.txt",  # nanotron
    "latest_checkpoint.json",
    "latest_checkpoint.txt",  # cosmos-predict
    "last_checkpoint",  # MMEngine
)
_LINKS = ("last", "latest", "hf-latest")  # lerobot, xtuner
_LONGEST = 4096
_TAG = "latest"  # DeepSpeed
_TRAINER_STATE = "trainer_state.json"
_FIRST, _SECOND = "pytorch_model", re.compile(r"pytorch_model_\d+")


class Marker(NamedTuple):
    """A file or a link of a run that states its latest step; None for one without a number."""

    name: str
    step: int | None


def is_marker(path: Path) -> bool:
    """Return whether a path is a file that states the latest step."""
    return path.name in _NAMES and path.is_file() and path.stat().st_size <= _LONGEST


def find_markers(run: Path) -> list[Marker]:
    """Return the markers in a run's directory."""
    found: list[Marker] = []
    for path in (run / name for name in (*_NAMES, *(one for one in _LINKS if one not in _NAMES))):
        with suppress(OSError):  # unreadable, or just removed
            if path.is_symlink() and path.name in _LINKS:
                step = step_of(path.readlink().name)
                found += [] if step is None else [Marker(path.name, step)]
            elif path.is_file():
                with path.open(encoding="utf-8", errors="replace") as stream:
                    found.append(Marker(path.name, _stated(stream.read(_LONGEST).strip())))
    return found


def stated_tag(place: Path) -> str | None:
    """Return the folder of a place that its file `latest` names: DeepSpeed's tag."""
    with suppress(OSError, ValueError):  # none, or just removed; or no text
        path = place / _TAG
        if path.is_file() and path.stat().st_size <= _LONGEST:
            tag = path.read_text(encoding="utf-8").strip()
            return tag if tag and Path(tag).name == tag else None
    return None


def step_of_tag(place: Path) -> Path | None:
    """Return the folder of the tag that is the checkpoint of a place; None if it may be several.

    A trainer's step (`checkpoint-10`) has one tag, whatever its name; a run has one per step. So a
    tag whose name states a step is the place's own only if that is a step, too. Where `latest` does
    not say which it is, a trainer's step has that of the highest step: its weights are what the
    training goes on from, and those of a whole model next to it are not.
    """
    tag = stated_tag(place)
    if tag is None or not (place / tag).is_dir():
        return _highest_tag(place) if _is_trainers_step(place) else None
    if _SECOND.fullmatch(tag) and (place / _FIRST).is_dir():
        return None  # accelerate names the tag of each model, and the last one stays
    if step_of(tag) is None:
        return place / tag
    if step_of(place.name) is None:
        return None
    tags = without_converted(one for one in place.iterdir() if one.is_dir())
    is_only = sum(step_of(one.name) is not None for one in tags) == 1
    return place / tag if is_only or _is_trainers_step(place) else None


def is_tag(folder: Path) -> bool:
    """Return whether a folder, or what it was converted from, is the tag of the one above it."""
    tag = folder.with_name(folder.name.removesuffix(UNIVERSAL))
    return step_of_tag(folder.parent) in (folder, tag)


def _is_trainers_step(place: Path) -> bool:
    """Return whether a place is a step for which transformers' Trainer saved its own state."""
    return step_of(place.name) is not None and (place / _TRAINER_STATE).is_file()


def _highest_tag(place: Path) -> Path | None:
    """Return the folder of DeepSpeed's files with the highest step; None if that is not one."""
    tags = (one for one in sorted(place.iterdir()) if one.is_dir() and _has_partitions(one))
    folders = without_converted(tags)
    steps = [-1 if (step := step_of(one.name)) is None else step for one in folders]
    highest = max(steps, default=-1)
    return folders[steps.index(highest)] if steps.count(highest) == 1 else None


def _has_partitions(folder: Path) -> bool:
    with suppress(OSError):  # just removed, or closed
        return any(is_zero_file(one.name) for one in folder.iterdir())
    return False


def _stated(text: str) -> int | None:
    """Return the step that a text, or the path in it, states; None if it may be several."""
    name = text.rpartition("/")[2]  # MMEngine writes the whole path of a file
    if not name.isascii():
        return None
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if len(numbers) == 1 else step_of(Path(name).stem)


def run_of(location: Location) -> Path:
    """Return the directory in which a trainer puts its markers: that of the steps."""
    is_file = location.place != location.weights_dir
    return location.weights_dir if is_file else location.step_dir.parent


def note_markers(location: Location) -> list[str]:
    """Return, for the user, which markers name another step than the one that was taken."""
    run = run_of(location)
    return [
        f"{run / name} names step {step}, but step {location.step} was taken: the highest there "
        "that is complete"
        for name, step in find_markers(run)
        if step is not None and location.step is not None and step != location.step
    ]


def note_tag(location: Location) -> list[str]:
    """Return, for the user, that a trainer's `latest` does not name the tag that was taken."""
    place, tag = location.step_dir, location.weights_dir
    if tag.parent != place or not _is_trainers_step(place) or not _has_partitions(tag):
        return []
    stated = stated_tag(place)
    if stated == tag.name:
        return []
    why = "is missing" if stated is None else f"names {stated}, which is not there"
    return [f"{place / _TAG} {why}: {tag.name} was taken, the highest there"]
