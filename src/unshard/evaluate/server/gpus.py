"""The GPUs of a server: which it may use, and which jobs use.

A GPU is a name that CUDA_VISIBLE_DEVICES takes: its number, or NVIDIA's id of a GPU (`GPU-...`) or
of a part of one (`MIG-...`).
"""

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError

_NONE = frozenset({"", "-1", "NoDevFiles"})
_NAME = re.compile(r"[0-9]{1,9}|(?:GPU|MIG)-[\w/-]+", re.ASCII)


def as_gpus(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return GPUs, each once, in the order given; None if a name is neither a number nor an id."""
    found = [name.strip() for name in names]
    if not all(map(_NAME.fullmatch, found)):
        return None
    return tuple(dict.fromkeys(str(int(one)) if one.isdecimal() else one for one in found))


def parse_gpus(text: str) -> tuple[str, ...]:
    """Return the GPUs that "0,1", "3," or "GPU-8f3a" names, or as many as "2" says.

    Raises:
        UsageError: the text means none of this.
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
    """Return the first GPUs that this process may use; any number if it may use all.

    `what` is how an error names the option.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names fewer, or cannot be read.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(map(str, range(count)))
    if len(here := find_gpus()) < count:
        raise UsageError(
            f"{what}: more than this process may use",
            found=f"CUDA_VISIBLE_DEVICES={visible!r:.200}",
            hint="name them by their numbers or ids, or ask for fewer",
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
            hint="name the GPUs by --gpus 0,1 or, in the configuration, gpus: [0, 1]",
        )
    return gpus


class Slots:
    """GPUs and one slot of the CPU, and which are free: one job at a time uses each.

    Any thread may use it.

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
        """Take as many GPUs as `check` allows, the lowest numbers first; None if too few are free.

        No names mean the slot of the CPU.
        """
        with self._lock:
            numbers_first = sorted(self._free, key=lambda gpu: (len(gpu), gpu))  # ids are longer
            chosen = tuple(numbers_first[:count])
            if self.are_cpu(count):
                return () if self._take_cpu() else None
            if len(chosen) < count:
                return None
            self._free.difference_update(chosen)
            return chosen

    def are_cpu(self, count: int) -> bool:
        """Return whether so many GPUs mean the slot of the CPU."""
        return count == 0 or not self._all

    def adopt(self, gpus: tuple[str, ...]) -> bool:
        """Take exactly these, for a job of an earlier server; return whether they were free."""
        with self._lock:
            if not gpus:
                return self._take_cpu()
            if len(set(gpus)) < len(gpus) or not self._free.issuperset(gpus):
                return False
            self._free.difference_update(gpus)
            return True

    def free(self) -> frozenset[str]:
        """Return the GPUs that no job or engine has now."""
        with self._lock:
            return frozenset(self._free)

    @property
    def cpu_is_free(self) -> bool:
        """Whether no job or engine has the slot of the CPU."""
        with self._lock:
            return self._cpu_is_free

    def give_back(self, gpus: tuple[str, ...]) -> None:
        """Give back what `take` returned or `adopt` took."""
        with self._lock:
            in_use = set(self._all) - self._free
            if not in_use.issuperset(gpus) or (not gpus and self._cpu_is_free):
                raise RuntimeError(f"slots {_shown(gpus)} are not in use")
            self._free.update(gpus)
            self._cpu_is_free = self._cpu_is_free or not gpus

    def _take_cpu(self) -> bool:
        taken, self._cpu_is_free = self._cpu_is_free, False
        return taken


def describe_slots(gpus: tuple[str, ...]) -> str:
    """Return what an attempt has, for people: "GPU 6, 7", or "the CPU"."""
    return f"GPU {_shown(gpus)}" if gpus else "the CPU"


def _shown(gpus: Iterable[str]) -> str:
    return ", ".join(gpus) or "none"
