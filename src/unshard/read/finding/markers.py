"""The files in which trainers write the latest step, for people and to be compared with the steps.

A marker is believed only where it agrees with what is there: it may be left by an earlier run, or
name a step that was removed.

Sources: the trainers in `tests/trainers`.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from unshard.read.finding.step_names import step_of

__all__ = ["Marker", "find_markers"]

_NAMES = (
    "latest_checkpointed_iteration.txt",  # verl, Megatron
    "latest_ckpt_global_step.txt",  # SkyRL
    "latest",  # DeepSpeed
    "latest.txt",  # nanotron
    "latest_checkpoint.json",
    "last_checkpoint",  # MMEngine
)
_LINKS = ("last", "latest", "hf-latest")  # lerobot, xtuner
_NUMBER = re.compile(r"(\d+)(?:\D*)$")
_LONGEST = 4096


class Marker(NamedTuple):
    """A file or a link of a run that states its latest step; None for one without a number."""

    name: str
    step: int | None


def find_markers(run: Path) -> list[Marker]:
    """Return the markers in a run's directory."""
    found: list[Marker] = []
    for path in (run / name for name in dict.fromkeys((*_NAMES, *_LINKS))):
        if path.is_symlink() and path.name in _LINKS:
            step = step_of(path.readlink().name)
            found += [] if step is None else [Marker(path.name, step)]
        elif path.is_file() and os.access(path, os.R_OK):
            with path.open(encoding="utf-8", errors="replace") as stream:
                text = stream.read(_LONGEST).strip()
            number = _NUMBER.search(text) if text.isascii() else None
            found.append(Marker(path.name, int(number[1]) if number else None))
    return found
