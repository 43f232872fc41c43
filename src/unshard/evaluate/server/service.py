"""What the server does, whatever the protocol: take jobs, show them, cancel them, read logs."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import Filters, Job, Request, Status
from unshard.evaluate.pins import PinError, Quota, pin_checkpoint
from unshard.evaluate.profiles import Profile
from unshard.evaluate.scheduler import Scheduler
from unshard.evaluate.store import Store
from unshard.evaluate.validation import check_request, resolve_checkpoint
from unshard.read.discover import discover
from unshard.read.format import Request as Wanted

__all__ = ["Service", "profile_named"]

_LOG_PART = 256 * 1024
_log = logging.getLogger(__name__)


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is the profile with another type of model.

    Raises:
        UsageError: there is none of this name.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"profile {base}: unknown", expected=f"one of: {known}")
    return replace(profiles[base], model=model) if model else profiles[base]


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """Everything that protocols ask for.

    Attributes:
        store: the jobs.
        scheduler: runs them.
        profiles: what may be run, by name.
        roots: where checkpoints may lie.
        quota: of the pins of one run.
        jobs_dir: where attempts have their logs.
    """

    store: Store
    scheduler: Scheduler
    profiles: Mapping[str, Profile]
    roots: tuple[Path, ...]
    quota: Quota
    jobs_dir: Path

    def submit(self, request: Request, pin: str | None) -> tuple[Job, bool]:
        """Queue a job; return it, and whether it is new.

        A checkpoint that its client has not pinned is pinned here, if that is possible.

        Raises:
            UnshardError: the request is refused.
        """
        check_request(request, profile_named(self.profiles, request.profile))
        checkpoint = resolve_checkpoint(request.checkpoint, self.roots)
        request = _completed(replace(request, checkpoint=str(checkpoint)))
        if pin is None:
            request, pin = self._pinned(request)
        else:
            pin = str(resolve_checkpoint(pin, self.roots))
        job, is_new = self.store.submit(request, pin=pin)
        self.scheduler.wake()
        return job, is_new

    def _pinned(self, request: Request) -> tuple[Request, str | None]:
        try:
            pin = pin_checkpoint(Path(request.checkpoint), quota=self.quota)
        except PinError as error:
            _log.warning("not pinned, it may be rotated away: %s", error)
            return request, None
        return replace(request, checkpoint=str(pin.path)), str(pin.path)

    def job(self, job_id: str) -> Job | None:
        """Return a job."""
        return self.store.get(job_id)

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a job, a running one too; return it as it stands then."""
        if self.store.get(job_id) is not None:
            self.scheduler.cancel(job_id)
        return self.store.get(job_id)

    def log(self, job: Job, offset: int) -> tuple[str, int, bool]:
        """Return a part of the log of a job's last attempt, where the next begins, and if it ends.

        Args:
            job: whose.
            offset: where to begin, bytes.
        """
        file = self.jobs_dir / job.id / str(max(job.attempts, 1)) / "log.txt"
        try:
            with file.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(_LOG_PART)
        except OSError:
            data = b""
        ended = job.status.is_final and len(data) < _LOG_PART
        return data.decode(errors="replace"), offset + len(data), ended

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        return sorted({job.request.run for job in self.store.jobs(Filters())})

    def queued(self) -> list[Job]:
        """Return the jobs that wait, the oldest first."""
        return self.store.jobs(Filters(status=Status.QUEUED))[::-1]


def _completed(request: Request) -> Request:
    """Fill in what the path says: the step, and the name of the run."""
    step, run = request.step, request.run
    path = Path(request.checkpoint)
    try:
        found = discover(path, Wanted(weights=request.weights))[0]
    except UnshardError:
        return replace(request, run=run or path.parent.name)
    folder = found.step_dir.parent if found.step is not None else found.step_dir
    return replace(request, step=found.step if step is None else step, run=run or folder.name)
