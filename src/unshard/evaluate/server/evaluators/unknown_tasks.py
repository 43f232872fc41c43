"""Which tasks an evaluator does not know.

What an evaluator knows is only found out by running it: a list of its tasks would take half a
minute and torch. The first job finds out, after its merge, and is not retried; later submissions
with the same task are refused.
"""

import threading
import time
from collections.abc import Iterable

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError

_MOST = 10_000
_REMEMBERED_S = 600.0  # then the evaluator is asked again: it may have been given the task


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
