"""Results as lines of JSON: the one sink that is always there.

    {"job": "…", "step": 500, "metrics": {"unshard_eval/mmlu/acc": 0.5}, "logged_at": 1790000000.0}

A job that is there already is not written again, and a line that a killed process left torn is
ended first.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["JsonlSink"]


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
        with self._path.open("ab") as stream:
            torn = _is_torn(self._path)
            stream.write((b"\n" if torn else b"") + json.dumps(fields).encode() + b"\n")
        self._known.add(job_id)

    def close(self) -> None:
        """Do nothing: every line is written at once."""


def _jobs_in(path: Path) -> set[str]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return set()
    known = set()
    for line in lines:
        try:
            known.add(str(json.loads(line)["job"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn
    return known


def _is_torn(path: Path) -> bool:
    with path.open("rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"
