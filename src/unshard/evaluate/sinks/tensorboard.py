"""Results as TensorBoard scalars, in a directory of their own below the training run's.

TensorBoard follows only the newest event file of a directory, so a second writer in the trainer's
own directory would hide the trainer's values. In `<log directory>/unshard_eval` the results are a
separate run, drawn over the same axis; steps may come in any order. Neither torch nor TensorFlow is
needed.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from unshard.evaluate.sinks.base import PREFIX


class TensorBoardSink:
    """Writes event files; `log_dir` is the log directory of the training run."""

    def __init__(self, log_dir: Path) -> None:
        self.name = f"tensorboard-{log_dir}"
        self._directory = log_dir / PREFIX
        self._writer: EventFileWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write one event and flush it."""
        del job_id
        if self._writer is None:
            self._writer = EventFileWriter(str(self._directory))
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
