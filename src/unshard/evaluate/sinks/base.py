"""What a sink of results is, what a result is called there, and what was written to it already."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["PREFIX", "STEP_METRIC", "Marks", "Sink", "metric_names"]

PREFIX = "unshard_eval"
_LONGEST_NAME = 200  # bytes; file systems take 255
STEP_METRIC = f"{PREFIX}/step"


class Sink(Protocol):
    """Writes results to one place.

    Attributes:
        name: what its marks are kept under; the same for the same place.
    """

    @property
    def name(self) -> str:
        """Return the sink's name."""

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics of a job under their own step; the same job again does no harm."""

    def close(self) -> None:
        """Write what is buffered; the sink is not used afterwards."""


def metric_names(metrics: Mapping[str, float], *, weights: str) -> dict[str, float]:
    """Return a job's metrics under the names that trackers know them by.

    `unshard_eval/<task>/<metric>`, and `unshard_eval/ema/…` for weights other than the model's.
    """
    start = PREFIX if weights == "model" else f"{PREFIX}/{weights}"
    return {f"{start}/{name}": float(value) for name, value in metrics.items()}


def _file_name(name: str) -> str:
    """Return a file's name for a sink's, which may be a long path."""
    plain = re.sub(r"[^\w.-]", "_", name)
    if len(plain.encode()) <= _LONGEST_NAME:
        return plain
    return f"{plain:.40}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class Marks:
    """Which jobs were written to a sink; a file of ids, which survives the process.

    Args:
        directory: holds one file for each sink.
        name: the sink's.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{_file_name(name)}.txt"
        try:
            self._known = set(self._path.read_text(encoding="utf-8").split())
        except FileNotFoundError:
            self._known = set()

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._known

    def of(self, start: str) -> set[str]:
        """Return the marks that begin so."""
        return {one for one in self._known if one.startswith(start)}

    def add(self, job_id: str) -> None:
        """Mark a job; one write, so that a killed process leaves a whole line or none."""
        self._known.add(job_id)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, f"{job_id}\n".encode())
        finally:
            os.close(file)
