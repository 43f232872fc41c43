"""The files in which trainers write the latest step, for people and to be compared with the steps.

A marker is believed only where it agrees with what is there: it may be left by an earlier run, or
name a step that was removed.

Sources: the trainers in `tests/trainers`.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unshard.read.finding.step_names import step_of
from unshard.read.format import Location

__all__ = ["Marker", "find_markers", "note_markers", "run_of"]

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


class Marker(NamedTuple):
    """A file or a link of a run that states its latest step; None for one without a number."""

    name: str
    step: int | None


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
