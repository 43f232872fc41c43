"""Hand results to sinks, each job once: at once from any thread, or one by one at a trainer's pace.

A sink that cannot write now (a tracker that is away) gets the result again later; a result counts
as recorded when every sink has it. What is not recorded when the process ends is kept by the spool.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unshard.evaluate.sinks.base import Marks, Sink

__all__ = ["PacedSink", "Recorder", "Recording"]

log = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, float], str], None]


class PacedSink(Sink, Protocol):
    """A sink that is written to from the trainer's thread only, one result per call of it."""

    @property
    def is_ready(self) -> bool:
        """Whether it can take a result now: `log` is not called otherwise."""

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a result when the trainer logs no more."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A result on its way to the sinks."""

    job_id: str
    step: int
    metrics: Mapping[str, float]


class Recorder:
    """Hands results to sinks.

    Args:
        sinks: written to as soon as a result comes, from whatever thread.
        paced: written to by `tick` and `flush`.
        marks: the directory that remembers which sink has which job.
        on_recorded: called with a job's id when every sink has it.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        paced: Sequence[PacedSink],
        *,
        marks: Path,
        on_recorded: Callable[[str], None],
    ) -> None:
        self._sinks = tuple(sinks)
        self._paced = tuple(paced)
        self._marks = {sink.name: Marks(marks, sink.name) for sink in (*sinks, *paced)}
        self._on_recorded = on_recorded
        self._late: dict[str, Recording] = {}  # by job: what a sink still lacks
        self._queue: deque[Recording] = deque()
        self._lock = threading.Lock()

    def add(self, recording: Recording) -> None:
        """Record a result: at once where that is possible; else queue it."""
        with self._lock:
            if recording.job_id in self._late:
                return
            self._late[recording.job_id] = recording
            self._queue.append(recording)
        self.retry()

    def retry(self) -> None:
        """Write what sinks still lack that are not paced. May wait for a tracker."""
        with self._lock:
            for recording in list(self._late.values()):
                for sink in self._sinks:
                    self._write(sink, recording, sink.log)
                self._settle(recording)

    def tick(self) -> None:
        """Write one queued result to the paced sinks, in the trainer's thread; never waits."""
        if self._queue and self._lock.acquire(blocking=False):
            try:
                if all(sink.is_ready for sink in self._paced):
                    self._write_next(lambda sink: sink.log)
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Write every queued result: the trainer logs no more."""
        with self._lock:
            while self._queue:
                self._write_next(lambda sink: sink.log_now)

    def close(self) -> None:
        """Flush and close the sinks."""
        self.flush()
        self.retry()
        for sink in (*self._sinks, *self._paced):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  (a tracker must not end a training)
                log.warning("%s: not closed: %s", sink.name, error)

    def _write_next(self, how: Callable[[PacedSink], Write]) -> None:
        """Write the next result that a paced sink lacks."""
        while self._queue:
            recording = self._queue.popleft()
            written = [self._write(sink, recording, how(sink)) for sink in self._paced]
            self._settle(recording)
            if any(written):
                return

    def _write(self, sink: Sink, recording: Recording, write: Write) -> bool:
        """Write a result unless the sink has it; tell whether it was written now."""
        marks = self._marks[sink.name]
        if recording.job_id in marks:
            return False
        try:
            write(recording.step, recording.metrics, recording.job_id)
            marks.add(recording.job_id)
        except Exception as error:  # noqa: BLE001  (whatever a tracker raises, training goes on)
            log.warning("%s: step %s not written: %s", sink.name, recording.step, error)
            return False
        return True

    def _settle(self, recording: Recording) -> None:
        if all(recording.job_id in marks for marks in self._marks.values()):
            self._late.pop(recording.job_id, None)
            self._on_recorded(recording.job_id)
