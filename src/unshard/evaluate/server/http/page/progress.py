"""How far a running evaluator is, as the end of its log says."""

import re
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.server.processes.bounded_log import last_lines

_PERCENT = re.compile(r"(?<![\d.])(\d{1,3})%\|")  # as tqdm writes it
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONGEST = 160


@dataclass(frozen=True, slots=True)
class Progress:
    """What an evaluator wrote last.

    Attributes:
        line: the last line, without escape sequences.
        percent: of the progress bar in it, if there is one.
    """

    line: str
    percent: int | None


def progress_of(log: Path) -> Progress | None:
    """Return how far the evaluator with this log is; None while it has written nothing."""
    text = _ESCAPES.sub("", last_lines(log, 20))
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    if not lines:
        return None
    line = lines[-1].strip()
    bars = _PERCENT.findall(line)
    percent = int(bars[-1]) if bars and int(bars[-1]) <= 100 else None
    return Progress(line[:_LONGEST], percent)
