"""GPU slots: each is lent to one job at a time. Jobs without a GPU take turns on the CPU."""

import threading
from collections.abc import Iterable

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError

__all__ = ["Slots", "shown_slots", "visible_devices"]


class Slots:
    """The GPUs of the server and one slot of its CPU, and which are free. Any thread may use it.

    Args:
        gpus: their numbers; none: a job for one GPU, which an earlier server with GPUs accepted,
            gets the CPU.

    Raises:
        UsageError: a number is negative or stands there twice.
    """

    def __init__(self, gpus: Iterable[int]) -> None:
        self._all = tuple(gpus)
        if len(set(self._all)) < len(self._all) or any(gpu < 0 for gpu in self._all):
            raise UsageError(f"GPUs {_shown(self._all)}: each needs a number of its own, from 0 on")
        self._free = set(self._all)
        self._cpu_is_free = True
        self._lock = threading.Lock()

    def check(self, count: int) -> None:
        """Refuse a job that would wait for ever.

        Raises:
            EvaluationError: it needs more GPUs than there are.
        """
        most = len(self._all) or 1
        if count > most:
            there = f"{len(self._all)} ({_shown(self._all)})" if self._all else "none: one CPU slot"
            raise EvaluationError(
                f"the job needs {count} GPUs, more than the server has",
                expected=f"at most {most}",
                found=there,
                hint="ask for fewer, or start the server with more",
            )

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take slots, the lowest numbers first; None where too few are free.

        Args:
            count: of GPUs, as `check` allows it.

        Returns:
            The numbers of the GPUs: none of them where the slot is the CPU's.
        """
        with self._lock:
            chosen = tuple(sorted(self._free)[:count])
            if not chosen and (count == 0 or not self._all):
                return () if self._take_cpu() else None
            if len(chosen) < count:
                return None
            self._free.difference_update(chosen)
            return chosen

    def adopt(self, gpus: tuple[int, ...]) -> bool:
        """Take exactly these, which an earlier server lent; tell whether they were free."""
        with self._lock:
            if not gpus:
                return self._take_cpu()
            if len(set(gpus)) < len(gpus) or not self._free.issuperset(gpus):
                return False
            self._free.difference_update(gpus)
            return True

    def give_back(self, gpus: tuple[int, ...]) -> None:
        """Give back what `take` returned or `adopt` took."""
        with self._lock:
            lent = set(self._all) - self._free
            if not lent.issuperset(gpus) or (not gpus and self._cpu_is_free):
                raise RuntimeError(f"slots {_shown(gpus)} are not lent")
            self._free.update(gpus)
            self._cpu_is_free = self._cpu_is_free or not gpus

    def _take_cpu(self) -> bool:
        taken, self._cpu_is_free = self._cpu_is_free, False
        return taken


def visible_devices(gpus: tuple[int, ...]) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be: "" hides every GPU."""
    return ",".join(str(gpu) for gpu in gpus)


def shown_slots(gpus: tuple[int, ...]) -> str:
    """Return what an attempt has, for people: "GPU 6, 7", or "the CPU"."""
    return f"GPU {_shown(gpus)}" if gpus else "the CPU"


def _shown(gpus: Iterable[int]) -> str:
    return ", ".join(str(gpu) for gpu in gpus) or "none"
