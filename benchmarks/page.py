"""Compare the page and the interface of a server of 500 runs with those of a server of 5 runs.

Each run has 20 jobs. Each server has its own database; the rounds interleave them, so that a noisy
machine slows both alike. Lists have as many entries as fit on their page: 25 jobs or 20 runs on a
view, 100 in an answer. Then Chromium opens the views in turns, and reports the time from the start
of each navigation to its first text or picture ("first-contentful-paint").

With 300 metrics a job, on two cores that also ran other programs, home was painted after 228 to 284
ms (medians of 15 rounds), 1.4 to 1.5 times as long as with 5 runs.

    PYTHONPATH=src:tests python benchmarks/page.py --rounds 40
"""

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from playwright.sync_api import Page
from trainer_step import free_port, server

from evaluation.browsing import chromium
from unshard.evaluate.jobs import Request, Status
from unshard.evaluate.server.store.runs import run_called
from unshard.evaluate.server.store.statements import insert_job, replace_results
from unshard.evaluate.server.store.store import Store

_RUNS = {"small": 5, "large": 500}
_STEPS = 20
_METRICS = ("task/acc", "task/acc_norm", "other/acc")
_HTML = {"Accept": "text/html"}
_ADDRESSES = {
    "overview": "/",
    "jobs": "/view/jobs",
    "failed jobs": "/view/jobs?status=failed",
    "a run": "/view/runs?run=run-0",
    "its plots": "/view/plots.json?run=run-0",
    "a job": "/view/jobs/{job}",
    "disk": "/view/disk",
    "GET /jobs": "/api/v1/jobs",
    "GET /jobs, 1": "/api/v1/jobs?limit=1",
    "GET /jobs/ID": "/api/v1/jobs/{job}",
    "GET /results, 1": "/api/v1/results?limit=1",
    "GET /results, run": "/api/v1/results?run=run-0",
    "GET /runs": "/api/v1/runs",
    "GET /profiles": "/api/v1/profiles",
    "GET /health": "/health",
    "GET /queue": "/queue",
}


_PAINTED = ("overview", "jobs", "a run", "a job")
_PAINTS = "() => performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"


@dataclass
class Contender:
    """A server, its last job, and the seconds that were measured, by the name of an address."""

    client: httpx.Client
    job: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, name: str) -> None:
        """Ask once."""
        address = _ADDRESSES[name].format(job=self.job)
        begin = time.perf_counter()
        self.client.get(address, headers=_HTML).raise_for_status()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def paint(self, name: str, page: Page) -> None:
        """Open a view in a browser."""
        address = str(self.client.base_url.join(_ADDRESSES[name].format(job=self.job)))
        page.goto(address, timeout=0, wait_until="commit")
        while not (painted := page.evaluate(_PAINTS)):
            time.sleep(0.01)
        self.seconds.setdefault(f"paint: {name}", []).append(painted[0] / 1000)


def fill(database: Path, runs: int) -> str:
    """Add runs whose jobs have ended, one of ten as failed; return the last job's id."""
    Store(database).close()  # makes the tables
    job_id, now, count = "", time.time(), runs * _STEPS
    with closing(sqlite3.connect(database)) as connection, connection:
        for number in range(count):
            name, step = f"run-{number % runs}", number // runs
            run_id = run_called(connection, name).id
            asked = Request(
                f"/none/{number}", "sleeps", ("task", "other"), step, name, run_id=run_id
            )
            job_id = insert_job(connection, asked, None, now)
            is_failed = number % 10 == 9
            connection.execute(
                "UPDATE jobs SET status = ?, attempts = 1, completed_at = ? WHERE id = ?",
                (Status.FAILED if is_failed else Status.COMPLETED, now, job_id),
            )
            connection.execute(
                "INSERT INTO attempts (job_id, number, began_at, ended_at) VALUES (?, 1, ?, ?)",
                (job_id, now, now),
            )
            numbers = (number / count, 0.01, True)
            replace_results(
                connection, job_id, {} if is_failed else dict.fromkeys(_METRICS, numbers)
            )
    return job_id


def measure(work: Path, rounds: int) -> Mapping[str, Contender]:
    """Return what was measured of each server; the first rounds warm up."""
    found = {}
    with ExitStack() as stack:
        for name, runs in _RUNS.items():
            place = work / name
            (place / "server").mkdir(parents=True, mode=0o700)
            job = fill(place / "server" / "jobs.sqlite", runs)
            url = stack.enter_context(server(place, free_port()))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
            found[name] = Contender(client, job)
        for turn in range(rounds + 3):
            for name in _ADDRESSES:
                for contender in found.values():
                    contender.measure(name)
            if turn == 2:
                for contender in found.values():
                    contender.seconds.clear()
        paint(found.values(), rounds)
    return found


def paint(contenders: Iterable[Contender], rounds: int) -> None:
    """Measure what a browser that has been here before needs until it paints."""
    with chromium() as browser:
        tabs = [(contender, browser.new_context().new_page()) for contender in contenders]
        for turn in range(rounds + 2):
            for name in _PAINTED:
                for contender, page in tabs:
                    contender.paint(name, page)
                    if turn < 2:
                        contender.seconds[f"paint: {name}"].clear()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(Path(folder), options.rounds)
    print(f"{options.rounds} rounds; 500 runs and 5 runs, with {_STEPS} jobs each:")
    print(f"{'':<18}{'500: median':>15}{'p95':>9}{'5 runs: median':>15}{'p95':>9}{'ratio':>7}")
    for name in (*_ADDRESSES, *(f"paint: {one}" for one in _PAINTED)):
        large, small = (sorted(found[one].seconds[name]) for one in ("large", "small"))
        shown = [
            value
            for of in (large, small)
            for value in (1000 * median(of), 1000 * of[int(0.95 * len(of))])
        ]
        ratio = median(large) / median(small)
        print(
            f"{name:<18}{shown[0]:>12.1f} ms{shown[1]:>6.1f} ms"
            f"{shown[2]:>12.1f} ms{shown[3]:>6.1f} ms{ratio:>7.2f}"
        )


if __name__ == "__main__":
    main()
