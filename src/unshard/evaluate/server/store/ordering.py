"""The places of queued jobs, where a profile does not evaluate a run's steps as they come.

The queue is in the order of `queued_at`, for every statement that reads it. So jobs that are to
begin earlier exchange these times with others of their run, and the order is the same for all.
"""

import math
import time

from unshard.evaluate.jobs import BASE_STEP, Job, Status
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import add_event

_OF_RUN = f"run = ? AND profile = ? AND status = 'queued' AND step > {BASE_STEP}"
_OF_USER = f"{_OF_RUN} AND COALESCE(json_extract(request, '$.user'), '') = ?"


class Ordering:
    """Which of the queued jobs of a run and profile are first, and which are skipped."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def put_newest_first(self, job: Job) -> None:
        """Have the highest steps of a job's run and profile take the first of their places.

        The places of other jobs stay, and so do those of jobs that had an attempt, of jobs without
        a step, and of step 0.
        """
        query = (
            f"SELECT id, queued_at, step FROM jobs WHERE {_OF_RUN}"  # noqa: S608
            " AND attempts = attempts_before ORDER BY queued_at, number"
        )
        with self._connections.transaction() as connection:
            rows = connection.execute(query, (job.run.id, job.request.profile)).fetchall()
            before = -math.inf
            for place, row in zip(rows, sorted(rows, key=lambda row: -row["step"]), strict=True):
                # Equal times would leave it to the numbers of the jobs, which stay.
                before = max(place["queued_at"], math.nextafter(before, math.inf))
                if before != row["queued_at"]:
                    connection.execute(
                        "UPDATE jobs SET queued_at = ? WHERE id = ?", (before, row["id"])
                    )

    def skip(self, job: Job, most: int) -> list[str]:
        """End the queued jobs of lower steps than a job's, but of the `most` highest steps.

        Only jobs of its run, profile and user are meant, and none of step 0. They are superseded,
        by no other job.

        Returns:
            Their ids.
        """
        step, now = job.request.step or 0, time.time()
        of_run = (job.run.id, job.request.profile, job.request.user)
        query = f"SELECT DISTINCT step FROM jobs WHERE {_OF_USER} ORDER BY step DESC LIMIT ?"  # noqa: S608
        with self._connections.transaction() as connection:
            steps = [row["step"] for row in connection.execute(query, (*of_run, most))]
            rows = connection.execute(
                "UPDATE jobs SET status = ?, completed_at = ?, superseded_by = NULL,"  # noqa: S608
                f" error = ? WHERE {_OF_USER} AND step < ? AND step < ? RETURNING id",
                (
                    *(Status.SUPERSEDED, now),
                    f"skipped: {most} newer steps of the run wait (max_lag: {most})",
                    *(*of_run, step, min(steps, default=0)),
                ),
            ).fetchall()
            for row in rows:
                add_event(connection, row["id"], now)
        return [str(row["id"]) for row in rows]
