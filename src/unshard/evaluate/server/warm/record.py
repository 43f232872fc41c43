"""What is recorded of a worker in its directory: by it the next server and clients know it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from unshard.evaluate.process import Process
from unshard.write.dirfd import write_whole

_NAME = "worker.json"


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """A process that keeps an engine.

    Attributes:
        process: of its supervisor, with its GPUs and its directory.
        profile: the name of the profile whose jobs it takes.
        key: of its engine; a job with another key needs another engine.
        idle_s: how long it is kept without a job.
    """

    process: Process
    profile: str
    key: str
    idle_s: float


def write_worker(worker: EngineWorker) -> None:
    """Record a worker in its directory.

    Raises:
        OSError: that is not possible.
    """
    write_whole(Path(worker.process.directory) / _NAME, json.dumps(asdict(worker)).encode())


def read_worker(directory: Path) -> EngineWorker | None:
    """Return the worker of a directory; None if none was recorded: then none has run."""
    try:
        fields = json.loads((directory / _NAME).read_bytes())
        process = fields.pop("process")
        gpus = tuple(process.pop("gpus"))
        return EngineWorker(Process(**process, gpus=gpus), **fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None
