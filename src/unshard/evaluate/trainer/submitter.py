"""Submit checkpoints and fetch results without harm to the training, for all callbacks.

In the trainer's thread only hard links and small files are made. A background thread sends the
spool, in order, polls pending jobs, and queues their results; another writes them to trackers.
The server may be away for an hour and the trainer may be killed: the spool keeps all submissions,
and the next trainer on the same directory continues with them. If several processes work on a run
(a trainer and `watch`), the first sends all submissions and fetches all results: its background
thread holds a lock on a file of the run. No public method raises.
"""

import logging
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.jobs import BASE_STEP
from unshard.evaluate.pins.files import ExpiredError, PinError
from unshard.evaluate.pins.pin import pin_checkpoint
from unshard.evaluate.run_folder import SPOOL_LOCK, RunFolder, unlock
from unshard.evaluate.sinks.base import JsonlSink, PacedSink, Sink
from unshard.evaluate.summary import summarise
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.courier import Courier, release
from unshard.evaluate.trainer.recorder import Recorder, Recording
from unshard.evaluate.trainer.spool import Spool, request_key
from unshard.integrations.harmless import ignoring_errors
from unshard.stores.remote_path import RemotePath, is_url, path_of

_SHORTEST_WAIT = 0.01  # seconds
_LOOK = 0.1  # seconds between looks at pending jobs, when training has ended
_GRACE = 2.0  # seconds that a thread has to end, if there is no time left

log = logging.getLogger(__name__)

StepMetrics = tuple[int, dict[str, float]]


def is_first_rank() -> bool:
    """Return whether this process is global rank 0, by its launcher's environment variables."""
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


class Submitter:
    """Submits the checkpoints of a run for evaluation.

    Args:
        config: of the evaluation.
        run_dir: the run's directory, on a disk, which contains the spool and the checkpoints;
            these may be in an object store instead.
        sinks: get each result as it comes, as does `<run>/_unshard/results.jsonl`.
        paced: get results by `tick`, in the trainer's thread.
        acts: whether this process submits; None: if it is global rank 0.
        logs_refusals: whether a refusal by the server is an error in the log; see `Courier`.
        checkpoints: the directory of the run's checkpoints, if it is not `run_dir`.
    """

    def __init__(  # noqa: PLR0913 (two kinds of sinks, and the log)
        self,
        config: EvalConfig,
        run_dir: Path,
        *,
        sinks: Sequence[Sink] = (),
        paced: Sequence[PacedSink] = (),
        acts: bool | None = None,
        logs_refusals: bool = True,
        checkpoints: Path | None = None,
    ) -> None:
        if is_url(run_dir):
            raise UsageError(
                f"{path_of(run_dir)}: submissions and results are kept on a disk",
                expected="a local directory as `run_dir`; only checkpoints may be in a store",
            )
        self.config = config
        self.run_dir = Path(run_dir).absolute()
        self.checkpoints = self.run_dir if checkpoints is None else checkpoints
        self.acts = is_first_rank() if acts is None else acts
        self._results: deque[StepMetrics] = deque()
        self._previous: int | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._sinks, self._paced = tuple(sinks), tuple(paced)
        self._folder = RunFolder(self.run_dir)
        self._recorder: Recorder | None = None  # made if this process is the first
        self._is_closing = self._has_time = self._has_results = self._is_second = False
        self._summary = ""
        self._is_all_there = not self.acts
        self._sent, self._recorded = threading.Event(), threading.Event()  # when training has ended
        # Used by the background thread only: the lock, and the times of polling and sending.
        self._lock: int | None = None
        self._polled = self._send_at = float("-inf")
        if self.acts:
            self._start(logs_refusals=logs_refusals)

    def submit(
        self,
        checkpoint_dir: str | Path,
        step: int,
        weights: str | Sequence[str] | None = None,
        *,
        again: str = "",
    ) -> bool:
        """Spool a saved checkpoint, if its evaluation is due; return whether it was spooled.

        Takes milliseconds: hard links and a file for each set of weights. The checkpoint must be
        complete.

        Args:
            checkpoint_dir: the checkpoint, or its address in an object store, which is not pinned.
            step: the training step.
            weights: "model", "ema" or both; None: those of the configuration.
            again: a text that distinguishes this evaluation from an earlier one.
        """
        is_spooled = False
        if isinstance(weights, str):
            weights = (weights,)
        with ignoring_errors(f"step {step} is not evaluated"):
            step = int(step)
            if not str(checkpoint_dir):  # `Path("")` would be the current directory
                raise UsageError("the checkpoint is an empty path")
            is_due = self.acts and self.config.is_due(step, self._previous)
            self._previous = step
            if is_due:
                checkpoint = path_of(checkpoint_dir).absolute()
                sets = weights or self.config.weights
                is_spooled = self._pin_and_spool(checkpoint, step, sets, again)
            self._wake.set()
        return is_spooled

    def completed(self) -> list[StepMetrics]:
        """Return the step and the metrics of each result that came since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def tick(self) -> None:
        """Write at most one result to the paced sinks: once per training log call."""
        if self._recorder is not None:
            with ignoring_errors("results are not logged now"):
                self._recorder.tick()

    def pending(self) -> list[tuple[str, int]]:
        """Return name and step of each evaluation that is not final: not sent, or on the server.

        A result is in `completed` before its evaluation is missing here.
        """
        if not self.acts:
            return []
        entries = (*self._spool.waiting(), *self._spool.pending())
        return [(entry.name, entry.step) for entry in entries]

    def summary(self) -> str:
        """Return a table of the run's best and last steps; "" without results or server."""
        config, run = self.config, self.config.served(str(self.checkpoints))
        try:
            with EvalClient(config.server_url, timeout=_GRACE / 2, token=config.token()) as client:
                return summarise(client, run)
        except Exception as error:  # noqa: BLE001  (a server may answer anything)
            log.debug("no summary: %s", error)
            return ""

    def close(self, timeout: float | None = None) -> bool:
        """Wait until all jobs are final, at most `timeout` seconds, and write their results.

        A table of the run's results is logged, if any came and there is time; and each step without
        a result, with the reason. The spool keeps everything unfinished for the next trainer on
        this run: jobs, and results that a tracker has not accepted.

        Returns:
            Whether every requested evaluation has its result.
        """
        if self._thread is None:
            return self._is_all_there
        limit = self.config.flush_timeout if timeout is None else timeout
        end = time.monotonic() + limit
        with ignoring_errors("not all results are logged"):
            self._is_closing, self._has_time = True, limit > 0
            self._wake.set()
            if limit and (count := len(self.pending())):
                log.warning("training waits for %d evaluations, %g s at most", count, limit)
            while self.pending() and not self._is_second and time.monotonic() < end:
                time.sleep(min(_LOOK, max(0.0, end - time.monotonic())))
            missing = self._missing()
            for text in missing:
                log.warning("%s", text)
            self._is_all_there = not missing
        self.stop(end)
        if self._summary:
            log.warning("%s", self._summary)
        return self._is_all_there

    def stop(self, end: float = 0.0) -> None:
        """Send waiting submissions and write new results; do not report missing results.

        Args:
            end: the deadline, by `time.monotonic`; each thread has at least two seconds.
        """
        if self._thread is None:
            return
        with ignoring_errors("not all results are logged"):
            self._stop.set()
            self._wake.set()
            if not self._sent.wait(max(_GRACE, end - time.monotonic())):
                log.warning("the evaluation server is slow to answer; not waiting for it")
            if self._recorder is not None:
                self._recorder.close(max(_GRACE, end - time.monotonic()))
        self._recorded.set()
        if self._sent.is_set():
            self._thread.join()  # the next process can take over when this returns
        self._thread = None

    def _missing(self) -> list[str]:
        """Return the evaluations without a result: failed, refused, or not final yet."""
        missing = [f"no result: {failure}" for failure in self._courier.failures.values()]
        missing += [
            f"no result: step {entry.step}: refused: {entry.fields.get('error')}"
            for entry in self._spool.refused()
        ]
        if steps := sorted({step for _, step in self.pending()}):
            listed = f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
            missing.append(
                f"no result yet: {listed}; the next trainer on {self.run_dir} fetches it, or "
                f"`unshard eval watch {shlex.quote(str(self.run_dir))}`"
            )
        return missing

    def _start(self, *, logs_refusals: bool) -> None:
        self.acts = False
        with ignoring_errors("checkpoints are not evaluated"):
            self._spool = spool = Spool(self.run_dir)
            self._courier = Courier(self.config, spool, self._take, logs_refusals=logs_refusals)
            self._thread = threading.Thread(None, self._work, "unshard-evaluation", daemon=True)
            self._thread.start()
            self.acts = True
        if self.acts and self.config.eval_strategy != "no":
            with ignoring_errors("the base model is not evaluated"):
                self._spool_base()

    def base_request(self) -> dict[str, object] | None:
        """Return the request for the base model, if there is one."""
        if self.config.base is None:
            return None
        paths = {"checkpoint": self.config.base, "directory": str(self.checkpoints)}
        return {**self.request(BASE_STEP), **paths, "weights": "model"}

    def _spool_base(self) -> None:
        """Submit the base model unless an earlier process has; the server has one job for both."""
        request, spool = self.base_request(), self._spool
        entries = (*spool.waiting(), *spool.pending(), *spool.arrived(), *spool.refused())
        if request is not None and request_key(request) not in {entry.key for entry in entries}:
            spool.add({"step": BASE_STEP, "pins": [], "request": request})
            self._wake.set()

    def _pin_and_spool(self, checkpoint: Path, step: int, sets: Sequence[str], again: str) -> bool:
        """Pin a checkpoint and add its submissions to the spool."""
        try:
            pins = self._pin(checkpoint, step)
        except ExpiredError as error:
            log.error("step %s cannot be evaluated any more: %s", step, error)  # noqa: TRY400
            return False
        request = self.request(step) | {"checkpoint": str(checkpoint)}
        request |= {"again": again} if again else {}
        try:
            for weights in sets:
                fields = {"step": step, "pins": pins, "request": {**request, "weights": weights}}
                release(self._spool.supersede(self._spool.add(fields)), self._spool)
        except BaseException:
            release(pins, self._spool)
            raise
        return True

    def _pin(self, checkpoint: Path, step: int) -> list[str]:
        """Return the pin of a checkpoint, in a list; none if it is not possible."""
        if isinstance(checkpoint, RemotePath):
            return []
        try:
            pin = pin_checkpoint(checkpoint, quota=self.config.quota, step=step, run=self.run_dir)
        except PinError as error:
            log.warning("not pinned, so it may be removed before it is evaluated: %s", error)
            return []
        return [str(pin.path)]

    def follow(self, job_id: str, checkpoint: Path, step: int, weights: str) -> None:
        """Fetch the result of a job that another client submitted, too."""
        with ignoring_errors(f"job {job_id} is not followed"):
            request = {**self.request(step), "checkpoint": str(checkpoint), "weights": weights}
            self._spool.follow(job_id, {"step": step, "pins": [], "request": request})
            self._wake.set()

    def request(self, step: int) -> dict[str, object]:
        """Return the request for the checkpoint of a step, without the weights."""
        config = self.config
        return {
            "step": step,
            "profile": config.profile,
            "tasks": list(config.tasks),
            "run": config.run or self._folder.name,
            **config.arguments.given(),
        }

    def _take(self, recording: Recording) -> None:
        if self._recorder is not None:
            self._recorder.add(recording)
        self._has_results = True
        self._results.append((recording.step, dict(recording.metrics)))

    def _forget(self, job_id: str) -> None:
        for entry in self._spool.arrived():
            if entry.name == job_id:
                self._spool.remove(entry)

    def _work(self) -> None:
        """Run the background thread: send, poll, wait, until the trainer ends."""
        try:
            while not self._stop.is_set():
                wait = self._round() if self._take_over() else self.config.poll_interval
                self._wake.wait(max(_SHORTEST_WAIT, wait))
                self._wake.clear()
            if self._take_over():
                with ignoring_errors("submissions wait"):
                    self._courier.send()  # the next process gets the results
                if self._has_time and self._has_results:
                    self._summary = self.summary()
            self._courier.close()
        finally:
            self._sent.set()
            # With the lock released earlier, the next process would write the same results again.
            self._recorded.wait()
            self._unlock()

    def _round(self) -> float:
        """Send and poll if it is time; return the seconds until the next round.

        After a failure, submissions pause while polling continues. When training has ended, they
        are sent at every poll.
        """
        interval = self.config.poll_interval
        if self._is_closing or time.monotonic() >= self._send_at:
            with ignoring_errors("submissions wait"):
                self._send_at = time.monotonic() + self._courier.send()
        if time.monotonic() - self._polled >= interval:
            self._polled = time.monotonic()
            with ignoring_errors("results wait"):
                self._courier.poll()
        now = time.monotonic()
        wait = self._polled + interval - now
        return min(wait, self._send_at - now) if self._send_at > now else wait

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _take_over(self) -> bool:
        """Become the process that sends the run's spool, if there is none; return whether it is."""
        if self._lock is None and self._folder.state.is_dir():
            with ignoring_errors("submissions wait"):
                self._lock = self._folder.lock(SPOOL_LOCK)
                if self._lock is None and not self._is_second:
                    log.warning(
                        "%s: another process sends this run's submissions and fetches all results; "
                        "this one only spools",
                        self.run_dir,
                    )
                self._is_second = self._lock is None
                if not self._is_second:
                    sinks = [JsonlSink(self._folder.state / "results.jsonl"), *self._sinks]
                    marks, forget = self._folder.state / "exports", self._forget
                    self._recorder = Recorder(sinks, self._paced, marks=marks, on_recorded=forget)
            if self._recorder is None:
                self._unlock()  # results cannot be written now; the next round tries again
            else:
                with ignoring_errors("the work of an earlier process is not resumed"):
                    self._courier.begin()
        return self._recorder is not None
