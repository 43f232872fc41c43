"""What a submission or an end costs does not depend on how many jobs wait."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from evaluation.running import script_profile, whole_model
from unshard.evaluate.jobs import Request
from unshard.evaluate.pins.pin import Pin, read_pin
from unshard.evaluate.server import pinning
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.service import Service

SHORT, LONG = 10, 300


@dataclass
class Cost:
    """What SQLite and the file system had to do."""

    statements: list[str] = field(default_factory=list)
    instructions: int = 0  # of SQLite's virtual machine: a row that is visited takes one at least
    pins: int = 0  # of which pin.json was read

    def count(self) -> int:
        self.instructions += 1
        return 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the pins that were read."""
    found = list[Path]()

    def counted(path: Path) -> Pin:
        found.append(path)
        return read_pin(path)

    monkeypatch.setattr(pinning, "read_pin", counted)
    return found


def queued_in(directory: Path, length: int, step_of: Callable[[int], int | None]) -> Service:
    """Return a server with a queue of one run, whose pins the quota has removed."""
    root = directory / str(length)
    config = ServerConfig(
        roots=(root,), work_directory=root / "work", profiles={"script": script_profile(gpus=0)}
    )
    service = make_service(config)
    service.store._connections.own.execute("PRAGMA synchronous = OFF")
    for number in range(length):
        path, tasks = f"{root}/run/checkpoint-{number}", (f"task-{number}",)
        pin = f"{root}/run/_unshard/pins/{number}/checkpoint-{number}"
        service.store.submit(Request(path, "script", tasks, step_of(number), "run"), pin=pin)
    return service


@contextmanager
def counted_in(service: Service, read: list[Path]) -> Iterator[Cost]:
    """Count what is done in this context."""
    cost, connection = Cost(), service.store._connections.own
    read.clear()
    connection.set_trace_callback(cost.statements.append)
    connection.set_progress_handler(cost.count, 1)
    yield cost
    connection.set_progress_handler(None, 1)
    connection.set_trace_callback(None)
    cost.pins = len(read)


@pytest.mark.parametrize(
    "step_of",
    [lambda number: number, lambda _: None, lambda _: 1],
    ids=["steps", "no step", "one step"],
)
def test_neither_a_submission_nor_an_end_looks_at_the_whole_queue(
    tmp_path: Path, read: list[Path], step_of: Callable[[int], int | None]
) -> None:
    submissions, ends = list[Cost](), list[Cost]()
    for length in (SHORT, LONG):
        service = queued_in(tmp_path, length, step_of)
        with closing(service.store):
            root = service.config.roots[0]
            checkpoint = whole_model(root / "run" / "model")
            step = step_of(LONG)
            after = None if step is None else step + 1  # those of its own step are looked at
            request = Request(str(checkpoint), "script", ("task",), after, "run")
            with counted_in(service, read) as cost:
                job, _ = service.submit(request, None)
                # The pin of the first is used again for the other.
                other, _ = service.submit(replace(request, tasks=("other",)), None)
            submissions.append(cost)
            assert job.pin is not None
            assert job.pin == other.pin
            with counted_in(service, read) as cost:
                service.scheduler.cancel(job.id)
                assert Path(job.pin).exists()
                service.scheduler.cancel(other.id)
                assert not Path(job.pin).exists()
            ends.append(cost)
    for short, long in (submissions, ends):
        assert len(long.statements) == len(short.statements) > 3
        assert long.instructions - short.instructions < LONG - SHORT
        assert long.pins == short.pins <= 3
