"""Sinks, to which results are written: metric names, marks of written results, the JSON lines sink.

Every run has a file with lines of JSON:

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
    """Writes results to one destination."""

    @property
    def name(self) -> str:
        """Return the name of the sink's marks; it is the same for the same destination."""

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write the metrics of a job under their own step; the same job may be written again."""

    def close(self) -> None:
        """Write what is buffered; the sink is not used afterwards."""


class PacedSink(Sink, Protocol):
    """A sink that only the trainer's thread uses, with one result per log call of the trainer."""

    @property
    def is_ready(self) -> bool:
        """Whether the last result has been committed, so that `log` may be called again."""

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a result after the last log call of the trainer."""


def name_metrics(metrics: Mapping[str, float], *, weights: str) -> dict[str, float]:
    """Return a job's metrics under their names in trackers.

    `unshard_eval/<task>/<metric>`, and `unshard_eval/ema/…` for EMA weights.
    """
    prefix = PREFIX if weights == "model" else f"{PREFIX}/{weights}"
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def describe(sink: Sink, settings: Mapping[str, object]) -> None:
    """Write the settings of results to the config of a tracker's run, if the sink has `describe`.

    `settings` are by profile, as in the server's `measured_with`.
    """
    write = getattr(sink, "describe", None)
    if write is not None and settings:
        write({f"{PREFIX}/{profile}": values for profile, values in settings.items()})


class Marks:
    """The ids of the jobs that were written to a sink, in a file; `name` is the sink's."""

    def __init__(self, directory: Path, name: str) -> None:
        plain = re.sub(r"[^\w.-]", "_", name)
        if len(plain.encode()) > _LONGEST_NAME:  # a TensorBoard sink's name has its path
            plain = f"{plain:.40}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self._directory, self._name = directory, f"{plain}.txt"
        self._marks: set[str] = set()
        with suppress(FileNotFoundError), self._opened(os.O_RDONLY) as file:
            self._marks.update(file.read().decode("utf-8", "replace").split())

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._marks

    def starting(self, start: str) -> set[str]:
        """Return the marks that begin with a text."""
        return {mark for mark in self._marks if mark.startswith(start)}

    def add(self, job_id: str) -> None:
        """Mark a job with one write, so that a killed process leaves a whole line or none."""
        self._marks.add(job_id)
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._opened(_APPEND) as file:
            file.write(f"{job_id}\n".encode())

    def _opened(self, flags: int) -> FileIO:
        """Open the file; neither it nor its directory may be a link: see `run_folder`."""
        with opened(self._directory.parent, self._directory.name) as folder:
            return FileIO(open_regular(self._name, flags, within=folder), _MODES[flags & os.O_RDWR])


class JsonlSink:
    """Appends lines of JSON to a file.

    The first result makes the file with its directory. Jobs in the file are not written again. An
    incomplete line of a killed process is ended first.
    """

    def __init__(self, path: Path) -> None:
        self.name = f"jsonl-{path.name}"
        self._settings: dict[str, object] = {}
        self._path = path
        self._written: set[str] = set()
        with (
            suppress(FileNotFoundError),
            os.fdopen(open_regular(path, os.O_RDONLY), "rb") as stream,
        ):
            while line := stream.readline(_LONGEST_LINE):
                # A line may be incomplete, or not ours.
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    self._written.add(str(json.loads(line)["job"]))

    def describe(self, config: Mapping[str, object]) -> None:
        """Set `measured_with` of the next lines."""
        self._settings = dict(config)

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        """Append a line."""
        if job_id in self._written:
            return
        fields: dict[str, object] = {"job": job_id, "step": step, "metrics": dict(metrics)}
        fields["logged_at"] = time.time()
        fields |= {"measured_with": self._settings} if self._settings else {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(self._path, _APPEND), "r+b") as stream:
            last = b"\n"
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                last = stream.read(1)
            stream.write((b"" if last == b"\n" else b"\n") + json.dumps(fields).encode() + b"\n")
        self._written.add(job_id)

    def close(self) -> None:
        """Do nothing: every line is written at once."""
