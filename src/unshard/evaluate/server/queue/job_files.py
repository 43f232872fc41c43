"""What an evaluator wrote about a completed job: its own results, and its samples.

They are in the directory of the job's attempt. Before that is removed, they are compressed into
`files/JOB/`, with a list of them and of those that were too large.
"""

import gzip
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.run_folder import opened
from unshard.write.dirfd import open_regular

JOBS = "jobs"
"""The directory, in the server's work directory, with a directory for each job."""

_FILES = "files"
_LIST = "files.json"
_PATTERNS = ("*samples_*.jsonl", "*results*.json")  # as both harnesses call them
_TASK = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.:-]+)?\.jsonl$")
_MOST = 1000
_PIECE = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobFile:
    """A file by its path below the evaluator's output; `is_kept` is false if only its size is."""

    name: str
    size: int
    is_kept: bool = True


def list_files(work_dir: Path, job: Job) -> list[JobFile]:
    """Return the files of a completed job, its results first."""
    if job.status is not Status.COMPLETED:
        return []
    return _list_written(_output_of(work_dir, job), job.results) or _list_kept(work_dir, job)


def list_samples(work_dir: Path, job: Job) -> dict[str, str]:
    """Return the tasks of which a completed job has samples, each with its file."""
    names = [one.name for one in list_files(work_dir, job) if one.is_kept]
    return {found[1]: name for name in names if (found := _TASK.search(name))}


def open_file(work_dir: Path, job: Job, name: str) -> BinaryIO | None:
    """Open one of a job's files for reading; None if it has no such file. No link is followed."""
    if name not in {one.name for one in list_files(work_dir, job) if one.is_kept}:
        return None
    try:
        return _open_written(_output_of(work_dir, job), name)
    except OSError:
        names = [one.name for one in _list_kept(work_dir, job)]
        path = work_dir / _FILES / job.id / f"{names.index(name)}.gz" if name in names else None
        return None if path is None else cast(BinaryIO, gzip.open(path))


def keep_files(work_dir: Path, job: Job, most_bytes: int) -> None:
    """Compress the files of a job whose directory will be removed, up to so many bytes.

    Its results come first, then the smaller samples. What has no room is logged, and listed.

    Raises:
        OSError: they cannot be read or written; what was kept before is still there.
    """
    output = _output_of(work_dir, job)
    files = _list_written(output, job.results) if job.status is Status.COMPLETED else []
    if not files or not most_bytes:
        return
    place = work_dir / _FILES / job.id
    fresh = place.with_name(f".{job.id}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    kept, room = list[JobFile](), most_bytes
    for number, one in enumerate(files):
        path = fresh / f"{number}.gz"
        with _open_written(output, one.name) as source:
            is_kept = _compress(source, path, room)
        room -= path.stat().st_size if is_kept else 0
        kept.append(JobFile(one.name, one.size, is_kept))
        if not is_kept:
            path.unlink()
            what = f"keep_samples_mb {most_bytes >> 20} has no room for {one.name}"
            _log.warning("job %s: %s, which is removed: %d bytes", job.id[:8], what, one.size)
    (fresh / _LIST).write_text(json.dumps([asdict(one) for one in kept]), encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    fresh.rename(place)


def _compress(source: BinaryIO, path: Path, most_bytes: int) -> bool:
    """Return whether a compressed file has at most so many bytes; else it is left unfinished."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as target:
        while (piece := source.read(_PIECE)) and raw.tell() <= most_bytes:
            target.write(piece)
    return not piece and path.stat().st_size <= most_bytes


def _output_of(work_dir: Path, job: Job) -> Path:
    return work_dir / JOBS / job.id / str(job.attempts) / "output"


def _list_written(output: Path, results: str | None) -> list[JobFile]:
    found = [
        JobFile(name, size)
        for name, size in islice(_walk(output), _MOST)
        if str(output / name) == results or _is_known(name)
    ]
    return sorted(found, key=lambda one: (str(output / one.name) != results, one.size, one.name))


def _is_known(name: str) -> bool:
    return any(fnmatchcase(Path(name).name, pattern) for pattern in _PATTERNS)


def _walk(output: Path) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of the regular files below a directory whose names are text."""
    for folder, folders, names in os.walk(output):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            status, inside = path.lstat(), str(path.relative_to(output))
            if stat.S_ISREG(status.st_mode) and inside.isprintable():
                yield inside, status.st_size


def _open_written(output: Path, name: str) -> BinaryIO:
    *folders, last = name.split("/")
    with opened(output, *folders) as folder:
        return os.fdopen(open_regular(last, os.O_RDONLY, within=folder), "rb")


def _list_kept(work_dir: Path, job: Job) -> list[JobFile]:
    try:
        found = json.loads((work_dir / _FILES / job.id / _LIST).read_bytes())
        return [JobFile(**one) for one in found]
    except (OSError, ValueError, TypeError):  # never kept, or damaged
        return []
