"""The views of runs: the list of runs, their plots, and plots as files."""

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
from unshard.evaluate.server.http.page.rendering import HEADERS, render_file
from unshard.evaluate.server.http.page.routes import FEW, Views, rows_of
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.overview import (
    list_curves,
    list_metrics,
    list_points,
    list_recent_metrics,
    list_runs,
)

router = APIRouter(include_in_schema=False)

_RUNS, _PLOTS, _SAVED = 20, 12, 200
_MOST_RUNS = 12  # overlaid
_NAMED = 3  # runs in a title
_COLUMNS = 3  # metrics in a list, by default

Names = Annotated[list[BoundedText], Field(max_length=_MOST_RUNS)]
PageNumber = Annotated[int, Field(ge=1, le=10_000)]


def as_query(fields: BaseModel, changes: Mapping[str, object]) -> str:
    """Return the query of an address, from its fields with changes."""
    values = {**fields.model_dump(exclude_defaults=True, by_alias=True), **changes}
    return "?" + urlencode({key: value for key, value in values.items() if value}, doseq=True)


class RunsPage(BaseModel):
    """Which runs to list or to plot, and how.

    Attributes:
        q: a part of a run's name; for plots, of a metric's name.
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
    metrics, _ = fold(list_recent_metrics(connection, ids))
    first_of_task = {name.partition("/")[0]: name for name in reversed(metrics)}.values()
    chosen = wanted.metric or [name for name in metrics if name in first_of_task][:_COLUMNS]
    return views.show(
        "home.html",
        "Runs",
        wanted=wanted,
        runs=page,
        total=len(every),
        has_more=len(every) > start + _RUNS,
        chosen=chosen,
        known=list(dict.fromkeys([*chosen, *sorted(metrics)])),
        cells=make_cells(list_curves(connection, ids, chosen)),
    )


@router.get("/view/runs")
def runs(views: Views, wanted: Annotated[RunsPage, Query()]) -> HTMLResponse:
    """Show the plots of runs, overlaid."""
    service = views.service
    selected = _runs_of(service, wanted.run)
    names, _ = _plotted(service, selected, wanted)
    start = (wanted.page - 1) * _PLOTS
    return views.show(
        "runs.html",
        _title_of([run.label for run in selected] or wanted.run),
        wanted=wanted,
        names=names[start : start + _PLOTS],
        has_more=len(names) > start + _PLOTS,
        unknown=[name for name in wanted.run if not service.store.runs.called(name)],
        jobs={
            run: rows_of(service, service.store.jobs(Filters(run=run.id, limit=FEW)))
            for run in selected
        },
    )


def _runs_of(service: Service, names: Sequence[str]) -> list[TrainingRun]:
    """Return the runs with these names, in their order; each once."""
    by_id = {run.id: run for name in names for run in service.store.runs.called(name)}
    return list(by_id.values())[:_MOST_RUNS]


def _title_of(runs: Sequence[str]) -> str:
    named, more = ", ".join(runs[:_NAMED]), len(runs) - _NAMED
    return f"{named} and {more} more" if more > 0 else named or "Runs"


def _plotted(
    service: Service, runs: Sequence[TrainingRun], wanted: RunsPage
) -> tuple[list[str], dict[str, int]]:
    """Return the names of all plots in order, and how many subtasks of a group have no plot."""
    names = list_metrics(service.store.connection, [run.id for run in runs], wanted.q)
    shown, folded = (names, {}) if wanted.q else fold(names)
    chosen = [name for name in wanted.metric if name in names]
    return list(dict.fromkeys([*chosen, *shown])), folded


def _plot(service: Service, wanted: RunsPage, start: int, count: int) -> PlotList:
    selected = _runs_of(service, wanted.run)
    names, folded = _plotted(service, selected, wanted)
    names, labels = names[start : start + count], [run.label for run in selected]
    points = list_points(service.store.connection, [run.id for run in selected], names)
    return PlotList(runs=labels, plots=make_plots(points, names, labels, folded))


@router.get("/view/plots.json")
def plots(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return the data of a page of plots."""
    return answer(_plot(service, wanted, (wanted.page - 1) * _PLOTS, _PLOTS))


@router.get("/view/export.html")
def export(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return the plots of all pages as one self-contained file."""
    plots = _plot(service, wanted, 0, _SAVED)
    return render_file("export.html", _title_of(plots.runs), plots.model_dump_json())


class OnePlot(BaseModel):
    """The plot to return as a file."""

    run: Names
    metric: BoundedText


@router.get("/view/plot.csv")
def plot_csv(service: Served, wanted: Annotated[OnePlot, Query()]) -> Response:
    """Return the points of a plot as CSV."""
    ids = [run.id for run in _runs_of(service, wanted.run)]
    text = as_csv(list_points(service.store.connection, ids, [wanted.metric]))
    attached = {"Content-Disposition": 'attachment; filename="plot.csv"'}
    return Response(text, media_type="text/csv", headers={**HEADERS, **attached})
