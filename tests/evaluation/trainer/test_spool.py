"""The spool survives processes: whole files, in order, never lost between two folders."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unshard.evaluate.trainer.spool import Spool


def test_submissions_come_back_in_order_in_another_process(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for step in range(20):
        spool.add({"step": step})
    code = (
        "import sys; from pathlib import Path; from unshard.evaluate.trainer.spool import Spool\n"
        "for entry in Spool(Path(sys.argv[1])).waiting(): print(entry.fields['step'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(step) for step in range(20)]


def test_an_entry_moves_from_queue_to_job_to_result(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    entry = spool.add({"step": 1, "pins": ["/p"]})
    assert spool.is_pin_needed("/p")
    job = spool.accept(entry, "abc")
    assert (spool.waiting(), [one.name for one in spool.pending()]) == ([], ["abc"])
    result = spool.arrive(job, {"metrics": {"a": 1.0}})
    assert spool.pending() == [job]
    spool.remove(job)
    assert (spool.pending(), spool.is_pin_needed("/p")) == ([], False)
    assert spool.arrived() == [result]
    spool.remove(result)
    spool.remove(result)
    assert spool.arrived() == []


def test_a_job_that_was_accepted_twice_keeps_both_pins(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.accept(spool.add({"step": 1, "pins": ["/one"]}), "abc")
    job = spool.accept(spool.add({"step": 1, "pins": ["/two"]}), "abc")
    assert job.pins == ["/one", "/two"]


def test_a_forgotten_job_goes_to_the_end_of_the_queue(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    job = spool.accept(spool.add({"step": 1}), "abc")
    spool.add({"step": 2})
    spool.requeue(job)
    assert [entry.fields["step"] for entry in spool.waiting()] == [2, 1]


def test_a_torn_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path)
    entry = spool.add({"step": 1})
    spool.add({"step": 2})
    entry.path.write_bytes(b'{"st')
    assert [one.fields["step"] for one in spool.waiting()] == [2]
    assert [one.fields["step"] for one in spool.waiting()] == [2]
    assert caplog.text.count("not readable") == 1


def test_nothing_is_made_before_something_is_added_and_mtimes_stay(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert (spool.waiting(), list(tmp_path.iterdir())) == ([], [])
    then = time.time_ns() - 10**11
    os.utime(tmp_path, ns=(then, then))
    spool.add({})
    assert tmp_path.stat().st_mtime_ns == then
