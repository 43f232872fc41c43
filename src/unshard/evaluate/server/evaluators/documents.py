"""Find and read the file of results that an evaluator wrote, and see whether it is complete.

lm-eval and lmms-eval write `{task: {"acc,none": 0.3, "acc_stderr,none": 0.1, "alias": ...}}`, where
a comma separates a metric from its filter. Only finite numbers are metrics, and `acc_stderr` is the
standard error of `acc`. Next to `results`, `higher_is_better` has `{task: {"acc": true}}`.
"""

import json
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.server.evaluators.work import Measured, Work

_STDERR = "_stderr"
_NOT_METRICS = frozenset({"alias", "name", "sample_len", "samples", "sample_count"})
_LOG = "the log of the job says why"
_MOST_METRICS = 10_000
_MOST_NAMES = 1 << 20  # bytes of all names together: a job is one answer of the server


def find_newest(directory: Path, pattern: str) -> Path | None:
    """Return the file below a directory that was written last, of those whose name fits."""
    files = [path for path in directory.rglob(pattern) if path.is_file() and not path.is_symlink()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def read_results(
    work: Work, path: Path | None, returncode: int, *, expected: str
) -> dict[str, object]:
    """Read the JSON object that an evaluator, which ended with this code, wrote.

    Raises:
        EvaluationError: it failed, or wrote nothing, too much, or something else.
    """
    program, most_bytes = work.program, work.profile.results_bytes
    if returncode != 0:
        names = {-number.value: f"ended by {number.name}" for number in signal.Signals}
        unnamed = f"exit code {returncode}" if returncode > 0 else f"ended by signal {-returncode}"
        raise EvaluationError(f"{program} failed", found=names.get(returncode, unnamed), hint=_LOG)
    if path is None:
        raise EvaluationError(f"{program} wrote no results", expected=expected, hint=_LOG)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise EvaluationError(
                    f"{path}: {program}'s results are too large to be read",
                    expected=f"at most {most_bytes} bytes",
                    found=f"{size} bytes",
                    hint="set `results_bytes` of the profile in the server's configuration",
                )
            document = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError) as error:
        raise EvaluationError(f"{path}: {program}'s results cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise EvaluationError(f"{path}: {program}'s results cannot be read", expected="an object")
    return document


def check_tasks(
    document: Mapping[str, object], tasks: Collection[str], *, program: str, file: Path | None
) -> Measured:
    """Return the numbers of a document that names every one of the tasks, with numbers.

    A group has numbers if it has its own or all of its tasks have.

    Raises:
        EvaluationError: a task is not named, or has no finite number; or there are too many.
    """
    results = _mapping_at(document, "results")
    metrics = collect_metrics(results)
    size = sum(len(name.encode("utf-8", "backslashreplace")) for name in metrics)
    if len(metrics) > _MOST_METRICS or size > _MOST_NAMES:
        raise EvaluationError(
            f"{program}'s results have too many numbers, or too long names",
            expected=f"at most {_MOST_METRICS} numbers, whose names have {_MOST_NAMES} bytes",
            found=f"{len(metrics)} numbers, whose names have {size} bytes",
        )
    # A group that has no numbers of its own is replaced by its tasks.
    parts = _expand(document, tasks, lambda task: bool(tasks_without([task], metrics)))
    missing = tasks_without(sorted(task for task in parts if not parts[task]), metrics)
    if metrics and not missing:
        directions = collect_directions(_mapping_at(document, "higher_is_better"), metrics)
        return Measured(metrics, collect_errors(results, metrics), directions, file)
    raise EvaluationError(
        f"{program}'s results have no finite number for: {', '.join(missing or tasks)}",
        expected=", ".join(tasks),
        found=f"{', '.join(sorted(results)):.1000}" or "no task",
        hint=_LOG,
    )


def replace_tags(document: Mapping[str, object], tasks: Collection[str]) -> Collection[str]:
    """Replace lm-eval's tags, which results do not record, by the tasks that nothing else explains.

    lm-eval has ended well and is known to refuse names that mean nothing.
    """
    results, groups = _mapping_at(document, "results"), _mapping_at(document, "group_subtasks")
    named = [task for task in tasks if task in results or task in groups]
    tagged = sorted(results.keys() - _expand(document, named, lambda _: True).keys())
    return [*named, *tagged] if tagged else tasks


def _expand(
    document: Mapping[str, object], tasks: Iterable[str], is_opened: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Return the tasks and all that their groups contain, each with its parts if it is opened."""
    groups = _mapping_at(document, "group_subtasks")
    found: dict[str, list[str]] = {}
    waiting = list(tasks)
    while waiting:
        task = waiting.pop()
        if task not in found:
            parts = groups.get(task) if is_opened(task) else None
            found[task] = list(map(str, parts)) if isinstance(parts, list) else []
            waiting += found[task]
    return found


def _mapping_at(document: Mapping[str, object], key: str) -> dict[str, object]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def as_finite(value: object) -> float | None:
    """Return a finite number as a float; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def metric_key(task: str, name: str) -> str | None:
    """Return the key of a result named "metric" or "metric,filter"; None if it is not a metric.

    The filter "none" is left out.
    """
    metric, _, filter_name = name.partition(",")
    if not metric.strip() or metric in _NOT_METRICS or _STDERR in metric:
        return None
    return f"{task}/{metric}" + (f",{filter_name}" if filter_name not in {"", "none"} else "")


def collect_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """Return all metrics of results by task, each of which is a mapping from names to values."""
    metrics = {}
    for task, values in results.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            key, number = metric_key(task, str(name)), as_finite(value)
            if key is not None and number is not None:
                metrics[key] = number
    return metrics


def collect_errors(results: Mapping[str, object], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the standard errors of metrics: that of "acc,filter" is "acc_stderr,filter"."""
    errors = dict[str, float]()
    for task, values in results.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            metric, comma, filter_name = str(name).partition(",")
            own = f"{metric.removesuffix(_STDERR)}{comma}{filter_name}"
            key, number = metric_key(task, own), as_finite(value)
            if not metric.endswith(_STDERR) or key not in metrics:
                continue
            if key is not None and number is not None and number >= 0:
                errors[key] = number
    return errors


def collect_directions(stated: Mapping[str, object], metrics: Iterable[str]) -> dict[str, bool]:
    """Return whether higher is better, of those metrics of which that is stated.

    It is stated by task and by metric, without a filter; lm-eval has None for groups whose tasks
    differ (0.4.13, evaluator.py).
    """
    found = dict[str, bool]()
    for task, values in stated.items():
        for name, is_better in values.items() if isinstance(values, Mapping) else ():
            if isinstance(is_better, bool):
                found[f"{task}/{name}"] = is_better
    named = {key: found.get(key.partition(",")[0]) for key in metrics}
    return {key: one for key, one in named.items() if one is not None}


def tasks_without(tasks: Iterable[str], metrics: Mapping[str, float]) -> list[str]:
    """Return the tasks that have no metric."""
    return [task for task in tasks if not any(key.startswith(f"{task}/") for key in metrics)]
