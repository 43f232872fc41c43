"""Which merged models stay after evaluation. Pure."""

from collections.abc import Iterable

from unshard.evaluate.jobs import Job
from unshard.evaluate.server.evaluators.work import Profile

__all__ = ["removable"]


def removable(job: Job, profile: Profile, completed: Iterable[Job]) -> list[str]:
    """Return the jobs whose merged models are not needed once a job is completed.

    Args:
        job: the one that is completed.
        profile: says what stays: nothing, all, or the best by its metric; a metric that begins
            with "-" is best where it is lowest. Of equals the first that was completed stays.
        completed: the completed jobs of the same run, weights and profile, this one among them.
    """
    if profile.keep == "all":
        return []
    if profile.keep != "best" or profile.best_metric is None:
        return [job.id]
    name = profile.best_metric.removeprefix("-")
    sign = -1 if profile.best_metric.startswith("-") else 1
    everyone = sorted(completed, key=lambda one: (one.completed_at or 0, one.id))
    measured = [one for one in everyone if name in one.metrics]
    best = max(measured, key=lambda one: sign * one.metrics[name], default=None)
    return [one.id for one in everyone if best is None or one.id != best.id]
