"""Numbers of an evaluator's results, by "task/metric" or "task/metric,filter". Pure.

lm-eval and lmms-eval write `{task: {"acc,none": 0.3, "acc_stderr,none": 0.1, "alias": ...}}`, where
a comma separates a metric from its filter. Only finite numbers are metrics.
"""

import math
from collections.abc import Iterable, Mapping

__all__ = ["finite", "metric_key", "metrics_of", "without_numbers"]

_NOT_METRICS = frozenset({"alias", "name", "sample_len", "samples", "sample_count"})


def finite(value: object) -> float | None:
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
    if not metric.strip() or metric in _NOT_METRICS or "_stderr" in metric:
        return None
    return f"{task}/{metric}" + (f",{filter_name}" if filter_name not in {"", "none"} else "")


def metrics_of(results: Mapping[str, object]) -> dict[str, float]:
    """Return all metrics of results by task, each of which is a mapping from names to values."""
    metrics = {}
    for task, values in results.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            key, number = metric_key(task, str(name)), finite(value)
            if key is not None and number is not None:
                metrics[key] = number
    return metrics


def without_numbers(tasks: Iterable[str], metrics: Mapping[str, float]) -> list[str]:
    """Return the tasks that have no metric."""
    return [task for task in tasks if not any(key.startswith(f"{task}/") for key in metrics)]
