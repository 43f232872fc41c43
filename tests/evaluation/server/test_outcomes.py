"""What is recorded of an attempt that has ended, without the processes that it had."""

import resource
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from evaluation.running import job_of, request, script_profile
from unshard.evaluate.jobs import Status
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.attempts.attempt import Attempt
from unshard.evaluate.server.attempts.merging import Merger
from unshard.evaluate.server.evaluators.work import Scores
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.queue.outcomes import Outcomes
from unshard.evaluate.server.store.store import Store


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_numbers_are_kept_where_earlier_attempts_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        merger = Merger(tmp_path / "merged", at_once=1)
        pins = Pins(store, (), Quota())
        ended = Outcomes(store, merger, pins, 0.0, lambda: True)
        store.submit(request(tmp_path), pin=None)
        job = store.claim(time.time())
        assert job is not None
        directory = tmp_path / "jobs" / job.id / "2"
        for number in "12":
            (directory.parent / number).mkdir(parents=True)
        attempt = Attempt(job, script_profile(), (), directory)
        with no_more_files():
            ended.record(attempt, Scores({"task/acc": 0.5}, {}))
        now = job_of(store, job.id)
    assert (now.status, now.metrics) == (Status.COMPLETED, {"task/acc": 0.5})
    assert "Too many open files" in caplog.text
    assert [one.name for one in sorted(directory.parent.iterdir())] == ["1", "2"]
