"""A server through all that happens to it: killed, out of space, checkpoints taken away."""

import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from evaluation.running import all_gone
from evaluation.runs import checkpoint, save_again
from evaluation.servers import Fields, Live, cli, live
from ranks import save_ranks, some_tensors
from unshard.evaluate.pins.pin import Quota, pin_checkpoint, unpin
from unshard.evaluate.server import serve
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-serve")]  # a server for most
QUOTA = Quota(8, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def busy(server: Live) -> Iterator[Fields]:
    """A job that has all GPUs until it is cancelled, so that others wait."""
    place = checkpoint(server.root / "busy", 1)
    (server.control / "began-1").unlink(missing_ok=True)
    job = server.submit(place, "waits", num_gpus=4)
    server.began(1)
    yield job
    server.v1("DELETE", f"/jobs/{job['id']}")


def pins(run: Path) -> list[str]:
    place = run / "_unshard" / "pins"
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def cancel(server: Live, job: Fields) -> None:
    server.v1("DELETE", f"/jobs/{job['id']}")


def test_a_checkpoint_that_is_rotated_away_while_it_waits_is_evaluated(
    server: Live, busy: Fields
) -> None:
    run = server.root / "rotated"
    place = checkpoint(run, 5)
    job = server.submit(place)
    again = server.submit(place)
    assert again["id"] == job["id"]
    assert len(pins(run)) == 1
    shutil.rmtree(place)
    cancel(server, busy)
    assert server.ended(job)["step"] == 5
    until(lambda: pins(run) == [], "the end of its pin")
    assert server.submit(run / "checkpoint-5", step=5, run="rotated")["id"] == job["id"]


def test_items_under_the_same_names_are_told_apart(server: Live) -> None:
    """Two runs of one name; and a training begun anew in the same place."""
    places = [checkpoint(server.root / name / "output", 5) for name in ("one", "other")]
    jobs = [server.ended(server.submit(place)) for place in places]
    assert [(job["run"], job["step"]) for job in jobs] == [("output", 5)] * 2
    pin = pin_checkpoint(places[1], quota=QUOTA)
    again = server.submit(pin.path, step=5, run="output", pin=str(pin.path))
    anew = server.ended(server.submit(checkpoint(server.root / "one" / "output", 5)))
    ids = [job["id"] for job in (*jobs, again, anew)]
    assert (ids[2], len(set(ids))) == (ids[1], 3)
    shutil.rmtree(places[0])
    assert server.submit(places[0], step=5, run="output")["id"] == anew["id"]


def test_a_pin_of_two_jobs_goes_with_the_last(server: Live, busy: Fields) -> None:
    run = server.root / "shared"
    place = checkpoint(run, 5, ema=True)
    model, ema = server.submit(place), server.submit(place, weights="ema")
    assert len(pins(run)) == 1
    shutil.rmtree(place)
    cancel(server, model)
    assert len(pins(run)) == 1
    cancel(server, busy)
    assert server.ended(ema)["weights"] == "ema"
    until(lambda: pins(run) == [], "the end of the pin")


def test_a_clients_pin_is_the_clients(server: Live) -> None:
    run = server.root / "pinned"
    pin = pin_checkpoint(checkpoint(run, 5), quota=QUOTA)
    shutil.rmtree(run / "checkpoint-5")
    job = server.ended(server.submit(pin.path, step=5, run="pinned", pin=str(pin.path)))
    assert (job["run"], pins(run)) == ("pinned", [pin.name])


def test_a_pin_that_is_gone_with_its_checkpoint_expires(server: Live) -> None:
    run = server.root / "expired"
    pin = pin_checkpoint(checkpoint(run, 5), quota=QUOTA)
    shutil.rmtree(run / "checkpoint-5")
    unpin(pin)
    job = server.submit(pin.path, step=5, run="expired", pin=str(pin.path))
    error = str(server.ended(job, "expired")["error"])
    assert "does not exist" in error
    assert "if the trainer pins them, set quota: {count: N, bytes: null}" in error
    found = server.call("GET", f"/jobs/{job['id']}").json()
    assert (found["status"], "does not exist" in found["error"]) == ("failed", True)


def test_a_job_whose_pin_made_room_says_whose_quota_it_was(tmp_path: Path) -> None:
    """The server's own pins, and those of a trainer: 1 each."""
    with live(tmp_path, pin_quota={"count": 1}) as server:
        run = server.root / "run"
        server.submit(checkpoint(run, 1), "waits", num_gpus=4)
        server.began(1)
        servers = [server.submit(checkpoint(run, step), num_gpus=4) for step in (2, 3)]
        clients = []
        for step in (4, 5):
            pin = pin_checkpoint(checkpoint(run, step), quota=Quota(1, None))
            clients.append(server.submit(pin.path, step=step, run="run", pin=str(pin.path)))
        for step in (2, 4):
            shutil.rmtree(run / f"checkpoint-{step}")
        server.go()
        errors = [str(server.ended(jobs[0], "expired")["error"]) for jobs in (servers, clients)]
        for jobs in (servers, clients):
            server.ended(jobs[1])
        assert "step 2 is no longer pinned: the pin_quota is used up" in server.told()
    assert "newer ones: set pin_quota: {count: N} in server.yaml" in errors[0]
    assert "newer ones: set quota: {count: N, bytes: null} in the YAML of the trainer" in errors[1]


def test_a_checkpoint_that_is_gone_before_it_is_pinned_expires(server: Live) -> None:
    run = checkpoint(server.root / "early", 5).parent
    job = server.submit(run / "checkpoint-4", step=4, run="early")
    assert "does not exist" in str(server.ended(job, "expired")["error"])
    nowhere = {"pretrained": str(server.root / "nowhere" / "checkpoint-4")}
    body = {"model": "script", "tasks": ["score"], "model_args": nowhere}
    answer = server.call("POST", "/evaluate", json=body)
    assert (answer.status_code, "does not exist" in answer.text) == (400, True)


@pytest.mark.parametrize("world", [2, 3])
def test_a_checkpoint_that_became_another_is_not_taken_for_the_first(
    server: Live, busy: Fields, world: int
) -> None:
    """The quota removed its pin, and a training began anew in the same place."""
    place = checkpoint(server.root / f"anew-{world}", 5)
    job = server.submit(place)
    shutil.rmtree(place.parent)
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(), world)
    cancel(server, busy)
    error = str(server.ended(job, "failed")["error"])
    assert "replaced while it was waiting" in error
    assert ("model_world_size_2_rank_1.pt" if world == 2 else str(place)) in error


def test_a_file_next_to_a_checkpoint_without_a_pin_is_not_a_change(
    server: Live, busy: Fields
) -> None:
    """The directory of a run that is a checkpoint itself, and a converted file."""
    place = checkpoint(server.root / "grows", 5)
    job = server.submit(place)
    shutil.rmtree(place.parent / "_unshard" / "pins")
    checkpoint(place, 6)
    (place / "pytorch_model_fsdp_0" / "converted.bin").write_bytes(b"other")
    cancel(server, busy)
    assert server.ended(job)["step"] == 5


def test_a_pin_that_is_rewritten_in_place_fails(server: Live, busy: Fields) -> None:
    place = checkpoint(server.root / "rewritten", 5)
    job = server.submit(place)
    file = place / "pytorch_model_fsdp_0" / "model_world_size_2_rank_0.pt"
    with file.open("r+b") as stream:
        stream.write(stream.read(4))
    cancel(server, busy)
    error = str(server.ended(job, "failed")["error"])
    assert "rewritten or replaced while it was waiting" in error
    assert file.name in error


def test_a_step_that_is_saved_twice_has_one_result_and_no_failure(
    server: Live, busy: Fields, caplog: pytest.LogCaptureFixture
) -> None:
    """The first submission waits at the server while the trainer writes the step again."""
    place = checkpoint(server.root / "twice", 5)
    fields = {"server_url": server.url, "profile": "script", "tasks": ["score"]}
    submitter = Submitter(EvalConfig.from_dict({**fields, "poll_interval": 0.05}), place.parent)
    submitter.submit(place, 5)
    until(lambda: server.v1("GET", "/jobs?run=twice")["jobs"], "the first")
    save_again(place)
    submitter.submit(place, 5)
    until(lambda: len(server.v1("GET", "/jobs?run=twice")["jobs"]) == 2, "the second")  # type: ignore[arg-type]
    cancel(server, busy)
    submitter.close(LIMIT_S)
    jobs = server.v1("GET", "/jobs?run=twice")["jobs"]
    assert isinstance(jobs, list)
    assert [job["status"] for job in jobs] == ["completed", "superseded"]
    assert [job["superseded_by"] for job in jobs] == [None, jobs[0]["id"]]
    assert [step for step, _ in submitter.completed()] == [5]
    assert "no result" not in caplog.text
    assert pins(place.parent) == []


def test_jobs_without_gpus_run_next_to_each_other(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        place = checkpoint(server.root / "run", 5)
        jobs = [server.submit(place, "waits", step=step, num_gpus=0) for step in range(3)]
        assert [server.began(step)["gpus"] for step in range(2)] == ["", ""]
        assert not (server.control / "began-2").exists()
        server.go()
        for job in jobs:
            server.ended(job)


def test_eight_jobs_share_four_gpus(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        place = checkpoint(server.root / "run", 1)
        jobs = [server.submit(place, "waits", step=step) for step in range(8)]
        gpus = sorted(str(server.began(step)["gpus"]) for step in range(4))
        assert gpus == ["0", "1", "2", "3"]
        assert server.call("GET", "/queue").json()["queue_size"] == 4
        server.go()
        done = [server.ended(job) for job in jobs]
        assert [one["metrics"]["waits/acc"] for one in done] == [  # type: ignore[index]  # a mapping
            step / 100 for step in range(8)
        ]
        assert {str(server.began(step)["gpus"]) for step in range(8)} == {"0", "1", "2", "3"}


def test_a_server_without_any_configuration(tmp_path: Path) -> None:
    server = Live(tmp_path)
    place = checkpoint(tmp_path / "run", 5)
    server.start("--port=0", "--gpus=0")
    try:
        profiles = server.v1("GET", "/profiles")["profiles"]
        kinds = ("lm-eval", "lmms-eval", "command")
        plain = {"gpus": 0, "order": "oldest", "max_lag": None}
        assert isinstance(profiles, list)
        assert len({one.pop("revision") for one in profiles}) == 3
        assert profiles == [{"name": kind, "kind": kind, **plain} for kind in kinds]
        assert server.url.startswith("http://127.0.0.1:")
        job = server.submit(place, "size", "values", profile="command", weights="model")
        metrics = server.ended(job)["metrics"]
        tensors = some_tensors(5).values()
        assert metrics["size/parameters"] == sum(one.numel() for one in tensors)  # type: ignore[index]
        assert metrics["values/nonfinite"] == 0  # type: ignore[index]  # a mapping
    finally:
        assert server.stop() == 0


def test_a_killed_server_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    server = Live(tmp_path)
    server.configure()
    server.start()
    place = checkpoint(server.root / "run", 5)
    first = server.ended(server.submit(place))
    running = server.submit(place, "waits")
    pids = server.began(5)["pids"]
    waiting = server.submit(place, "later", num_gpus=4)
    server.kill()
    assert not all_gone(pids)
    store = Store(server.work / "jobs.sqlite")
    unneeded = Pins(store, [server.root], QUOTA).ensure_pin(
        checkpoint(server.root / "left", 5), 5, server.root / "left"
    )
    store.close()
    server.configure(pin_quota={"count": 0})
    server.start()
    try:
        assert unneeded is not None
        assert not Path(unneeded).exists()
        assert server.job(first) == first
        assert server.job(running)["status"] == "running"
        unpinned = checkpoint(server.root / "run", 6)
        lost = server.submit(unpinned)
        shutil.rmtree(unpinned)
        server.go()
        assert server.ended(running)["attempts"] == 1
        assert server.ended(waiting)["status"] == "completed"
        assert "does not exist" in str(server.ended(lost, "expired")["error"])
    finally:
        assert server.stop() == 0


def test_a_full_disk_is_reported_and_the_merge_tried_again(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        server.configure()
        run = server.root / "run"
        place = run / "checkpoint-5"
        save_ranks(place / "pytorch_model_fsdp_0", {"big": torch.zeros(5_000_000)}, 1)
        (place / "config.json").write_text("{}")
        assert server.process is not None
        _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (8_000_000, hard))
        job = server.submit(place)
        until(lambda: server.job(job)["error"], "a merge that fails")
        waits = server.job(job)
        assert waits["status"] == "queued"
        assert "large" in str(waits["error"]) or "space" in str(waits["error"])
        assert list((server.work / "merged").iterdir()) == []
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        cancel(server, job)  # and submitted again it need not wait
        assert server.submit(place)["id"] == job["id"]
        assert server.ended(job)["attempts"] == 2


def test_a_server_ends_though_it_merges_for_a_client(tmp_path: Path) -> None:
    server = Live(tmp_path)
    server.configure()
    place = server.root / "run" / "checkpoint-5"
    save_ranks(place / "pytorch_model_fsdp_0", {"big": torch.zeros(150_000_000)}, 1)
    (place / "config.json").write_text("{}")
    server.start()
    answers: list[httpx.Response] = []
    asked = {"checkpoint_path": str(place)}
    merging = threading.Thread(
        target=lambda: answers.append(server.call("POST", "/merge", json=asked))
    )
    merging.start()
    target = place.parent / "_unshard" / "merged"
    until(lambda: target.exists() and any(target.iterdir()), "a merge that has begun")
    assert server.stop() == 0
    merging.join()
    assert [answer.status_code for answer in answers] == [503]
    assert not (target / "checkpoint-5").exists()


def test_a_server_ends_though_a_client_follows_its_events(server: Live, tmp_path: Path) -> None:
    other = Live(tmp_path)
    other.configure()
    other.start()
    with httpx.stream("GET", f"{other.url}/api/v1/events", timeout=LIMIT_S) as answer:
        assert next(answer.iter_lines()) == ": alive"
        assert other.stop() == 0
    taken = server.url.rpartition(":")[2]
    done = cli("", "serve", "--port", taken, "--work-dir", str(tmp_path / "work"))
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True)
    assert "choose another port: --port N" in done.stderr
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("correct-horse-battery-staple")
    elsewhere = ("--host", "203.0.113.1", "--token-file", str(tmp_path / "token"))
    done = cli("", "serve", *elsewhere, "--work-dir", str(tmp_path / "work"))
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True)
    assert "--port N" not in done.stderr  # no such address here: another port is no help
    done = cli("", "serve", "--port", "0", "--work-dir", str(server.work))
    assert (done.returncode, "another server is using it" in done.stderr) == (2, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_answer_does_not_wait_for_its_clients_acknowledgement(host: str) -> None:
    """asyncio leaves it to whoever listens; each answer has two packets, headers and body."""
    with (
        serve._listen(host, 0) as listening,
        socket.create_connection(listening.getsockname()[:2]),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
