"""GPU slots: each is lent to one job at a time. Without GPUs there is one slot, on the CPU."""

import threading
from collections.abc import Iterable
from typing import Self

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError

__all__ = ["Slots", "visible_devices"]


class Slots:
    """The GPUs of the server, and which of them are free. Any thread may use it.

    Args:
        gpus: their numbers; none: one slot on the CPU, which a job for one GPU gets, too.

    Raises:
        UsageError: a number is negative or stands there twice.
    """

    def __init__(self, gpus: Iterable[int]) -> None:
        self._all = tuple(gpus)
        if len(set(self._all)) < len(self._all) or any(gpu < 0 for gpu in self._all):
            raise UsageError(f"GPUs {_shown(self._all)}: each needs a number of its own, from 0 on")
        self._free = set(self._all)
        self._cpu_is_free = not self._all
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str | int | None) -> Self:
        """Return the slots that "0,1", a count, or None or "" for the CPU, mean.

        A text of one number is that GPU; only an integer is a count.

        Raises:
            UsageError: the text means none.
        """
        if isinstance(text, int):
            if text < 0:
                raise UsageError(f"{text} GPUs: there cannot be fewer than none")
            return cls(range(text))
        names = [name.strip() for name in (text or "").split(",")]
        if names in ([""], ["none"]):
            return cls(())
        if not all(name.isascii() and name.isdigit() for name in names):
            raise UsageError(f"GPUs {text!r}: not understood", expected='numbers, as in "0,1"')
        return cls(int(name) for name in names)

    @property
    def total(self) -> int:
        """How many slots there are."""
        return len(self._all) or 1

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        with self._lock:
            return len(self._free) + self._cpu_is_free

    def check(self, count: int) -> None:
        """Refuse a job that would wait for ever.

        Raises:
            EvaluationError: it needs more GPUs than there are.
        """
        if count > self.total:
            there = f"{len(self._all)} ({_shown(self._all)})" if self._all else "none: one CPU slot"
            raise EvaluationError(
                f"the job needs {count} GPUs, more than the server has",
                expected=f"at most {self.total}",
                found=there,
                hint="ask for fewer, or start the server with more",
            )

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take slots, the lowest numbers first, at least one; None where too few are free.

        Returns:
            The numbers of the GPUs: none of them where the slot is the CPU's.
        """
        needed = max(count, 1)
        with self._lock:
            if not self._all:
                taken = self._cpu_is_free and needed == 1
                self._cpu_is_free = self._cpu_is_free and not taken
                return () if taken else None
            if len(self._free) < needed:
                return None
            chosen = tuple(sorted(self._free)[:needed])
            self._free.difference_update(chosen)
            return chosen

    def adopt(self, gpus: tuple[int, ...]) -> bool:
        """Take exactly these, which an earlier server lent; tell whether they were free."""
        with self._lock:
            if not gpus:
                adopted, self._cpu_is_free = self._cpu_is_free, False
                return adopted
            if len(set(gpus)) < len(gpus) or not self._free.issuperset(gpus):
                return False
            self._free.difference_update(gpus)
            return True

    def give_back(self, gpus: tuple[int, ...]) -> None:
        """Give back what `take` returned or `adopt` took."""
        with self._lock:
            lent = set(self._all) - self._free
            if not lent.issuperset(gpus) or (not gpus and (self._all or self._cpu_is_free)):
                raise RuntimeError(f"slots {_shown(gpus)} are not lent")
            self._free.update(gpus)
            self._cpu_is_free = not self._all


def visible_devices(gpus: tuple[int, ...]) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be: "" hides every GPU."""
    return ",".join(str(gpu) for gpu in gpus)


def _shown(gpus: Iterable[int]) -> str:
    return ", ".join(str(gpu) for gpu in gpus) or "none"
