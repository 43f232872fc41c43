"""The results and samples that an evaluator wrote for a completed job.

They are in the directory of the job's attempt. Before that is removed, they are compressed into
`files/JOB/`, with a list of all files, which includes files that were too large.
"""

import gzip
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.run_folder import opened
from unshard.evaluate.server.config.arguments import matches
from unshard.write.dirfd import open_regular

JOBS = "jobs"  # the directory in the server's work directory with a directory for each job
_FILES = "files"
_LIST = "files.json"
_PATTERNS = ("*samples_*.jsonl", "*results*.json")  # of both harnesses
_TASK = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.:-]+)?\.jsonl$")
_MOST = 1000
_PIECE = 1 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobFile:
    """A file by its path below the evaluator's output; without `is_kept` only its size is known."""

    name: str
    size: int
    is_kept: bool = True


def list_files(work_dir: Path, job: Job) -> list[JobFile]:
    """Return the files of a completed job, its results first."""
    if job.status is not Status.COMPLETED:
        return []
    return _list_written(_output_of(work_dir, job), job.results) or _list_kept(work_dir, job)


def list_samples(work_dir: Path, job: Job) -> dict[str, str]:
    """Return the tasks with samples of a completed job, each with its file."""
    names = [file.name for file in list_files(work_dir, job) if file.is_kept]
    return {match[1]: name for name in names if (match := _TASK.search(name))}


def open_file(work_dir: Path, job: Job, name: str) -> BinaryIO | None:
    """Open a file of a job for reading; None if it has no such file. No link is followed."""
    if name not in {file.name for file in list_files(work_dir, job) if file.is_kept}:
        return None
    try:
        return _open_written(_output_of(work_dir, job), name)
    except OSError:
        names = [file.name for file in _list_kept(work_dir, job)]
        path = work_dir / _FILES / job.id / f"{names.index(name)}.gz" if name in names else None
        return None if path is None else cast(BinaryIO, gzip.open(path))


def keep_files(work_dir: Path, job: Job, most_bytes: int) -> None:
    """Compress the files of a job whose directory will be removed, up to `most_bytes`.

    Its results come first, then the smaller samples. Files that do not fit are logged and listed.

    Raises:
        OSError: they cannot be read or written; files that were kept before remain.
    """
    output = _output_of(work_dir, job)
    files = _list_written(output, job.results) if job.status is Status.COMPLETED else []
    if not files or not most_bytes:
        return
    directory = work_dir / _FILES / job.id
    draft = directory.with_name(f".{job.id}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    entries, room = list[dict[str, object]](), most_bytes
    for number, file in enumerate(files):
        path = draft / f"{number}.gz"
        with _open_written(output, file.name) as source:
            is_kept = _compress(source, path, room)
        room -= path.stat().st_size if is_kept else 0
        entries.append(asdict(replace(file, is_kept=is_kept)))
        if not is_kept:
            path.unlink()
            why = f"keep_samples_mb {most_bytes >> 20} has no room for {file.name}"
            _log.warning("job %s: %s, which is removed: %d bytes", job.id[:8], why, file.size)
    (draft / _LIST).write_text(json.dumps(entries), encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    draft.rename(directory)


def _compress(source: BinaryIO, path: Path, most_bytes: int) -> bool:
    """Compress a file; return False, with an unfinished file, if it has more than `most_bytes`."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as target:
        while (piece := source.read(_PIECE)) and raw.tell() <= most_bytes:
            target.write(piece)
    return not piece and path.stat().st_size <= most_bytes


def _output_of(work_dir: Path, job: Job) -> Path:
    return work_dir / JOBS / job.id / str(job.attempts) / "output"


def _list_written(output: Path, results: str | None) -> list[JobFile]:
    files = [
        file
        for file in islice(_walk(output), _MOST)
        if str(output / file.name) == results or matches(Path(file.name).name, _PATTERNS)
    ]
    return sorted(
        files, key=lambda file: (str(output / file.name) != results, file.size, file.name)
    )


def _walk(output: Path) -> Iterator[JobFile]:
    """Yield the regular files below a directory whose names are printable."""
    for folder, folders, names in os.walk(output):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            status, inside = path.lstat(), str(path.relative_to(output))
            if stat.S_ISREG(status.st_mode) and inside.isprintable():
                yield JobFile(inside, status.st_size)


def _open_written(output: Path, name: str) -> BinaryIO:
    *folders, last = name.split("/")
    with opened(output, *folders) as folder:
        return os.fdopen(open_regular(last, os.O_RDONLY, within=folder), "rb")


def _list_kept(work_dir: Path, job: Job) -> list[JobFile]:
    try:
        entries = json.loads((work_dir / _FILES / job.id / _LIST).read_bytes())
        return [JobFile(**entry) for entry in entries]
    except (OSError, ValueError, TypeError):  # never kept, or damaged
        return []
