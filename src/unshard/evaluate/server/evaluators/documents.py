"""Finds and reads an evaluator's file of results, and checks that it is complete.

lm-eval and lmms-eval write `{task: {"acc,none": 0.3, "acc_stderr,none": 0.1, "alias": ...}}`, where
a comma separates a metric from its filter. Only finite numbers are metrics, and `acc_stderr` is the
standard error of `acc`. Next to `results`, `higher_is_better` has `{task: {"acc": true}}`.
"""

import json
import math
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.server.evaluators.work import EvalInput, Scores, TaskFacts
from unshard.evaluate.values import LARGEST

FACTS = frozenset({"versions", "n-shot", "n-samples", "higher_is_better"})
"""The keys next to `results` that have a value for each task."""

Numbers = dict[str, dict[str, object]]
"""Values by task and metric; those that are not finite numbers are left out later."""

_NAMES = {"{task}": "(?P<task>.+)", "{metric}": "(?P<metric>.+)"}
_NAME = re.compile(r"(\*|\{task\}|\{metric\})")
_STDERR = "_stderr"
_NOT_METRICS = frozenset({"alias", "name", "sample_len", "samples", "sample_count"})
_LOG = "see the log of the job"
_MOST_METRICS = 10_000
_LONGEST_VERSION = 200
_NO_VERSION = (None, "Yaml")  # in both harnesses, for tasks without a version
_MOST_NAMES = 1 << 20  # bytes of all names together: a job is one answer of the server


def find_newest(directory: Path, pattern: str) -> Path | None:
    """Return the file below a directory that was written last, among those that fit a pattern."""
    files = [path for path in directory.rglob(pattern) if path.is_file() and not path.is_symlink()]
    return max(files, key=lambda path: path.stat().st_mtime_ns, default=None)


def read_results(
    work: EvalInput, path: Path | None, returncode: int, *, expected: str
) -> dict[str, object]:
    """Read an evaluator's JSON object; EvaluationError if it failed or wrote no such file."""
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
) -> Scores:
    """Return the scores of a document that has numbers for every task.

    A group has numbers if it has its own or all of its tasks have.

    Raises:
        EvaluationError: a task is missing, or has no finite number; or there are too many.
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
        errors, facts = collect_errors(results, metrics), collect_facts(document, metrics)
        return Scores(metrics, errors, directions, file, facts, evaluator_of(document))
    raise EvaluationError(
        f"{program}'s results have no finite number for: {', '.join(missing or tasks)}",
        expected=", ".join(tasks),
        found=f"{', '.join(sorted(results)):.1000}" or "no task",
        hint=_LOG,
    )


def collect_facts(document: Mapping[str, object], metrics: Iterable[str]) -> dict[str, TaskFacts]:
    """Return the reported facts about tasks with metrics; a group counts all its questions."""
    versions, shots = _mapping_at(document, "versions"), _mapping_at(document, "n-shot")
    counts = _mapping_at(document, "n-samples")
    facts = dict[str, TaskFacts]()
    tasks = dict.fromkeys(key.rpartition("/")[0] for key in metrics)
    groups = _mapping_at(document, "group_subtasks")
    parents = {part: task for task in tasks for part in _as_names(groups.get(task))}
    for task in tasks:
        parts = [part for part in _expand(document, [task], lambda _: True) if part in counts]
        version = versions.get(task)
        facts[task] = TaskFacts(
            None if version in _NO_VERSION else f"{version}"[:_LONGEST_VERSION],
            _as_count(shots.get(task)),
            _total(_mapping_at(counts, part) for part in parts),
            parents.get(task),
        )
    return {task: fact for task, fact in facts.items() if fact != TaskFacts()}


def _total(sizes: Iterable[Mapping[str, object]]) -> int | None:
    """Return the number of questions of all tasks; None if that of one is unknown."""
    counts = [_as_count(size.get("effective")) for size in sizes]
    valid = [count for count in counts if count is not None]
    return sum(valid) if valid and len(valid) == len(counts) else None


def _as_count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= LARGEST else None


def evaluator_of(document: Mapping[str, object]) -> str | None:
    """Return name and version of the evaluator, if it is one of the harnesses."""
    for name in ("lm_eval", "lmms_eval"):
        version = document.get(f"{name}_version")
        if isinstance(version, str) and version.strip():
            return f"{name} {version.strip()}"[:_LONGEST_VERSION]
    return None


def is_path_of_numbers(path: str) -> bool:
    """Return whether a path has no empty key, and names a task and a metric once at most."""
    pattern = "".join(_pattern(path)) if all(path.split(".")) else ""
    return bool(pattern) and all(pattern.count(name) <= 1 for name in _NAMES.values())


def _pattern(path: str) -> list[str]:
    """Return a regular expression for each key; a last `*` is a metric, any other a task."""
    *before, last = path.split(".")
    keys = [(key, "{task}") for key in before] + [(last, "{metric}")]
    return [
        "".join(
            _NAMES.get(star if part == "*" else part, re.escape(part)) for part in _NAME.split(key)
        )
        for key, star in keys
    ]


def numbers_at(
    document: Mapping[str, object], paths: Iterable[str], tasks: Sequence[str]
) -> Numbers:
    """Return the values at some paths of keys, such as `scores.*` or `results.*.acc`.

    A path without a name for the metric ends with the metric. Without a name for the task, a number
    whose metric is named like a task is that task's "score"; others belong to the only task.
    """
    results: Numbers = {}
    for path in paths:
        last = path.rpartition(".")[2]
        for names, value in _values_at(document, [re.compile(key) for key in _pattern(path)]):
            task, metric = names.get("task"), names.get("metric", last)
            if task is None and metric in tasks:
                task, metric = metric, "score"
            elif task is None and len(tasks) == 1:
                task = tasks[0]
            if task is not None:
                results.setdefault(task, {})[metric] = value
    return results


def _values_at(
    value: object, keys: Sequence["re.Pattern[str]"]
) -> Iterator[tuple[dict[str, str], object]]:
    """Yield all values at a path, with the names that its keys match."""
    if not keys:
        yield {}, value
        return
    inside = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, list) else inside:
        if (match := keys[0].fullmatch(str(key))) is not None:
            for names, end in _values_at(item, keys[1:]):
                yield {**match.groupdict(), **names}, end


def replace_tags(document: Mapping[str, object], tasks: Collection[str]) -> Collection[str]:
    """Replace lm-eval's tags, which results do not record, by the tasks that are left over.

    After lm-eval has succeeded, every name is a task, a group or a tag: it refuses others.
    """
    results, groups = _mapping_at(document, "results"), _mapping_at(document, "group_subtasks")
    named = [task for task in tasks if task in results or task in groups]
    tagged = sorted(results.keys() - _expand(document, named, lambda _: True).keys())
    return [*named, *tagged] if tagged else tasks


def _expand(
    document: Mapping[str, object], tasks: Iterable[str], is_opened: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Return tasks and the members of their groups, each with its members if it is opened."""
    groups = _mapping_at(document, "group_subtasks")
    members: dict[str, list[str]] = {}
    waiting = list(tasks)
    while waiting:
        task = waiting.pop()
        if task not in members:
            parts = groups.get(task) if is_opened(task) else None
            members[task] = _as_names(parts)
            waiting += members[task]
    return members


def _as_names(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []


def _mapping_at(document: Mapping[str, object], key: str) -> dict[str, object]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def as_finite(value: object) -> float | None:
    """Return a finite number as a float; None for any other value, also for booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def metric_key(task: str, name: str) -> str | None:
    """Return the key of "metric" or "metric,filter", without "none"; None for other values."""
    metric, _, filter_name = name.partition(",")
    if not metric.strip() or metric in _NOT_METRICS or _STDERR in metric:
        return None
    return f"{task}/{metric}" + (f",{filter_name}" if filter_name not in {"", "none"} else "")


def collect_metrics(results: Mapping[str, object]) -> dict[str, float]:
    """Return all metrics of results, which have a mapping of names to values for each task."""
    metrics = {}
    for task, name, value in _values_by_task(results):
        key, number = metric_key(task, name), as_finite(value)
        if key is not None and number is not None:
            metrics[key] = number
    return metrics


def collect_errors(results: Mapping[str, object], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the standard errors of metrics: "acc_stderr,filter" is that of "acc,filter"."""
    errors = dict[str, float]()
    for task, name, value in _values_by_task(results):
        metric, comma, filter_name = name.partition(",")
        if metric.endswith(_STDERR):
            key = metric_key(task, f"{metric.removesuffix(_STDERR)}{comma}{filter_name}")
            number = as_finite(value)
            if key is not None and key in metrics and number is not None and number >= 0:
                errors[key] = number
    return errors


def collect_directions(stated: Mapping[str, object], metrics: Iterable[str]) -> dict[str, bool]:
    """Return whether higher is better, for metrics whose direction the document has.

    It has them by task and by metric, without a filter; lm-eval writes None for groups whose tasks
    differ (0.4.13, evaluator.py).
    """
    directions = {f"{task}/{name}": value for task, name, value in _values_by_task(stated)}
    by_metric = {key: directions.get(key.partition(",")[0]) for key in metrics}
    return {key: value for key, value in by_metric.items() if isinstance(value, bool)}


def tasks_without(tasks: Iterable[str], metrics: Mapping[str, float]) -> list[str]:
    """Return the tasks that have no metric."""
    return [task for task in tasks if not any(key.startswith(f"{task}/") for key in metrics)]


def _values_by_task(results: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    for task, values in results.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            yield task, str(name), value
