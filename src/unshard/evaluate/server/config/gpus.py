"""Which GPUs the server may use: those that are given, or those of the machine.

A GPU is a name that CUDA_VISIBLE_DEVICES takes: its number, or NVIDIA's id of a GPU (`GPU-...`) or
of a part of one (`MIG-...`).
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from unshard.errors import UsageError

__all__ = ["as_gpus", "first_gpus", "gpus_expected", "gpus_here", "gpus_in"]

_NONE = frozenset({"", "-1", "NoDevFiles"})
_NAME = re.compile(r"[0-9]{1,9}|(?:GPU|MIG)-[\w/-]+", re.ASCII)


def as_gpus(names: Iterable[str]) -> tuple[str, ...] | None:
    """Return GPUs, each once, in the order given; None if a name is neither a number nor an id."""
    found = [name.strip() for name in names]
    if not all(map(_NAME.fullmatch, found)):
        return None
    return tuple(dict.fromkeys(str(int(one)) if one.isdecimal() else one for one in found))


def gpus_in(text: str) -> tuple[str, ...]:
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
    """Return, for an error, how many GPUs a job may ask for on a server with so many."""
    if not there:
        return "0: the server has no GPUs"
    return f"0 to {there}, which is how many GPUs the server has"


def first_gpus(count: int, *, what: str) -> tuple[str, ...]:
    """Return the first GPUs that this process may use; any number if it may use all.

    Args:
        count: how many.
        what: how error messages name the option.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names fewer, or cannot be read.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(map(str, range(count)))
    if len(here := gpus_here()) < count:
        raise UsageError(
            f"{what}: more than this process may use",
            found=f"CUDA_VISIBLE_DEVICES={visible!r:.200}",
            hint="name them by their numbers or ids, or ask for fewer",
        )
    return here[:count]


def gpus_here() -> tuple[str, ...]:
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
