"""Our own protocol, spoken to a real server."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import httpx
import pytest
from pydantic import BaseModel

from evaluation.running import all_gone
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, live
from unshard.evaluate.client.v1 import RefusedError
from unshard.evaluate.jobs import Request
from unshard.evaluate.pins.pin import Quota, pin_checkpoint
from unshard.evaluate.server.http import views
from unshard.evaluate.server.http.answers import ErrorBody, ErrorFields
from unshard.evaluate.server.store.store import Store
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-v1")]  # one server for all


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def run(server: Live) -> Path:
    for step in (5, 10):
        checkpoint(server.root / "run", step, ema=True)
    return server.root / "run"


@pytest.fixture(scope="module")
def done(server: Live, run: Path) -> Fields:
    return server.ended(server.submit(run / "checkpoint-5", "score", "other"))


def error_of(answer: httpx.Response) -> ErrorFields:
    assert set(answer.json()) >= {"error"}
    return ErrorBody.model_validate(answer.json()).error


def test_a_checkpoint_is_merged_and_evaluated_and_its_numbers_come_back(done: Fields) -> None:
    assert (done["run"], done["step"], done["weights"]) == ("run", 5, "model")
    metrics = done["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["score/acc"] == metrics["other/acc"] == 0.05
    assert metrics["score/acc,strict"] == 0.5
    assert metrics["score/size"] > 0
    assert set(metrics) == {f"{t}/{m}" for t in ("score", "other") for m in METRICS}


METRICS = ("acc", "acc,strict", "size")


def test_a_new_job_is_created_and_the_same_again_is_not(
    server: Live, run: Path, done: Fields
) -> None:
    body = {"checkpoint": str(run / "checkpoint-5"), "profile": "script"}
    again = server.call("POST", "/api/v1/jobs", json={**body, "tasks": ["other", "score"]})
    assert (again.status_code, again.json()["id"]) == (200, done["id"])
    ema = server.call("POST", "/api/v1/jobs", json={**body, "tasks": ["score"], "weights": "ema"})
    assert (ema.status_code, ema.json()["id"] == done["id"]) == (201, False)
    assert server.ended(ema.json())["weights"] == "ema"
    assert list((run / "_unshard" / "pins").iterdir()) == []


def test_the_beginning_of_an_id_is_the_job_if_no_other_begins_like_it(
    server: Live, done: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = str(done["id"])[:8]
    for path in (f"/api/v1/jobs/{short}", f"/api/v1/jobs/{short}/log", f"/jobs/{short}"):
        assert server.call("GET", path).status_code == 200, path
    assert server.v1("DELETE", f"/jobs/{short}") == done
    assert server.call("GET", f"/api/v1/jobs/{short[:3]}").status_code == 404
    alike = iter(("0" * 16, "abcdabcd00000000", "abcdabcd11111111"))  # the first of the run
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(alike))
    store = Store(server.work / "jobs.sqlite")
    for step in (1, 2):
        store.submit(Request("/gone", "no-profile", ("t",), step), pin=None)
    for method in ("GET", "DELETE"):
        answer = server.call(method, "/api/v1/jobs/abcdabcd")
        assert answer.status_code == 400
        assert error_of(answer).found == "abcdabcd00000000, abcdabcd11111111"
    assert server.v1("GET", "/jobs/abcdabcd1")["id"] == "abcdabcd11111111"
    for start in ("abcdabcd0", "abcdabcd1"):  # they would wait for their profile
        assert server.v1("DELETE", f"/jobs/{start}")["status"] == "cancelled"
    store.close()


def test_the_directory_of_a_run_means_its_newest_step(server: Live, run: Path) -> None:
    job = server.ended(server.submit(run))
    assert (job["step"], job["checkpoint"]) == (10, str(run / "checkpoint-10"))
    assert not (run.parent / "_unshard").exists()


def test_the_directory_of_a_run_with_a_step_means_that_step(server: Live, run: Path) -> None:
    job = server.ended(server.submit(run, "chosen", step=5))
    assert (job["step"], job["checkpoint"]) == (5, str(run / "checkpoint-5"))
    body = {"checkpoint": str(run), "profile": "script", "tasks": ["chosen"], "step": 7}
    answer = server.call("POST", "/api/v1/jobs", json=body)
    assert (answer.status_code, error_of(answer).found) == (400, "steps 5, 10")


def test_the_weights_directory_means_its_step(server: Live, run: Path) -> None:
    job = server.ended(server.submit(run / "checkpoint-10" / "pytorch_model_fsdp_0", "inside"))
    assert (job["run"], job["step"]) == ("run", 10)
    assert not (run / "checkpoint-10" / "_unshard").exists()


def test_jobs_are_listed_by_what_they_are(server: Live, run: Path, done: Fields) -> None:
    server.ended(server.submit(run / "checkpoint-10", "score", run="elsewhere"))

    def listed(query: str) -> list[object]:
        jobs = server.v1("GET", f"/jobs?{query}")["jobs"]
        assert isinstance(jobs, list)
        return [job["id"] for job in jobs]

    assert done["id"] in listed("status=completed&run=run&step=5&weights=model&profile=script")
    for query in ("status=queued", "run=other", "step=6", "weights=ema", "profile=other"):
        assert done["id"] not in listed(query)
    assert len(listed("limit=1")) == 1


def test_results_are_numbers_with_their_steps(server: Live, done: Fields) -> None:
    found = server.v1("GET", "/results?run=run&step=5")["results"]
    assert isinstance(found, list)
    mine = {
        (one["task"], one["metric"]): one["value"] for one in found if one["job_id"] == done["id"]
    }
    assert mine["score", "acc"] == 0.05
    assert len(mine) == 6
    assert server.v1("GET", "/results?run=none") == {"results": [], "next": None}


def test_runs_and_profiles_are_listed(server: Live, done: Fields) -> None:
    runs = server.v1("GET", "/runs")["runs"]
    assert isinstance(runs, list)
    assert done["run"] in runs
    profiles = server.v1("GET", "/profiles")["profiles"]
    (script,) = [one for one in profiles if one["name"] == "script"]  # type: ignore[attr-defined]
    revision = script.pop("revision")
    assert (type(revision), len(revision)) == (str, 12)
    known = {"name": "script", "kind": "command", "gpus": 1, "order": "oldest", "max_lag": None}
    assert script == known
    with server.client() as client:
        # As a submission means them: by name, by a type of lmms-eval's model, by both.
        asked = ("script", "qwen2_5_vl", "lmms-eval:qwen2_5_vl")
        found = [[one["name"] for one in client.profiles(name)] for name in asked]
        assert found == [["script"], ["lmms-eval"], ["lmms-eval"]]
        with pytest.raises(RefusedError, match="unknown profile 'none'"):
            client.profiles("none")


def test_a_running_job_is_cancelled_with_all_its_processes(server: Live, run: Path) -> None:
    job = server.submit(run / "checkpoint-5", "waits", step=7)
    pids = server.began(7)["pids"]
    assert not all_gone(pids)
    assert server.v1("DELETE", f"/jobs/{job['id']}")["status"] == "cancelled"
    until(lambda: all_gone(pids), "the end of its processes")
    assert server.v1("DELETE", f"/jobs/{job['id']}")["status"] == "cancelled"
    until(lambda: not any((run / "_unshard" / "pins").iterdir()), "the end of its pin")


def test_a_job_that_waits_is_cancelled(server: Live, run: Path) -> None:
    first = server.submit(run / "checkpoint-5", "waits", step=8, num_gpus=4)
    second = server.submit(run / "checkpoint-5", "waits", step=9)
    server.began(8)
    assert (second["status"], server.job(second)["position"]) == ("queued", 1)
    assert server.v1("DELETE", f"/jobs/{second['id']}")["status"] == "cancelled"
    server.v1("DELETE", f"/jobs/{first['id']}")
    assert not (server.control / "began-9").exists()


def test_what_has_ended_is_retried_and_nothing_else(server: Live, run: Path) -> None:
    failed = server.ended(server.submit(run / "checkpoint-5", "fails"), "failed")
    again = server.v1("POST", f"/jobs/{failed['id']}/retry")
    assert (again["id"], again["status"], again["error"]) == (failed["id"], "queued", None)
    server.ended(failed, "failed")
    waiting = server.submit(run / "checkpoint-5", "waits", step=8)
    answer = server.call("POST", f"/api/v1/jobs/{waiting['id']}/retry")
    assert (answer.status_code, error_of(answer).expected) == (400, "a job that has ended")
    server.v1("DELETE", f"/jobs/{waiting['id']}")
    assert server.call("POST", "/api/v1/jobs/0000/retry").status_code == 404


def test_a_job_is_retried_from_its_pin_when_its_checkpoint_is_gone(
    server: Live,
) -> None:
    place = checkpoint(server.root / "gone", 5)
    pin = pin_checkpoint(place, quota=Quota(count=8))
    failed = server.ended(server.submit(place, "fails", pin=str(pin.path)), "failed")
    rmtree(place)
    again = server.v1("POST", f"/jobs/{failed['id']}/retry")
    assert again["id"] == failed["id"]
    assert "nothing was measured" in str(server.ended(failed, "failed")["error"])


def test_a_log_is_read_part_by_part(server: Live, run: Path) -> None:
    job = server.ended(server.submit(run / "checkpoint-5", "talks"))
    text, offset = "", 0
    while True:
        part = server.v1("GET", f"/jobs/{job['id']}/log?offset={offset}")
        text += str(part["text"])
        assert isinstance(part["offset"], int)
        offset = part["offset"]
        if part["ended"]:
            break
    assert text == f"evaluating step 5 with model\n{'ä' * 2_000_000} the end\n"
    assert offset == len(text.encode())
    middle = server.v1("GET", f"/jobs/{job['id']}/log?offset={offset - 4}")
    assert middle["text"] == "end\n"


def test_events_come_in_order_and_go_on_where_a_client_stopped(server: Live, done: Fields) -> None:
    assert done["status"] == "completed"
    first = read_events(server, {}, "since=0", 4)
    numbers = [int(str(event["number"])) for event in first]
    assert numbers == sorted(set(numbers))
    rest = read_events(server, {"Last-Event-ID": str(numbers[1])}, "since=0", 2)
    assert [event["number"] for event in rest] == numbers[2:4]
    odd = read_events(server, {"Last-Event-ID": b"\xb2"}, f"since={numbers[0]}", 1)
    assert odd[0]["number"] == numbers[1]
    job = first[0]["job"]
    assert isinstance(job, dict)
    views.JobView.model_validate(job)


def read_events(
    server: Live, headers: dict[str, str | bytes], query: str, count: int
) -> list[Fields]:
    found: list[Fields] = []
    url = f"{server.url}/api/v1/events?{query}"
    given = [
        (name.encode(), one.encode() if isinstance(one, str) else one)
        for name, one in headers.items()
    ]
    with httpx.stream("GET", url, headers=httpx.Headers(given), timeout=LIMIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        ids = []
        for line in answer.iter_lines():
            if line.startswith("id: "):
                ids.append(int(line[4:]))
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                break
    assert ids == [event["number"] for event in found]
    return found


def test_a_stream_without_events_is_kept_alive(server: Live) -> None:
    url = f"{server.url}/api/v1/events?since={2**53}"
    beats = 0
    with httpx.stream("GET", url, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            beats += line == ": alive"
            if beats == 2:
                break
    assert beats == 2


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/jobs/none", 404, "job none does not exist"),
        ("DELETE", "/jobs/none", 404, "job none does not exist"),
        ("GET", "/jobs/none/log", 404, "job none does not exist"),
        ("GET", "/nothing", 404, "Not Found"),
        ("PUT", "/jobs", 405, "Method Not Allowed"),
        ("GET", "/jobs?status=odd", 400, "status"),
        ("GET", "/jobs?limit=0", 400, "limit"),
        ("GET", "/jobs?before=none", 404, "job none does not exist"),
        ("GET", "/results?limit=10001", 400, "limit"),
        ("GET", "/results?after=x", 400, "after"),
        ("GET", f"/jobs?step={10**30}", 400, "step"),
        ("GET", f"/events?since={10**30}", 400, "since"),
        ("GET", f"/results?step={10**19}", 400, "step"),
    ],
)
def test_errors_have_the_same_form(
    server: Live, method: str, path: str, status: int, message: str
) -> None:
    answer = server.call(method, f"/api/v1{path}")
    assert answer.status_code == status
    assert message in error_of(answer).message


def test_a_refusal_says_what_is_wrong(server: Live, run: Path) -> None:
    body = {"checkpoint": str(run / "checkpoint-5"), "profile": "none:x", "tasks": ["score"]}
    error = error_of(server.call("POST", "/api/v1/jobs", json=body))
    assert (error.type, error.code, "script" in error.expected) == ("UsageError", 2, True)
    error = error_of(server.call("POST", "/api/v1/jobs", json={**body, "extra": 1}))
    assert error.message.startswith("extra:")
    error = error_of(server.call("POST", "/api/v1/jobs", json={**body, "profile": "lm_eval"}))
    assert "unknown profile 'lm_eval'" in error.message
    assert "script" in error.expected
    gone = {**body, "profile": "script", "checkpoint": str(run / "other" / "checkpoint-99")}
    answer = server.call("POST", "/api/v1/jobs", json=gone)
    assert (answer.status_code, error_of(answer).type) == (400, "UsageError")


def test_the_description_names_every_answer_and_their_models(server: Live, done: Fields) -> None:
    spec = server.call("GET", "/openapi.json").json()
    answers: dict[str, type[BaseModel]] = {
        f"/api/v1/jobs/{done['id']}": views.JobView,
        "/api/v1/jobs": views.JobList,
        "/api/v1/results": views.ResultList,
        "/api/v1/runs": views.RunList,
        "/api/v1/profiles": views.ProfileList,
        f"/api/v1/jobs/{done['id']}/log": views.LogPart,
    }
    for path, model in answers.items():
        found = server.call("GET", path).json()
        assert model.model_validate(found, strict=False).model_dump(mode="json") == found
        stated = spec["paths"][path.replace(str(done["id"]), "{job_id}")]["get"]["responses"]
        schema = stated["200"]["content"]["application/json"]["schema"]
        assert schema["$ref"].rpartition("/")[2] == model.__name__
    for path, methods in spec["paths"].items():
        for method in methods.values():
            error = method["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"]
            is_ours = path.startswith("/api/v1")
            assert error.endswith("/ErrorBody" if is_ours else "/Problem"), path
            assert "422" not in method["responses"], path
    assert "5XX" in spec["paths"]["/merge"]["post"]["responses"]


def test_nothing_is_served_that_needs_the_internet(server: Live) -> None:
    assert server.call("GET", "/docs").status_code == 404
    assert server.call("GET", "/redoc").status_code == 404
    assert "http://" not in server.call("GET", "/openapi.json").text
