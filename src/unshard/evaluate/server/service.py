"""What the server does, whatever the protocol: take jobs, show them, cancel them, read logs."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.bounded_log import read_log
from unshard.evaluate.jobs import Filters, Job, Request, Status
from unshard.evaluate.pins import PinError, Quota, pin_checkpoint, read_pin, unpin
from unshard.evaluate.profiles import Profile, ServerConfig
from unshard.evaluate.scheduler import Scheduler
from unshard.evaluate.store import Store
from unshard.evaluate.validation import check_request, resolve_checkpoint
from unshard.read.discover import discover
from unshard.read.format import Request as Wanted

__all__ = ["Service", "let_go", "profile_named"]

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
_log = logging.getLogger(__name__)


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is the profile with another type of model.

    Raises:
        UsageError: there is none of this name, or the type cannot be one.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"profile {base!r}: unknown", expected=f"one of: {known}")
    if not model:
        return profiles[base]
    if not _MODEL.fullmatch(model):
        raise UsageError(f"model {model!r}: cannot be one", expected="letters, digits, _ and -")
    return replace(profiles[base], model=model)


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """Everything that protocols ask for.

    Attributes:
        store: the jobs.
        scheduler: runs them.
        config: what may be run, and where checkpoints may lie.
        quota: of the pins of one run.
    """

    store: Store
    scheduler: Scheduler
    config: ServerConfig
    quota: Quota

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """What may be run, by name."""
        return self.config.profiles

    def submit(self, request: Request, pin: str | None) -> tuple[Job, bool]:
        """Queue a job; return it, and whether it is new.

        A checkpoint that its client has not pinned is pinned here, if that is possible.

        Raises:
            UnshardError: the request is refused.
        """
        profile = profile_named(self.profiles, request.profile)
        known = {**self.profiles, request.profile: profile}
        check_request(request, replace(self.config, profiles=known))
        checkpoint = resolve_checkpoint(request.checkpoint, self.config.roots)
        request = _completed(replace(request, checkpoint=str(checkpoint)))
        if pin is None:
            request, pin = self._pinned(request)
        else:
            pin = str(resolve_checkpoint(pin, self.config.roots))
        job, is_new = self.store.submit(request, pin=pin)
        if job.pin != pin:  # the same job again, which has its own
            let_go(self.store, pin)
        self.scheduler.wake()
        return job, is_new

    def _pinned(self, request: Request) -> tuple[Request, str | None]:
        try:
            pin = pin_checkpoint(Path(request.checkpoint), quota=self.quota, step=request.step)
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
        file = self.scheduler.directory_of(job) / "log.txt"
        try:
            text, after = read_log(file, offset)
        except OSError:
            text, after = "", offset
        return text, after, job.status.is_final and not text

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        return sorted({job.request.run for job in self.store.jobs(Filters())})

    def queued(self) -> list[Job]:
        """Return the jobs that wait, the oldest first."""
        return self.store.jobs(Filters(status=Status.QUEUED))[::-1]


def let_go(store: Store, pin: str | None) -> None:
    """Remove a pin that no job needs any more."""
    if pin is None:
        return
    waiting = (Filters(status=Status.QUEUED), Filters(status=Status.RUNNING))
    if any(job.pin == pin for filters in waiting for job in store.jobs(filters)):
        return
    try:
        unpin(read_pin(Path(pin)))
    except (UnshardError, OSError) as error:
        _log.debug("pin %s: %s", pin, error)


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
