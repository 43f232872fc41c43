"""Write results to sinks, each job once, from a separate thread or at a trainer's pace.

The first sink is a file and gets every result at once. Trackers may be slow or away: one thread
writes to all of them, and pauses for a tracker that fails. A result that a tracker refuses several
times while it accepts others is given up there. A result is recorded when every sink has it; the
spool keeps all that are not when the process ends.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.evaluate.jobs import backoff
from unshard.evaluate.sinks.base import Marks, PacedSink, Sink, describe
from unshard.integrations.harmless import ignoring_errors

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0  # seconds without a write after a sink's failure
_MOST_REFUSALS = 3  # of a result, by a sink that accepts others

log = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, float], str], None]


@dataclass(frozen=True, slots=True)
class Recording:
    """A result on its way to the sinks, with its settings by profile."""

    job_id: str
    step: int
    metrics: Mapping[str, float]
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Failure:
    """The failures of a sink to write one result.

    Attributes:
        why: the last error.
        refusals: the failures after each of which, except the last, other results were written.
        written: the results that the sink had written before the last failure.
    """

    step: int
    why: str
    refusals: int
    written: int


class _Outlet:
    """A sink, the results that it has, and the time of the next try after a failure."""

    def __init__(self, sink: Sink, marks: Marks) -> None:
        self._sink = sink
        self._marks = marks
        self._uncommitted: list[str] = []
        self._lock = threading.Lock()
        self._in_vain = 0
        self._written = 0
        self._failures: dict[str, _Failure] = {}
        self.not_before = float("-inf")

    def has(self, job_id: str) -> bool:
        """Return whether a result is written and committed."""
        return job_id in self._marks

    def lacks(self, job_id: str) -> bool:
        """Return whether a result has to be written."""
        return self.awaits(job_id) and job_id not in self._uncommitted

    def awaits(self, job_id: str) -> bool:
        """Return whether a result is neither committed nor set aside."""
        return job_id not in self._marks and self.refusals(job_id) < _MOST_REFUSALS

    def refusals(self, job_id: str) -> int:
        """Return how often the sink refused a result, while it accepted others."""
        failure = self._failures.get(job_id)
        return 0 if failure is None else failure.refusals

    def log_failures(self) -> None:
        """Log which results were not written, and why."""
        for failure in self._failures.values():
            log.warning(
                "%s: step %s was not written: %s", self._sink.name, failure.step, failure.why
            )

    def write(self, recording: Recording, write: Write) -> bool:
        """Write a result if that is possible now; return whether it was written."""
        with self._lock:
            if not self.lacks(recording.job_id) or time.monotonic() < self.not_before:
                return False
            try:
                describe(self._sink, recording.settings)
                write(recording.step, recording.metrics, recording.job_id)
                self._uncommitted.append(recording.job_id)
                self._mark()
            except Exception as error:  # noqa: BLE001  (no tracker may end a training)
                self._record_failure(recording, error)
                return False
            self._in_vain = 0
            self._written += 1
            self._failures.pop(recording.job_id, None)
            return True

    def _record_failure(self, recording: Recording, error: Exception) -> None:
        wait_s = backoff(self._in_vain, first_s=_FIRST_WAIT, most_s=_LONGEST_WAIT)
        self._in_vain += 1
        self.not_before = time.monotonic() + wait_s
        failure = self._failures.setdefault(recording.job_id, _Failure(recording.step, "", 0, -1))
        failure.refusals += failure.written != self._written
        failure.written, failure.why = self._written, str(error)
        later = "tried again later" if self.awaits(recording.job_id) else "set aside"
        log.warning(
            "%s: step %s not written, %s: %s", self._sink.name, recording.step, later, error
        )

    def commit(self) -> None:
        """Mark the results that the sink has committed."""
        with self._lock:
            self._mark()

    def close(self) -> None:
        with ignoring_errors(f"{self._sink.name}: not closed"):
            self._sink.close()
            self.commit()

    def _mark(self) -> None:
        while self._uncommitted and getattr(self._sink, "is_ready", True):
            self._marks.add(self._uncommitted[0])
            self._uncommitted.pop(0)


class Recorder:
    """Writes results to sinks.

    Args:
        sinks: `add` writes to the first, which never waits; a thread writes to the others.
        paced: only `tick` and `close` write to these.
        marks: the directory with the `Marks` of each sink.
        on_recorded: called with a job's id when every sink has its result.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        paced: Sequence[PacedSink],
        *,
        marks: Path,
        on_recorded: Callable[[str], None],
    ) -> None:
        outlets = {sink.name: _Outlet(sink, Marks(marks, sink.name)) for sink in (*sinks, *paced)}
        self._outlets = tuple(outlets.values())
        self._sinks = [(sink, outlets[sink.name]) for sink in sinks]
        self._paced = [(sink, outlets[sink.name]) for sink in paced]
        self._on_recorded = on_recorded
        self._late: dict[str, Recording] = {}  # by job: results that a sink lacks
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="unshard-trackers", daemon=True)
        self._thread.start()

    def add(self, recording: Recording) -> None:
        """Write a result to the first sink, and queue it for the others."""
        if recording.job_id in self._late:
            return
        self._late[recording.job_id] = recording
        for sink, outlet in self._sinks[:1]:
            outlet.write(recording, sink.log)
        self._report_recorded()
        self._wake.set()

    def tick(self) -> None:
        """Write one queued result to the paced sinks, in the trainer's thread, without waiting."""
        for _, outlet in self._paced:
            outlet.commit()
        if all(sink.is_ready for sink, _ in self._paced):
            self._write_next(lambda sink: sink.log)
        self._report_recorded()

    def close(self, timeout: float) -> None:
        """Write the queued results and close the sinks: the trainer logs no more.

        A tracker gets at most `timeout` seconds; the spool keeps the results that it lacks.
        """
        end = time.monotonic() + timeout
        self._stop.set()
        self._wake.set()
        for _, outlet in self._paced:
            outlet.not_before = float("-inf")
        while self._write_next(lambda sink: sink.log_now) and time.monotonic() < end:
            pass
        for _, outlet in self._paced:
            outlet.close()
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("a tracker is slow; it gets the remaining results when training resumes")
        for outlet in self._outlets:
            outlet.log_failures()
        self._report_recorded()

    def _work(self) -> None:
        """Write to the sinks that are not paced, in the background thread."""
        while not self._stop.is_set():
            self._wake.wait(self._write_late())
            self._wake.clear()
        for _, outlet in self._sinks:
            outlet.not_before = float("-inf")
        self._write_late()
        for _, outlet in self._sinks:
            outlet.close()

    def _write_late(self) -> float | None:
        """Write the results that sinks lack; return the seconds after which to try again."""
        late = list(self._late.values())
        for sink, outlet in self._sinks:
            # Refused results come last, so that they do not hold up the others.
            for recording in sorted(late, key=lambda one: outlet.refusals(one.job_id)):
                outlet.write(recording, sink.log)
        self._report_recorded()
        lacking = [
            outlet.not_before
            for _, outlet in self._sinks
            if any(outlet.awaits(recording.job_id) for recording in late)
        ]
        return max(0.0, min(lacking) - time.monotonic()) if lacking else None

    def _write_next(self, how: Callable[[PacedSink], Write]) -> bool:
        """Write the next result that a paced sink lacks, refused ones last; return whether any."""

        def refusals(recording: Recording) -> int:
            return sum(outlet.refusals(recording.job_id) for _, outlet in self._paced)

        for recording in sorted(self._late.values(), key=refusals):
            written = [outlet.write(recording, how(sink)) for sink, outlet in self._paced]
            if any(written):
                return True
        return False

    def _report_recorded(self) -> None:
        """Report every result that all sinks have."""
        for job_id in list(self._late):
            is_everywhere = all(outlet.has(job_id) for outlet in self._outlets)
            # Two threads may get here at once: `pop` lets only one report.
            if is_everywhere and self._late.pop(job_id, None) is not None:
                self._on_recorded(job_id)
