"""Sinks: where results are written, under which names, and which results each has already."""

import hashlib
import os
import re
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Protocol

from unshard.evaluate.run_folder import opened
from unshard.write.staging.beneath import open_regular

__all__ = ["PREFIX", "STEP_METRIC", "Marks", "PacedSink", "Sink", "name_metrics"]

PREFIX = "unshard_eval"
_LONGEST_NAME = 200  # bytes; file systems take 255
_MODES = {os.O_RDONLY: "r", os.O_RDWR: "r+"}
STEP_METRIC = f"{PREFIX}/step"


class Sink(Protocol):
    """Writes results to one place.

    Attributes:
        name: of its marks; the same for the same place.
    """

    @property
    def name(self) -> str:
        """Return the sink's name."""

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics of a job under their own step; the same job again does no harm."""

    def close(self) -> None:
        """Write what is buffered; the sink is not used afterwards."""


class PacedSink(Sink, Protocol):
    """A sink that is written to from the trainer's thread only, one result per call of it."""

    @property
    def is_ready(self) -> bool:
        """Whether the last result has been committed, so that `log` may be called again."""

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a result when the trainer logs no more."""


def name_metrics(metrics: Mapping[str, float], *, weights: str) -> dict[str, float]:
    """Return a job's metrics under the names that trackers know them by.

    `unshard_eval/<task>/<metric>`, and `unshard_eval/ema/…` for weights other than the model's.
    """
    start = PREFIX if weights == "model" else f"{PREFIX}/{weights}"
    return {f"{start}/{name}": float(value) for name, value in metrics.items()}


def _file_name(name: str) -> str:
    """Return the name of a file for a sink; the sink's own name may be a long path."""
    plain = re.sub(r"[^\w.-]", "_", name)
    if len(plain.encode()) <= _LONGEST_NAME:
        return plain
    return f"{plain:.40}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class Marks:
    """The ids of the jobs that were written to a sink, in a file that survives the process.

    Args:
        directory: of the files, one for each sink.
        name: the sink's.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = f"{_file_name(name)}.txt"
        self._known: set[str] = set()
        try:
            with self._opened(os.O_RDONLY) as file:
                self._known.update(file.read().decode("utf-8", "replace").split())
        except FileNotFoundError:
            pass

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._known

    def starting(self, start: str) -> set[str]:
        """Return the marks that begin with a text."""
        return {one for one in self._known if one.startswith(start)}

    def add(self, job_id: str) -> None:
        """Mark a job with one write, so that a killed process leaves a whole line or none."""
        self._known.add(job_id)
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._opened(os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
            file.write(f"{job_id}\n".encode())

    def _opened(self, flags: int) -> FileIO:
        """Open the file; neither it nor its directory may be a link: see `run_folder`."""
        with opened(self._directory.parent, self._directory.name) as folder:
            return FileIO(open_regular(self._name, flags, within=folder), _MODES[flags & os.O_RDWR])
