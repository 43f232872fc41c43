"""The thread engine: progress, errors, and how many threads, bytes and files it takes."""

import errno
import os
import resource
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import take
from unshard.engines import threads
from unshard.engines.threads import MIN_BUFFER, Resources, default_workers, run_plan
from unshard.errors import CorruptError
from unshard.plan import planner, work
from unshard.plan.layout import lay_out
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.plan.work import Unit
from unshard.progress import Advanced, Event, ignore
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME, numpy_dtype
from unshard.write.execute import Executor
from waiting import LIMIT_S

MEGABYTE = 1_000_000
ONE = Resources(workers=1, memory_bytes=MEGABYTE)
THREE = Resources(workers=3, memory_bytes=MEGABYTE)


def rows_in_files(
    directory: Path,
    *,
    files: int,
    rows_each: int,
    width: int,
    dtype: str = "float32",
    to: str = "float32",
    transposed: bool = False,
    max_shard_size: int = 10**12,
) -> Plan:
    """Write `files` source files and plan a matrix of them, one tensor of some rows from each."""
    paths = tuple(directory / f"rank{n}.bin" for n in range(files))
    itemsize = BY_NAME[dtype].itemsize
    outputs = []
    for n, path in enumerate(paths):
        path.write_bytes(np.full(rows_each * width * itemsize, n % 251, np.uint8).tobytes())
        rows = ChunkRows(2)
        sizes = (rows_each, width)
        strides = (1, rows_each) if transposed else row_major_strides(sizes)
        rows.add(
            rank=n, file=n, start=0, itemsize=itemsize, offsets=(0, 0), sizes=sizes, strides=strides
        )
        entry = TensorEntry(f"t{n:04}", BY_NAME[dtype], sizes, rows.table(paths))
        outputs.append(ConvertedTensor(entry.fqn, BY_NAME[to], take(entry)))
    return make_plan(lay_out(outputs, max_shard_size))


def small(directory: Path, files: int = 6) -> Plan:
    return rows_in_files(directory, files=files, rows_each=4, width=5)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    directory = tmp_path / "output"
    directory.mkdir()
    return directory


@pytest.fixture
def no_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LONG_RUN", 10**9)


# progress


@pytest.mark.parametrize("resources", [ONE, THREE])
@pytest.mark.parametrize("long_run", [1, planner.LONG_RUN], ids=["copied", "gathered"])
def test_progress_adds_up_to_the_bytes_of_all_tensors(
    tmp_path: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: Resources,
    long_run: int,
) -> None:
    monkeypatch.setattr(planner, "LONG_RUN", long_run)
    monkeypatch.setattr(work, "_COPY_UNIT", 64)
    monkeypatch.setattr(work, "_MAX_TILE", 64)
    plan = small(tmp_path)
    events: list[Event] = []
    run_plan(plan, output, resources, events.append)
    written = [event.written_bytes for event in events if isinstance(event, Advanced)]
    assert len(written) == len(events) > len(plan)
    assert sum(written) == plan.layout.total_size


def test_progress_of_a_cast_counts_what_is_written(tmp_path: Path, output: Path) -> None:
    plan = rows_in_files(tmp_path, files=3, rows_each=4, width=5, to="bfloat16")
    events: list[Event] = []
    run_plan(plan, output, THREE, events.append)
    assert events == [Advanced(4 * 5 * 2)] * 3


def test_events_come_from_one_thread_at_a_time(tmp_path: Path, output: Path) -> None:
    lock = threading.Lock()
    refused = []

    def listen(_event: Event) -> None:
        if not lock.acquire(blocking=False):
            refused.append(threading.current_thread())
            return
        threading.Event().wait(0.001)
        lock.release()

    run_plan(small(tmp_path, files=40), output, THREE, listen)
    assert refused == []


def test_a_plan_without_operations_still_makes_its_files(tmp_path: Path, output: Path) -> None:
    plan = rows_in_files(tmp_path, files=2, rows_each=0, width=5)
    assert len(plan) == 0
    run_plan(plan, output, THREE, ignore)
    assert (output / "model.safetensors").read_bytes() == plan.layout.files[0].header


# errors


def truncate_second(directory: Path) -> None:
    (directory / "rank1.bin").write_bytes(b"short")


def test_the_first_error_stops_a_worker(tmp_path: Path, output: Path) -> None:
    plan = small(tmp_path)
    truncate_second(tmp_path)
    events: list[Event] = []
    with pytest.raises(CorruptError, match=r"rank1\.bin"):
        run_plan(plan, output, ONE, events.append)
    assert len(events) == 1


def test_an_error_in_one_worker_stops_all(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers wait inside their first unit until one has failed."""
    plan = small(tmp_path, files=50)
    failed: list[threading.Thread] = []
    done: list[Unit] = []

    class Stuck(Executor):
        def do(self, unit: Unit) -> int:
            if not failed:
                failed.append(threading.current_thread())
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            failed[0].join()
            done.append(unit)
            return 0

    monkeypatch.setattr(threads, "Executor", Stuck)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        run_plan(plan, output, THREE, ignore)
    assert set(threading.enumerate()) <= before
    assert len(done) <= 2


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_what_a_listener_raises_stops_the_work(
    tmp_path: Path, output: Path, error: BaseException
) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        raise error

    before = set(threading.enumerate())
    with pytest.raises(type(error)):
        run_plan(small(tmp_path, files=50), output, ONE, listen)
    assert set(threading.enumerate()) <= before
    assert len(events) == 1


def test_an_interrupt_waits_for_the_workers_and_is_raised(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = threading.Thread.join
    interrupted: list[threading.Thread] = []

    def join_once_interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted:
            interrupted.append(thread)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_once_interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run_plan(small(tmp_path, files=50), output, THREE, ignore)
    assert set(threading.enumerate()) <= before


def test_an_output_file_that_is_there_already_is_left_alone(tmp_path: Path, output: Path) -> None:
    present = output / "model.safetensors"
    present.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        run_plan(small(tmp_path), output, ONE, ignore)
    assert present.read_bytes() == b"precious"


# threads, bytes and files


class Recorded:
    """Stands in for `Executor` and keeps what every one was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open_files: list[int] = []
        self.buffer_bytes: list[int] = []
        monkeypatch.setattr(threads, "Executor", self._make)

    def _make(self, outputs: tuple[Path, ...], *, open_files: int, buffer_bytes: int) -> Executor:
        self.open_files.append(open_files)
        self.buffer_bytes.append(buffer_bytes)
        return Executor(outputs, open_files=open_files, buffer_bytes=buffer_bytes)


@pytest.mark.parametrize(
    ("resources", "workers"),
    [
        (Resources(3, 64 * MEGABYTE), 3),
        (Resources(8, 3 * MIN_BUFFER), 3),
        (Resources(8, MIN_BUFFER), 1),
        (Resources(8, 1), 1),
        (Resources(0, 64 * MEGABYTE), 1),
    ],
)
def test_workers_are_as_many_as_asked_for_and_as_memory_feeds(
    tmp_path: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    resources: Resources,
    workers: int,
) -> None:
    recorded = Recorded(monkeypatch)
    run_plan(small(tmp_path), output, resources, ignore)
    assert len(recorded.buffer_bytes) == workers
    assert sum(recorded.buffer_bytes) <= resources.memory_bytes


@pytest.mark.parametrize("workers", [1, 3, 8, 20, 64, 200])
@pytest.mark.parametrize("limit", [64, 256, 1024, resource.RLIM_INFINITY])
def test_workers_share_the_open_files_that_the_process_may_have(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch, workers: int, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    recorded = Recorded(monkeypatch)
    run_plan(small(tmp_path), output, Resources(workers, 64 * MEGABYTE), ignore)
    assert min(recorded.open_files) >= 2
    assert max(recorded.open_files) <= 64
    assert limit == resource.RLIM_INFINITY or sum(recorded.open_files) <= limit - 16


CHILD = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
sys.path[:0] = sys.argv[2:]
from test_threads import many_files
many_files(Path(sys.argv[1]))
"""


def many_files(directory: Path) -> None:
    """Merge 300 source files into 100 output files; run in a child process of few descriptors."""
    plan = rows_in_files(directory, files=300, rows_each=4, width=5, max_shard_size=240)
    assert len(plan.layout.files) == 100
    run_plan(plan, directory / "output", Resources(8, 64 * MEGABYTE), ignore)


def test_64_descriptors_are_enough_for_any_number_of_files(tmp_path: Path, output: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(here), str(here.parent)]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    assert len(list(output.iterdir())) == 100
    data = b"".join(path.read_bytes()[-240:] for path in sorted(output.iterdir()))
    assert data == b"".join(bytes([n % 251]) * 80 for n in range(300))


@pytest.mark.parametrize("resources", [Resources(1, 500_000), Resources(3, 2 * MEGABYTE)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "to"), [("uint8", "uint8"), ("float64", "bfloat16")])
@pytest.mark.usefixtures("no_run_is_long")
def test_tiles_stay_within_the_memory_asked_for(
    tmp_path: Path,
    output: Path,
    resources: Resources,
    dtype: str,
    to: str,
    *,
    transposed: bool,
) -> None:
    rows = 4 * MEGABYTE // 200 // BY_NAME[dtype].itemsize
    options = {"files": 4, "rows_each": rows, "width": 200}
    plan = rows_in_files(tmp_path, **options, dtype=dtype, to=to, transposed=transposed)
    assert len(plan.tiled) == 4
    one_tile = resources.memory_bytes // resources.workers // 4
    assert one_tile < peak_of(plan, output, resources) < most_for(resources)


def test_copies_without_the_kernel_stay_within_the_memory_asked_for(
    tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.copy_file_range", raising=False)
    plan = rows_in_files(tmp_path, files=4, rows_each=1000, width=1000)
    assert len(plan.copies) == 4
    resources = Resources(2, 500_000)
    assert peak_of(plan, output, resources) < most_for(resources)


def most_for(resources: Resources) -> int:
    """Return the buffers asked for, and some for what Python itself needs to run a plan."""
    return resources.memory_bytes + 50_000 * resources.workers


def peak_of(plan: Plan, output: Path, resources: Resources) -> int:
    """Return the most bytes that Python and numpy hold at once while this plan runs."""
    numpy_dtype(BY_NAME["bfloat16"])  # what it imports is not a buffer
    tracemalloc.start()
    try:
        run_plan(plan, output, resources, ignore)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_default_is_a_thread_per_core_and_at_most_8(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[int | None, int] = {}
    for cores in (None, 1, 3, 8, 100):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        counts[cores] = default_workers()
    assert counts == {None: 1, 1: 1, 3: 3, 8: 8, 100: 8}
