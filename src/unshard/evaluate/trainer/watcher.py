"""Submit the checkpoints of a run as they become complete, for trainers without hooks (verl).

What is submitted twice would be evaluated twice where the first time failed. So the server is asked
whether it has the job, in whatever state; while it is away, `<run>/_unshard/watched.txt` says what
was handed to the spool before. Where the pins have no room, checkpoints wait, instead of taking
the place of those that wait already.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.client.lmms import EvalClient
from unshard.evaluate.client.v1 import ServerAwayError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.locks import unlock
from unshard.evaluate.pins.files import fingerprint, list_checkpoint, stamps_of
from unshard.evaluate.pins.pin import pins_of
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.sinks.base import Marks
from unshard.evaluate.trainer.completeness import Watcher
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Fields, Spool
from unshard.evaluate.trainer.submitter import Completed, Submitter
from unshard.read.discover import discover, step_numbers
from unshard.read.format import Choice, Location

__all__ = ["Answer", "Watching"]

_TIMEOUT = 10.0  # seconds for a request
_LOOK = 0.05  # seconds between looks at the spool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said to the submission of a step; `refused`: why, None if it accepted it."""

    step: int
    weights: tuple[str, ...]
    refused: str | None


class Watching:
    """A run that is watched, by one process at a time.

    Args:
        run: the directory that holds the checkpoints; it may come later.
        config: what is evaluated, and by whom. Its `eval_steps` count from multiple to multiple:
            of the checkpoints from one to the next, the first that is complete is evaluated.

    Raises:
        UsageError: `run` is a checkpoint itself, or another process watches it.
    """

    def __init__(self, run: Path, config: EvalConfig) -> None:
        self.run = run.absolute()
        self._check_is_run()
        held = RunFolder(self.run).lock("watch.lock")
        if held is None:
            raise UsageError(f"{run}: another process watches it")
        self._lock = held
        self._config = config
        self._every = config.eval_steps if config.eval_strategy == "steps" else None
        if config.eval_strategy == "no":
            log.warning("eval_strategy is no: nothing is submitted")
        self._watchers = {weights: Watcher(self.run, weights=weights) for weights in config.weights}
        self._complete: dict[Path, set[str]] = {}
        self._ready: list[Location] = []
        self._marks = Marks(RunFolder(self.run).state, "watched")
        self._spool = Spool(self.run)
        # What waits for the server's answer, by what is asked; then what was said of it.
        left = (*self._spool.waiting(), *self._spool.refused())
        self._unanswered: dict[str, str | None] = {_asked(entry.fields): None for entry in left}
        self._client = EvalClient(config.server_url, timeout=_TIMEOUT, token=config.token())
        always = replace(config, eval_strategy="steps", eval_steps=None, save_steps=None)
        # `answers` returns the refusals.
        self._submitter = Submitter(always, self.run, acts=True, logs_refusals=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def look(self) -> list[tuple[int, tuple[str, ...]]]:
        """Submit what is complete; return step and weights of each checkpoint.

        It is in the spool then: `answers` says what became of it.

        Raises:
            RefusedError: the server does not let this client ask.
        """
        self._collect()
        submitted = []
        while self._ready and self._has_room(_checkpoint(self._ready[0])):
            location = self._ready[0]
            weights = self._unknown(location)
            if weights and not self._submitter.submit(
                _checkpoint(location), location.step or 0, weights
            ):
                if _checkpoint(location).exists():
                    break  # it could not be written down: later
                weights = None  # gone, and said so
            self._ready.pop(0)
            if weights is not None:
                self._mark(location)
            if weights:
                submitted.append((location.step or 0, weights))
                self._unanswered |= {self._asked_of(location, one): None for one in weights}
        return submitted

    @property
    def held_back(self) -> int:
        """How many complete checkpoints wait until the pins have room."""
        return len(self._ready)

    def completed(self) -> list[Completed]:
        """Return the results that came since the last call: step, metrics by their own names."""
        return self._submitter.completed()

    def sent(self, timeout: float) -> bool:
        """Wait until the server has everything, or `timeout` seconds; return whether it has."""
        end = time.monotonic() + timeout
        while self._spool.waiting() and time.monotonic() < end:
            time.sleep(_LOOK)
        return not self._spool.waiting()

    def answers(self) -> list[Answer]:
        """Return what the server has answered since the last call, also to what was left before.

        What is refused is sent again now and then, and is answered again if the answer changes.
        """
        # Twice: what is sent again meanwhile is never in neither place.
        before = self._refusals()
        waiting = {_asked(entry.fields) for entry in self._spool.waiting()}
        refused = before | self._refusals()
        found: dict[tuple[int, str | None], list[str]] = {}
        for asked, said in list(self._unanswered.items()):
            why = refused.get(asked)
            if asked in waiting or (why is not None and why == said):
                continue
            if why is None:
                del self._unanswered[asked]
            else:
                self._unanswered[asked] = why
            request = json.loads(asked)
            found.setdefault((int(request["step"]), why), []).append(request["weights"])
        return [Answer(step, tuple(weights), why) for (step, why), weights in found.items()]

    @property
    def has_refusals(self) -> bool:
        """Whether the server refused a submission that is still wanted."""
        return bool(self._spool.refused())

    def _refusals(self) -> dict[str, str]:
        return {_asked(one.fields): str(one.fields.get("error")) for one in self._spool.refused()}

    def _asked_of(self, location: Location, weights: str) -> str:
        request = self._submitter.request(location.step or 0)
        asked = {**request, "checkpoint": str(_checkpoint(location)), "weights": weights}
        return _asked({"request": asked})

    def close(self) -> None:
        """Stop; what is not final goes on with the next that watches."""
        self._submitter.stop()
        self._client.close()
        unlock(self._lock)

    def _check_is_run(self) -> None:
        try:
            found = discover(self.run, Choice(None, "actor", None))
        except (UnshardError, OSError):
            return  # nothing yet
        place = self.run.resolve()
        if not step_numbers(place) and not any(place in one.step_dir.parents for one in found):
            raise UsageError(
                f"{self.run}: is a checkpoint", expected="the directory that holds checkpoints"
            )

    def _collect(self) -> None:
        """Queue the checkpoints that are complete with all weights that are wanted."""
        for weights, watcher in self._watchers.items():
            for location in watcher.look():
                there = self._complete.setdefault(location.step_dir, set())
                there.add(weights)
                if len(there) == len(self._watchers):
                    self._ready.append(location)
        self._ready.sort(key=lambda location: location.step or 0)

    def _unknown(self, location: Location) -> tuple[str, ...] | None:
        """Return the weights that were not submitted yet; None if the step is not wanted."""
        step = location.step
        if step is None or self._config.eval_strategy == "no" or not self._is_due(step):
            return None
        version = fingerprint(stamps_of(_checkpoint(location)))
        sets = self._config.weights
        return tuple(one for one in sets if not self._is_known(location, step, version, one))

    def _is_due(self, step: int) -> bool:
        """Return whether no other checkpoint is the one for the same stretch of steps."""
        window = self._window(step)
        own = f"{window}/{step}"
        return (
            window is None
            or own in self._marks
            or (not window.startswith("0/") and window not in self._marks)
        )

    def _window(self, step: int) -> str | None:
        return f"{step // self._every}/{self._every}/{self._what('')}" if self._every else None

    def _is_known(self, location: Location, step: int, version: str, weights: str) -> bool:
        """Return whether a job was submitted before: to the spool, or to the server.

        One that another client submitted is followed, so that its result comes here, too.
        """
        entries = (*self._spool.waiting(), *self._spool.pending(), *self._spool.refused())
        if any(self._is_same(entry.fields, step, weights) for entry in entries):
            return True
        place, own = f"{step}/{version}/", f"{step}/{version}/{self._what(weights)}"
        name = self._config.run or RunFolder(self.run).name
        try:
            jobs = self._client.jobs(run=name, step=step, weights=weights)
        except (ServerAwayError, EvaluationError):
            return own in self._marks
        known = next((job for job in jobs if self._is_like(job, version)), None)
        # A job's other arguments are not told: a mark says what was asked for from here.
        if known is None:
            return False
        if self._marks.of(place):
            return own in self._marks
        self._submitter.follow(str(known.get("id")), _checkpoint(location), step, weights)
        return True

    def _is_like(self, job: Fields, version: str) -> bool:
        """Return whether a job of the server is of our profile, or its type of model, and tasks."""
        is_ours = f":{job.get('profile')}".endswith(f":{self._config.profile}")
        same = (_names(job.get("tasks")), job.get("fingerprint"))
        return is_ours and same == (set(self._config.tasks), version)

    def _is_same(self, fields: Fields, step: int, weights: str) -> bool:
        request = fields.get("request")
        if not isinstance(request, dict):
            return False
        asked = {key: value for key, value in request.items() if key != "checkpoint"}
        return asked == {**self._submitter.request(step), "weights": weights}

    def _mark(self, location: Location) -> None:
        step, version = location.step or 0, fingerprint(stamps_of(_checkpoint(location)))
        for weights in self._config.weights:
            self._marks.add(f"{step}/{version}/{self._what(weights)}")
        if (window := self._window(step)) is not None:
            self._marks.add(window)
            self._marks.add(f"{window}/{step}")

    def _what(self, weights: str) -> str:
        """Name what is asked of a checkpoint, in a few letters."""
        tasks = sorted(self._config.tasks)
        asked = {**self._submitter.request(0), "tasks": tasks, "weights": weights}
        asked["server"] = self._config.server_url
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]

    def _has_room(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint can be pinned without the loss of another pin."""
        pins = [pin for pin in pins_of(self.run) if pin.is_ours and not pin.owner]
        quota = self._config.quota
        if not pins or quota.count == 0:
            return True
        if quota.count is not None and len(pins) >= quota.count:
            return False
        if quota.bytes is None:
            return True
        try:
            new = list_checkpoint(checkpoint).files.values()
        except OSError:  # gone: whoever submits it is told
            return True
        files = [*(file for pin in pins for file in pin.files.values()), *new]
        return sum({inode: size for inode, size, _ in files}.values()) <= quota.bytes


def _checkpoint(location: Location) -> Path:
    """Return what is submitted: the step, or the role's part of it (verl)."""
    return location.step_dir if location.role is None else location.weights_dir


def _asked(fields: Fields) -> str:
    """Name what an entry of the spool asks for."""
    return json.dumps(fields.get("request"), sort_keys=True)


def _names(found: object) -> set[str]:
    return set(map(str, found)) if isinstance(found, Sequence) else set()
