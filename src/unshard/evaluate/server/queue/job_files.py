"""The files of jobs: results and samples of completed jobs, and the directories of ended jobs.

Results and samples are in the directory of the job's attempt. Before that is removed, they are
compressed into `files/JOB/`, with a list of all files, which includes files that were too large.

The row of a job is never removed: clients look up whether they have submitted a checkpoint before,
and a failed or cancelled evaluation must not run again because time has passed. Only directories
of jobs that the database has are removed, without following a link.
"""

import gzip
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.run_folder import leave_alone, opened
from unshard.evaluate.server.config.arguments import matches
from unshard.evaluate.server.store.store import Store
from unshard.write.dirfd import open_regular, remove, status_of

JOBS = "jobs"  # the directory in the server's work directory with a directory for each job
_FILES = "files"
_LIST = "files.json"
_PATTERNS = ("*samples_*.jsonl", "*results*.json")  # of both harnesses
_TASK = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.:-]+)?\.jsonl$")
_MOST = 1000
_PIECE = 1 << 20
_DAY_S = 24 * 3600.0
_GB = 1e9
_EVERY_S = 3600.0
_AT_ONCE = 100  # jobs in one transaction

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


@dataclass(eq=False)
class Retention:
    """Removes the directories of old jobs, once an hour.

    Attributes:
        work_dir: with the directories.
        keep_days: how long a directory stays after the end of its job; None: for ever.
        keep_gb: how many GB the directories of ended jobs have together; None: any number.
        keep_samples_mb: how many MiB of a job's results and samples are kept afterwards.
    """

    store: Store
    work_dir: Path
    keep_days: float | None
    keep_gb: float | None = None
    keep_samples_mb: int = 64
    _next: float = float("-inf")

    def begin_turn(self) -> bool:
        """Return whether a sweep is due: the first, or an hour after the last."""
        is_never = self.keep_days is None and self.keep_gb is None
        if is_never or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _EVERY_S
        return True

    def sweep(self, is_stopped: Callable[[], bool]) -> int:
        """Remove directories that are too old or too large together; return of how many jobs.

        A job is first marked in the database, which ends its log, then its directory is removed,
        then the mark: the next server finishes the jobs that a killed server has marked.
        """
        if self.keep_days is not None:
            before = time.time() - self.keep_days * _DAY_S
            self._forget(self.store.leftovers.list_ended(before), before, is_stopped)
        if self.keep_gb is not None:
            now = time.time()
            self._forget(self._list_excess(now, self.keep_gb * _GB), now, is_stopped)
        removed = 0
        for job_id in self.store.leftovers.list_forgotten():
            if is_stopped():
                break
            if self._is_removed(job_id):
                self.store.leftovers.record_removed(job_id)
                removed += 1
        if removed:
            limits = f"keep_days {self.keep_days or 'null'}, keep_gb {self.keep_gb or 'null'}"
            _log.info("removed the directories of %d jobs (%s)", removed, limits)
        return removed

    def _forget(self, jobs: Sequence[str], before: float, is_stopped: Callable[[], bool]) -> None:
        for begin in range(0, len(jobs), _AT_ONCE):
            ready = [
                job_id
                for job_id in jobs[begin : begin + _AT_ONCE]
                if not is_stopped() and self._are_files_kept(job_id)
            ]
            self.store.leftovers.forget(ready, before)

    def _are_files_kept(self, job_id: str) -> bool:
        """Keep the results and samples of a job; return False if its directory must stay."""
        job = self.store.get(job_id)
        try:
            if job is not None:
                keep_files(self.work_dir, job, self.keep_samples_mb << 20)
        except OSError as error:
            _log.warning("job %s: its files cannot be kept, its directory stays: %s", job_id, error)
            return False
        return True

    def _list_excess(self, before: float, most: float) -> list[str]:
        """Return the jobs whose directories must go for the others to fit into `most` bytes.

        The oldest are first; failed jobs, whose logs explain the failure, are last.
        """
        ended = self.store.leftovers.list_ended(before)
        sizes = {job_id: _size_of(self.work_dir / JOBS / job_id) for job_id in ended}
        total = sum(sizes.values())
        excess = list[str]()
        for job_id in ended:
            if total <= most:
                break
            total -= sizes[job_id]
            excess.append(job_id)
        return excess

    def _is_removed(self, job_id: str) -> bool:
        """Remove the directory of a job; return False if that failed."""
        path = self.work_dir / JOBS / job_id
        try:
            with opened(self.work_dir, JOBS) as folder:
                status = status_of(job_id, within=folder)
                if status is not None and not stat.S_ISDIR(status.st_mode):
                    leave_alone(f"{path}: not a directory")
                else:
                    remove(job_id, within=folder)
        except FileNotFoundError:  # no job has begun so far
            return True
        except OSError as error:
            _log.warning("%s: cannot be removed: %s", path, error)
            return False
        return True


def _size_of(directory: Path) -> int:
    """Return the bytes on disk of the files below a directory; follow no links."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                size += Path(folder, name).lstat().st_blocks * 512
    return size
