"""Submit the checkpoints of a run as they become complete, for trainers without hooks (verl).

A second submission would evaluate a checkpoint again if its first evaluation failed. So `watch`
first asks the server for the job, in any state; while the server is away, it reads its earlier
submissions in `<run>/_unshard/watched.txt`. If the pin quota is used up, checkpoints wait, and do
not displace older pins. The profile's `order` and `max_lag` apply to them as to jobs in the queue;
until the server has answered, the lowest step is first.
"""

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from unshard.api.following.finder import CheckpointFinder, check_run
from unshard.errors import StoreError, UsageError
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.jobs import BASE_STEP
from unshard.evaluate.pins.files import list_checkpoint, read_stamps
from unshard.evaluate.pins.pin import Quota, list_pins
from unshard.evaluate.run_folder import WATCH_LOCK, WATCHED, RunFolder, unlock
from unshard.evaluate.sinks.base import Marks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.served_run import ServedRun, name_steps
from unshard.evaluate.trainer.spool import Spool, request_key
from unshard.evaluate.trainer.submitter import StepMetrics, Submitter
from unshard.read.finding.versions import fingerprint
from unshard.read.format import Choice, Location
from unshard.stores.remote_path import path_of

_TIMEOUT = 10.0  # seconds for a request
_LOOK = 0.05  # seconds between looks at the spool
_SKIPPED = "skipped/"  # the beginning of marks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """The server's answer to a submission of sets of weights.

    Attributes:
        refused: why the server refused them; None if it accepted them.
    """

    step: int
    weights: tuple[str, ...]
    refused: str | None


class Watching:
    """A watched run; one process at a time may watch it.

    Args:
        run: the directory of the checkpoints, or its address; it need not exist yet.
        config: of the evaluation. From one multiple of `eval_steps` to the next, the first
            complete checkpoint is evaluated.
        directory: of the submissions and results; None: the run, which must then be on a disk.
        is_again: whether to evaluate steps again that were measured before the profile changed.

    Attributes:
        held_back: the number of complete checkpoints that wait for room in the pin quota.

    Raises:
        UsageError: `run` is a checkpoint, or another process watches it.
    """

    def __init__(
        self,
        run: Path,
        config: EvalConfig,
        directory: Path | None = None,
        *,
        is_again: bool = False,
    ) -> None:
        self.run = path_of(run).absolute()
        check_run(self.run)
        config = replace(config, run=config.run or RunFolder(self.run).name)
        self._folder = RunFolder(self.run if directory is None else directory.absolute())
        self._lock = self._take_lock()
        self._config = config
        self._every = config.eval_steps if config.eval_strategy == "steps" else None
        if config.eval_strategy == "no":
            log.warning("eval_strategy is no: nothing is submitted")
        self._finders = {
            weights: CheckpointFinder(self.run, Choice(weights=weights))
            for weights in config.weights
        }
        self._complete: dict[Path, set[str]] = {}
        self._ready: dict[Path, Location] = {}  # neither submitted nor left out, lowest step first
        self._asked: set[Path] = set()  # ready ones that had no job when they became ready
        self._new_weights: dict[Path, tuple[str, ...]] = {}  # without a job, in this look
        self._left_out: dict[int, str] = {}  # why, by step
        self.held_back = 0
        self._marks = Marks(self._folder.state, WATCHED)
        self._spool = Spool(self._folder.path)
        # Why each request was refused, as `decisions` reported last; None if it has no answer yet.
        earlier = (*self._spool.waiting(), *self._spool.refused())
        self._unanswered: dict[str, str | None] = {entry.key: None for entry in earlier}
        self._client = EvalClient(config.server_url, timeout=_TIMEOUT, token=config.token())
        self._submitter = self._make_submitter()
        self._served = ServedRun(
            *(config, self._client, self._spool, self._submitter, self._marks), is_again=is_again
        )
        if (base := self._submitter.base_request()) is not None:
            self._unanswered[request_key(base)] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> list[tuple[int, tuple[str, ...]]]:
        """Spool complete checkpoints; return step and weights of each.

        `decisions` returns the server's answers later.

        Raises:
            RefusedError: the server does not allow this client's queries.
        """
        self._collect()
        submitted: list[tuple[int, tuple[str, ...]]] = []
        try:
            self._submit_ready(submitted)
        except StoreError as error:
            log.warning("submissions wait until the store answers: %s", error)
        return submitted

    def _submit_ready(self, submitted: list[tuple[int, tuple[str, ...]]]) -> None:
        due = self._list_due()
        self.held_back = len(due)
        for location in due:
            checkpoint, step = _checkpoint(location), location.step or 0
            if not self._has_room(checkpoint):
                break
            # Another client may have submitted it while it waited.
            weights = self._new_weights.get(location.path) or self._weights_without_job(location)
            again = self._served.again(step)
            if weights and not self._submitter.submit(checkpoint, step, weights, again=again):
                if checkpoint.exists():
                    break  # it could not be spooled: the next look tries again
                self.held_back -= 1
                self._leave_out(location, "it is gone")
                continue
            self.held_back -= 1
            self._leave_out(location)
            self._mark(location)
            if weights:
                submitted.append((step, weights))
                request = {**self._submitter.request(step), "checkpoint": str(checkpoint)}
                request |= {"again": again} if again else {}
                keys = [request_key({**request, "weights": name}) for name in weights]
                self._unanswered |= dict.fromkeys(keys)

    def completed(self) -> list[StepMetrics]:
        """Return the step and the metrics of each result that came since the last call."""
        return self._submitter.completed()

    def wait_until_sent(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the spool is sent; return whether it is."""
        end = time.monotonic() + timeout
        while self._spool.waiting() and time.monotonic() < end:
            time.sleep(_LOOK)
        return not self._spool.waiting()

    def decisions(self) -> list[Decision]:
        """Return the server's answers since the last call, also to earlier processes.

        A refused submission is sent again from time to time, and is returned again if the answer
        changes.
        """
        # Refusals are read twice: a submission may go back to the queue between the two reads.
        before = self._refusals()
        waiting = {entry.key for entry in self._spool.waiting()}
        refused = before | self._refusals()
        answers: dict[tuple[int, str | None], list[str]] = {}
        for key, reported in list(self._unanswered.items()):
            why = refused.get(key)
            if key in waiting or (why is not None and why == reported):
                continue
            if why is None:
                del self._unanswered[key]
            else:
                self._unanswered[key] = why
            request = json.loads(key)
            answers.setdefault((int(request["step"]), why), []).append(request["weights"])
        return [Decision(step, tuple(weights), why) for (step, why), weights in answers.items()]

    def left_out(self) -> list[str]:
        """Return why steps of the run are not submitted: a line for each reason."""
        reasons: dict[int, str] = {}
        for finder in self._finders.values():
            reasons |= finder.reasons
        by_reason: dict[str, list[int]] = {}
        for step, why in sorted((reasons | self._left_out).items()):
            by_reason.setdefault(why, []).append(step)
        return [f"{name_steps(steps)}: {why}" for why, steps in by_reason.items()]

    @property
    def has_refusals(self) -> bool:
        """Whether the spool has a submission that the server refused."""
        return bool(self._spool.refused())

    def _refusals(self) -> dict[str, str]:
        return {one.key: str(one.fields.get("error")) for one in self._spool.refused()}

    def summary(self) -> str:
        """Return a table of the run's best and last steps; "" without results or server."""
        return self._submitter.summary()

    def close(self) -> None:
        """Stop; the next process that watches continues with the jobs that are not final."""
        self._submitter.stop()
        self._client.close()
        unlock(self._lock)

    def _take_lock(self) -> int:
        lock = self._folder.lock(WATCH_LOCK)
        if lock is None:
            raise UsageError(f"{self.run}: another process watches this run")
        return lock

    def _make_submitter(self) -> Submitter:
        """Return a submitter for which every checkpoint is due, and which logs no refusals."""
        config = replace(self._config, eval_strategy="steps", eval_steps=None, save_steps=None)
        if self._config.eval_strategy == "no":
            config = replace(config, base=None)
        return Submitter(
            config, self._folder.path, acts=True, logs_refusals=False, checkpoints=self.run
        )

    def _collect(self) -> None:
        """Queue the checkpoints that are complete with all sets of weights."""
        ready = list(self._ready.values())
        for weights, finder in self._finders.items():
            for location in finder.look():
                complete = self._complete.setdefault(location.step_dir, set())
                complete.add(weights)
                if len(complete) == len(self._finders):
                    ready.append(location)
                    complete.clear()  # the step may be saved again, with all its weights
        by_step = sorted(ready, key=lambda location: location.step or 0)
        self._ready = {location.path: location for location in by_step}

    def _list_due(self) -> list[Location]:
        """Return the checkpoints to submit, in the order of the profile."""
        due: dict[object, Location] = {}
        if self._ready:
            self._served.ask_for_profile()
        self._new_weights = {}
        for location in list(self._ready.values()):
            window = self._window(location.step or 0) or location.path
            if (why := self._why_not_due(location)) is not None:
                self._leave_out(location, why)
            elif window in due:
                continue  # until the lower step of the window is submitted
            elif location.path in self._asked:
                due[window] = location
            elif weights := self._weights_without_job(location):
                self._asked.add(location.path)
                self._new_weights[location.path] = weights
                due[window] = location
            else:
                self._leave_out(location)
                self._mark(location)
        self._served.log_old_results()
        steps = self._skip_lagging([*due.values()])
        return steps[::-1] if self._served.is_newest_first else steps

    def _why_not_due(self, location: Location) -> str | None:
        """Return why the configuration excludes a step; None if it does not."""
        step = location.step
        if step is None:
            return "it has no step"
        if self._config.eval_strategy == "no":
            return "eval_strategy is no"
        if step == BASE_STEP and self._config.base is not None:
            return "the base model is evaluated as this step"
        window = self._window(step)
        is_new = window is not None and f"{window}/{step}" not in self._marks
        # The first checkpoint of a window is evaluated; in the window before `eval_steps` none is.
        if window is not None and is_new and (window.startswith("0/") or window in self._marks):
            return f"not the first at or after a multiple of {self._every} (eval_steps)"
        return None

    def _leave_out(self, location: Location, why: str | None = None) -> None:
        step = location.step or 0
        del self._ready[location.path]
        is_skipped = self._marks.starting(f"{_SKIPPED}{step}/")
        self._left_out[step] = why or ("skipped before" if is_skipped else "submitted before")

    def _skip_lagging(self, due: list[Location]) -> list[Location]:
        """Leave out the steps that the server would skip, because `max_lag` higher ones wait."""
        most = self._served.max_lag
        trained = [location for location in due if location.step != BASE_STEP]
        skipped = [] if most is None else trained[:-most]
        why = f"skipped, because newer steps wait (max_lag: {most})"
        for location in skipped:
            self._mark(location, _SKIPPED)
            self._leave_out(location, why)
        if skipped:
            steps = name_steps([location.step or 0 for location in skipped])
            log.warning("%s: %s; to evaluate one of them: unshard eval submit", steps, why)
        return [location for location in due if location.path in self._ready]

    def _weights_without_job(self, location: Location) -> tuple[str, ...]:
        """Return the weights of a step that were neither submitted nor skipped before."""
        step, version = location.step or 0, fingerprint(read_stamps(_checkpoint(location)))
        return tuple(
            weights
            for weights in self._config.weights
            if f"{_SKIPPED}{step}/{version}/{self._served.mark_of(weights)}" not in self._marks
            and not self._served.has_job(_checkpoint(location), step, version, weights)
        )

    def _window(self, step: int) -> str | None:
        """Return a mark that is the same for all steps from one multiple of `eval_steps` on."""
        if not self._every:
            return None
        return f"{step // self._every}/{self._every}/{self._served.mark_of('')}"

    def _mark(self, location: Location, start: str = "") -> None:
        step, version = location.step or 0, fingerprint(read_stamps(_checkpoint(location)))
        for weights in self._config.weights:
            self._marks.add(f"{start}{step}/{version}/{self._served.mark_of(weights)}")
        if (window := self._window(step)) is not None:
            self._marks.add(window)
            self._marks.add(f"{window}/{step}")

    def _has_room(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint can be pinned without the loss of another pin."""
        if self._config.quota == Quota(None, None):
            return True
        pins = [pin.files for pin in list_pins(self._folder.path) if pin.is_ours and not pin.owner]
        if not pins or self._config.quota.count == 0:
            return True
        try:
            new = list_checkpoint(checkpoint).files
        except OSError:  # it is gone: `submit` reports that
            return True
        return not self._config.quota.is_exceeded([*pins, new])


def _checkpoint(location: Location) -> Path:
    """Return the path to submit: the step, its one file, or the role's part of it (verl)."""
    return location.path if location.role is None else location.weights_dir
