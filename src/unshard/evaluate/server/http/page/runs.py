"""The views of runs: the list of runs, their plots, and plots as files."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from unshard.evaluate.jobs import Filters, TrainingRun
from unshard.evaluate.server.http.answers import BoundedText, Served, answer
from unshard.evaluate.server.http.page.plots import (
    PlotList,
    as_csv,
    fold,
    make_cells,
    make_plots,
    metric_of,
    sort_runs,
)
from unshard.evaluate.server.http.page.rendering import attached, render_file
from unshard.evaluate.server.http.page.routes import FEW, Views, rows_of
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.overview import (
    list_curves,
    list_groups,
    list_metrics,
    list_points,
    list_recent_metrics,
    list_runs,
)

router = APIRouter(include_in_schema=False)

_RUNS, _PLOTS = 20, 12
_MOST_RUNS = 12  # overlaid: each has a colour of its own
_MOST_CHOSEN = 12  # metrics of a list
_SAVED_BYTES = 32 << 20
_NAMED = 3  # runs in a title
_COLUMNS = 3  # metrics in a list, by default

Names = Annotated[list[BoundedText], Field(max_length=2000)]
PageNumber = Annotated[int, Field(ge=1, le=10_000)]


def as_query(fields: BaseModel, changes: Mapping[str, object]) -> str:
    """Return the query of an address, from its fields with changes."""
    values = {**fields.model_dump(exclude_defaults=True, by_alias=True), **changes}
    return "?" + urlencode({key: value for key, value in values.items() if value}, doseq=True)


class RunsPage(BaseModel):
    """Which runs to list or to plot, and how.

    Attributes:
        run: the names of runs, the first of which are plotted.
        q: a part of a run's name or directory; for plots, of a metric's name.
        metric: the chosen metrics, which are shown first.
        sort: see `sort_runs`.
    """

    run: Names = []
    q: BoundedText = ""
    page: PageNumber = 1
    metric: Names = []
    sort: BoundedText = ""

    def query(self, **changes: object) -> str:
        """Return the query with changes."""
        return as_query(self, changes)


@router.get("/")
def home(views: Views, wanted: Annotated[RunsPage, Query()]) -> HTMLResponse:
    """List runs, with the chosen metrics."""
    connection = views.service.store.connection
    every = list_runs(connection, wanted.q)
    cells = {}
    if metric := metric_of(wanted.sort):
        cells = make_cells(list_curves(connection, [one.run.id for one in every], [metric]))
    start = (wanted.page - 1) * _RUNS
    page = sort_runs(every, wanted.sort, cells)[start : start + _RUNS]
    ids = [one.run.id for one in page]
    metrics, _ = fold(list_recent_metrics(connection, ids), list_groups(connection, ids))
    first_of_task = {name.partition("/")[0]: name for name in reversed(metrics)}.values()
    default = [name for name in metrics if name in first_of_task][:_COLUMNS]
    chosen = wanted.metric[:_MOST_CHOSEN] or default
    return views.show(
        "home.html",
        "Runs",
        wanted=wanted,
        runs=page,
        total=len(every),
        has_more=len(every) > start + _RUNS,
        chosen=chosen,
        known=list(dict.fromkeys([*wanted.metric, *chosen, *sorted(metrics)])),
        cells=make_cells(list_curves(connection, ids, chosen)),
    )


@router.get("/view/runs")
def runs(views: Views, wanted: Annotated[RunsPage, Query()]) -> HTMLResponse:
    """Show the plots of runs, overlaid."""
    service = views.service
    called = _runs_called(service, wanted.run)
    selected = called[:_MOST_RUNS]
    names, _ = _plotted(service, selected, wanted)
    start = (wanted.page - 1) * _PLOTS
    return views.show(
        "runs.html",
        _title_of([run.label for run in selected] or wanted.run),
        wanted=wanted,
        called=len(called),
        names=names[start : start + _PLOTS],
        total=len(names),
        has_more=len(names) > start + _PLOTS,
        unknown=[name for name in wanted.run if not service.store.runs.called(name)],
        jobs={
            run: rows_of(service, service.store.jobs(Filters(run=run.id, limit=FEW)))
            for run in selected
        },
    )


def _runs_called(service: Service, names: Sequence[str]) -> list[TrainingRun]:
    """Return the runs with these names, in their order; each once."""
    by_id = {run.id: run for name in names for run in service.store.runs.called(name)}
    return list(by_id.values())


def _runs_of(service: Service, names: Sequence[str]) -> list[TrainingRun]:
    return _runs_called(service, names)[:_MOST_RUNS]


def _title_of(runs: Sequence[str]) -> str:
    named, more = ", ".join(runs[:_NAMED]), len(runs) - _NAMED
    return f"{named} and {more} more" if more > 0 else named or "Runs"


def _plotted(
    service: Service, runs: Sequence[TrainingRun], wanted: RunsPage
) -> tuple[list[str], dict[str, int]]:
    """Return the names of all plots in order, and how many subtasks of a group have no plot."""
    connection, ids = service.store.connection, [run.id for run in runs]
    names = list_metrics(connection, ids, wanted.q)
    shown, folded = (names, {}) if wanted.q else fold(names, list_groups(connection, ids))
    chosen = [name for name in wanted.metric if name in names]
    return list(dict.fromkeys([*chosen, *shown])), folded


def _plot(
    service: Service, runs: Sequence[TrainingRun], names: Sequence[str], folded: Mapping[str, int]
) -> PlotList:
    labels = [run.label for run in runs]
    points = list_points(service.store.connection, [run.id for run in runs], names)
    return PlotList(runs=labels, plots=make_plots(points, names, labels, folded))


@router.get("/view/plots.json")
def plots(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return the data of a page of plots."""
    selected, start = _runs_of(service, wanted.run), (wanted.page - 1) * _PLOTS
    names, folded = _plotted(service, selected, wanted)
    return answer(_plot(service, selected, names[start : start + _PLOTS], folded))


@router.get("/view/export.html")
def export(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return all plots as one self-contained file; the plots of subtasks come last.

    A file that would be too large ends earlier.
    """
    selected = _runs_of(service, wanted.run)
    labels = [run.label for run in selected]
    first, _ = _plotted(service, selected, wanted)
    every = list_metrics(service.store.connection, [run.id for run in selected], wanted.q)
    names = list(dict.fromkeys([*first, *every]))
    plots, size = list[str](), 0
    for start in range(0, len(names), _PLOTS):  # so that few exist as objects
        if size > _SAVED_BYTES:
            break
        some = _plot(service, selected, names[start : start + _PLOTS], {}).plots
        plots += [one.model_dump_json() for one in some]
        size = sum(map(len, plots))
    data = f'{{"runs":{json.dumps(labels)},"plots":[{",".join(plots)}]}}'
    left_out = len(names) - len(plots)
    return render_file("export.html", _title_of(labels), data, left_out=left_out)


class OnePlot(BaseModel):
    """The plot to return as a file."""

    run: Names
    metric: BoundedText


@router.get("/view/plot.csv")
def plot_csv(service: Served, wanted: Annotated[OnePlot, Query()]) -> Response:
    """Return the points of a plot as CSV."""
    selected = _runs_of(service, wanted.run)
    ids = [run.id for run in selected]
    text = as_csv(list_points(service.store.connection, ids, [wanted.metric]))
    name = f"{_title_of([run.label for run in selected])} {wanted.metric}"
    return Response(text, media_type="text/csv", headers=attached(name, ".csv"))
