"""The cells of a list of runs: last value, best value and sparkline of each chosen metric.

A run may have several lines of a metric. The cell has the line with the highest step, among equals
that of the model's own weights, and the number of lines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from unshard.evaluate.jobs import Status
from unshard.evaluate.server.store.overview import Point, RunSummary

_WIDTH, _HEIGHT, _DRAWN = 960, 200, 40
_LAST, _BEST = "last ", "best "


@dataclass(frozen=True, slots=True)
class Cell:
    """A run's line of a metric, by step, and the number of its lines of this metric."""

    line: Mapping[int, Point]
    lines: int

    @property
    def last(self) -> Point:
        """The point of the highest step."""
        return self.line[max(self.line)]

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is; 0: the evaluator does not report it."""
        better = self.last.higher_is_better
        return 0 if better is None else 1 if better else -1

    @property
    def best(self) -> Point | None:
        """The best point, the lowest step among equals; None: the direction is not known."""
        sign = self.sign
        if sign == 0:
            return None
        return max(self.line.values(), key=lambda one: (sign * one.value, -one.step))

    @property
    def drawn(self) -> str:
        """The points of a sparkline in SVG, at most 40."""
        points = [self.line[step] for step in sorted(self.line)]
        points = [*points[: -1 : -(-len(points) // _DRAWN)], points[-1]]
        values, first = [one.value for one in points], points[0].step
        low, across = min(values), (_WIDTH - 20) / ((points[-1].step - first) or 1)
        span = (max(values) / 2 - low / 2) or 1  # halves: a difference of floats may be infinite
        up = _HEIGHT - 20
        return " ".join(
            f"{10 + (step - first) * across:.0f},{10 + up - (value / 2 - low / 2) / span * up:.0f}"
            for step, value in zip([one.step for one in points], values, strict=True)
        )


def make_cells(points: Iterable[Point]) -> dict[tuple[str, str], Cell]:
    """Return cells by the run's id and the metric, from points in the order of arrival."""
    lines: dict[tuple[str, str], dict[tuple[object, ...], dict[int, Point]]] = {}
    for one in points:
        of_metric = lines.setdefault((one.run, one.metric), {})
        of_metric.setdefault((one.weights, one.profile, one.settings), {})[one.step] = one

    def rank(line: Mapping[int, Point]) -> tuple[int, str, int]:
        last = line[max(line)]
        return last.step, last.weights, last.number  # "model" is after "ema" in the alphabet

    return {key: Cell(max(of.values(), key=rank), len(of)) for key, of in lines.items()}


def metric_of(sort: str) -> str:
    """Return the metric in a sort key; empty if there is none."""
    text = sort.removeprefix("-")
    return text[len(_LAST) :] if text.startswith((_LAST, _BEST)) else ""


def sort_runs(
    runs: Iterable[RunSummary], sort: str, cells: Mapping[tuple[str, str], Cell]
) -> list[RunSummary]:
    """Sort runs by best, most or newest first; runs without a value are last.

    Args:
        runs: the newest first.
        sort: "name", "step", "waiting", "failed", "last METRIC" or "best METRIC", reversed after a
            "-"; otherwise the newest first.
        cells: of the metric in `sort`.
    """
    text, metric = sort.removeprefix("-"), metric_of(sort)

    def key(run: RunSummary) -> float | str | None:
        if not metric:
            open_ = run.counts[Status.QUEUED] + run.counts[Status.RUNNING]
            counts = {"step": run.step, "waiting": open_, "failed": run.counts[Status.FAILED]}
            return run.run.label.casefold() if text == "name" else counts.get(text, 0)
        cell = cells.get((run.run.id, metric))
        if cell is None:
            return None
        point = cell.best if text.startswith(_BEST) else cell.last
        return point and (-1 if cell.sign < 0 else 1) * point.value

    keyed = [(key(run), run) for run in runs]
    comparable = [one for one in keyed if one[0] is not None]
    is_falling = (text != "name") != sort.startswith("-")
    comparable.sort(key=lambda one: one[0], reverse=is_falling)  # type: ignore[arg-type, return-value]
    return [run for _, run in comparable] + [run for value, run in keyed if value is None]
