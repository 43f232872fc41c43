"""The views of runs: home, which lists them, their plots, and these as a file for others."""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field

from unshard.evaluate.jobs import Filters, TrainingRun
from unshard.evaluate.server.http.answers import BoundedText, Served, answer
from unshard.evaluate.server.http.page.home import make_cells, metric_of, sort_runs
from unshard.evaluate.server.http.page.plots import PlotList, as_csv, fold, make_plots
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
_COLUMNS = 3  # metrics of a list, if none is chosen

Names = Annotated[list[BoundedText], Field(max_length=_MOST_RUNS)]
PageNumber = Annotated[int, Field(ge=1, le=10_000)]


class RunsPage(BaseModel):
    """Which runs to list or to plot, and how.

    Attributes:
        q: what a run's name contains; of plots, what a metric's name contains.
        metric: those that were chosen, which are shown first.
        sort: see `sort_runs`.
    """

    run: Names = []
    q: BoundedText = ""
    page: PageNumber = 1
    metric: Names = []
    sort: BoundedText = ""

    def query(self, **changes: object) -> str:
        """Return it as an address has it, with changes."""
        values = {**self.model_dump(exclude_defaults=True), **changes}
        return "?" + urlencode({key: one for key, one in values.items() if one}, doseq=True)


@router.get("/")
def home(views: Views, wanted: Annotated[RunsPage, Query()]) -> HTMLResponse:
    """List runs, with the metrics that are chosen."""
    service = views.service
    connection = service.store.connection
    found = list_runs(connection, wanted.q)
    cells = {}
    if metric := metric_of(wanted.sort):
        cells = make_cells(list_curves(connection, [one.run.id for one in found], [metric]))
    start = (wanted.page - 1) * _RUNS
    shown = sort_runs(found, wanted.sort, cells)[start : start + _RUNS]
    ids = [one.run.id for one in shown]
    known, _ = fold(list_recent_metrics(connection, ids))
    one_each = {name.partition("/")[0]: name for name in reversed(known)}
    first = [name for name in known if name in one_each.values()][:_COLUMNS]
    chosen = wanted.metric or first
    return views.show(
        "home.html",
        "Runs",
        wanted=wanted,
        runs=shown,
        total=len(found),
        has_more=len(found) > start + _RUNS,
        chosen=chosen,
        known=list(dict.fromkeys([*chosen, *sorted(known)])),
        cells=make_cells(list_curves(connection, ids, chosen)),
    )


@router.get("/view/runs")
def runs(views: Views, wanted: Annotated[RunsPage, Query()]) -> HTMLResponse:
    """Show the plots of runs, overlaid."""
    service = views.service
    found = _runs_of(service, wanted.run)
    names, _ = _plotted(service, found, wanted)
    start = (wanted.page - 1) * _PLOTS
    return views.show(
        "runs.html",
        _title_of([one.label for one in found] or wanted.run),
        wanted=wanted,
        names=names[start : start + _PLOTS],
        has_more=len(names) > start + _PLOTS,
        unknown=[name for name in wanted.run if not service.store.runs.called(name)],
        jobs={
            run: rows_of(service, service.store.jobs(Filters(run=run.id, limit=FEW)))
            for run in found
        },
    )


def _runs_of(service: Service, names: Sequence[str]) -> list[TrainingRun]:
    """Return the runs that are called by these names, in their order; each once."""
    found = [run for name in names for run in service.store.runs.called(name)]
    return list({run.id: run for run in found}.values())[:_MOST_RUNS]


def _title_of(runs: Sequence[str]) -> str:
    named, more = ", ".join(runs[:_NAMED]), len(runs) - _NAMED
    return f"{named} and {more} more" if more > 0 else named or "Runs"


def _plotted(
    service: Service, runs: Sequence[TrainingRun], wanted: RunsPage
) -> tuple[list[str], dict[str, int]]:
    """Return the names of all plots in order, and how many subtasks of a group are not shown."""
    names = list_metrics(service.store.connection, [one.id for one in runs], wanted.q)
    kept, folded = (names, {}) if wanted.q else fold(names)
    chosen = [name for name in wanted.metric if name in names]
    return list(dict.fromkeys([*chosen, *kept])), folded


def _plot(service: Service, wanted: RunsPage, start: int, count: int) -> PlotList:
    found = _runs_of(service, wanted.run)
    names, folded = _plotted(service, found, wanted)
    some, labels = names[start : start + count], [one.label for one in found]
    points = list_points(service.store.connection, [one.id for one in found], some)
    return PlotList(runs=labels, plots=make_plots(points, some, labels, folded))


@router.get("/view/plots.json")
def plots(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return the data of a page of plots."""
    return answer(_plot(service, wanted, (wanted.page - 1) * _PLOTS, _PLOTS))


@router.get("/view/export.html")
def export(service: Served, wanted: Annotated[RunsPage, Query()]) -> Response:
    """Return the plots of all pages as one file, which needs no server and no other file."""
    found = _plot(service, wanted, 0, _SAVED)
    return render_file("export.html", _title_of(found.runs), found.model_dump_json())


class OnePlot(BaseModel):
    """A plot as a file."""

    run: Names
    metric: BoundedText


@router.get("/view/plot.csv")
def plot_csv(service: Served, wanted: Annotated[OnePlot, Query()]) -> Response:
    """Return the points of a plot as CSV."""
    ids = [one.id for one in _runs_of(service, wanted.run)]
    text = as_csv(list_points(service.store.connection, ids, [wanted.metric]))
    attached = {"Content-Disposition": 'attachment; filename="plot.csv"'}
    return Response(text, media_type="text/csv", headers={**HEADERS, **attached})
