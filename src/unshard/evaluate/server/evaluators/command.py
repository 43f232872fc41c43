"""Any program that evaluates a checkpoint and writes its numbers to a JSON file.

The file holds `{task: {metric: number}}`, or flat: `{"task/metric": number}`, `{task: number}`
(the metric is then called "score"), or for one task `{metric: number}`.
"""

from collections.abc import Mapping
from pathlib import Path

from unshard.evaluate.jobs import OPTIONS
from unshard.evaluate.server.config.arguments import fill
from unshard.evaluate.server.evaluators.documents import (
    check_exit,
    check_tasks,
    demand_empty,
    read_document,
)
from unshard.evaluate.server.evaluators.work import Work

__all__ = ["CommandEvaluator"]


class CommandEvaluator:
    """Runs the command of the profile, without a shell."""

    def command(self, work: Work) -> list[str]:
        """Fill in the profile's arguments; each stays one argument, whatever is filled in."""
        demand_empty(work.output)
        request = work.request
        values = {
            "checkpoint": str(work.model),
            "output": str(work.output),
            "tasks": ",".join(request.tasks),
            "step": "" if request.step is None else str(request.step),
            "weights": request.weights,
            "run": request.run,
            **dict.fromkeys(OPTIONS, ""),
            **{name: str(value) for name, value in request.arguments.options().items()},
        }
        return [fill(part, values) for part in work.profile.command]

    def metrics(self, work: Work, returncode: int) -> Mapping[str, float]:
        """Return the numbers of all tasks."""
        check_exit(work.profile.name, returncode)
        document = read_document(
            self.results_file(work),
            program=work.profile.name,
            expected=work.profile.results,
            most_bytes=work.profile.results_bytes,
        )
        tasks = work.request.tasks
        return check_tasks({"results": _by_task(document, tasks)}, tasks, program=work.profile.name)

    def results_file(self, work: Work) -> Path | None:
        """Return the file that the profile names, if it is there."""
        path = work.output / work.profile.results
        return path if path.is_file() else None


def _by_task(document: Mapping[str, object], tasks: tuple[str, ...]) -> dict[str, object]:
    """Return `{task: {metric: value}}`, whatever form the program chose."""
    results: dict[str, dict[str, object]] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            results.setdefault(name, {}).update(value)
            continue
        task, slash, metric = name.rpartition("/")
        if name in tasks:
            task, metric = name, "score"
        elif not slash:
            task = tasks[0] if len(tasks) == 1 else ""
        if task:
            results.setdefault(task, {})[metric] = value
    return dict(results)
