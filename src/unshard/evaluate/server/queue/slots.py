"""GPU slots: each is lent to one job at a time. Jobs without a GPU take turns on the CPU."""

import threading
from collections.abc import Iterable

from unshard.evaluate.jobs import EvaluationError

__all__ = ["Slots", "shown_slots"]


class Slots:
    """The GPUs of the server and one slot of its CPU, and which are free. Any thread may use it.

    Args:
        gpus: their names, each once; none: a job for one GPU, which an earlier server with GPUs
            accepted, gets the CPU.
    """

    def __init__(self, gpus: Iterable[str]) -> None:
        self._all = tuple(gpus)
        self._free = set(self._all)
        self._cpu_is_free = True
        self._lock = threading.Lock()

    def check(self, count: int) -> None:
        """Refuse a job that would never start.

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

    def take(self, count: int) -> tuple[str, ...] | None:
        """Take slots, the lowest numbers first; return None if too few are free.

        Args:
            count: of GPUs, as `check` allows it.

        Returns:
            The names of the GPUs; none for the slot of the CPU.
        """
        with self._lock:
            chosen = tuple(sorted(self._free, key=_rank)[:count])
            if not chosen and (count == 0 or not self._all):
                return () if self._take_cpu() else None
            if len(chosen) < count:
                return None
            self._free.difference_update(chosen)
            return chosen

    def adopt(self, gpus: tuple[str, ...]) -> bool:
        """Take exactly these, which an earlier server lent; return whether they were free."""
        with self._lock:
            if not gpus:
                return self._take_cpu()
            if len(set(gpus)) < len(gpus) or not self._free.issuperset(gpus):
                return False
            self._free.difference_update(gpus)
            return True

    def give_back(self, gpus: tuple[str, ...]) -> None:
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


def _rank(gpu: str) -> tuple[int, str]:
    """Return what sorts numbers by their value, before ids."""
    return len(gpu), gpu


def shown_slots(gpus: tuple[str, ...]) -> str:
    """Return what an attempt has, for people: "GPU 6, 7", or "the CPU"."""
    return f"GPU {_shown(gpus)}" if gpus else "the CPU"


def _shown(gpus: Iterable[str]) -> str:
    return ", ".join(gpus) or "none"
