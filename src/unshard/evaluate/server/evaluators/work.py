"""What an evaluator is given, what it must be able to do, and which tasks it does not know.

What an evaluator knows is only found out by running it: a list of its tasks would take half a
minute and torch. The first job finds out, after its merge, and is not retried; later submissions
with the same task are refused.
"""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError, Request
from unshard.evaluate.server.config.profiles import Profile

_MOST = 10_000
_REMEMBERED_S = 600.0  # then the evaluator is asked again: it may have been given the task


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt, as an evaluator sees it.

    Attributes:
        model: a Hugging Face directory.
        output: where its results belong; fresh and empty when it starts.
        directory: the attempt's own, for configuration files; it holds `output` and the log, and
            the evaluator runs in it.
        request: what was asked for.
        profile: how the evaluator is configured.
    """

    model: Path
    output: Path
    directory: Path
    request: Request
    profile: Profile

    @property
    def gpus(self) -> int:
        """How many GPUs the attempt has."""
        asked = self.request.arguments.num_gpus
        return self.profile.gpus if asked is None else asked

    @property
    def program(self) -> str:
        """What errors call the evaluator: any program has the name of its profile."""
        return self.profile.kind if self.profile.modules else self.request.profile


@dataclass(frozen=True, slots=True)
class Measured:
    """The finite numbers of results, by "task/metric" or "task/metric,filter".

    Attributes:
        metrics: what was measured.
        errors: the standard errors of those metrics that have one; not negative.
        directions: whether higher values are better, of those metrics of which that is known.
    """

    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    directions: Mapping[str, bool] = field(default_factory=dict)


class Evaluator(Protocol):
    """Knows how to start one kind of evaluator, and how to read what it left."""

    def command(self, work: Work) -> list[str]:
        """Return the arguments of its process, the interpreter first.

        May write files into the attempt's directory.
        """

    def measured(self, work: Work, returncode: int) -> Measured:
        """Return the finite numbers that were measured.

        Raises:
            EvaluationError: what was asked for is not there.
        """

    def results_file(self, work: Work) -> Path | None:
        """Return the evaluator's own file of results, if there is one."""


def demand_empty(directory: Path) -> None:
    """Raise unless a directory is empty: what is there later is then new."""
    if directory.is_dir() and any(directory.iterdir()):
        raise EvaluationError(
            f"{directory} already contains files", expected="a fresh directory for every attempt"
        )


class UnknownTasksError(EvaluationError):
    """An evaluator does not know tasks that it was asked for; another attempt would not help."""

    def __init__(self, program: str, tasks: Iterable[str], *, hint: str) -> None:
        self.tasks = tuple(tasks)
        super().__init__(f"{program} does not know the task {', '.join(self.tasks)}", hint=hint)


class UnknownTasks:
    """What evaluators did not know in the last ten minutes; for any number of threads."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], tuple[float, UnknownTasksError]] = {}
        self._lock = threading.Lock()

    def add(self, profile: str, error: UnknownTasksError) -> None:
        """Remember what the evaluator of a profile does not know."""
        with self._lock:
            for task in error.tasks:
                self._errors.pop((profile, task), None)
                self._errors[profile, task] = time.monotonic(), error
            for oldest in list(self._errors)[: max(0, len(self._errors) - _MOST)]:
                del self._errors[oldest]

    def check(self, profile: str, tasks: Iterable[str]) -> None:
        """Refuse tasks that the evaluator of a profile is known not to know.

        Raises:
            UsageError: names them.
        """
        since = time.monotonic() - _REMEMBERED_S
        with self._lock:
            found = {task: self._errors.get((profile, task), (since, None)) for task in tasks}
        fresh = {task: error for task, (at, error) in found.items() if error and at > since}
        for error in fresh.values():
            raise UsageError(
                f"profile {profile}: the evaluator does not know the task {', '.join(fresh)}",
                found="a job failed because of that less than ten minutes ago",
                hint=error.hint,
            )
