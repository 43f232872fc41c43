"""The results and samples of an evaluator: served while they are there, and kept afterwards."""

import errno
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.running import script_profile
from evaluation.runs import checkpoint
from evaluation.servers import Still, live, still
from unshard.evaluate.jobs import Job, Request
from unshard.evaluate.server.queue import job_files
from unshard.evaluate.server.queue.job_files import JOBS, Retention

RESULTS = '{"results": {"task": {"acc,none": 0.5}}}'
SAMPLES = "".join(json.dumps({"doc": number, "text": "ä"}) + "\n" for number in range(1000))
STDERR = {"task/acc": 0.1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Still]:
    with still(tmp_path, script=script_profile(gpus=0)) as made:
        yield made


def running(server: Still, step: int = 1) -> tuple[Job, Path]:
    """Return a job that runs, and the directory of its evaluator's output."""
    store = server.service.store
    job, _ = store.submit(Request("/x", "script", ("task",), step), pin=None)
    claimed = store.claim(time.time(), job.id)
    assert claimed is not None
    output = server.service.scheduler.directory_of(claimed) / "output"
    (output / "run__model").mkdir(parents=True)
    (output / "results_now.json").write_text(RESULTS)
    (output / "run__model" / "samples_a b+c?#.jsonl").write_text(SAMPLES)
    (output / "weights.bin").write_bytes(b"x")
    return job, output


def complete(server: Still, job: Job, output: Path) -> None:
    server.service.store.complete(job.id, {"task/acc": 0.5}, output / "results_now.json", STDERR)


def listed(server: Still, job: Job) -> dict[str, tuple[int, bool]]:
    answer = server.client.get(f"/api/v1/jobs/{job.id}/files")
    assert answer.status_code == 200
    return {one["name"]: (one["size"], one["is_kept"]) for one in answer.json()["files"]}


def get(server: Still, job: Job, name: str) -> tuple[int, str]:
    answer = server.client.get(f"/api/v1/jobs/{job.id}/files/{name}")
    return answer.status_code, answer.text


def sweep(server: Still, most_mib: int = 64) -> None:
    Retention(
        server.service.store, server.service.work_dir, None, 1e-12, most_mib
    ).sweep(lambda: False)  # fmt: skip


def test_files_are_the_same_before_and_after_their_directory_is_removed(server: Still) -> None:
    job, output = running(server)
    assert listed(server, job) == {}  # it still writes them
    complete(server, job, output)
    whole = {
        "results_now.json": (len(RESULTS), True),
        "run__model/samples_a b+c?#.jsonl": (len(SAMPLES.encode()), True),
    }
    for is_removed in (False, True):
        assert (server.service.work_dir / JOBS / job.id).exists() is not is_removed
        assert listed(server, job) == whole
        assert next(iter(listed(server, job))) == "results_now.json"
        assert get(server, job, "results_now.json") == (200, RESULTS)
        assert get(server, job, "run__model/samples_a%20b%2Bc%3F%23.jsonl") == (200, SAMPLES)
        assert get(server, job, "weights.bin")[0] == 404
        page = server.client.get(f"/view/jobs/{job.id}").text
        assert f"/api/v1/jobs/{job.id}/files/run__model/samples_a%20b%2Bc%3F%23.jsonl" in page
        sweep(server)
    stored = sum(path.stat().st_size for path in (server.service.work_dir / "files").rglob("*.gz"))
    assert 0 < stored < len(SAMPLES) / 4


def test_a_browser_runs_nothing_of_a_file(server: Still) -> None:
    job, output = running(server)
    (output / "samples_x.jsonl").write_text("<script>alert(1)</script>")
    complete(server, job, output)
    headers = server.client.get(f"/api/v1/jobs/{job.id}/files/samples_x.jsonl").headers
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-disposition"] == "attachment; filename*=UTF-8''samples_x.jsonl"


@pytest.mark.parametrize(
    "name",
    ["../log.txt", "..%2Flog.txt", "%2e%2e/log.txt", "/etc/passwd", "%2Fetc%2Fpasswd",
     "samples_link.jsonl", "linked/samples_secret.jsonl", "samples_pipe.jsonl", "results_no.json",
     "results_now.json/", "run__model", "results_now.json%00"],
)  # fmt: skip
def test_only_files_of_the_evaluator_are_served(server: Still, tmp_path: Path, name: str) -> None:
    job, output = running(server)
    secret = tmp_path / "elsewhere" / "samples_secret.jsonl"
    secret.parent.mkdir()
    secret.write_text("secret")
    (output.parent / "log.txt").write_text("log")
    (output / "samples_link.jsonl").symlink_to(secret)
    (output / "linked").symlink_to(secret.parent)
    os.mkfifo(output / "samples_pipe.jsonl")
    complete(server, job, output)
    for _ in range(2):
        assert len(listed(server, job)) == 2
        code, text = get(server, job, name)
        assert code == 404
        assert "secret" not in text
        sweep(server)


def test_a_job_that_does_not_exist_has_no_files(server: Still) -> None:
    for path in ("/files", "/files/a"):
        assert server.client.get(f"/api/v1/jobs/0000000000000000{path}").status_code == 404


def test_what_is_too_large_is_named(server: Still, caplog: pytest.LogCaptureFixture) -> None:
    """Results come first; of the samples those that fit, smaller ones before larger."""
    job, output = running(server)
    noise = random.Random(0).randbytes(2 << 20)
    (output / "samples_large.jsonl").write_bytes(noise)
    complete(server, job, output)
    sweep(server, most_mib=1)
    found = listed(server, job)
    assert {name: kept for name, (_, kept) in found.items()} == {
        "results_now.json": True,
        "run__model/samples_a b+c?#.jsonl": True,
        "samples_large.jsonl": False,
    }
    assert found["samples_large.jsonl"][0] == 2 << 20
    assert get(server, job, "samples_large.jsonl")[0] == 404
    assert get(server, job, "results_now.json") == (200, RESULTS)
    assert "keep_samples_mb 1 has no room for samples_large.jsonl" in caplog.text
    assert "too large to be kept" in server.client.get(f"/view/jobs/{job.id}").text


def test_none_are_kept_if_none_are_wanted(server: Still) -> None:
    job, output = running(server)
    complete(server, job, output)
    sweep(server, most_mib=0)
    assert listed(server, job) == {}
    assert not (server.service.work_dir / JOBS / job.id).exists()


def test_a_directory_stays_until_its_files_are_kept(
    server: Still, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, output = running(server)
    complete(server, job, output)

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(job_files, "_compress", full)
        sweep(server)
    assert "its files cannot be kept, its directory stays" in caplog.text
    assert len(listed(server, job)) == 2
    assert (server.service.work_dir / JOBS / job.id).exists()
    sweep(server)
    assert not (server.service.work_dir / JOBS / job.id).exists()
    assert get(server, job, "results_now.json") == (200, RESULTS)


def test_a_damaged_list_is_an_empty_one(server: Still) -> None:
    job, output = running(server)
    complete(server, job, output)
    sweep(server)
    path = server.service.work_dir / "files" / job.id / "files.json"
    for text in ("", "[1]", '[{"name": "a"}]', "{"):
        path.write_text(text)
        assert listed(server, job) == {}


@pytest.mark.slow
def test_a_servers_own_jobs_have_files(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        place = checkpoint(server.root / "run", 5)
        job = server.ended(server.submit(place, "samples"))
        path = f"/api/v1/jobs/{job['id']}/files"
        names = [one["name"] for one in server.call("GET", path).json()["files"]]
        assert names == ["results.json", "model/now_samples_samples.jsonl"]
        assert server.call("GET", f"{path}/{names[1]}").text == "{}"
        assert "acc,none" in server.call("GET", f"{path}/{names[0]}").text
