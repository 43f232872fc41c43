"""Which job begins next: none starves, no GPU that may be used is idle, and equals keep order."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.running import job_of, request, scheduler, wait_for, whole_model
from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.server.gpus import CPU
from unshard.evaluate.server.queue.choosing import Free, NextJob, QueuedJob, choose
from waiting import wait_until

NONE: frozenset[str] = frozenset()
CPUS = frozenset({CPU})


def waiting(*gpus: int | None) -> list[QueuedJob]:
    return [QueuedJob(str(number), "profile", count) for number, count in enumerate(gpus)]


def chosen(
    queue: list[QueuedJob], free: Free, most: int = 9, **passed: int
) -> tuple[str, tuple[str, ...]] | None:
    found = choose(queue, free, {name[1:]: count for name, count in passed.items()}, most)
    return None if found is None else (found.job.job_id, found.passes)


def test_the_first_job_that_fits_begins() -> None:
    assert chosen(waiting(1, 1), Free(2)) == ("0", ())
    assert chosen(waiting(2, 4, 1), Free(1)) == ("2", ("0", "1"))
    assert chosen(waiting(2, 2), Free(1)) is None
    assert chosen([], Free(1)) is None


def test_a_job_is_passed_so_often_and_no_more() -> None:
    queue = waiting(2, 1)
    assert chosen(queue, Free(1), 3, _0=2) == ("1", ("0",))
    assert chosen(queue, Free(1), 3, _0=3) is None
    assert chosen(queue, Free(2), 3, _0=3) == ("0", ())
    assert chosen(queue, Free(1), 0) is None


def test_jobs_on_the_cpu_and_on_gpus_do_not_wait_for_one_another() -> None:
    assert chosen(waiting(2, 1, 0), Free(1), 0) == ("2", ())
    assert chosen(waiting(0, 0, 1), Free(1, pools=NONE), 0) == ("2", ())
    assert chosen(waiting(2, 0), Free(1, pools=NONE)) is None


def test_each_pool_of_slots_is_waited_for_by_its_own_jobs_only() -> None:
    queue = [QueuedJob("0", "a", 0, "launch:a"), QueuedJob("1", "b", 0, "launch:b"), *waiting(0)]
    assert chosen(queue, Free(0, pools=frozenset({"launch:b"}))) == ("1", ())
    assert chosen(queue, Free(0, pools=frozenset({"launch:a", "launch:b"}))) == ("0", ())
    assert chosen(queue[:2], Free(2)) is None
    large = [QueuedJob("2", "c", 4), *queue]
    assert chosen(large, Free(1, pools=frozenset({"launch:a"})), 0) == ("0", ())


def test_what_engines_can_give_back_is_waited_for_and_not_given_to_others() -> None:
    assert chosen(waiting(2, 1), Free(1, lent=1)) == ("0", ())
    assert chosen(waiting(3, 1), Free(0, lent=1)) == ("1", ("0",))
    own = frozenset({("profile", 2)})
    assert chosen(waiting(4, 2), Free(0, lent=2, engines=own)) == ("1", ("0",))


def test_a_job_that_the_configuration_does_not_allow_holds_up_nobody_and_is_not_passed() -> None:
    assert chosen(waiting(None, 1, None, 0), Free(1), 0) == ("1", ())
    assert chosen(waiting(2, None, 1), Free(1)) == ("2", ("0",))
    assert chosen(waiting(None, None), Free(1)) is None


@dataclass
class Model:
    """A server that begins what `choose` says, and how often each job was passed."""

    total: int
    most: int
    queue: list[QueuedJob] = field(default_factory=list)
    running: list[QueuedJob] = field(default_factory=list)
    begun: list[QueuedJob] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    overtaken: Counter[str] = field(default_factory=Counter)
    submitted: int = 0

    def free(self) -> Free:
        used = sum(job.gpus or 0 for job in self.running)
        return Free(
            self.total - used, pools=NONE if any(not job.gpus for job in self.running) else CPUS
        )

    def submit(self, gpus: int) -> None:
        self.queue.append(QueuedJob(str(self.submitted), "profile", gpus))
        self.submitted += 1
        self.begin()

    def end(self, number: int) -> None:
        if self.running:
            del self.running[number % len(self.running)]
            self.begin()

    def begin(self) -> None:
        while choice := choose(self.queue, self.free(), self.passed, self.most):
            self._begin(choice)

    def _begin(self, choice: NextJob) -> None:
        job, before = choice.job, self.queue[: self.queue.index(choice.job)]
        assert self.free().is_enough_for(job)
        assert not any(other.gpus == job.gpus for other in before)  # equals keep their order
        self.overtaken.update(one.job_id for one in before if one.gpus and job.gpus)
        self.passed.update(choice.passes)
        self.queue.remove(job)
        self.running.append(job)
        self.begun.append(job)


Step = tuple[str, int]


@given(
    total=st.integers(1, 4),
    most=st.integers(0, 3),
    steps=st.lists(st.tuples(st.sampled_from(["submit", "end"]), st.integers(0, 4)), max_size=60),
)
def test_no_job_starves_and_no_gpu_is_idle_that_a_job_may_use(
    total: int, most: int, steps: list[Step]
) -> None:
    model = Model(total, most)
    for what, number in steps:
        if what == "submit":
            model.submit(number % (total + 1))
        else:
            model.end(number)
        # None is passed more often than that, counted by the model itself.
        assert max(model.overtaken.values(), default=0) <= most
        # What fits waits only behind a job that was passed so often, and the CPU never waits.
        is_held = False
        for job in model.queue:
            assert not model.free().is_enough_for(job) or (job.gpus and is_held)
            is_held |= bool(job.gpus) and model.overtaken[job.job_id] >= most
    while model.running:
        model.end(0)
    assert not model.queue
    assert len(model.begun) == model.submitted
    if most == 0:
        for of_cpu in (True, False):
            own = [int(job.job_id) for job in model.begun if of_cpu is not bool(job.gpus)]
            assert own == sorted(own)


WAITS = """
(model.parent / f"began-{step}").touch()
while not (model.parent / f"end-{step}").exists():
    time.sleep(0.02)
done(acc=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 0])
def test_a_small_job_passes_a_large_one_as_often_as_is_allowed(tmp_path: Path, most: int) -> None:
    """On two GPUs: a job runs on one, a job for both waits, and two small ones are behind it."""
    store, server = scheduler(tmp_path / "work", WAITS, gpus="0,1", pass_at_most=most)
    model = whole_model(tmp_path / "model")

    def submit(step: int, gpus: int) -> Job:
        return store.submit(request(model, step, num_gpus=gpus), pin=None)[0]

    def began(step: int) -> bool:
        return (tmp_path / f"began-{step}").exists()

    def end(step: int) -> None:
        (tmp_path / f"end-{step}").touch()

    first = submit(1, 1)
    server.start()
    try:
        wait_until(lambda: began(1), "the first job")
        large, third, fourth = submit(2, 2), submit(3, 1), submit(4, 1)
        assert [store.position(job.id) for job in (large, third, fourth)] == [1, 2, 3]
        server.wake()
        if most:
            wait_until(lambda: began(3), "the job that passes")
            end(3)
            wait_for(store, third.id, Status.COMPLETED)
        # A GPU is free now, but held: the loop has looked again when a later job has begun.
        on_cpu = submit(5, 0)
        wait_until(lambda: began(5), "the job on the CPU")
        end(5)
        wait_for(store, on_cpu.id, Status.COMPLETED)
        assert job_of(store, fourth.id).status is Status.QUEUED
        assert job_of(store, third.id).status is (Status.COMPLETED if most else Status.QUEUED)
        assert len(server._allotment._passed) == most
        end(1)
        wait_until(lambda: began(2), "the large job")
        assert not began(4)
        for step in (2, 3, 4):
            end(step)
        for job in (first, large, third, fourth):
            wait_for(store, job.id, Status.COMPLETED)
        assert server._allotment._passed == {}
    finally:
        server.stop(end=True)


def test_a_long_queue_is_not_read_to_its_end() -> None:
    endless = repeat(QueuedJob("0", "profile", 2))
    assert choose(endless, Free(0, pools=NONE), {}, 9) is None
    assert choose(endless, Free(1, pools=NONE), {}, 0) is None
