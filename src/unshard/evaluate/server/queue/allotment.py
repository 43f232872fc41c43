"""Who gets the slots of the server: the job that begins next, and engines that make room for it.

A job whose profile, evaluator or GPUs the server lacks is left in the queue, with its pin: its
checkpoint may be gone elsewhere, and the next configuration may be right.
"""

import time
from collections.abc import Callable, Iterator, Mapping
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

_LOOKED_AT = 1000  # jobs of the queue at a time: a look is short, however long the queue
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
        raise EvaluationError(f"the config of its profile is not there: {profile.config}")
    asked = request.arguments.num_gpus
    count = profile.gpus if asked is None else asked
    if not profile.launch:
        slots.check(count)
    return profile, count


def why_unfit(found: Callable[[], object]) -> str | None:
    """Return why something that `find_work` looks for is not there; None if it is."""
    try:
        found()
    except UnshardError as error:
        why = str(error)
        # The frames have it as a local, and it has the frames: what their callers were reading in
        # the database would stay open until the next search for garbage.
        error.__traceback__ = None
        return why
    return None


class Allotment:
    """Chooses the next job, and gives it its slots.

    One thread uses it, but for `why_not`, `find`, `forget` and `hold`.

    Args:
        store: with the queue.
        slots: what jobs may have.
        profiles: say how many GPUs a job needs.
        engines: have slots while they are idle.
        pass_at_most: how many jobs may pass a job that waits for GPUs.
        retire: ends an idle engine, and gives its slots back.
    """

    def __init__(  # noqa: PLR0913 (what has slots, and who wants them)
        self,
        store: Store,
        slots: Slots,
        profiles: Mapping[str, Profile],
        engines: Engines,
        *,
        pass_at_most: int,
        retire: Callable[[Gpus], None],
    ) -> None:
        self._store = store
        self._slots = slots
        self._profiles = profiles
        self._engines = engines
        self._pass_at_most = pass_at_most
        self._retire = retire
        self._passed: dict[str, int] = {}
        self._skipped = 0
        self._unfit: dict[str, float] = {}
        self._held: dict[str, tuple[float, str]] = {}
        self._users = GpuUsers()

    def choose(self, now: float) -> NextJob | None:
        """Return the job that begins next, if one can."""
        choice, wait_for_gpus = self._choose(now, frozenset())
        free = self._slots.free()
        if not (free and wait_for_gpus) or (choice is not None and not choice.job.gpus):
            return choice
        taken = self._users.ask(free)
        return self._choose(now, taken)[0] if taken else choice

    def _choose(self, now: float, taken: frozenset[str]) -> tuple[NextJob | None, bool]:
        """Return the job that begins next, and whether jobs wait for GPUs; others use `taken`."""
        others, wait_for_gpus = self._users.count if taken else 0, False
        needs = cache(partial(self._needs, others=others))  # of a long queue most are alike
        skipped, clock = 0, time.monotonic()

        def read() -> Iterator[QueuedJob]:
            nonlocal skipped, wait_for_gpus
            # Those that cannot begin do not count: the next look gets beyond them.
            for job_id, name, asked in self._store.due(now, _LOOKED_AT + self._skipped):
                count = None if self._unfit.get(job_id, 0.0) > clock else needs(name, asked)
                skipped += count is None
                pool = self._slots.pool(base_of(name), count or 0)
                wait_for_gpus |= pool == GPU
                yield QueuedJob(job_id, name, count if pool == GPU or count is None else 0, pool)

        choice = choose(read(), self._free(taken), self._passed, self._pass_at_most)
        self._skipped = max(self._skipped, skipped)
        return choice, wait_for_gpus

    def count(self, choice: NextJob) -> None:
        """Count the jobs that the chosen one has passed, now that it begins."""
        self.forget(choice.job.job_id)
        for job_id in choice.passes:
            self._passed[job_id] = self._passed.get(job_id, 0) + 1

    def forget(self, job_id: str) -> None:
        """Forget a job that waits no longer."""
        self._passed.pop(job_id, None)
        self._unfit.pop(job_id, None)

    def pass_over_unfit(self) -> None:
        """Leave the jobs in the queue, for a while, for whose requests `find` has nothing.

        All at once: to find them one after another would be a look at the whole queue for each.
        """
        until = time.monotonic() + _HELD_S
        for job in self._store.jobs(Filters(status=Status.QUEUED)):
            if why_unfit(partial(self.find, job.request)) is not None:
                self._unfit[job.id] = until

    def hold(self, name: str, why: str) -> None:
        """Begin no job of a profile for a while: its evaluator is not there."""
        self._held[base_of(name)] = time.monotonic() + _HELD_S, why

    def find(self, request: Request) -> tuple[Profile, int]:
        """Return the profile of a request, and how many GPUs its job gets.

        Raises:
            UnshardError: the job cannot begin as the server is configured.
        """
        return find_work(self._profiles, self._slots, request)

    def why_not(self, request: Request) -> str | None:
        """Return why a job cannot begin now, as the server is configured; None if it can."""
        return self._why_held(request.profile) or why_unfit(partial(self.find, request))

    def why_gpus_wait(self, request: Request) -> str | None:
        """Return that others use GPUs that a job could have; None if they do not."""
        profile, count = self.find(request)
        return None if profile.launch else self._users.describe(self._slots.free(), count)

    def take(self, name: str, profile: Profile, count: int) -> Gpus | None:
        """Take slots for a job: those of an idle engine of its profile, or free ones.

        None: too few are free; if an idle engine of other jobs has some, it is ended for them.
        """
        pool = self._slots.pool(base_of(name), count)
        on_cpu = pool == CPU
        are_ending = self._engines.are_ending  # asked first: then their slots may suffice
        gpus = None
        if profile.engine:
            gpus = self._engines.take(name, 0 if on_cpu else count)
        if gpus is None:
            gpus = self._slots.take(pool, count, but_for=self._users.taken)
        if gpus is None and not are_ending and not profile.launch:
            idle = self._engines.take_longest_idle(on_cpu=on_cpu)
            if idle is not None:
                self._retire(idle)
        return gpus

    def return_unused(self, gpus: Gpus) -> None:
        """Give back what `take` returned for a job that did not begin."""
        if not self._engines.rest(gpus):
            self._slots.give_back(gpus)

    def _needs(self, name: str, asked: int | None, *, others: int) -> int | None:
        """Return how many GPUs a job needs; None if it cannot begin."""
        if self._why_held(name) is not None:
            return None
        try:
            profile = profile_named(self._profiles, name)
            count = profile.gpus if asked is None else asked
            if not profile.launch:
                self._slots.check(count)
        except UnshardError:
            return None
        # A job that needs what others use is not passed, and nothing is kept free for it.
        needs_all = self._slots.pool(base_of(name), count) == GPU
        return None if needs_all and count > self._slots.count - others else count

    def _why_held(self, name: str) -> str | None:
        until, why = self._held.get(base_of(name), (0.0, ""))
        return why if time.monotonic() < until else None

    def _free(self, taken: frozenset[str]) -> Free:
        lent = [(name, gpus_of(slots) or ()) for name, slots in self._engines.list_lent()]
        return Free(
            gpus=len(self._slots.free() - taken),
            lent=sum(len(gpus) for _, gpus in lent),
            pools=self._slots.free_pools() | {CPU for _, gpus in lent if not gpus},
            engines=frozenset((name, len(gpus)) for name, gpus in lent if name is not None),
        )
