"""What Prometheus reads: /metrics, by the parser of prometheus_client."""

from pathlib import Path

import pytest

from evaluation.running import whole_model
from evaluation.servers import SCRIPT, Live, live
from waiting import wait_until

parser = pytest.importorskip("prometheus_client.parser")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: Live) -> Samples:
    answer = server.call("GET", "/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(parser.text_string_to_metric_families(answer.text))
    assert all(family.documentation for family in families)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"unshard_eval_{name}", frozenset(labels.items())]


def test_prometheus_reads_jobs_attempts_and_requests(tmp_path: Path) -> None:
    with live(tmp_path, script=SCRIPT) as server:
        first = scrape(server)
        assert of(first, "jobs", status="queued") == 0
        assert ("unshard_eval_attempts_total", frozenset({("outcome", "completed")})) not in first
        model = whole_model(server.root / "a-secret-run" / "checkpoint-5")
        server.ended(server.submit(model, "score", step=5))
        server.ended(server.submit(model, "fails", step=5), "failed")
        server.submit(model, "waits", step=5)
        server.began(5)
        assert server.call("GET", "/api/v1/jobs/none").status_code == 404
        assert server.call("GET", "/nothing/here").status_code == 404
        found = scrape(server)
        for status, count in {"completed": 1, "failed": 1, "running": 1, "queued": 0}.items():
            assert of(found, "jobs", status=status) == count
        assert of(found, "running_jobs", phase="evaluating") == 1
        assert (of(found, "gpus"), of(found, "gpus_busy")) == (4, 1)
        assert of(found, "attempts_total", outcome="completed") == 1
        assert of(found, "attempts_total", outcome="failed") == 1
        assert of(found, "attempt_duration_seconds_count") == 2
        assert of(found, "queue_wait_seconds_count") == 2
        assert of(found, "disk_free_bytes") > 0
        assert of(found, "accepting") == 1
        assert of(found, "draining") == 0
        assert of(found, "http_requests_total", route="/api/v1/jobs", status="201") == 3
        assert of(found, "http_requests_total", route="/api/v1/jobs/{job_id}", status="404") == 1
        assert of(found, "http_requests_total", route="other", status="404") == 1
        assert "secret" not in str(found)
        again = scrape(server)
        assert of(again, "attempts_total", outcome="completed") == 1
        server.go()
        wait_until(lambda: of(scrape(server), "attempts_total", outcome="completed") == 2, "it")


def test_the_metrics_need_the_token_if_there_is_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    with live(tmp_path, token_file=str(token)) as server:
        assert server.call("GET", "/metrics").status_code == 401
        server.headers["Authorization"] = "Bearer 0123456789abcdef"
        assert of(scrape(server), "http_requests_total", route="other", status="401") == 1
