"""The server's jobs of a watched run, and the profile's order of its steps."""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.console import counted
from unshard.evaluate.client.v1 import EvalClient, RefusedError, ServerAwayError
from unshard.evaluate.jobs import NOT_SETTINGS, EvaluationError, Status
from unshard.evaluate.sinks.base import Marks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool, request_key
from unshard.evaluate.trainer.submitter import Submitter

_MOST_NAMED = 5  # steps

log = logging.getLogger(__name__)


class ServedRun:
    """Queries of the server before a checkpoint is submitted.

    Args:
        config: of the evaluation.
        client: of the server.
        spool: of the run, filled by the `submitter`.
        marks: of earlier submissions, by `mark_of`, for a server that does not answer.
        is_again: whether to evaluate steps again that were measured before the profile changed.

    Attributes:
        is_newest_first, max_lag: of the profile; until the server answers, the lowest step is
            first.
    """

    def __init__(  # noqa: PLR0913  (client, and what replaces it while the server is away)
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
        self._run = config.served(str(submitter.checkpoints))  # its directory; later its id
        self._outdated: set[int] = set()  # steps to evaluate again
        self._old_results: set[int] = set()  # steps that keep results of the profile's past
        self.is_newest_first = False
        self.max_lag: int | None = None

    def ask_for_profile(self) -> None:
        """Update the profile's order and revision; without an answer, the last ones count."""
        with suppress(ServerAwayError, EvaluationError, RefusedError):
            profiles = self._client.profiles(self._config.profile)
            profile = profiles[0] if len(profiles) == 1 else {}
            lag = profile.get("max_lag")
            self.is_newest_first = profile.get("order") == "newest"
            self.max_lag = lag if isinstance(lag, int) else None
            self._revision = str(profile.get("revision") or "")
            # It may have been moved since, and be reached by links here.
            if self._run.startswith("/"):
                self._run = str(self._client.see_run(self._run)["id"])

    def has_job(self, checkpoint: Path, step: int, version: str, weights: str) -> bool:
        """Return whether the spool or the server has the job of a checkpoint, with our settings.

        A job that another client submitted is followed, so that its result is fetched too. The
        server may have the checkpoint by another path; `version` is its fingerprint.
        """
        request = _without(("checkpoint", "again"), self._submitter.request(step))
        request["weights"] = weights
        entries = (*self._spool.waiting(), *self._spool.pending(), *self._spool.refused())
        mark = f"{step}/{version}/{self.mark_of(weights)}"
        # A request has no version: an entry may be of a checkpoint that was saved over since.
        end = f"/{self.mark_of(weights)}"
        marked = [one for one in self._marks.starting(f"{step}/") if one.endswith(end)]
        if mark in marked or not marked:
            spooled = (_without(("checkpoint", "again"), one.request) for one in entries)
            if request in spooled:
                return True
        try:
            jobs = self._client.jobs(run=self._run, step=step, weights=weights)
        except (ServerAwayError, EvaluationError):
            return mark in self._marks
        job = next((job for job in jobs if self._is_same(job, version)), None)
        if job is None:
            return False
        # An older server's answer does not have the job's arguments, but our own marks have.
        if "arguments" not in job and self._marks.starting(f"{step}/{version}/"):
            return mark in self._marks
        settings = job.get("measured_with")
        revision = settings.get("revision") if isinstance(settings, dict) else None
        if job.get("status") == Status.COMPLETED and self._revision not in {"", revision}:
            if self._is_again:
                self._outdated.add(step)
                return False
            self._old_results.add(step)
        self._submitter.follow(str(job.get("id")), checkpoint, step, weights)
        return True

    def _is_same(self, job: Mapping[str, object], version: str) -> bool:
        """Return whether a job evaluates this version of the checkpoint with our settings."""
        tasks, arguments = job.get("tasks"), job.get("arguments")
        ours = _without(NOT_SETTINGS, self._config.arguments.given())
        return (
            # The configuration may have a model's type instead of the profile's name.
            f":{job.get('profile')}".endswith(f":{self._config.profile}")
            and isinstance(tasks, list)
            and {*map(str, tasks)} == set(self._config.tasks)
            and job.get("fingerprint") == version
            and (not isinstance(arguments, dict) or _without(NOT_SETTINGS, arguments) == ours)
        )

    def again(self, step: int) -> str:
        """Return the field `again` of a step's submission: the revision, if it has changed."""
        return self._revision if step in self._outdated else ""

    def log_old_results(self) -> None:
        """Log which steps keep results that were measured before the profile changed."""
        if self._old_results:
            log.warning(
                "%s: measured before the profile %s has changed, and kept; to evaluate them again: "
                "unshard eval watch --again",
                name_steps(sorted(self._old_results)),
                self._config.profile,
            )
        self._old_results.clear()

    def mark_of(self, weights: str) -> str:
        """Return a short hash of the request, without step and checkpoint, and of the server."""
        tasks = sorted(self._config.tasks)
        request = {**self._submitter.request(0), "tasks": tasks, "weights": weights}
        request["server"] = self._config.server_url
        return hashlib.sha256(request_key(request).encode()).hexdigest()[:12]


def _without(names: Collection[str], fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in names}


def name_steps(steps: Sequence[int]) -> str:
    """Return "steps 1, 2"; of more than five steps only their number, the first and the last."""
    if len(steps) > _MOST_NAMED:
        return f"{counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}"
