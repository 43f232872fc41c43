"""Read many rank files, in several processes where that pays.

Files that are alike are compared with one that was unpickled: this process does that, because every
other would have to unpickle one first, and would need the memory for it. Where files are not alike,
each is unpickled: interpreted work, about 50 µs a tensor, so a thousand files of a thousand tensors
take a core a minute. Workers are plain child processes that read paths from a pipe and send tables
back: nothing of the caller's program is imported again, and nothing is pickled on the way.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import pack, unpack
from typing import IO

from unshard.containers.torch_files.reader import open_torch_file
from unshard.errors import CorruptError, UnshardError
from unshard.read.torch_save.alike import RankFileReader
from unshard.read.torch_save.table import RankTable, problem, problem_fields
from unshard.stores.at_once import ahead
from unshard.stores.remote_path import RemotePath, path_of

_WORTH_PROCESSES = 16 * 1024 * 1024
"""Bytes of pickle, all files together, from which on processes are started for unlike files."""

_Job = tuple[int, int, Path]


def read_rank_files(
    files: Sequence[tuple[int, Path]], *, allowed: frozenset[str], processes: int
) -> Iterator[RankTable]:
    """Yield the table of every (rank, path), in this order; a CheckpointError if one has none."""
    jobs = [(number, rank, path) for number, (rank, path) in enumerate(files)]
    if any(isinstance(path, RemotePath) and path.is_on_nodes for _, path in files):
        processes = 1  # others are not connected with the nodes
    reader, names = RankFileReader(allowed), 0
    tables = _tables(jobs, reader)
    for done in range(len(jobs)):
        # Torch writes some 350 bytes for a DTensor.
        many = 350 * names * len(jobs) >= _WORTH_PROCESSES
        if done and processes > 1 and many and reader.has_given_up:
            yield from _read_in_processes(jobs[done:], allowed, min(processes, len(jobs) - done))
            return
        table = next(tables)
        names = len(table.names)
        yield table


def _tables(jobs: Sequence[_Job], reader: RankFileReader) -> Iterator[RankTable]:
    paths = [path for _, _, path in jobs]
    in_bucket = any(isinstance(path, RemotePath) for path in paths)
    archives = (ahead if in_bucket else map)(open_torch_file, paths)
    for (number, rank, _), archive in zip(jobs, archives, strict=True):
        yield reader.take(archive, rank=rank, file=number)


def _read_in_processes(
    jobs: Sequence[_Job], allowed: frozenset[str], processes: int
) -> Iterator[RankTable]:
    """Deal the jobs out in turn and collect the results in turn: the order is that of the jobs."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with ExitStack() as stack:
        pipes = []
        for worker in range(processes):
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "unshard.read.rank_files.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for this process, which ends its workers
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            mine = [(number, rank, str(path)) for number, rank, path in jobs[worker::processes]]
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("a worker without pipes")
            # A worker that is dead already is reported as any other: by the table that is missing.
            with suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(json.dumps([sorted(allowed), mine]).encode())
            pipes.append(child.stdout)
        names: list[list[str] | None] = [None] * processes
        for turn, (_, _, file) in enumerate(jobs):
            worker = turn % processes
            table = _receive(pipes[worker], file, names[worker])
            names[worker] = table.names
            yield table


def _receive(pipe: IO[bytes], path: Path, names: list[str] | None) -> RankTable:
    """Return the next table of a worker; `names` are those of its last one."""
    head = pipe.read(9)
    if len(head) == 9:
        kind, size = head[:1], unpack("<Q", head[1:])[0]
        data = pipe.read(size)
        if len(data) == size:
            if kind == b"T":
                return RankTable.from_bytes(data, names)
            raise problem(json.loads(data))
    raise CorruptError(f"{path}: the process that read it died: not a valid checkpoint")


def main() -> None:
    """Be a worker: read jobs from stdin, write tables (T) or the first error (E) to stdout."""
    gc.disable()  # tables are freed by reference; cycles of a pickle are few, and the process ends
    allowed, given = json.load(sys.stdin)
    jobs = [(number, rank, path_of(path)) for number, rank, path in given]
    known: list[str] | None = None
    try:
        for count, table in enumerate(_tables(jobs, RankFileReader(frozenset(allowed)))):
            _send(b"T", table.to_bytes(known))
            known = table.names
            if count % 16 == 0:
                gc.collect()
    except UnshardError as error:
        _send(b"E", json.dumps(problem_fields(error)).encode())


def _send(kind: bytes, data: bytes) -> None:
    sys.stdout.buffer.write(kind + pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
