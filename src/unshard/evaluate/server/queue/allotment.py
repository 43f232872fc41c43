"""Who gets the slots of the server: the job that begins next, and engines that make room for it.

A job whose profile, evaluator or GPUs the server lacks is left in the queue, with its pin: its
checkpoint may be gone elsewhere, and the next configuration may be right.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache

from unshard.errors import UnshardError, UsageError, raise_all
from unshard.evaluate.jobs import EvaluationError, Request
from unshard.evaluate.server.admission import list_unfitting
from unshard.evaluate.server.config.profiles import Profile, base_of, keeps_engine
from unshard.evaluate.server.evaluators.programs import Profiles
from unshard.evaluate.server.evaluators.work import Evaluator
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.queue.choosing import Choice, Free, Waiting, choose
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.engines import Engines

_LOOKED_AT = 1000  # jobs of the queue at a time: a look is short, however long the queue
_HELD_S = 600.0  # until an evaluator that could not be started is tried again


def find_work(profiles: Profiles, slots: Slots, request: Request) -> tuple[Profile, Evaluator, int]:
    """Return the profile of a request, its evaluator, and how many GPUs its job gets.

    Raises:
        UnshardError: the job cannot begin as the server is configured.
    """
    profile, evaluator = profiles.find(request.profile)
    raise_all(UsageError, "The request does not fit", list(list_unfitting(request, profile)))
    asked = request.arguments.num_gpus
    count = profile.gpus if asked is None else asked
    slots.check(count)
    return profile, evaluator, count


class Allotment:
    """Chooses the next job, and gives it its slots.

    One thread uses it, but for `find`, `forget` and `hold`.

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
        profiles: Profiles,
        engines: Engines,
        *,
        pass_at_most: int,
        retire: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._store = store
        self._slots = slots
        self._profiles = profiles
        self._engines = engines
        self._pass_at_most = pass_at_most
        self._retire = retire
        self._passed: dict[str, int] = {}
        self._skipped = 0
        self._unfit: set[str] = set()
        self._held: dict[str, tuple[float, str]] = {}

    def choose(self, now: float) -> Choice | None:
        """Return the job that begins next, if one can."""
        needs = cache(self._needs)  # of a long queue most are alike
        skipped = 0

        def read() -> Iterator[Waiting]:
            nonlocal skipped
            # Those that cannot begin do not count: the next look gets beyond them.
            for job_id, name, asked in self._store.due(now, _LOOKED_AT + self._skipped):
                count = None if job_id in self._unfit else needs(name, asked)
                skipped += count is None
                yield Waiting(job_id, name, count)

        choice = choose(read(), self._free(), self._passed, self._pass_at_most)
        self._skipped = max(self._skipped, skipped)
        return choice

    def count(self, choice: Choice) -> None:
        """Count the jobs that the chosen one has passed, now that it begins."""
        self.forget(choice.job.job_id)
        for job_id in choice.passes:
            self._passed[job_id] = self._passed.get(job_id, 0) + 1

    def forget(self, job_id: str) -> None:
        """Forget a job that waits no longer."""
        self._passed.pop(job_id, None)
        self._unfit.discard(job_id)

    def pass_over(self, job_id: str) -> None:
        """Leave a job in the queue that `find` refuses for what it asks of its profile."""
        self._unfit.add(job_id)

    def hold(self, name: str, why: str) -> None:
        """Begin no job of a profile for a while: its evaluator is not there."""
        self._held[base_of(name)] = time.monotonic() + _HELD_S, why

    def find(self, request: Request) -> tuple[Profile, Evaluator, int]:
        """Return the profile of a request, its evaluator, and how many GPUs its job gets.

        Raises:
            UnshardError: the job cannot begin now, as the server is configured.
        """
        self._check_held(request.profile)
        return find_work(self._profiles, self._slots, request)

    def take(self, name: str, profile: Profile, count: int) -> tuple[str, ...] | None:
        """Take slots for a job: those of an idle engine of its profile, or free ones.

        None: too few are free; if an idle engine of other jobs has some, it is ended for them.
        """
        on_cpu = self._slots.are_cpu(count)
        are_ending = self._engines.are_ending  # asked first: then their slots may suffice
        gpus = None
        if keeps_engine(profile):
            gpus = self._engines.take(name, 0 if on_cpu else count)
        if gpus is None:
            gpus = self._slots.take(count)
        if gpus is None and not are_ending:
            idle = self._engines.take_longest_idle(on_cpu=on_cpu)
            if idle is not None:
                self._retire(idle)
        return gpus

    def return_unused(self, gpus: tuple[str, ...]) -> None:
        """Give back what `take` returned for a job that did not begin."""
        if not self._engines.rest(gpus):
            self._slots.give_back(gpus)

    def _needs(self, name: str, asked: int | None) -> int | None:
        """Return how many GPUs a job needs, 0 for the CPU; None if it cannot begin."""
        try:
            self._check_held(name)
            profile, _ = self._profiles.find(name)
            count = profile.gpus if asked is None else asked
            self._slots.check(count)
        except UnshardError:
            return None
        return 0 if self._slots.are_cpu(count) else count

    def _check_held(self, name: str) -> None:
        until, why = self._held.get(base_of(name), (0.0, ""))
        if time.monotonic() < until:
            raise EvaluationError(why)

    def _free(self) -> Free:
        lent = self._engines.list_lent()
        return Free(
            gpus=len(self._slots.free()),
            lent=sum(len(gpus) for _, gpus in lent),
            cpu=self._slots.cpu_is_free or any(not gpus for _, gpus in lent),
            engines=frozenset((name, len(gpus)) for name, gpus in lent if name is not None),
        )
