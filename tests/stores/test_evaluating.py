"""Checkpoints in an object store are evaluated; nothing is pinned, and the job says so."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bucket_server import ACCESS_KEY, BUCKET, SECRET_KEY, Store
from evaluation.running import job_of, request, scheduler, wait_for
from evaluation.runs import checkpoint
from evaluation.servers import Live, Stub, cli, live, scores, serving, still, unshard
from ranks import save_ranks, some_tensors
from unshard.api.following.finder import CheckpointFinder
from unshard.errors import StoreError, UsageError
from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.pins.files import read_stamps
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.queue.scheduler import Scheduler
from unshard.evaluate.server.store.store import Store as Jobs
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from unshard.read.finding.versions import fingerprint
from unshard.stores.remote_path import path_of
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.xdist_group("a bucket")

ROOT = f"s3://{BUCKET}/runs"
SCRIPT = """
import json, os, sys
model, output, _, tasks, step, _ = sys.argv[1:]
assert any(name.endswith(".safetensors") for name in os.listdir(model)), os.listdir(model)
given = [name for name in os.environ if name.startswith("AWS_") and "KEY" in name]
with open(os.path.join(output, "results.json"), "w") as file:
    json.dump({"score": {"acc": int(step) / 100, "credentials": len(given)}}, file)
"""
DONE = 'done(size=sum(os.path.getsize(one) for one in model.glob("*.safetensors")))'


@pytest.fixture(scope="module")
def server(served: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    assert served.endpoint  # the server inherits its address and keys
    directory = tmp_path_factory.mktemp("server")
    with live(directory, script=SCRIPT, roots=[ROOT]) as started:
        yield started


def saved(store: Store, directory: Path, run: str, step: int) -> str:
    """Put a checkpoint of two ranks into the store; return its address."""
    made = checkpoint(directory / run, step)
    return store.upload(made, f"runs/{run}/{made.name}")


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_and_its_result_has_the_step(
    store: Store, server: Live, tmp_path: Path
) -> None:
    address = saved(store, tmp_path, "first", 5)
    asked = ("--tasks=score", "--profile=script")
    done = cli(server.url, "submit", address, *asked, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    assert (job["checkpoint"], job["run"], job["step"]) == (address, "first", 5)
    assert job["pinned"] is False
    assert job["metrics"] == {"score/acc": 0.05, "score/credentials": 0.0}
    (again,) = json.loads(cli(server.url, "submit", address, *asked, "--json").stdout)["jobs"]
    assert again["id"] == job["id"]  # its objects are the same
    assert ", not pinned" in server.told(0)
    kept = [path.read_bytes() for path in server.directory.rglob("*") if path.is_file()]
    assert not any(secret.encode() in data for data in kept for secret in (ACCESS_KEY, SECRET_KEY))


@pytest.mark.parametrize(
    "address",
    [
        f"s3://{BUCKET}/other/first/checkpoint-5",
        f"s3://{BUCKET}/runs-2/checkpoint-5",
        f"s3://{BUCKET}/runs/../other/checkpoint-5",
        f"s3://{BUCKET}/runs/%2e%2e/other/checkpoint-5",
        f"s3a://{BUCKET}/runs/first/checkpoint-5",
        "s3://another/runs/first/checkpoint-5",
        f"s3://{ACCESS_KEY}:{SECRET_KEY}@{BUCKET}/runs/first",
        f"s3://{BUCKET}/runs/first?token={SECRET_KEY}",
        f"/runs/s3:/{BUCKET}/runs/first",
        "file:///etc/passwd",
    ],
)
def test_what_is_not_below_a_root_is_refused_without_a_request(
    store: Store, server: Live, address: str
) -> None:
    body = {"checkpoint": address, "profile": "script", "tasks": ["score"]}
    answer = server.call("POST", "/api/v1/jobs", json=body)
    assert answer.status_code == 400
    assert not store.requests
    if SECRET_KEY in address:
        assert SECRET_KEY not in answer.text
    assert SECRET_KEY not in server.told(0)


def test_a_pin_in_a_store_and_a_profile_that_merges_nothing_are_refused(
    store: Store, tmp_path: Path
) -> None:
    address = saved(store, tmp_path, "direct", 5)
    profile = LmEvalProfile(weights="direct", model="hf", interpreter="python3")
    with still(tmp_path, direct=profile) as one:
        config = one.service.config.model_copy(update={"roots": (path_of(ROOT),)})
        pins = type(one.service.pins)(one.service.store, config.roots, one.service.pins.quota)
        with pytest.raises(UsageError, match="pin cannot be accepted"):
            pins.find_client_pin(f"{ROOT}/direct/_unshard/pins/aa/checkpoint-5")
        service = replace(one.service, config=config, pins=pins)
        asked = request(Path(address), 5)
        with pytest.raises(UsageError, match="cannot read object stores"):
            service.submit(replace(asked, checkpoint=address, profile="direct"), None)


@pytest.fixture
def queued(store: Store, tmp_path: Path) -> Iterator[tuple[Jobs, Scheduler, Job, str]]:
    """A job that waits for its scheduler, and the address of its checkpoint."""
    address = saved(store, tmp_path, tmp_path.name, 5)
    jobs, one = scheduler(tmp_path / "work", DONE, backoff_s=600.0)
    stamps = read_stamps(path_of(address))
    asked = request(Path("x"), 5, fingerprint=fingerprint(stamps), stamps=stamps)
    job, _ = jobs.submit(replace(asked, checkpoint=address), pin=None)
    try:
        yield jobs, one, job, address
    finally:
        one.stop(end=True)
        jobs.close()


def test_what_was_replaced_while_it_waited_fails_at_once(
    store: Store, queued: tuple[Jobs, Scheduler, Job, str], tmp_path: Path
) -> None:
    jobs, one, job, address = queued
    save_ranks(tmp_path / "again", some_tensors(7), 2)
    store.upload(
        tmp_path / "again", f"{address.removeprefix(f's3://{BUCKET}/')}/pytorch_model_fsdp_0"
    )
    one.start()
    ended = wait_for(jobs, job.id, Status.FAILED)
    assert ended.attempts == 1
    assert "was rewritten or replaced while it was waiting" in str(ended.error)


def test_what_is_gone_expires(store: Store, queued: tuple[Jobs, Scheduler, Job, str]) -> None:
    jobs, one, job, address = queued
    prefix = address.removeprefix(f"s3://{BUCKET}/")
    for name in store.files(prefix):
        store.s3.delete_object(Bucket=BUCKET, Key=f"{prefix}/{name}")
    one.start()
    ended = wait_for(jobs, job.id, Status.EXPIRED)
    assert ended.attempts == 1
    assert "an object store has no pins" in str(ended.error)


def test_a_store_that_refuses_postpones_the_job(
    store: Store, queued: tuple[Jobs, Scheduler, Job, str]
) -> None:
    """The credentials may be corrected; attempts are far apart, and none counts as a failure."""
    jobs, one, job, _ = queued
    store.fault = lambda _: "403"
    one.start()
    wait_until(lambda: job_of(jobs, job.id).error is not None, "an attempt")
    waiting = job_of(jobs, job.id)
    assert (waiting.status, waiting.attempts, waiting.failures) == (Status.QUEUED, 1, 0)
    assert "the store answers 403" in str(waiting.error)


def test_a_server_whose_store_does_not_answer_has_the_client_wait(
    store: Store, server: Live
) -> None:
    store.fault = lambda _: "403"
    body = {"checkpoint": f"{ROOT}/away/checkpoint-5", "profile": "script", "tasks": ["score"]}
    answer = server.call("POST", "/api/v1/jobs", json=body)
    assert answer.status_code == 503
    assert "Retry-After" in answer.headers
    assert answer.json()["error"]["type"] == StoreError.__name__


def test_a_trainer_submits_an_address_without_a_pin(store: Store, tmp_path: Path) -> None:
    address = saved(store, tmp_path, "trained", 10)
    with serving(Stub(finishes=scores)) as stub:
        fields = {"server_url": stub.url, "profile": "p", "tasks": ["t"], "poll_interval": 0.02}
        submitter = Submitter(EvalConfig.from_dict(fields), tmp_path / "run")
        assert submitter.submit(address, 10)
        assert submitter.close(LIMIT_S)
        assert submitter.completed() == [(10, {"unshard_eval/t/acc": 0.1})]
        (body,) = stub.submissions
    assert body["checkpoint"] == address
    assert "pin" not in body
    with pytest.raises(UsageError, match="on a disk"):
        Submitter(EvalConfig.from_dict(fields), path_of(ROOT))


def test_a_checkpoint_is_complete_when_its_objects_rest_and_it_can_be_read(
    store: Store, tmp_path: Path
) -> None:
    made = checkpoint(tmp_path / "growing", 10)
    (last,) = made.rglob("*rank_1.pt")
    whole = last.read_bytes()
    last.unlink()
    address = store.upload(made, "runs/growing/checkpoint-10")
    finder = CheckpointFinder(path_of(f"{ROOT}/growing"))
    assert [finder.look() for _ in range(3)] == [[], [], []]
    key = f"runs/growing/checkpoint-10/pytorch_model_fsdp_0/{last.name}"
    for body in (whole[:-100], whole):
        store.s3.put_object(Bucket=BUCKET, Key=key, Body=body)
        assert finder.look() == []  # it has just changed
        found = finder.look()
        assert len(found) == (body is whole)
        reads = len(store.requests)
        assert finder.look() == []
        assert not [one for one in store.requests[reads:] if one.range]  # nothing is new
    assert str(found[0].path) == address
    assert finder.look() == []
    assert finder.is_as_found(found[0])
    store.s3.put_object(Bucket=BUCKET, Key=key, Body=whole[:-1] + b"x")
    assert not finder.is_as_found(found[0])
    store.s3.put_object(Bucket=BUCKET, Key=key, Body=whole)
    assert finder.is_as_found(found[0])
    store.s3.delete_object(Bucket=BUCKET, Key="runs/growing/checkpoint-10/config.json")
    assert not finder.is_as_found(found[0])
    store.fault = lambda _: "403"
    assert finder.look() == []


def test_a_look_at_a_run_lists_its_steps_once_and_only_new_ones_deep(
    store: Store, tmp_path: Path
) -> None:
    finder = CheckpointFinder(path_of(f"{ROOT}/many"))
    for step in (10, 20, 30):
        saved(store, tmp_path, "many", step)
        found = [finder.look() for _ in range(2)]
        assert [[one.step for one in look] for look in found] == [[], [step]]
    store.forget_requests()
    assert finder.look() == []
    assert [one.query.rpartition("prefix=")[2] for one in store.requests] == ["runs/many/"]
    store.s3.put_object(Bucket=BUCKET, Key="runs/many/checkpoint-40/config.json", Body=b"{}")
    store.forget_requests()
    assert finder.look() == []
    listed = [one.query for one in store.requests]
    assert [one for one in listed if "checkpoint-40" in one]
    assert not [one for one in listed if "checkpoint-10" in one or "checkpoint-20" in one]


@pytest.mark.slow
def test_a_run_in_a_store_is_watched_and_results_come_back_at_their_steps(
    store: Store, server: Live, tmp_path: Path
) -> None:
    for step in (10, 20):
        saved(store, tmp_path, "watched", step)
    arguments = ("--tasks=score", "--profile=script", "--once", "--interval=0.1")
    place = tmp_path / "here"
    place.mkdir()
    watch = ("eval", "watch", f"{ROOT}/watched", *arguments, f"--server={server.url}")
    done = unshard(*watch, f"--work-dir={place}")
    assert done.stdout.splitlines() == ["step 10: submitted (model)", "step 20: submitted (model)"]
    results = place / "s3" / BUCKET / "runs" / "watched" / "_unshard" / "results.jsonl"

    def fetched() -> bool:
        again = unshard(*watch, f"--work-dir={place}")
        assert "submitted" not in again.stdout
        return results.is_file() and len(results.read_text().splitlines()) == 2

    wait_until(fetched, "both results")
    found = {one["step"]: one for one in map(json.loads, results.read_text().splitlines())}
    assert {step: one["metrics"]["unshard_eval/score/acc"] for step, one in found.items()} == {
        10: 0.1,
        20: 0.2,
    }
