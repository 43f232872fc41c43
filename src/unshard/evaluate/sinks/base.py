"""Sinks: where results are written, under which names, and which results each has already.

The sink that every run has is a file with lines of JSON:

    {"job": "…", "step": 500, "metrics": {"unshard_eval/mmlu/acc": 0.5}, "logged_at": 1790000000.0,
     "measured_with": {"unshard_eval/lm-eval": {"arguments": {"num_fewshot": 5}, …}}}
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Protocol

from unshard.evaluate.run_folder import opened
from unshard.write.dirfd import open_regular

PREFIX = "unshard_eval"
STEP_METRIC = f"{PREFIX}/step"
_LONGEST_NAME = 200  # bytes; file systems take 255
_LONGEST_LINE = 64 << 20  # bytes
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
_MODES = {os.O_RDONLY: "r", os.O_RDWR: "r+"}


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


def describe(sink: Sink, settings: Mapping[str, object]) -> None:
    """Write what results are measured with to where a tracker has a run's config.

    Args:
        sink: of the tracker; if it has such a place, its own `describe` takes names and values.
        settings: of each profile, as the server's `measured_with` has them.
    """
    own = getattr(sink, "describe", None)
    if own is not None and settings:
        own({f"{PREFIX}/{profile}": found for profile, found in settings.items()})


class Marks:
    """The ids of the jobs that were written to a sink, in a file that survives the process.

    Args:
        directory: of the files, one for each sink.
        name: the sink's.
    """

    def __init__(self, directory: Path, name: str) -> None:
        plain = re.sub(r"[^\w.-]", "_", name)
        if len(plain.encode()) > _LONGEST_NAME:  # of a tracker in a long path
            plain = f"{plain:.40}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self._directory, self._name = directory, f"{plain}.txt"
        self._known: set[str] = set()
        with suppress(FileNotFoundError), self._opened(os.O_RDONLY) as file:
            self._known.update(file.read().decode("utf-8", "replace").split())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._known

    def starting(self, start: str) -> set[str]:
        """Return the marks that begin with a text."""
        return {one for one in self._known if one.startswith(start)}

    def add(self, job_id: str) -> None:
        """Mark a job with one write, so that a killed process leaves a whole line or none."""
        self._known.add(job_id)
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._opened(_APPEND) as file:
            file.write(f"{job_id}\n".encode())

    def _opened(self, flags: int) -> FileIO:
        """Open the file; neither it nor its directory may be a link: see `run_folder`."""
        with opened(self._directory.parent, self._directory.name) as folder:
            return FileIO(open_regular(self._name, flags, within=folder), _MODES[flags & os.O_RDWR])


class JsonlSink:
    """Appends lines of JSON to a file.

    A job that the file has is not written again, and a line that a killed process left incomplete
    is ended first.

    Args:
        path: of the file; made with its directory when the first result comes.
    """

    def __init__(self, path: Path) -> None:
        self.name = f"jsonl-{path.name}"
        self._settings: dict[str, object] = {}
        self._path = path
        self._known: set[str] = set()
        with (
            suppress(FileNotFoundError),
            os.fdopen(open_regular(path, os.O_RDONLY), "rb") as stream,
        ):
            while line := stream.readline(_LONGEST_LINE):
                # A line may be torn, or not ours.
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._known.add(str(json.loads(line)["job"]))

    def describe(self, config: Mapping[str, object]) -> None:
        """Have the next lines say what their results were measured with."""
        self._settings = dict(config)

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        """Append a line."""
        if job_id in self._known:
            return
        fields: dict[str, object] = {"job": job_id, "step": step, "metrics": dict(metrics)}
        fields["logged_at"] = time.time()
        fields |= {"measured_with": self._settings} if self._settings else {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(self._path, _APPEND), "r+b") as stream:
            is_torn = False
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                is_torn = stream.read(1) != b"\n"
            stream.write((b"\n" if is_torn else b"") + json.dumps(fields).encode() + b"\n")
        self._known.add(job_id)

    def close(self) -> None:
        """Do nothing: every line is written at once."""
