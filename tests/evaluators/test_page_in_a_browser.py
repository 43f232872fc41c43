"""The page in Chromium, with a real server: what a person sees, and what no text may do there."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, ViewportSize, expect

from evaluation.browsing import WIDE, Scheme, View, chromium, viewing
from evaluation.runs import checkpoint
from evaluation.servers import SCRIPT, Live, free_port, live, still
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.store.store import Store
from waiting import wait_until

pytestmark = pytest.mark.xdist_group("eval-page")  # one browser, and one server for most
TOKEN = "correct-horse-battery-staple"  # noqa: S105  (of the test)
PHONE = ViewportSize(width=360, height=740)
LINES = 1_000_000
SPEAKS = f"""
if "floods" in tasks:
    for first in range(0, {LINES}, 1000):
        print("\\n".join(f"\\x1b[1mline {{n}}\\x1b[0m" for n in range(first, first + 1000)))
    print("<img src=x onerror='window.isHacked = 1'>\\x07 5%\\r60%\\rthe end", flush=True)
if "waits" in tasks:"""
DIRECTED = """
document = {task: numbers for task in tasks.split(",")}
document["higher_is_better"] = {task: {"acc": True} for task in tasks.split(",")}
(output / "results.json").write_text(json.dumps(document))
asked = [[f"{'long' * number} question {number}"] for number in range(25)]
with open(output / "samples_score.jsonl", "w") as file:
    for number, one in enumerate(asked):
        sample = {"doc_id": number, "target": "x" * 200, "arguments": one, "acc": number % 2}
        print(json.dumps({**sample, "filtered_resps": [step], "filter": "strict"}), file=file)
"""
PAGE_SCRIPT = (
    SCRIPT.replace('"acc_stderr": 9', '"acc_stderr,none": 0.05').replace(
        '\nif "waits" in tasks:', SPEAKS, 1
    )
    + DIRECTED
)
HOSTILE = "<img src=x onerror='window.isHacked = 1'>\"]}\x1b[31m\u202e"
IS_HACKED = "window.isHacked !== undefined || document.querySelector('main img') !== null"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose run `a` has results of three steps, and of EMA weights."""
    with live(tmp_path_factory.mktemp("server"), script=PAGE_SCRIPT) as started:
        run = started.root / "a"
        jobs = []
        for step in (0, 10, 20):
            place = checkpoint(run, step, ema=True)
            jobs += [started.submit(place, weights=one) for one in ("model", "ema")]
        jobs.append(started.submit(checkpoint(started.root / "b", 5)))
        for job in jobs:
            started.ended(job)
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def view(browser: Browser, server: Live) -> Iterator[View]:
    with viewing(browser, server) as opened:
        yield opened


@pytest.fixture
def waiting(server: Live) -> Iterator[dict[str, object]]:
    """A job that runs until the test lets it go."""
    (server.control / "go").unlink(missing_ok=True)
    for note in server.control.glob("began-*"):
        note.unlink()
    unique = f"t{time.time_ns()}"
    job = server.submit(server.root / "a" / "checkpoint-20", "waits", unique, step=7)
    server.began(7)
    yield job
    server.go()
    wait_until(lambda: server.job(job)["completed_at"], "the end of the job")


def plotted(view: View) -> Any:
    """Return the data of the first plot."""
    view.until("document.querySelector('figure')?.plot?.data[0].length > 0")
    return view.page.evaluate("document.querySelector('figure').plot.data")


def test_a_job_goes_through_its_states_without_a_reload(
    view: View, waiting: dict[str, object]
) -> None:
    view.open(f"/view/jobs/{waiting['id']}")
    view.mark()
    state = view.page.locator("#live-job .state")
    expect(state).to_have_text("running")
    expect(view.page.locator("#live-job")).to_contain_text("evaluating")
    expect(view.page.locator("#log")).to_contain_text("evaluating step 7 with model")
    view.server.go()
    expect(state).to_have_text("completed")
    expect(view.page.locator("#live-job table").first).to_contain_text("± 0.05")
    expect(view.page.locator("#announce")).to_contain_text("completed")
    assert view.is_marked()


def test_a_plot_has_the_points_at_their_steps_with_error_bars(view: View) -> None:
    view.open("/view/runs?run=a&q=score/acc")
    steps, model, ema, *bases = plotted(view)
    assert steps == [0, 10, 20]
    assert model == ema == [0, 0.1, 0.2]
    assert bases == [[0, 0, 0], [0, 0, 0]]
    drawn = view.page.evaluate(
        """() => {
            const { plot } = document.querySelector("figure");
            const [steps, values] = plot.data;
            const isDrawn = (step, y) => {
                const at = [plot.valToPos(step, "x", true) - 2, plot.valToPos(y, "y", true) - 2];
                const { data } = plot.ctx.getImageData(...at.map(Math.round), 5, 5);
                const isOpaque = (index) => data[index + 3] > 200;
                return data.some((red, index) => index % 4 === 0 && red < 90 && isOpaque(index));
            };
            return steps.map((step, one) => [0.03, 0.05, 0.08].map(
                (off) => isDrawn(step, values[one] + off)));
        }"""
    )
    assert [one[:2] for one in drawn] == [[True, True]] * 3  # along the bar, and at its end
    assert not any(one[2] for one in drawn[1:2])  # above it is the grid
    label = view.page.locator("figure [role=img]").first.get_attribute("aria-label")
    assert label is not None
    assert "a · model: 0.2 at step 20" in label


def has_star(view: View) -> bool:
    """Return whether there is an arm of a star to the right of the last point of the first line."""
    return bool(
        view.page.evaluate(
            """() => {
                const { plot } = document.querySelector("figure");
                const [steps, values] = plot.data;
                const x = plot.valToPos(steps.at(-1), "x", true);
                const y = plot.valToPos(values.at(-1), "y", true);
                const { data } = plot.ctx.getImageData(Math.round(x) + 5, Math.round(y) - 2, 1, 2);
                return data.some((red, at) => at % 4 === 0 && red < 90 && data[at + 3] > 200);
            }"""
        )
    )


def test_the_best_step_is_marked_in_plot_legend_and_table(view: View) -> None:
    view.open("/view/runs?run=a&q=score/acc")
    plotted(view)
    assert has_star(view)
    label = view.page.locator("figure [role=img]").first.get_attribute("aria-label")
    assert label is not None
    assert "a · model: 0.2 at step 20, best 0.2 at step 20" in label
    figure = view.page.locator("figure").first
    expect(figure.locator(".legend li").first).to_contain_text("★ best 0.2 at 20")
    figure.get_by_text("Table").click()
    marked = figure.locator("tbody tr").filter(has_text="★ best")
    expect(marked).to_have_count(2)  # model and ema
    expect(marked.first).to_contain_text("20a · model0.2 ★ best")
    view.open("/view/runs?run=a&q=score/size")  # of which no direction is known
    plotted(view)
    assert not has_star(view)
    expect(figure.locator(".legend")).not_to_contain_text("best")


def test_plots_are_zoomed_read_and_saved(browser: Browser, server: Live, view: View) -> None:
    view.open("/view/runs?run=a")
    plotted(view)
    over = view.page.locator("figure .u-over")
    over.first.scroll_into_view_if_needed()
    box = over.first.bounding_box()
    assert box is not None
    view.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    for number in (0, 1):  # all plots of the view have the pointer
        tip = over.nth(number).locator(".tip")
        expect(tip).to_contain_text("step 10")
        expect(tip).to_contain_text("a · ema")
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 60, steps=3)
    view.page.mouse.up()
    plots = "[...document.querySelectorAll('figure')].map((one) => one.plot)"
    view.until(f"{plots}.every((one) => one.scales.x.min > 5)")
    view.page.get_by_role("button", name="All steps").click()
    view.until(f"{plots}.every((one) => one.scales.x.min <= one.data[0][0])")
    view.page.locator(".legend button").first.click()
    expect(view.page.locator(".legend button").first).to_have_attribute("aria-pressed", "false")
    view.page.get_by_label("Log steps").check()
    view.page.reload()
    plotted(view)
    expect(view.page.get_by_label("Log steps")).to_be_checked()
    with view.page.expect_download() as picture:
        view.page.get_by_role("button", name="PNG").first.click()
    assert Path(picture.value.path()).read_bytes().startswith(b"\x89PNG")
    with view.page.expect_download() as file:
        view.page.get_by_role("link", name="Save all").click()
    context = browser.new_context(offline=True)
    try:
        alone = View(context.new_page(), server)
        saved = Path(file.value.path()).rename(server.root / "saved.html")
        alone.page.goto(saved.as_uri())
        assert plotted(alone)[0] == [0, 10, 20]
        assert (alone.mistakes, alone.requests, alone.violations()) == ([], [saved.as_uri()], [])
    finally:
        context.close()


def test_a_zoom_between_two_points_shows_the_line_and_stays(view: View) -> None:
    view.open("/view/runs?run=a&q=score/acc&from=12&to=18&log-y=1")
    plotted(view)
    low, high = view.page.evaluate(
        "(({ min, max }) => [min, max])(document.querySelector('figure').plot.scales.y)"
    )
    assert (low < 0.12, 0.18 < high < 0.2) == (True, True)
    view.page.locator("figure .u-over").first.hover()
    expect(view.page.locator(".tip").first).to_be_hidden()  # there is no point in between
    expect(view.page.locator("figure .linear").first).to_be_visible()  # a value is 0
    view.page.get_by_label("Log steps").check()
    view.page.get_by_label("to", exact=True).fill("20")
    view.page.keyboard.press("Tab")
    first = view.page.get_by_role("link", name="Show first").first
    expect(first).to_have_attribute("href", re.compile("log-x=1&log-y=1&from=12&to=20"))
    view.page.get_by_role("button", name="Search").click()
    view.page.wait_for_url(re.compile("log-x=1&log-y=1&from=12&to=20"))
    plotted(view)
    expect(view.page.get_by_label("Steps from")).to_have_value("12")
    view.page.get_by_role("button", name="All steps").click()
    view.until("!location.search.includes('from')")


def test_a_picture_has_dashes_and_whole_letters(view: View) -> None:
    view.open("/view/runs?run=a&q=score/acc")
    plotted(view)
    view.page.evaluate(
        """() => {
            window.drawn = { dashes: [], texts: [] };
            const { prototype } = CanvasRenderingContext2D;
            prototype.setLineDash = (dash) => window.drawn.dashes.push(dash.join(" "));
            prototype.fillText = (text, x, y, width) => window.drawn.texts.push([text, width]);
            for (const one of document.querySelector("figure").points.series)
                one.run = `b${"o".repeat(300)}k`;
        }"""
    )
    with view.page.expect_download() as picture:
        view.page.get_by_role("button", name="PNG").first.click()
    assert picture.value.suggested_filename == "a-score-acc.png"
    drawn = view.page.evaluate("window.drawn")
    assert {"", "8 5"} <= set(drawn["dashes"])
    (model, width), (ema, _) = drawn["texts"][1:]
    assert ("…" in model, model.endswith("ook · model"), ema.endswith("ook · ema")) == ((True,) * 3)
    assert width is None  # which would squeeze the letters


def test_the_largest_and_smallest_numbers_have_ticks(browser: Browser, tmp_path: Path) -> None:
    with still(tmp_path, script=CommandProfile(command=("true",))) as server:
        store = server.service.store
        for step, (large, tiny) in enumerate(((1e308, 5e-324), (-1e308, 1e-323), (1.7e308, 0))):
            job, _ = store.submit(Request("/c", "script", ("t",), step=step, run="a"), pin=None)
            store.claim(time.time(), job.id)
            numbers = {"t/large": large, "t/tiny": tiny, "t/both": 10.0 ** (300 * (step - 1))}
            store.complete(job.id, numbers, None)
        saved = tmp_path / "saved.html"
        saved.write_text(server.client.get("/view/export.html?run=a").text)
    context = browser.new_context(offline=True)
    try:
        page = context.new_page()
        page.goto(f"{saved.as_uri()}?log-y=1")
        both, large, tiny = page.evaluate(
            """() => [...document.querySelectorAll("figure")].map(
                ({ plot }) => plot.axes[1]._values.filter(Boolean).map(Number))"""
        )
    finally:
        context.close()
    assert (min(both) < 1e-200, max(both) > 1e200, len(both) >= 5) == (True,) * 3
    assert (min(large), max(large)) == (-1e308, 1e308)
    assert {0, 1e-323} <= set(tiny)


def test_a_result_appears_in_the_plot_without_a_reload(view: View) -> None:
    run = f"new-{time.time_ns()}"
    view.open(f"/view/runs?run={run}")
    expect(view.page.locator("#live-names")).to_contain_text(f"no run called {run}")
    view.mark()
    view.server.submit(checkpoint(view.server.root / run, 20))
    assert plotted(view) == [[20], [0.2]]
    view.server.submit(checkpoint(view.server.root / run, 10))
    view.until("document.querySelector('figure').plot.data[0].length === 2")
    assert view.is_marked()


def test_plots_that_load_or_fail_are_told_and_asked_for_again(view: View) -> None:
    answers: list[Route] = []

    def hold(route: Route) -> None:
        answers.append(route)

    view.page.route("**/view/plots.json**", hold)
    view.open("/view/runs?run=a&q=score/acc")
    told = view.page.locator("#plots-loading")
    expect(told).to_be_visible()
    expect(told).to_have_text("Loading the plots …")
    assert view.violations() == []
    wait_until(lambda: view.page.title() and answers, "the request for plots")
    answers[0].fulfill(status=500, body="no")
    expect(told).to_contain_text("cannot be loaded: the server answers with 500. Trying again.")
    view.page.unroute("**/view/plots.json**")
    plotted(view)
    expect(told).to_be_hidden()


def test_the_queue_shows_who_has_a_gpu_and_the_place_in_the_queue(
    view: View, waiting: dict[str, object]
) -> None:
    server = view.server
    place = server.root / "b" / "checkpoint-5"
    # Of four GPUs one has the job that waits already.
    jobs = [server.submit(place, "waits", f"q{number}") for number in range(5)]
    view.open("/")
    view.page.get_by_role("link", name="GPUs in use").click()
    expect(view.page.locator(".gpus li")).to_have_count(4)
    holder = view.page.locator(".gpus li").filter(has_text=str(waiting["id"])[:8])
    expect(holder).to_contain_text("a/7")
    queue = view.page.locator("#live-queue tbody tr")
    expect(queue).to_have_count(2)
    expect(queue.nth(1)).to_contain_text("#2 in the queue")
    expect(queue.nth(1)).to_contain_text(str(jobs[-1]["id"])[:8])
    for job in jobs:
        server.v1("DELETE", f"/jobs/{job['id']}")


def test_runs_are_chosen_and_overlaid_and_their_points_are_saved(view: View) -> None:
    view.open("/")
    view.page.get_by_label("choose run a", exact=True).check()
    view.page.get_by_label("choose run b", exact=True).check()
    view.page.get_by_role("button", name="Plot the chosen runs").click()
    view.page.wait_for_url("**/view/runs?run=*&run=*")
    assert plotted(view)[0] == [0, 5, 10, 20]
    figure = view.page.locator("figure").filter(has_text="score/acc").first
    figure.get_by_text("Table").click()
    expect(figure.locator("tbody tr")).to_have_count(7)
    with view.page.expect_download() as saved:
        figure.get_by_role("link", name="CSV").click()
    rows = Path(saved.value.path()).read_text().splitlines()
    assert len(rows) == 8


def test_a_job_is_cancelled_and_retried_by_keyboard(view: View, waiting: dict[str, object]) -> None:
    view.open(f"/view/jobs/{waiting['id']}")
    state = view.page.locator("#live-job .state")
    expect(state).to_have_text("running")
    view.press_until("Tab", "[data-action=cancel]")
    view.page.keyboard.press("Enter")
    expect(state).to_have_text("cancelled")
    assert "Cancel job" in view.dialogs[0]
    view.until("document.activeElement?.matches('[data-action=retry]')")
    view.page.keyboard.press("Enter")
    expect(state).to_have_text("running")
    view.until("document.activeElement?.matches('[data-action=cancel]')")


def test_results_are_hidden_shown_and_measured_again(view: View) -> None:
    place = checkpoint(view.server.root / "corrected", 5)
    job = view.server.ended(view.server.submit(place))
    view.open(f"/view/jobs/{job['id']}")
    box = view.page.locator("#live-job")
    expect(box).to_contain_text("Revision")
    view.page.get_by_role("button", name="Hide").click()
    expect(box).to_contain_text("Hidden in curves and tables: for a reason")
    view.page.get_by_role("button", name="Show again").click()
    expect(box).to_contain_text("was hidden: for a reason")
    view.page.get_by_role("button", name="Evaluate again").click()
    view.page.wait_for_url(lambda url: str(job["id"]) not in url)
    expect(view.page.locator("#live-job .state")).to_have_text("completed")


def test_runs_of_one_name_are_told_apart(view: View) -> None:
    for name in ("one", "two"):
        place = checkpoint(view.server.root / name / "output", 5)
        view.server.ended(view.server.submit(place))
    view.open("/?q=output")
    for label in ("output (one)", "output (two)"):
        expect(view.page.locator("#live-runs").get_by_role("link", name=label)).to_be_visible()
    view.open("/view/runs?run=output")
    legend = view.page.locator(".legend").first
    expect(legend).to_contain_text("output (one)")
    expect(legend).to_contain_text("output (two)")


def test_a_checkpoint_is_submitted_by_the_form(view: View) -> None:
    view.open("/view/submit")
    view.page.get_by_label("Checkpoint").fill("/nowhere")
    view.page.get_by_label("Profile").select_option("script")
    view.page.get_by_label("Tasks").fill("score, other")
    view.page.get_by_role("button", name="Submit").click()
    expect(view.page.get_by_role("alert").filter(has_text="root")).to_be_visible()
    place = str(view.server.root / "b" / "checkpoint-5")
    view.page.get_by_label("Checkpoint").fill(place)
    view.page.get_by_role("button", name="Submit").click()
    view.page.wait_for_url("**/view/jobs/*")
    expect(view.page.locator("#live-job .state")).to_have_text("completed")
    expect(view.page.locator("#live-job")).to_contain_text(place)


VIEWS = (
    "/",
    "/view/queue",
    "/view/jobs",
    "/view/runs?run=a&run=b",
    "/view/submit",
    "/view/disk",
    "/view/none",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, WIDE], ids=["phone", "wide"])
def test_every_view_fits_and_can_be_read_by_everyone(
    browser: Browser, server: Live, waiting: dict[str, object], size: ViewportSize, scheme: Scheme
) -> None:
    with viewing(browser, server, size=size, scheme=scheme) as view:
        jobs = server.v1("GET", "/jobs?run=a&status=completed&profile=script")["jobs"]
        first, second = (one["id"] for one in jobs[-2:])  # type: ignore[index]  # its list
        own = [f"/view/jobs/{one}" for one in (waiting["id"], first)]
        for address in (*VIEWS, *own, f"/view/answers?job={first}&with={second}"):
            view.open(address)
            if "runs" in address:
                plotted(view)
            width = view.page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], address
            assert view.violations() == [], address
            back = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness = sum(map(int, back.removeprefix("rgb(").rstrip(")").split(",")))
            assert (brightness < 200) == (scheme == "dark")


def test_no_text_of_others_does_any_harm(view: View) -> None:
    with closing(Store(view.server.work / "jobs.sqlite")) as store:
        asked = Request("/c", HOSTILE, (HOSTILE,), step=3, run=HOSTILE)
        job, _ = store.submit(asked, pin=None)
        store.claim(time.time(), job.id)
        store.complete(job.id, {f"{HOSTILE}/{HOSTILE}": 0.5, f"{HOSTILE}/x": 1e308}, None)
    for address in ("/", "/view/jobs", f"/view/jobs/{job.id}", "/view/disk"):
        view.open(address)
        assert not view.page.evaluate(IS_HACKED), address
    view.open("/")
    view.page.locator("tbody").get_by_role("link", name="<img src=x").first.click()
    assert plotted(view)[0] == [3]
    view.page.locator("summary").first.click()
    expect(view.page.locator("figure td").first).to_be_visible()
    assert not view.page.evaluate(IS_HACKED)
    assert view.dialogs == []


def test_a_log_of_a_million_lines_is_shown_in_part_and_as_text(view: View) -> None:
    job = view.server.submit(view.server.root / "b" / "checkpoint-5", "floods")
    view.server.ended(job)
    view.open(f"/view/jobs/{job['id']}")
    log = view.page.locator("#log")
    expect(log).to_contain_text("the end")
    text = log.inner_text()
    assert len(text) < 300_000
    assert f"line {LINES - 1}\n" in text
    assert "\x1b" not in text
    assert "60%" not in text
    assert not view.page.evaluate(IS_HACKED)


def test_without_events_the_page_asks(view: View, waiting: dict[str, object]) -> None:
    def refuse(route: Route) -> None:
        route.abort()

    view.page.route("**/api/v1/events*", refuse)
    view.open("/view/jobs?status=running")
    expect(view.page.locator("tbody tr")).to_have_count(1)
    view.server.v1("DELETE", f"/jobs/{waiting['id']}")
    expect(view.page.locator(".empty")).to_have_text("No job matches.")


def test_a_server_that_is_away_is_noticed_and_so_is_its_return(
    browser: Browser, tmp_path: Path
) -> None:
    with live(tmp_path, script=PAGE_SCRIPT, port=free_port()) as server:
        place = checkpoint(server.root / "run", 5)
        with viewing(browser, server) as view:
            view.open("/view/jobs")
            expect(view.page.locator(".empty")).to_be_visible()
            view.mark()
            server.kill()
            expect(view.page.locator("#stale")).to_contain_text("The server does not answer.")
            server.start()
            expect(view.page.locator("#stale")).to_be_hidden()
            server.submit(place)
            expect(view.page.locator("tbody .state")).to_have_text("completed")
            assert view.is_marked()


def test_a_browser_logs_in_and_out(browser: Browser, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with live(tmp_path, "--token-file", str(token)) as server, viewing(browser, server) as view:
        view.open("/view/jobs?status=failed")
        view.page.get_by_label("Token").fill(f"{TOKEN}x")
        view.page.keyboard.press("Enter")
        alert = view.page.get_by_role("alert").filter(has_text="wrong token")
        expect(alert).to_be_visible()
        assert view.violations() == []
        view.page.get_by_label("Token").fill(TOKEN)
        view.page.keyboard.press("Enter")
        view.page.wait_for_url("**/view/jobs?status=failed")
        assert view.page.evaluate("document.cookie") == ""
        view.page.get_by_role("button", name="Log out").click()
        expect(view.page.get_by_label("Token")).to_be_visible()
        view.open("/view/disk")
        assert "log-in" in view.page.url
    assert json.dumps(TOKEN) not in str(view.requests)
