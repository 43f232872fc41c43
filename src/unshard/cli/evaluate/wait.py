"""`unshard eval submit --wait`: follow jobs to their ends, and print what happens to them."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unshard.cli.evaluate.show import describe_state, shorten
from unshard.cli.running.streams import say

if TYPE_CHECKING:
    from unshard.evaluate.client.v1 import EvalClient

__all__ = ["wait_for"]

Fields = Mapping[str, object]

_LOOK_S = 1.0  # between looks at the jobs


def wait_for(client: "EvalClient", jobs: Sequence[str]) -> list[dict[str, object]]:
    """Wait until all jobs, or those that superseded them, have ended, and return them.

    Waiting outlasts restarts of the server; after Ctrl-C the jobs continue. Changes are printed to
    stderr.
    """
    followed = [_Followed(client, job) for job in jobs]
    try:
        while not all([one.look() for one in followed]):  # noqa: C419  (look at every one)
            time.sleep(_LOOK_S)
    except KeyboardInterrupt as error:
        left = ", ".join(shorten(one.job_id) for one in followed if not one.has_ended)
        raise KeyboardInterrupt(
            f"interrupted: the server continues with {left}\n"
            "to cancel a job: unshard eval cancel JOB"
        ) from error
    return [dict(one.job) for one in followed]


class _Followed:
    """A job that is waited for, and what was printed about it last."""

    def __init__(self, client: "EvalClient", job_id: str) -> None:
        self.job_id = job_id
        self.job: Fields = {}
        self.has_ended = False
        self._client = client
        self._said = ""
        self._failed: object = 0
        self._is_away = False
        say(f"waiting for job {shorten(job_id)}")

    def look(self) -> bool:
        """Print what has changed; return whether the job has ended."""
        from unshard.evaluate.client.v1 import ServerAwayError

        if self.has_ended:
            return True
        try:
            self.job = self._client.job(self.job_id)
            self._is_away = False
        except ServerAwayError as error:
            if not self._is_away:
                say(f"waiting: {error}")
            self._is_away = True
            return False
        newer = self.job.get("superseded_by")
        if newer is not None:
            say(f"job {shorten(self.job_id)}: saved again since; waiting for job {shorten(newer)}")
            self.job_id = str(newer)
            return self.look()
        self.has_ended = self.job["completed_at"] is not None
        self._say_change()
        return self.has_ended

    def _say_change(self) -> None:
        job, name = self.job, f"job {shorten(self.job_id)}"
        attempts = int(str(job.get("attempts") or 0))
        over = attempts if job.get("status") == "queued" else attempts - 1
        if job.get("error") and not self.has_ended and over != self._failed:
            self._failed = over
            why = str(job["error"]).replace("\n", "\n    ")
            say(f"{name}: attempt {over} did not complete, the job is tried again: {why}")
        again = f", attempt {attempts}" if job.get("status") == "running" and over else ""
        now = f"{name}: {describe_state(job)}{again}"
        if now != self._said:
            say(now)
        self._said = now
