"""Which job of the queue begins next, as a pure function of the queue and the free slots.

The first job that fits begins. A job that needs more GPUs than are free may be passed by later
jobs, but only a number of times: then GPUs are held for it until it begins. So no job starves: it
waits for the running jobs and for that many more. Jobs on the CPU, and the jobs of each profile
that a cluster schedules, have slots of their own, and wait for no other jobs.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unshard.evaluate.server.gpus import CPU


class QueuedJob(NamedTuple):
    """A queued job that is due.

    Attributes:
        job_id: its id.
        profile: the name of its profile, whose idle engine it may use.
        gpus: how many it needs, 0 for a slot of its pool; None: it cannot run as the server is
            configured, and waits; later jobs do not count as passing it.
        pool: the pool of its slot; unused with GPUs.
    """

    job_id: str
    profile: str
    gpus: int | None
    pool: str = CPU


class Free(NamedTuple):
    """The slots that jobs may have now, or soon.

    Attributes:
        gpus: how many GPUs no job and no engine has.
        lent: how many GPUs belong to engines that are ending, or idle, and end if they are needed.
        pools: the pools with a free slot, or with a slot of such an engine.
        engines: profile and number of GPUs of the idle engines.
    """

    gpus: int
    lent: int = 0
    pools: frozenset[str] = frozenset({CPU})
    engines: frozenset[tuple[str, int]] = frozenset()

    def is_enough_for(self, job: QueuedJob) -> bool:
        """Return whether a job can begin, at the latest when idle engines have ended."""
        if not job.gpus:
            return job.pool in self.pools
        return job.gpus <= self.gpus + self.lent or (job.profile, job.gpus) in self.engines


class NextJob(NamedTuple):
    """The job that begins next, and the ids of jobs before it that wait for GPUs."""

    job: QueuedJob
    passes: tuple[str, ...] = ()


def choose(
    queue: Iterable[QueuedJob], free: Free, passed: Mapping[str, int], most: int
) -> NextJob | None:
    """Return the job that begins next; None if none can.

    Args:
        queue: the jobs that are due, in order; read as far as necessary.
        free: the free slots.
        passed: how many jobs have passed a job so far, by its id.
        most: how many may pass a job; with 0, jobs get GPUs strictly in order.
    """
    waiting: list[str] = []
    is_held = not (free.gpus or free.lent)
    for job in queue:
        if is_held and not free.pools:
            return None
        if job.gpus is None:
            continue
        needs_gpus = job.gpus > 0
        if needs_gpus and is_held:
            continue
        if free.is_enough_for(job):
            return NextJob(job, tuple(waiting) if needs_gpus else ())
        if needs_gpus:
            waiting.append(job.job_id)
            is_held = passed.get(job.job_id, 0) >= most
    return None
