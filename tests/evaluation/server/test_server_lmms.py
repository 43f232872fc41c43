"""lmms-eval's protocol, spoken by its own unmodified client and by lmms-engine's trainer."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from evaluation.running import all_gone
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, live
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard.evaluate import lmms_engine as ours
from unshard.evaluate.server import service
from unshard.evaluate.server.http.lmms import JobInfo
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-lmms")]  # one server for all
TOKEN = "correct-horse-battery-staple"  # noqa: S105  (of the test)

CLIENT = """
import asyncio, json, sys
from lmms_eval.entrypoints import AsyncEvalClient, EvalClient

url, run = sys.argv[1:]
five, ten = ({"pretrained": f"{run}/checkpoint-{step}"} for step in (5, 10))
found = {}
with EvalClient(url) as client:
    found["healthy"] = client.is_healthy()
    found["models"], found["tasks"] = client.list_models(), client.list_tasks()
    job = client.evaluate(model="script", tasks=["score"], model_args=five)
    found["submitted"] = job
    found["done"] = client.wait_for_job(job["job_id"], poll_interval=0.1, verbose=False)
    found["again"] = client.evaluate(model="script", tasks=["score"], model_args=five)
    job = client.evaluate(model="script", tasks=["fails"], model_args=five)
    try:
        client.wait_for_job(job["job_id"], poll_interval=0.1, verbose=False)
    except RuntimeError as error:
        found["failed"] = str(error)
    found["merged"] = client.merge_checkpoint(f"{run}/checkpoint-5", checkpoint_type="ema")
    job = client.evaluate(model="script", tasks=["waits"], model_args={**ten, "num_gpus": 4})
    later = client.evaluate(model="script", tasks=["waits", "later"], model_args=ten)
    found["queue"] = client.get_queue_status()
    found["ids"] = [job["job_id"], later["job_id"]]
    for one in (later, job):
        found["cancelled"] = client.cancel_job(one["job_id"])
        found["status"] = client.get_job(one["job_id"])["status"]

async def use():
    async with AsyncEvalClient(url) as client:
        jobs = [
            await client.evaluate(model="script", tasks=[task], model_args=ten)
            for task in ("one", "two")
        ]
        waits = [client.wait_for_job(job["job_id"], poll_interval=0.1) for job in jobs]
        done = await asyncio.gather(*waits)
        return [job["status"] for job in done]

found["asynchronous"] = asyncio.run(use())
print()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that needs a token, which is the password in its address."""
    directory = tmp_path_factory.mktemp("server")
    file = directory / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with live(directory, "--token-file", str(file)) as started:
        started.url = started.url.replace("http://", f"http://user:{TOKEN}@")
        for step in (5, 10):
            checkpoint(started.root / "run", step, ema=True)
        yield started


@pytest.fixture(scope="module")
def run(server: Live) -> Path:
    return server.root / "run"


def evaluate(server: Live, **body: object) -> Fields:
    answer = server.call("POST", "/evaluate", json={"model": "script", "tasks": ["score"], **body})
    assert answer.is_success, answer.text
    found: Fields = answer.json()
    return found


def info(server: Live, job: Fields) -> JobInfo:
    return JobInfo.model_validate(server.call("GET", f"/jobs/{job['job_id']}").json())


@pytest.fixture(scope="module")
def interpreter() -> str:
    """A Python that has lmms-eval's client."""
    found = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON", sys.executable)
    done = subprocess.run(
        [found, "-c", "import lmms_eval.entrypoints"], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("no client of lmms-eval: make .venv-lmms/.installed")
    return found


@pytest.mark.evaluators
def test_its_own_clients_work_unchanged(server: Live, run: Path, interpreter: str) -> None:
    done = subprocess.run(
        [interpreter, "-c", CLIENT, server.url, str(run)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["healthy"], found["tasks"]) == (True, [])
    assert found["models"] == ["lmms-eval", "script"]
    assert found["submitted"]["status"] == "queued"
    (results,) = [one["results"] for one in found["done"]["result"].values() if "results" in one]
    assert json.loads(Path(results).read_text())["results"]["score"]["acc,none"] == 0.05
    assert found["done"]["result"]["metrics"]["score/acc"] == 0.05
    assert found["again"]["job_id"] == found["submitted"]["job_id"]
    assert "nothing was measured" in found["failed"]
    assert (Path(found["merged"]["merged_path"]) / "model.safetensors").is_file()
    assert found["queue"]["queued_jobs"][-1] == found["ids"][1]
    assert found["queue"]["queue_size"] >= 1
    assert found["status"] == "cancelled"
    assert found["asynchronous"] == ["completed", "completed"]


def test_the_checkpoint_is_named_by_whichever_key_and_not_handed_on(
    server: Live, run: Path
) -> None:
    for key in ("model", "pretrained", "ckpt_path"):
        job = evaluate(server, tasks=[key], model_args={key: str(run / "checkpoint-5")})
        assert info(server, job).request.model_args == {"pretrained": str(run / "checkpoint-5")}
        server.call("DELETE", f"/jobs/{job['job_id']}")


def test_lmms_engines_arguments_choose_the_weights(server: Live, run: Path) -> None:
    place = str(run / "checkpoint-10")
    engine = {"model_path": place, "checkpoint_type": "ema", "output_path": None}
    job = evaluate(server, tasks=["chosen"], model_args={"model": place}, lmms_engine_kwargs=engine)
    found = server.ended({"id": job["job_id"]})
    assert (found["weights"], found["step"]) == ("ema", 10)
    log = server.v1("GET", f"/jobs/{job['job_id']}/log")
    assert log["text"] == "evaluating step 10 with ema\n"


def test_misplaced_arguments_are_lifted(server: Live, run: Path) -> None:
    blocker = evaluate(server, tasks=["waits"], model_args={"model": str(run), "num_gpus": 4})
    arguments = {"pretrained": str(run / "checkpoint-5"), "num_gpus": 2, "batch_size": 4}
    job = evaluate(server, model="qwen2_vl", model_args={**arguments, "max_pixels": 1})
    asked = info(server, job).request
    assert (asked.model, asked.num_gpus, asked.batch_size) == ("lmms-eval:qwen2_vl", 2, 4)
    assert asked.model_args == {"pretrained": str(run / "checkpoint-5"), "max_pixels": 1}
    own = {"checkpoint": arguments["pretrained"], "profile": "qwen2_vl", "tasks": asked.tasks}
    same = {**own, "batch_size": 4, "model_args": {"max_pixels": 1}}
    for written in (same, {**same, "batch_size": "4"}):
        assert server.call("POST", "/api/v1/jobs", json=written).json()["id"] == job["job_id"]
    for one in (job, blocker):
        message = server.call("DELETE", f"/jobs/{one['job_id']}").json()["message"]
        assert message == f"Job {one['job_id']} cancelled"
    again = server.call("DELETE", f"/jobs/{job['job_id']}")
    assert (again.status_code, "cancelled" in again.json()["detail"]) == (400, True)


def test_a_job_is_reported_though_its_files_were_removed(server: Live, run: Path) -> None:
    job = evaluate(server, tasks=["tidied"], model_args={"pretrained": str(run / "checkpoint-5")})
    server.ended({"id": job["job_id"]})
    shutil.rmtree(server.work / "jobs" / str(job["job_id"]))
    found = info(server, job)
    assert found.status == "completed"
    assert found.result is not None
    assert found.result["metrics"]["tidied/acc"] == 0.05


def test_files_of_samples_are_listed(server: Live, run: Path) -> None:
    job = evaluate(server, tasks=["samples"], model_args={"pretrained": str(run / "checkpoint-5")})
    server.ended({"id": job["job_id"]})
    result = info(server, job).result
    assert result is not None
    samples = result["checkpoint-5"]["samples"]
    assert isinstance(samples, list)
    assert [Path(path).name for path in samples] == ["now_samples_samples.jsonl"]
    assert Path(samples[0]).is_file()


def test_metrics_with_a_slash_belong_to_their_task() -> None:
    found = service.group_by_task({"mme/acc": 1.0, "mme/a/b,strict": 2.0})
    assert found == {"mme": {"acc,none": 1.0, "a/b,strict": 2.0}}


def test_what_would_measure_nothing_is_refused(server: Live, run: Path) -> None:
    place = str(run / "checkpoint-5")
    body = {"model": "script", "tasks": ["score"], "model_args": {"pretrained": place}}
    answer = server.call("POST", "/evaluate", json={**body, "predict_only": True})
    assert (answer.status_code, "predict_only" in answer.json()["detail"]) == (400, True)


def test_a_running_job_can_be_cancelled(server: Live, run: Path) -> None:
    job = evaluate(server, tasks=["waits", "long"], model_args={"model": str(run / "checkpoint-5")})
    pids = server.began(5)["pids"]
    server.call("DELETE", f"/jobs/{job['job_id']}")
    until(lambda: all_gone(pids), "the end of its processes")
    assert info(server, job).status == "cancelled"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/jobs/none", 404), ("DELETE", "/jobs/none", 404), ("POST", "/evaluate", 422)],
)
def test_errors_have_the_form_that_its_clients_expect(
    server: Live, method: str, path: str, status: int
) -> None:
    answer = server.call(method, path, json={"tasks": []})
    assert answer.status_code == status
    assert isinstance(answer.json()["detail"], str)


@pytest.mark.parametrize(("name", "status"), [("checkpoint-9", 404), ("x" * 300, 400)])
def test_a_checkpoint_that_is_not_there_is_not_merged(
    server: Live, run: Path, name: str, status: int
) -> None:
    answer = server.call("POST", "/merge", json={"checkpoint_path": str(run / name)})
    assert answer.status_code == status


def test_a_merge_is_exact(server: Live, run: Path) -> None:
    """The tensors of a run are float32, among others: none is cast."""
    asked = {"checkpoint_path": str(run / "checkpoint-5"), "checkpoint_type": "ema"}
    answer = server.call("POST", "/merge", json=asked)
    assert_same(merged(Path(answer.json()["merged_path"])), some_tensors(1005))


def test_a_merge_of_a_part_of_a_step_leaves_the_step_alone(server: Live) -> None:
    """verl's actor: rotation goes by the times of steps, and takes all that is in one."""
    step = server.root / "verl" / "global_step_7"
    save_ranks(step / "actor", some_tensors(7), 2)
    (step / "actor" / "config.json").write_text('{"model_type": "qwen2"}')
    before = step.stat().st_mtime_ns
    answer = server.call("POST", "/merge", json={"checkpoint_path": str(step / "actor")})
    place = step.parent / "_unshard" / "merged" / "global_step_7-actor"
    assert answer.json()["merged_path"] == str(place)
    assert_same(merged(place), some_tensors(7))
    assert step.stat().st_mtime_ns == before


def test_a_damaged_checkpoint_is_not_merged(server: Live, run: Path) -> None:
    place = checkpoint(run, 20)
    (place / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt").write_bytes(b"")
    answer = server.call("POST", "/merge", json={"checkpoint_path": str(place)})
    assert (answer.status_code, "rank_1" in answer.json()["detail"]) == (500, True)
    assert not (run / "_unshard" / "merged" / "checkpoint-20").exists()


def test_lmms_engines_backend_gets_the_numbers(
    server: Live, run: Path, backends: ModuleType
) -> None:
    ours.install_client()
    config = {"model": "script", "tasks": ["engine"], "model_args": {"num_gpus": 1}}
    backend = backends.EvalServerBackend(server.url, poll_interval=0.1, eval_config=config)
    try:
        place = str(run / "checkpoint-10")
        job = backend.submit_eval(place, 10, f"{place}/eval", checkpoint_type="ema")
        assert job is not None
        until(lambda: not backend.results_queue.empty(), "its result")
        ((step, metrics),) = backend.check_and_get_completed()
    finally:
        backend.close()
    assert (step, metrics["eval/engine_acc"] in {0.1, 0.5}) == (10, True)
    assert metrics["eval/engine_size"] > 0
    assert not (run / "checkpoint-10" / "eval").exists()
