"""Evaluators on a real Ray cluster of two nodes with pretended GPUs, driven over HTTP."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bucket_server import ACCESS_KEY, BUCKET, SECRET_KEY, serving
from evaluation.ray_nodes import PYTHON, Nodes, needs_ray, nodes
from evaluation.running import all_gone, whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, started
from unshard.evaluate.server.store.store import Store
from waiting import wait_until

pytestmark = [needs_ray, pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes(2, 2) as made:
        yield made


@pytest.fixture
def server(cluster: Nodes, tmp_path: Path) -> Iterator[Live]:
    """Run a server that may use more GPUs than the cluster has."""
    made = Live(tmp_path, interpreter=PYTHON)
    made.configure(executor="ray", ray_address=cluster.address, gpus=6)
    with started(made):
        yield made
        made.go()
        with made.client() as client:
            for job in client.jobs():
                client.cancel(str(job["id"]))


def submit(server: Live, *steps: int) -> dict[int, Fields]:
    model = whole_model(server.root / "model")
    return {step: server.submit(model, "waits", step=step, run="run") for step in steps}


def begun(server: Live) -> set[int]:
    return {int(note.name.partition("-")[2]) for note in server.control.glob("began-*")}


def log_of(server: Live, job: Fields) -> str:
    return str(server.v1("GET", f"/jobs/{job['id']}/log")["text"])


def node_of(server: Live, job: Fields, attempt: int = 1) -> str:
    place = server.work / "jobs" / str(job["id"]) / str(attempt) / "node" / "placed.json"
    return str(json.loads(place.read_text())["node"])


def test_jobs_share_the_gpus_of_all_nodes_and_a_cancelled_one_makes_room(server: Live) -> None:
    jobs = submit(server, 1, 2, 3, 4, 5)
    wait_until(lambda: len(begun(server)) == 4, "an evaluator on every GPU")
    notes = {step: server.began(step) for step in begun(server)}
    places = {(node_of(server, jobs[step]), str(note["gpus"])) for step, note in notes.items()}
    assert sorted(gpu for _, gpu in places) == ["0", "0", "1", "1"]
    assert len({node for node, _ in places}) == 2

    (last,) = jobs.keys() - notes.keys()
    wait_until(lambda: "waiting for 1 GPU on a node" in log_of(server, jobs[last]), "its log")
    first = min(notes)
    wait_until(lambda: f"evaluating step {first}" in log_of(server, jobs[first]), "its log")

    server.v1("DELETE", f"/jobs/{jobs[first]['id']}")
    wait_until(lambda: all_gone(notes[first]["pids"]), "the end of the processes on the node")
    assert server.began(last)["gpus"] in {"0", "1"}
    server.go()
    for step in jobs.keys() - {first}:
        assert server.ended(jobs[step])["attempts"] == 1
    server.ended(jobs[first], "cancelled")


def test_a_killed_server_finds_its_evaluators_again_and_begins_none_twice(server: Live) -> None:
    jobs = submit(server, 1, 2, 3)
    wait_until(lambda: len(begun(server)) == 3, "all evaluators")
    before = {step: server.began(step)["pids"] for step in jobs}
    server.kill()
    server.start()
    assert "adopted: attempt 1" in server.told()
    assert not any(all_gone(pids) for pids in before.values())
    server.go()
    for step, job in jobs.items():
        assert server.ended(job)["attempts"] == 1
        assert server.began(step)["pids"] == before[step]
        assert log_of(server, job).count(f"evaluating step {step}") == 1


def test_the_jobs_of_a_lost_node_run_on_the_other_one(server: Live, cluster: Nodes) -> None:
    jobs = submit(server, 1, 2, 3, 4)
    wait_until(lambda: len(begun(server)) == 4, "an evaluator on every GPU")
    before = {step: server.began(step)["pids"] for step in jobs}
    was_on = {step: node_of(server, job) for step, job in jobs.items()}
    cluster.kill(1)
    wait_until(lambda: sum(map(all_gone, before.values())) == 2, "the end of what ran there")
    lost = {step for step, pids in before.items() if all_gone(pids)}
    assert len({was_on[step] for step in lost}) == 1
    server.go()
    for step, job in jobs.items():
        assert server.ended(job)["attempts"] == (2 if step in lost else 1)
        assert failures_of(server, job) == 0
        if step in lost:
            assert node_of(server, job, 2) != was_on[step]
    assert "is lost" in server.told()
    cluster.add(2)


def test_what_is_on_a_node_ends_with_the_process_that_placed_it(server: Live) -> None:
    """As after a crash of the server's machine; Ray kills the actor, but not its grandchildren."""
    (job,) = submit(server, 1).values()
    pids = server.began(1)["pids"]
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        if str(job["id"]) in environment_of(place.parent) and b"cluster.place" in read(place):
            os.kill(int(place.parent.name), signal.SIGKILL)
    wait_until(lambda: all_gone(pids), "the end of the processes on the node")
    wait_until(lambda: server.job(job)["status"] == "queued", "the next attempt")
    assert failures_of(server, job) == 0


def test_a_checkpoint_in_a_store_is_merged_by_the_server_and_no_node_has_credentials(
    cluster: Nodes, tmp_path: Path
) -> None:
    """The cluster was started before there was a store: only the server has address and keys."""
    with serving() as store:
        made = checkpoint(tmp_path / "run", 5)
        address = store.upload(made, "runs/run/checkpoint-5")
        server = Live(tmp_path / "server", interpreter=PYTHON)
        executor = {"executor": "ray", "ray_address": cluster.address}
        server.configure(**executor, gpus=2, roots=[f"s3://{BUCKET}/runs"])
        with started(server):
            body = {"checkpoint": address, "profile": "script", "tasks": ["waits"]}
            job = server.v1("POST", "/jobs", json=body)
            server.began(5)
            asked = len(store.requests)
            places = [place.parent for place in Path("/proc").glob("[0-9]*/environ")]
            own = [found for place in places if str(job["id"]) in (found := environment_of(place))]
            assert len(own) >= 4  # two supervisors, what placed the evaluator, and the evaluator
            assert not [found for found in own if SECRET_KEY in found or ACCESS_KEY in found]
            server.go()
            done = server.ended(job)
        assert (done["step"], done["attempts"], done["pinned"]) == (5, 1, False)
        assert len(store.requests) == asked
    for directory in (server.directory, cluster.directory):
        kept = [read(path) for path in directory.rglob("*") if path.is_file()]
        assert kept
        assert not any(key.encode() in data for data in kept for key in (SECRET_KEY, ACCESS_KEY))


def failures_of(server: Live, job: Fields) -> int:
    with closing(Store(server.work / "jobs.sqlite")) as store:
        found = store.get(str(job["id"]))
    assert found is not None
    return found.failures


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def environment_of(process: Path) -> str:
    return read(process / "environ").decode(errors="replace")
