"""What the server has of a run that is watched, and how the profile takes its steps."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.evaluate.client.v1 import EvalClient, RefusedError, ServerAwayError
from unshard.evaluate.jobs import EvaluationError, Status
from unshard.evaluate.settings import NOT_SETTINGS
from unshard.evaluate.sinks.base import Marks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool, request_key
from unshard.evaluate.trainer.submitter import Submitter
from unshard.showing import counted

_MOST_NAMED = 5  # steps

log = logging.getLogger(__name__)


class ServedRun:
    """What is asked of the server before a checkpoint is submitted.

    Args:
        config: what is evaluated, and by which server.
        client: of the server.
        spool: of the run, and the `submitter` that fills it.
        marks: of what was submitted before, by `mark_of`, for a server that does not answer.
        is_again: whether to evaluate again what was measured before the profile changed.

    Attributes:
        is_newest_first, max_lag: as the profile says; until the server has answered, the lowest
            step is first.
    """

    def __init__(  # noqa: PLR0913  (what answers when the server does not)
        self,
        config: EvalConfig,
        client: EvalClient,
        spool: Spool,
        submitter: Submitter,
        marks: Marks,
        *,
        is_again: bool,
    ) -> None:
        self._config = config
        self._client = client
        self._spool = spool
        self._submitter = submitter
        self._marks = marks
        self._is_again = is_again
        self._revision = ""  # of the profile
        self._run = config.served(str(submitter.checkpoints))  # its directory, or then its id
        self._outdated: set[int] = set()
        self._kept: set[int] = set()
        self.is_newest_first = False
        self.max_lag: int | None = None

    def ask_for_profile(self) -> None:
        """Ask the server how the profile is now; without an answer, the last one counts."""
        with suppress(ServerAwayError, EvaluationError, RefusedError):
            found = self._client.profiles(self._config.profile)
            profile = found[0] if len(found) == 1 else {}
            lag = profile.get("max_lag")
            self.is_newest_first = profile.get("order") == "newest"
            self.max_lag = lag if isinstance(lag, int) else None
            self._revision = str(profile.get("revision") or "")
            # It may have been moved since, and be reached by links here.
            if self._run.startswith("/"):
                self._run = str(self._client.see_run(self._run)["id"])

    def has_job(self, checkpoint: Path, step: int, version: str, weights: str) -> bool:
        """Return whether the spool or the server has the job of a checkpoint.

        A job that another client submitted is followed, so that its result is fetched, too. Only
        one with the same settings is meant.

        Args:
            checkpoint: the checkpoint, which the server may know by another path.
            step: of it.
            version: its fingerprint.
            weights: which of its weights.
        """
        asked = _plain({**self._submitter.request(step), "weights": weights})
        entries = (*self._spool.waiting(), *self._spool.pending(), *self._spool.refused())
        mark = f"{step}/{version}/{self.mark_of(weights)}"
        # A request does not name the version: that of one that was saved over is another job's.
        ends = f"/{self.mark_of(weights)}"
        marked = [one for one in self._marks.starting(f"{step}/") if one.endswith(ends)]
        if (mark in marked or not marked) and any(_plain(one.request) == asked for one in entries):
            return True
        try:
            jobs = self._client.jobs(run=self._run, step=step, weights=weights)
        except (ServerAwayError, EvaluationError):
            return mark in self._marks
        known = next((job for job in jobs if self._is_meant(job, version)), None)
        if known is None:
            return False
        # The answer of an older server does not have a job's arguments, but our own marks have.
        if "arguments" not in known and self._marks.starting(f"{step}/{version}/"):
            return mark in self._marks
        with_what = known.get("measured_with")
        revision = with_what.get("revision") if isinstance(with_what, dict) else None
        if known.get("status") == Status.COMPLETED and self._revision not in {"", revision}:
            if self._is_again:
                self._outdated.add(step)
                return False
            self._kept.add(step)
        self._submitter.follow(str(known.get("id")), checkpoint, step, weights)
        return True

    def _is_meant(self, job: Mapping[str, object], version: str) -> bool:
        tasks, given = job.get("tasks"), job.get("arguments")
        chosen = self._config.arguments.given()
        return (
            f":{job.get('profile')}".endswith(f":{self._config.profile}")  # or it is a model's type
            and isinstance(tasks, list)
            and {*map(str, tasks)} == set(self._config.tasks)
            and job.get("fingerprint") == version
            and (not isinstance(given, dict) or _settings(given) == _settings(chosen))
        )

    def again(self, step: int) -> str:
        """Return what a submission of a step says in `again`: the revision, if it has changed."""
        return self._revision if step in self._outdated else ""

    def say_kept(self) -> None:
        """Log which steps keep results that were measured before the profile changed."""
        if self._kept:
            log.warning(
                "%s: measured before the profile %s has changed, and kept; to evaluate them again: "
                "unshard eval watch --again",
                name_steps(sorted(self._kept)),
                self._config.profile,
            )
        self._kept.clear()

    def mark_of(self, weights: str) -> str:
        """Return a short hash of what is evaluated of a checkpoint, and by which server."""
        tasks = sorted(self._config.tasks)
        asked = {**self._submitter.request(0), "tasks": tasks, "weights": weights}
        asked["server"] = self._config.server_url
        return hashlib.sha256(request_key(asked).encode()).hexdigest()[:12]


def _plain(request: Mapping[str, object]) -> dict[str, object]:
    """Return a request without its checkpoint's path, and whether it is made again."""
    return {key: one for key, one in request.items() if key not in {"checkpoint", "again"}}


def _settings(arguments: Mapping[str, object]) -> dict[str, object]:
    return {key: one for key, one in arguments.items() if key not in NOT_SETTINGS}


def name_steps(steps: Sequence[int]) -> str:
    """Return a few steps by their numbers, or the first and the last of more."""
    if len(steps) > _MOST_NAMED:
        return f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
