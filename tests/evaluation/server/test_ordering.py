"""Which step of a run is evaluated first, and which are skipped, as the profile says."""

import logging
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.running import job_of, request, whole_model
from evaluation.servers import Live, cli, live
from properties import examples
from unshard.evaluate.jobs import Filters, Request, Status
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    """Return a server whose slot of the CPU has step 1 of another run until `go`."""
    command = [sys.executable, "-I", "-S", str(tmp_path / "script.py"), "{checkpoint}", "{output}"]
    command += [str(tmp_path / "control"), "{tasks}", "{step}", "{weights}"]
    plain = {"kind": "command", "command": command, "gpus": 0}
    profiles = {
        "script": plain,
        "newest": {**plain, "order": "newest"},
        "skipping": {**plain, "order": "newest", "max_lag": 2},
        "bounded": {**plain, "max_lag": 1},
    }
    with live(tmp_path, profiles=profiles, cpu_slots=1) as started:
        submit(started, 1, "waits", run="first", profile="script")
        started.began(1)
        yield started


def submit(server: Live, step: int, *tasks: str, **more: object) -> dict[str, object]:
    run = str(more.setdefault("run", "run"))
    checkpoint = whole_model(server.root / run / f"checkpoint-{step}")
    return server.submit(checkpoint, *tasks, step=step, **more)


def queued(server: Live) -> list[dict[str, object]]:
    found = server.v1("GET", "/jobs?status=queued")["jobs"]
    assert isinstance(found, list)
    return sorted(found, key=lambda job: int(job["position"] or 0))  # it may have begun meanwhile


def order_of(server: Live) -> list[object]:
    """Return the steps that wait, by the place that the server shows for each."""
    found = queued(server)
    places = list(range(1, len(found) + 1))
    assert [job["position"] for job in found] == places
    assert [server.job(job)["position"] for job in found] == places
    return [job["step"] for job in found]


def test_the_highest_step_is_first_and_other_runs_keep_their_places(server: Live) -> None:
    for step in (20, 10):
        submit(server, step, profile="newest")
    submit(server, 5, run="other", profile="newest")
    submit(server, 7, run="other", profile="script")
    assert order_of(server) == [20, 5, 10, 7]
    submit(server, 40, profile="newest")
    submit(server, 0, profile="newest")  # the base keeps its place
    answer = submit(server, 30, profile="newest")
    assert order_of(server) == [40, 5, 30, 7, 20, 0, 10]
    assert answer["position"] == 3
    queue = server.call("GET", "/queue").json()["queued_jobs"]
    assert queue[2] == answer["id"]
    server.go()
    ended = [job for job in server.all_ended(8) if job["run"] != "first"]
    began = sorted(ended, key=lambda job: float(str(job["started_at"])))
    assert [job["step"] for job in began] == [40, 5, 30, 7, 20, 0, 10]


def test_steps_that_fell_behind_are_skipped_and_their_clients_are_told(
    server: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = EvalConfig.from_dict(
        {"server_url": server.url, "profile": "skipping", "tasks": ["score"], "poll_interval": 0.05}
    )
    run = server.root / "run"
    submitter = Submitter(config, run, acts=True)
    try:
        for step in (0, 10, 20):
            assert submitter.submit(whole_model(run / f"checkpoint-{step}"), step)
        wait_until(lambda: len(queued(server)) == 3, "three jobs")
        first = server.v1("GET", "/jobs?step=10")["jobs"][0]  # type: ignore[index]  # its list
        assert submitter.submit(whole_model(run / "checkpoint-30"), 30)
        skipped = server.ended(first, "superseded")
        # Step 0 keeps its place, and is never skipped.
        wait_until(lambda: [job["step"] for job in queued(server)] == [0, 30, 20], "the order")
        assert skipped["superseded_by"] is None
        assert skipped["error"] == "skipped: 2 newer steps of the run wait (max_lag: 2)"
        waited = cli(server.url, "status", str(first["id"]))
        assert "skipped: 2 newer steps" in waited.stdout
        server.go()
        assert not submitter.close(LIMIT_S)
    finally:
        submitter.stop()
    assert {step for step, _ in submitter.completed()} == {0, 20, 30}
    assert f"no result: step 10: job {first['id']} superseded: skipped" in caplog.text
    # Its pin is gone; it can be had all the same, because the checkpoint is still there.
    again = server.v1("POST", f"/jobs/{first['id']}/retry")
    assert server.ended(again)["metrics"]


def test_a_step_that_is_asked_for_later_is_not_skipped_by_itself(server: Live) -> None:
    late = submit(server, 30, profile="bounded")
    early = submit(server, 10, profile="bounded")
    other = submit(server, 20, run="other", profile="bounded")
    assert order_of(server) == [30, 20, 10]
    waited = cli(server.url, "results", "--run", "run")
    assert waited.returncode == 0
    newest = submit(server, 40, profile="bounded")
    assert order_of(server) == [20, 40]
    for one in (late, early):
        assert server.ended(one, "superseded")["superseded_by"] is None
    server.go()
    for one in (other, newest):
        server.ended(one)


Submission = tuple[int, str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = Store(tmp_path_factory.mktemp("store") / "jobs.sqlite")
    made.connection.execute("PRAGMA synchronous = OFF")
    yield made
    made.close()


@settings(max_examples=examples(30))  # each has dozens of transactions
@given(
    submissions=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["a", "b"])), max_size=12, unique=True
    ),
    begun=st.integers(0, 3),
)
def test_places_are_exchanged_within_a_run_only(
    store: Store, submissions: list[Submission], begun: int
) -> None:
    """The model: each run's steps fill the places of the run from the highest step down."""
    places: list[Submission] = []
    for number, (step, run) in enumerate(submissions):
        job, _ = store.submit(request(Path("/model"), step, weights=run), pin=None)
        places.append((step, run))
        if number < begun:  # it is tried again, and keeps its place
            store.claim(2e9, job.id)
            store.postpone(job.id, "lost", "", 0)
        store.ordering.put_newest_first(job)
    movable = [place for n, place in enumerate(places) if n >= begun and place[0]]
    movable.sort(key=lambda place: -place[0])
    expected = [
        places[n][0] if n < begun or not places[n][0] else movable.pop(0)[0]
        for n in range(len(places))
    ]
    queued = [job_of(store, job_id) for job_id in store.queued_ids()]
    assert [job.request.step for job in queued] == expected
    assert [store.position(job.id) for job in queued] == list(range(1, len(queued) + 1))
    assert len(store.jobs(Filters(status=Status.QUEUED))) == len(places)
    for table in ("attempts", "jobs"):
        store.connection.execute(f"DELETE FROM {table}")  # noqa: S608


def test_new_runs_do_not_keep_a_run_from_its_turn(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:

        def submit(run: str, step: int) -> None:
            store.submit(Request(f"/{run}/{step}", "script", ("task",), step, run), pin=None)

        for step in range(9):
            submit("big", step)
        began: list[str] = []
        for number in range(8):
            if began[-1:] != ["big"]:  # as one ends, the next is there
                submit(f"new-{number}", 0)
            ((first, _, _),) = store.due(2e9, 1)
            job = store.claim(2e9, first)
            assert job is not None
            began.append(job.request.run.partition("-")[0])
        assert began == ["big", "new"] * 4


def test_a_job_that_is_sent_again_keeps_its_place(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:

        def submit(run: str, step: int) -> str:
            asked = Request(f"/{run}/{step}", "script", ("task",), step, run)
            return store.submit(asked, pin=None)[0].id

        first, second, waits = submit("a", 0), submit("a", 1), submit("b", 0)
        store.claim(2e9, first)
        later = submit("c", 0)
        store.claim(2e9, second)
        assert submit("b", 0) == waits
        assert store.queued_ids() == [waits, later]


def test_runs_take_turns(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:

        def submit(run: str, step: int) -> str:
            asked = Request(f"/{run}/{step}", "script", ("task",), step, run)
            return store.submit(asked, pin=None)[0].id

        jobs = {(run, step): submit(run, step) for run in "aab" for step in range(3)}
        jobs["c", 0] = submit("c", 0)
        names = {job_id: name for name, job_id in jobs.items()}

        def waiting() -> list[tuple[str, int]]:
            ids = store.queued_ids()
            assert [job_id for job_id, _, _ in store.due(2e9, 99)] == ids
            assert [store.position(one) for one in ids] == list(range(1, len(ids) + 1))
            return [names[one] for one in ids]

        turns = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
        assert waiting() == turns
        for begun in turns[:2]:
            store.claim(2e9, jobs[begun])
        submitted = names[submit("d", 0)] = ("d", 0)
        # A new run is behind those that wait, each of which has one turn before it.
        turns = [("c", 0), ("a", 1), ("b", 1), submitted, ("a", 2), ("b", 2)]
        assert waiting() == turns
        store.cancel(jobs["c", 0])
        store.claim(2e9, jobs["b", 1])
        assert waiting() == [("a", 1), submitted, ("b", 2), ("a", 2)]
