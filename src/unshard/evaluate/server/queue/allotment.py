"""Gives slots to the job that begins next, and ends idle engines for it.

A job whose profile, evaluator or GPUs the server lacks is left in the queue, with its pin: its
checkpoint may be gone elsewhere, and the next configuration may be right.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

from unshard.errors import UnshardError, UsageError, raise_all
from unshard.evaluate.jobs import EvaluationError, Filters, Request, Status
from unshard.evaluate.server.admission import list_unfitting
from unshard.evaluate.server.evaluators.profiles import base_of, profile_named
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.gpus import CPU, GPU, Gpus, Slots, gpus_of
from unshard.evaluate.server.processes.gpu_users import GpuUsers
from unshard.evaluate.server.queue.choosing import Free, NextJob, QueuedJob, choose
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.engines import Engines

_LOOKED_AT = 1000  # jobs of the queue at a time, to bound the time of a look
_HELD_S = 600.0  # until an evaluator that could not be started is tried again


def find_work(
    profiles: Mapping[str, Profile], slots: Slots, request: Request
) -> tuple[Profile, int]:
    """Return the profile of a request, and how many GPUs its job gets.

    Raises:
        UnshardError: the job cannot begin as the server is configured.
    """
    profile = profile_named(profiles, request.profile)
    raise_all(UsageError, "The request does not fit", list(list_unfitting(request, profile)))
    if profile.config is not None and not profile.config.exists():
        raise EvaluationError(f"its profile's config does not exist: {profile.config}")
    num_gpus = request.arguments.num_gpus
    count = profile.gpus if num_gpus is None else num_gpus
    if not profile.launch:
        slots.check(count)
    return profile, count


@dataclass(eq=False)
class Allotment:
    """Chooses the next job, and gives it its slots.

    `why_not`, `why_gpus_wait`, `find`, `forget` and `hold` may be called from several threads.

    Attributes:
        pass_at_most: how many jobs may pass a job that waits for GPUs.
        retire: ends an idle engine, and gives its slots back.
    """

    store: Store
    slots: Slots
    profiles: Mapping[str, Profile]
    engines: Engines
    pass_at_most: int
    retire: Callable[[Gpus], None]
    _passed: dict[str, int] = field(default_factory=dict)
    _skipped: int = 0
    _unfit: dict[str, float] = field(default_factory=dict)
    _held: dict[str, tuple[float, str]] = field(default_factory=dict)
    _users: GpuUsers = field(default_factory=GpuUsers)

    def choose(self, now: float) -> NextJob | None:
        """Return the job that begins next, if one can."""
        choice, wait_for_gpus = self._choose(now, frozenset())
        free = self.slots.free()
        if not (free and wait_for_gpus) or (choice is not None and not choice.job.gpus):
            return choice
        taken = self._users.ask(free)
        return self._choose(now, taken)[0] if taken else choice

    def _choose(self, now: float, taken: frozenset[str]) -> tuple[NextJob | None, bool]:
        """Return the job that begins next, and whether any job is for GPUs; others use `taken`."""
        others, wait_for_gpus = self._users.count if taken else 0, False
        needs = cache(partial(self._needs, others=others))  # most jobs of a long queue are alike
        skipped, clock = 0, time.monotonic()

        def read() -> Iterator[QueuedJob]:
            nonlocal skipped, wait_for_gpus
            # Jobs that cannot begin are not counted, so that the next look gets beyond them.
            for job_id, name, asked in self.store.due(now, _LOOKED_AT + self._skipped):
                count = None if self._unfit.get(job_id, 0.0) > clock else needs(name, asked)
                skipped += count is None
                pool = self.slots.pool(base_of(name), count or 0)
                wait_for_gpus |= pool == GPU
                yield QueuedJob(job_id, name, count if pool == GPU or count is None else 0, pool)

        choice = choose(read(), self._free(taken), self._passed, self.pass_at_most)
        self._skipped = max(self._skipped, skipped)
        return choice, wait_for_gpus

    def count(self, choice: NextJob) -> None:
        """Count the jobs that the chosen one has passed, now that it begins."""
        self.forget(choice.job.job_id)
        for job_id in choice.passes:
            self._passed[job_id] = self._passed.get(job_id, 0) + 1

    def forget(self, job_id: str) -> None:
        """Forget a job that no longer waits."""
        self._passed.pop(job_id, None)
        self._unfit.pop(job_id, None)

    def pass_over_unfit(self) -> None:
        """Leave all jobs that cannot begin as the server is configured in the queue for a while.

        All at once, because each call to find a single one would look at the whole queue.
        """
        until = time.monotonic() + _HELD_S
        for job in self.store.jobs(Filters(status=Status.QUEUED)):
            if self._why_unfit(job.request) is not None:
                self._unfit[job.id] = until

    def hold(self, name: str, why: str) -> None:
        """Begin no job of a profile for a while: its evaluator is missing."""
        self._held[base_of(name)] = time.monotonic() + _HELD_S, why

    def find(self, request: Request) -> tuple[Profile, int]:
        """Return the profile of a request, and how many GPUs its job gets: see `find_work`."""
        return find_work(self.profiles, self.slots, request)

    def why_not(self, request: Request) -> str | None:
        """Return why a job cannot begin now, as the server is configured; None if it can."""
        return self._why_held(request.profile) or self._why_unfit(request)

    def _why_unfit(self, request: Request) -> str | None:
        try:
            self.find(request)
        except UnshardError as error:
            why = str(error)
            # The frames refer to the error, and it to the frames: without this, their callers'
            # cursors in the database would stay open until the next garbage collection.
            error.__traceback__ = None
            return why
        return None

    def why_gpus_wait(self, request: Request) -> str | None:
        """Describe the GPUs that others use, if a job waits for them; None if it does not."""
        profile, count = self.find(request)
        return None if profile.launch else self._users.describe(self.slots.free(), count)

    def take(self, name: str, profile: Profile, count: int) -> Gpus | None:
        """Take slots for a job: those of an idle engine of its profile, or free slots.

        None: too few are free; an idle engine of other jobs, if there is one, is ended for them.
        """
        pool = self.slots.pool(base_of(name), count)
        on_cpu = pool == CPU
        are_ending = self.engines.are_ending  # before the slots: an engine that ends frees some
        gpus = None
        if profile.engine:
            gpus = self.engines.take(name, 0 if on_cpu else count)
        if gpus is None:
            gpus = self.slots.take(pool, count, but_for=self._users.taken)
        if gpus is None and not are_ending and not profile.launch:
            idle = self.engines.take_longest_idle(on_cpu=on_cpu)
            if idle is not None:
                self.retire(idle)
        return gpus

    def return_unused(self, gpus: Gpus) -> None:
        """Give back the slots that `take` returned for a job that did not begin."""
        if not self.engines.rest(gpus):
            self.slots.give_back(gpus)

    def _needs(self, name: str, asked: int | None, *, others: int) -> int | None:
        """Return how many GPUs a job needs; None if it cannot begin."""
        if self._why_held(name) is not None:
            return None
        try:
            profile = profile_named(self.profiles, name)
            count = profile.gpus if asked is None else asked
            if not profile.launch:
                self.slots.check(count)
        except UnshardError:
            return None
        # No GPUs are held for a job that needs GPUs that others use.
        on_gpus = self.slots.pool(base_of(name), count) == GPU
        return None if on_gpus and count > self.slots.count - others else count

    def _why_held(self, name: str) -> str | None:
        until, why = self._held.get(base_of(name), (0.0, ""))
        return why if time.monotonic() < until else None

    def _free(self, taken: frozenset[str]) -> Free:
        lent = [(name, gpus_of(slots) or ()) for name, slots in self.engines.list_lent()]
        return Free(
            gpus=len(self.slots.free() - taken),
            lent=sum(len(gpus) for _, gpus in lent),
            pools=self.slots.free_pools() | {CPU for _, gpus in lent if not gpus},
            engines=frozenset((name, len(gpus)) for name, gpus in lent if name is not None),
        )
