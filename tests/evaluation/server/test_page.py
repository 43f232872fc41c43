"""The page as a server answers it: what the views show, and what a browser is told."""

import csv
import html
import io
import json
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import pytest

from evaluation.servers import Still, still
from unshard.evaluate.comparing import as_results, compare_runs
from unshard.evaluate.jobs import Request, Settings, Status
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.documents import collect_facts
from unshard.evaluate.server.http.page.plots import as_csv, fold, make_plots
from unshard.evaluate.server.http.page.rendering import STATIC
from unshard.evaluate.server.http.page.routes import progress_of
from unshard.evaluate.server.store.overview import list_holders, list_points, list_runs

HTML = {"Accept": "text/html"}
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e'\""
VIEWS = ("/", "/view/queue", "/view/jobs", "/view/runs", "/view/submit", "/view/disk")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Still]:
    with still(tmp_path, script=CommandProfile(command=("true",))) as server:
        yield server


def complete(
    server: Still, run: str, step: int | None, metrics: dict[str, float], **more: object
) -> str:
    """Add a job that was completed; return its id."""
    errors, directions = more.pop("errors", {}), more.pop("directions", {})
    assert isinstance(errors, dict)
    assert isinstance(directions, dict)
    asked = Request(f"/runs/{run}/{step}", "script", ("task",), step=step, run=run)
    store = server.service.store
    job, _ = store.submit(replace(asked, **more), pin=None)  # type: ignore[arg-type]  # its fields
    store.claim(time.time(), job.id)
    store.complete(job.id, metrics, None, errors, directions)
    return job.id


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_an_empty_server_says_that_it_is_empty(served: Still, view: str) -> None:
    answer = served.client.get(view, headers=HTML)
    assert answer.status_code == 200
    assert "text/html" in answer.headers["content-type"]
    assert "empty" in answer.text or view == "/view/submit"


@pytest.mark.parametrize("view", [*VIEWS, "/view/jobs/0000", "/view/nothing", "/view/log-in"])
def test_no_view_has_code_inside_or_lets_any_from_elsewhere_run(served: Still, view: str) -> None:
    answer = served.client.get(view, headers=HTML)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?! src=\"/view/static/)|<style| style=| on\w+=", answer.text)
    assert not re.search(r"(?:src|href|action)=\"(?!/|#)", answer.text)


def test_hostile_names_are_shown_as_text(served: Still) -> None:
    complete(served, HOSTILE, 3, {f"{HOSTILE}/{HOSTILE}": 0.5}, tasks=(HOSTILE,))
    job_id = complete(served, HOSTILE, 4, {f"{HOSTILE}/acc": 0.5})
    for view in ("/", "/view/jobs", f"/view/jobs/{job_id}", f"/view/runs?run={quote(HOSTILE)}"):
        text = served.client.get(view, headers=HTML).text
        assert "<img" not in text
        assert "\x1b" not in text
        assert r"&lt;img src=x onerror=alert(1)&gt;\x1b[31m" in text


def test_an_unknown_job_is_an_error_for_people_and_for_programs(served: Still) -> None:
    people = served.client.get("/view/jobs/0000", headers=HTML)
    assert (people.status_code, "does not exist" in people.text) == (404, True)
    assert "<h1><bdi>Not found</bdi></h1>" in people.text
    assert '<a href="/view/queue">Queue</a>' in people.text
    assert served.client.get("/view/jobs/0000").json() == {"detail": "job 0000 does not exist"}


def test_the_files_of_the_page_are_kept_by_browsers_until_they_change(served: Still) -> None:
    page = served.client.get("/", headers=HTML).text
    addresses = re.findall(r"\"(/view/static/[^\"]+)\"", page)
    assert addresses
    for address in addresses:
        assert "immutable" in served.client.get(address).headers["cache-control"]
    old = served.client.get("/view/static/page.js?v=0")
    assert old.headers["cache-control"] == "no-cache"
    assert served.client.get("/view/static/../routes.py").status_code == 404
    assert set(STATIC) >= {"uPlot.LICENSE", "uPlot.iife.min.js"}


def test_a_plot_has_a_line_for_each_run_and_its_weights_by_rising_step(served: Still) -> None:
    for step in (20, 0, 10):
        complete(served, "a", step, {"t/acc": step / 100}, errors={"t/acc": 0.01})
    complete(served, "a", 10, {"t/acc": 0.7}, weights="ema")
    complete(served, "b", 5, {"t/acc": 0.2, "t/f1": 0.3})
    complete(served, "b", None, {"t/acc": 0.9})
    answer = served.client.get("/view/plots.json?run=b&run=a").json()
    acc, f1 = answer["plots"]
    assert (acc["name"], f1["name"]) == ("t/acc", "t/f1")
    lines = [(one["run"], one["weights"], one["steps"], one["values"]) for one in acc["series"]]
    assert lines == [
        ("b", "model", [5], [0.2]),
        ("a", "model", [0, 10, 20], [0.0, 0.1, 0.2]),
        ("a", "ema", [10], [0.7]),
    ]
    assert acc["series"][1]["errors"] == [0.01] * 3
    assert [one["base"] for one in acc["series"]] == [None, 0.0, None]
    assert f1["series"][0]["errors"] == [None]


def test_the_best_step_of_a_line_is_the_one_that_compare_prints(served: Still) -> None:
    directions = {"t/acc": True, "t/loss": False}
    for step, value in ((0, 0.3), (10, 0.9), (20, 0.9), (30, 0.2)):
        metrics = dict.fromkeys(["t/acc", "t/loss", "t/other"], value)
        complete(served, "a", step, metrics, directions=directions)
    plots = served.client.get("/view/plots.json?run=a").json()["plots"]
    best = {one["name"]: one["series"][0]["best"] for one in plots}
    assert best == {"t/acc": 10, "t/loss": 30, "t/other": None}
    answers = served.client.get("/api/v1/results?run=a").json()["results"]
    compared = compare_runs(["a"], as_results(answers), higher_is_better=None)
    assert best == {
        f"{one.last.task}/{one.last.metric}": one.best and one.best.step for one in compared
    }


def test_a_title_names_three_runs_at_most(served: Still) -> None:
    address = "/view/runs?" + "&".join(f"run=r{number}" for number in range(5))
    page = served.client.get(address, headers=HTML).text
    assert "<h1><bdi>r0, r1, r2 and 2 more</bdi></h1>" in page


def test_of_two_results_of_a_step_the_later_one_is_plotted(served: Still) -> None:
    complete(served, "a", 1, {"t/acc": 0.1})
    complete(served, "a", 1, {"t/acc": 0.2}, fingerprint="saved again")
    (run,) = served.service.store.runs.all()
    points = list_points(served.service.store.connection, [run.id], ["t/acc"])
    (plot,) = make_plots(points, ["t/acc"], ["a"])
    assert plot.series[0].values == [0.2]


def test_a_plot_as_csv_has_its_numbers_exactly_and_no_formula(served: Still) -> None:
    complete(served, "=cmd()", 7, {"+task/-acc": 0.1 + 0.2}, errors={"+task/-acc": 1 / 3})
    answer = served.client.get("/view/plot.csv?run==cmd()&metric=%2Btask/-acc")
    assert answer.headers["content-disposition"].startswith("attachment")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["run"], row["task"], row["metric"]) == ("'=cmd()", "'+task", "'-acc")
    assert (float(row["value"]), float(row["stderr"]), row["step"]) == (0.1 + 0.2, 1 / 3, "7")
    assert as_csv([]).count("\n") == 1


def test_plots_are_searched_and_have_pages(served: Still) -> None:
    complete(served, "a", 1, {f"task{number:02d}/acc": 0.5 for number in range(30)})
    names, counts = set(), []
    for page in (1, 2, 3, 4):
        found = served.client.get(f"/view/plots.json?run=a&page={page}").json()["plots"]
        names |= {one["name"] for one in found}
        counts.append(len(found))
    assert counts == [12, 12, 6, 0]
    assert len(names) == 30
    assert len(served.client.get("/view/plots.json?run=a&q=TASK07").json()["plots"]) == 1
    assert 'rel="next"' in served.client.get("/view/runs?run=a", headers=HTML).text


def test_runs_are_listed_with_the_newest_job_first(served: Still) -> None:
    for run, step in (("old", 5), ("new", 2), ("new", 1)):
        complete(served, run, step, {"t/acc": 0.5})
    served.service.store.submit(Request("/c", "script", ("t",), step=9, run="old"), pin=None)
    found = list_runs(served.service.store.connection, "")
    assert [(one.run.label, one.step) for one in found] == [("old", 9), ("new", 2)]
    assert found[0].counts[Status.QUEUED] == found[0].counts[Status.COMPLETED] == 1
    only = list_runs(served.service.store.connection, "NE")
    assert [one.run.label for one in only] == ["new"]


def test_home_has_last_and_best_of_the_chosen_metrics_and_sorts_by_them(served: Still) -> None:
    lower = {"t/loss": False}
    for run, values in (("up", (0.9, 0.5)), ("down", (0.3, 0.4)), ("none", ())):
        complete(served, run, 7, {"t/other": 1})
        for step, value in enumerate(values):
            complete(served, run, step, {"t/loss": value}, directions=lower)
    complete(served, "down", 1, {"t/loss": 0.1}, directions=lower, weights="ema")

    page = served.client.get("/?metric=t/loss&q=down", headers=HTML).text
    row = re.sub(r"<[^>]+>", " ", page.partition("<tbody")[2].partition("</tbody")[0])
    assert "down 7 0.4 at 1 best 0.3 at 0 1 of 2 lines 0 0" in " ".join(row.split())
    for sort, names in (
        ("name", ["down", "none", "up"]),
        ("-name", ["up", "none", "down"]),
        ("last t/loss", ["down", "up", "none"]),
        ("-best t/loss", ["up", "down", "none"]),
        ("", ["down", "none", "up"]),
    ):
        page = served.client.get(f"/?metric=t/loss&sort={sort}", headers=HTML).text
        assert re.findall(r'aria-label="choose run (\w+)"', page) == names, sort


def test_the_subtasks_of_a_group_are_folded_and_chosen_metrics_are_first(served: Still) -> None:
    subjects = [f"mmlu_{subject}/acc" for subject in "abcde"]
    others = ["arc_easy/acc", "gsm8k/acc", "gsm8k_cot/acc", "mmlu/acc"]
    complete(served, "a", 1, dict.fromkeys([*subjects, *others], 0.5))

    def plots(query: str) -> dict[str, int]:
        found = served.client.get(f"/view/plots.json?run=a&{query}").json()["plots"]
        return {one["name"]: one["subtasks"] for one in found}

    assert plots("") == dict.fromkeys(others, 0) | {"mmlu/acc": 5}
    chosen = list(plots("metric=mmlu_c/acc&metric=mmlu/acc"))
    assert chosen == ["mmlu_c/acc", "mmlu/acc", *others[:3]]
    assert list(plots("q=mmlu_")) == subjects


@pytest.mark.parametrize("metric", ["acc", "exact_match"])
def test_a_benchmark_is_not_folded_into_another_one(metric: str) -> None:
    subjects = [f"mmlu_{subject}" for subject in "abcde"]
    pro = [f"mmlu_pro_{subject}" for subject in "abcd"]
    tasks = ["mmlu", "mmlu_stem", *subjects, "mmlu_pro", *pro]
    names = [f"{task}/acc" for task in tasks]
    other = f"mmlu_redux/{metric}"
    stem = dict.fromkeys(subjects[:2], "mmlu_stem") | {"mmlu_stem": "mmlu"}
    parents = dict.fromkeys(subjects[2:], "mmlu") | dict.fromkeys(pro, "mmlu_pro") | stem
    kept, counts = fold([*names, other], parents if metric == "acc" else {})
    assert kept == ["mmlu/acc", "mmlu_pro/acc", other]
    assert counts == {"mmlu": 6, "mmlu_pro": 4}


def test_groups_are_those_that_the_evaluator_reports(served: Still) -> None:
    numbers = {f"g{part}/acc": 0.5 for part in ("", "_a", "_b", "_c", "_d", "_e")}
    job_id = complete(served, "a", 1, numbers)
    parts = [f"g_{part}" for part in "abcd"]
    facts = collect_facts({"group_subtasks": {"g": parts, "none": ["g_e"]}}, numbers)
    served.service.store.describe(job_id, Settings(), facts)
    plots = served.client.get("/view/plots.json?run=a").json()["plots"]
    assert {one["name"]: one["subtasks"] for one in plots} == {"g/acc": 4, "g_e/acc": 0}


def test_more_runs_and_metrics_than_fit_are_cut_and_counted(served: Still) -> None:
    metrics = {f"t{number:02d}/acc": 0.5 for number in range(14)}
    for number in range(14):
        complete(served, f"r{number}", 1, metrics)
    chosen = "&".join(f"metric={name}" for name in metrics)
    home = served.client.get(f"/?{chosen}", headers=HTML).text
    assert "14 runs; 12 of 14 metrics are shown" in home
    assert home.count("checked") == 12
    runs = "&".join(f"run=r{number}" for number in range(14))
    page = served.client.get(f"/view/runs?{runs}&{chosen}", headers=HTML)
    assert "12 of 14 runs are shown" in page.text
    found = served.client.get(f"/view/plots.json?{runs}&{chosen}").json()
    assert (len(found["runs"]), len(found["plots"])) == (12, 12)


def test_metrics_of_every_job_that_is_shown_can_be_chosen(served: Still) -> None:
    complete(served, "a", 1, {"old/acc": 0.5}, tasks=("old",))
    hidden = complete(served, "a", 3, {"hidden/acc": 0.5}, tasks=("hidden",))
    served.service.store.hiding.hide(hidden, "wrong")
    complete(served, "a", 2, {"new/acc": 0.5}, tasks=("new",))
    page = served.client.get("/", headers=HTML).text
    offered = re.findall(r'name="metric" value="([^"]+)"( checked)?', page)
    assert offered == [("new/acc", " checked"), ("old/acc", " checked")]
    assert page.index("old/acc</a>") > page.index("new/acc</a>")


def test_a_view_that_is_empty_says_which(served: Still) -> None:
    nothing = "/view/jobs?run=&status=&profile="
    assert "There are no jobs yet." in served.client.get(nothing, headers=HTML).text
    complete(served, "a", 1, {"t/acc": 0.5})
    for address, why in (
        ("/?page=9", "There is no page 9."),
        ("/view/runs?run=a&page=99", "There is no page 99."),
        ("/view/runs?run=nope", "The server has no run called <bdi>nope</bdi>."),
        ("/?q=nope", "No run's name or directory contains this."),
        ("/view/runs?run=a&q=nope", "No task or metric contains this."),
        ("/view/jobs?run=nope", "No job matches."),
    ):
        page = served.client.get(address, headers=HTML).text
        assert why in page, address
        assert "no results yet" not in page
        assert "There are no" not in page


def test_a_long_name_of_a_metric_is_shortened_on_home(served: Still) -> None:
    name = f"{'long' * 50}/acc"
    complete(served, "a", 1, {name: 0.5})
    page = served.client.get("/", headers=HTML).text
    assert f'title="{name}">long' in page
    assert f"{name}</a>" not in page


def test_files_to_save_are_named_after_run_and_metric(served: Still) -> None:
    complete(served, "a/b \u00e4\r\n", 1, {"t/acc,none": 0.5})
    run = quote("a/b \u00e4\r\n", safe="")
    for address, name in (
        (f"/view/plot.csv?run={run}&metric=t/acc,none", "a-b-t-acc-none.csv"),
        (f"/view/export.html?run={run}", "a-b.html"),
    ):
        headers = served.client.get(address).headers
        assert headers["content-disposition"] == f'attachment; filename="{name}"'


def test_a_saved_file_has_all_plots_that_fit(
    served: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number:03d}/acc" for number in range(210)]
    names += ["g/acc", *[f"g_{part}/acc" for part in "abcd"], "z/acc"]
    complete(served, "a", 1, dict.fromkeys(names, 0.5))

    def saved() -> tuple[list[str], str]:
        text = served.client.get("/view/export.html?run=a&metric=z/acc").text
        data = re.search(r'id="plots-data">(.*?)</script>', text, re.DOTALL)
        assert data is not None
        return [one["name"] for one in json.loads(data[1])["plots"]], text

    plots, text = saved()
    assert plots == ["z/acc", *names[:211], *names[211:215]]
    assert "plots left out" not in text
    monkeypatch.setattr("unshard.evaluate.server.http.page.runs._SAVED_BYTES", 1)
    plots, text = saved()
    assert plots == ["z/acc", *names[:11]]
    assert f"{len(names) - 12} plots left out" in text


def test_a_saved_file_lets_nothing_run_but_its_own_scripts(served: Still) -> None:
    name = f"</script>{HOSTILE}"
    complete(served, name, 1, {f"{name}/acc": 0.5})
    answer = served.client.get(f"/view/export.html?run={quote(name, safe='')}")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "<img" not in answer.text
    allowed = re.findall(r"'sha256-([^']+)'", answer.text)
    scripts = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    assert allowed == [b64encode(sha256(one.encode()).digest()).decode() for one in scripts]
    data = re.search(r'id="plots-data">(.*?)</script>', answer.text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["plots"][0]["series"][0]["run"] == name


def test_jobs_are_filtered_and_have_pages(served: Still) -> None:
    for step in range(40):
        complete(served, "a", step, {"t/acc": 0.5})
    complete(served, "b/c", 1, {"t/acc": 0.5})

    def ids(address: str) -> tuple[list[str], str | None]:
        text = served.client.get(address, headers=HTML).text
        after = re.search(r'rel="next" href="([^"]+)"', text)
        found = re.findall(r'<th scope="row"[^>]*><a href="/view/jobs/(\w+)"', text)
        return found, after and after[1].replace("&amp;", "&")

    first, after = ids("/view/jobs?run=a&status=&profile=")
    assert after is not None
    rest, end = ids(after)
    assert (len(first), len(rest), end) == (25, 15, None)
    assert len({*first, *rest}) == 40
    assert len(ids("/view/jobs?run=b/c")[0]) == 1
    assert ids("/view/jobs?status=failed")[0] == []


def test_an_attempt_has_its_gpus_before_its_process_is_there(served: Still) -> None:
    store = served.service.store
    job, _ = store.submit(Request("/c", "script", ("t",), step=9, run="a"), pin=None)
    store.claim(time.time(), job.id, ("6", "7"))
    (holder,) = list_holders(store.connection)
    assert (holder.job_id, holder.step, holder.gpus) == (job.id, 9, ("6", "7"))


def test_the_progress_of_an_evaluator_is_that_of_its_last_bar(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert progress_of(log) is None
    log.write_text("accuracy 99%|\nloading\r\x1b[32mRequests:  40%|####      | 4/10\x1b[0m\r")
    found = progress_of(log)
    assert found is not None
    assert (found.percent, found.line) == (40, "Requests:  40%|####      | 4/10")
    log.write_text("RuntimeError: 0.5% of all\n")
    assert (found := progress_of(log)) is not None
    assert found.percent is None


def test_a_job_shows_how_to_do_it_again(served: Still) -> None:
    job_id = complete(served, "run", 3, {"task/acc": 0.5})
    address = f"/view/jobs/{job_id}/again.sh"
    assert address not in served.client.get(f"/view/jobs/{job_id}").text
    assert served.client.get(address).status_code == 404
    served.service.store.record_recipe(job_id, f"#!/bin/sh\necho '{HOSTILE}\udcff'\n", "{}")
    text = served.client.get(f"/view/jobs/{job_id}").text
    assert f'href="{address}"' in text
    assert "unshard.json of the merged model" in text
    assert "<img" not in text
    script = served.client.get(address)
    assert script.headers["content-type"].startswith("text/plain")
    assert HOSTILE in script.text
    early = served.service.store.submit(Request("/c", "script", ("t",), step=9, run="a"), pin=None)
    answer = served.client.get(f"/view/jobs/{early[0].id}/again.sh")
    assert answer.json()["detail"].endswith("has no script: it has not started")


def test_an_address_that_cannot_be_right_names_its_part(served: Still) -> None:
    page = served.client.get("/view/jobs?status=odd", headers=HTML)
    assert (page.status_code, "<h1><bdi>Unprocessable" in page.text) == (422, True)
    found = re.search(r'role="alert">([^<]*)<', page.text)
    assert found is not None
    assert html.unescape(found[1]).startswith("status: should be 'queued', 'running'")
    assert "[" not in found[1]


PATHS = ("/", "/view/jobs", "/view/static/page.css", "/view/none", "/health", "/openapi.json")


@pytest.mark.parametrize("path", [*PATHS, "/api/v1/jobs", "/api/v1/events", "/metrics"])
def test_head_has_the_headers_of_get(served: Still, path: str) -> None:
    head = served.client.head(path, headers=HTML)
    assert head.content == b""
    if "events" in path:  # GET would not end
        assert head.status_code == 200
        assert head.headers["content-type"].startswith("text/event-stream")
        return
    whole = served.client.get(path, headers=HTML)
    for name in ("content-type", "cache-control"):
        assert (head.status_code, head.headers.get(name)) == (
            whole.status_code,
            whole.headers.get(name),
        )


def test_head_changes_nothing(served: Still) -> None:
    assert served.client.head("/api/v1/drain").status_code == 405
    assert served.client.post("/health").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("method", "headers", "status", "why"),
    [
        ("GET", {"Host": "evil.example"}, 403, "to use another DNS name, or a proxy"),
        ("GET", {"Origin": "http://evil.example"}, 403, "Origin &#39;http://evil.example&#39;"),
        ("POST", {"Content-Length": "99999999"}, 413, "the body is too large"),
        ("POST", {"Content-Type": "text/plain"}, 415, "Content-Type must be application/json"),
    ],
)
def test_a_browser_gets_a_refusal_as_a_page(
    served: Still, method: str, headers: dict[str, str], status: int, why: str
) -> None:
    page = served.client.request(method, "/", headers={**HTML, **headers}, content=b"{}")
    assert (page.status_code, page.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert why in page.text
    assert "<h1>" in page.text
    program = served.client.request(method, "/", headers=headers, content=b"{}")
    assert (program.status_code, program.json()["error"]["code"]) == (status, status)
