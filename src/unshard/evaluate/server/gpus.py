"""The GPUs of a server, and its slots for jobs.

A GPU is an entry of CUDA_VISIBLE_DEVICES: its number, or NVIDIA's id of a GPU (`GPU-...`) or of a
part of one (`MIG-...`).
"""

import itertools
import os
import re
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError

_NONE = frozenset({"", "-1", "NoDevFiles"})
GPU, CPU, _LAUNCH = "gpu", "cpu", "launch"  # pools of slots
Gpus = tuple[str, ...]
_OF_OLD_SERVERS = (f"{CPU}:1",)  # they had one slot of the CPU, without a name
_NAME = re.compile(r"[0-9]{1,9}|(?:GPU|MIG)-[\w/-]+", re.ASCII)


def as_gpus(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return distinct GPUs in their order; None if a name is neither a number nor an id."""
    gpus = [name.strip() for name in names]
    if not all(map(_NAME.fullmatch, gpus)):
        return None
    return tuple(dict.fromkeys(str(int(gpu)) if gpu.isdecimal() else gpu for gpu in gpus))


def parse_gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs of a list such as "0,1", "3," or "GPU-8f3a", or the first GPUs for a count.

    Raises:
        UsageError: the text is neither.
    """
    gpus = as_gpus(text.removesuffix(",").split(","))
    if gpus is None:
        raise UsageError(
            f"--gpus {text}: unknown",
            expected='GPU numbers ("0,1"; "0," for GPU 0 alone), ids ("GPU-...", "MIG-...") '
            'or a count ("2")',
        )
    is_count = "," not in text and gpus[0].isdecimal()
    return first_gpus(int(gpus[0]), what=f"--gpus {text}") if is_count else gpus


def gpus_expected(there: int) -> str:
    """Return, for an error, how many GPUs a job may ask for on a server that has `there`."""
    if not there:
        return "0: the server has no GPUs"
    return f"0 to {there}, which is how many GPUs the server has"


def first_gpus(count: int, *, what: str) -> tuple[str, ...]:
    """Return the first `count` GPUs that this process may use; it may use all without a variable.

    `what` is the option in an error.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES has fewer, or cannot be read.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(map(str, range(count)))
    if len(here := find_gpus()) < count:
        raise UsageError(
            f"{what}: more than this process may use",
            found=f"CUDA_VISIBLE_DEVICES={visible!r:.200}",
            hint="list their numbers or ids, or ask for fewer",
        )
    return here[:count]


def find_gpus() -> tuple[str, ...]:
    """Return NVIDIA's GPUs of this machine that this process may use.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES cannot be read.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        names = (device.name.removeprefix("nvidia") for device in Path("/dev").glob("nvidia[0-9]*"))
        return tuple(map(str, sorted(int(name) for name in names if name.isdecimal())))
    if visible.strip() in _NONE:
        return ()
    gpus = as_gpus(part for part in visible.split(",") if part.strip())
    if gpus is None:
        raise UsageError(
            "CUDA_VISIBLE_DEVICES cannot be read",
            expected="numbers, or ids (GPU-..., MIG-...)",
            found=f"{visible!r:.200}",
            hint="list the GPUs by --gpus 0,1 or, in the configuration, gpus: [0, 1]",
        )
    return gpus


class Slots:
    """The slots of a server, each for one job at a time; thread-safe.

    A slot is a GPU, `cpu:N`, or `launch:PROFILE:N` of a profile whose jobs a cluster schedules.

    Args:
        gpus: distinct names; if there are none, a job for one GPU, which an earlier server
            accepted, gets a slot of the CPU.
        cpu: the number of slots for jobs without GPUs.
        launched: the number of slots of each profile with `launch`.
    """

    def __init__(
        self, gpus: Iterable[str], *, cpu: int = 1, launched: Mapping[str, int] | None = None
    ) -> None:
        self._gpus = tuple(gpus)
        self._sizes = {CPU: cpu} | {_pool(name): size for name, size in (launched or {}).items()}
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    def check(self, count: int) -> None:
        """Raise an EvaluationError for a job that needs more GPUs than there are."""
        most = len(self._gpus) or 1
        if count > most:
            names = ", ".join(self._gpus)
            raise EvaluationError(
                f"the job needs {count} GPUs, more than the server has",
                expected=f"at most {most}",
                found=f"{len(self._gpus)} ({names})" if names else "none: slots of the CPU only",
                hint="ask for fewer, or start the server with more",
            )

    def pool(self, profile: str, count: int) -> str:
        """Return the pool of a job's slots: `GPU`, `CPU`, or its profile's."""
        if _pool(profile) in self._sizes:
            return _pool(profile)
        return GPU if count and self._gpus else CPU

    def take(self, pool: str, count: int, *, but_for: Container[str] = ()) -> Gpus | None:
        """Take GPUs, the lowest numbers first and none of `but_for`, or one slot of a pool.

        None: too few are free.
        """
        with self._lock:
            if pool == GPU:
                free = [gpu for gpu in self._gpus if gpu not in self._taken and gpu not in but_for]
                free.sort(key=lambda gpu: (len(gpu), gpu))  # ids are longer than numbers
                chosen, is_enough = tuple(free[:count]), len(free) >= count
            else:
                numbers = (f"{pool}:{number}" for number in itertools.count(1))
                chosen = (next(name for name in numbers if name not in self._taken),)
                is_enough = self._has_free(pool)
            if not is_enough:
                return None
            self._taken.update(chosen)
            return chosen

    def adopt(self, slots: Gpus) -> bool:
        """Take exactly these slots, for a job of an earlier server; return False if impossible.

        GPUs must be free, and this server's. Other slots may exceed the configured number.
        """
        with self._lock:
            names = slots or _OF_OLD_SERVERS
            has_all = all(name in self._gpus for name in names if is_gpu(name))
            if not has_all or len({*names}) < len(names) or not self._taken.isdisjoint(names):
                return False
            self._taken.update(names)
            return True

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return len(self._gpus)

    def free(self) -> frozenset[str]:
        """Return the GPUs without a job or an engine."""
        with self._lock:
            return frozenset(self._gpus) - self._taken

    def free_pools(self) -> frozenset[str]:
        """Return the pools, except that of the GPUs, with a free slot."""
        with self._lock:
            return frozenset(filter(self._has_free, self._sizes))

    def _has_free(self, pool: str) -> bool:
        return sum(name.startswith(f"{pool}:") for name in self._taken) < self._sizes[pool]

    def give_back(self, slots: Gpus) -> None:
        """Give back slots of `take` or `adopt`."""
        with self._lock:
            names = slots or _OF_OLD_SERVERS
            if not self._taken.issuperset(names):
                raise RuntimeError(f"slots {', '.join(names)} are not in use")
            self._taken.difference_update(names)


def _pool(profile: str) -> str:
    return f"{_LAUNCH}:{profile}"


def is_gpu(slot: str) -> bool:
    """Return whether a slot is a GPU of this machine."""
    return _NAME.fullmatch(slot) is not None


def gpus_of(slots: Gpus) -> Gpus | None:
    """Return the GPUs among the slots of an attempt; None: a cluster chooses them."""
    is_launched = any(slot.startswith(f"{_LAUNCH}:") for slot in slots)
    return None if is_launched else tuple(filter(is_gpu, slots))


def describe_slots(slots: Gpus) -> str:
    """Return a text such as "GPU 6, 7", "the CPU" or "the cluster"."""
    gpus = gpus_of(slots)
    return "the cluster" if gpus is None else f"GPU {', '.join(gpus)}" if gpus else "the CPU"
