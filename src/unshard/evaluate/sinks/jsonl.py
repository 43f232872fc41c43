"""Results as lines of JSON: the sink that every run has.

    {"job": "…", "step": 500, "metrics": {"unshard_eval/mmlu/acc": 0.5}, "logged_at": 1790000000.0}

A job that the file has is not written again, and a line that a killed process left incomplete is
ended first.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from unshard.write.staging.beneath import open_regular

__all__ = ["JsonlSink"]

_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
_LONGEST_LINE = 64 << 20  # bytes


class JsonlSink:
    """Appends to a file.

    Args:
        path: of the file; made with its directory when the first result comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _jobs_in(path)

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return f"jsonl-{self._path.name}"

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        """Append a line."""
        if job_id in self._known:
            return
        fields = {"job": job_id, "step": step, "metrics": dict(metrics), "logged_at": time.time()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(self._path, _APPEND), "r+b") as stream:
            torn = _is_torn(stream)
            stream.write((b"\n" if torn else b"") + json.dumps(fields).encode() + b"\n")
        self._known.add(job_id)

    def close(self) -> None:
        """Do nothing: every line is written at once."""


def _jobs_in(path: Path) -> set[str]:
    known = set()
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as stream:
            while line := stream.readline(_LONGEST_LINE):
                try:
                    known.add(str(json.loads(line)["job"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # torn, or not ours
    except FileNotFoundError:
        pass
    return known


def _is_torn(stream: BinaryIO) -> bool:
    """Return whether the last line is incomplete, and leave the position at the file's end."""
    if stream.seek(0, os.SEEK_END) == 0:
        return False
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) != b"\n"
