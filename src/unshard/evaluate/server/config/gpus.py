"""Which GPUs the server may use: those that it is told, or those that are there."""

import os
from pathlib import Path

from unshard.errors import UsageError

__all__ = ["first_gpus", "gpus_expected", "gpus_here", "gpus_in"]

_NONE = frozenset({"", "-1", "NoDevFiles"})


def gpus_in(text: str) -> tuple[int, ...]:
    """Return the GPUs that "0,1" or "3," names, or how many "2" means.

    Raises:
        UsageError: the text means none of this.
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise UsageError(
            f"--gpus {text}: unknown", expected="numbers, 0,1 or 0, for one; or how many: 2"
        )
    if "," not in text:
        return first_gpus(int(parts[0]), what=f"--gpus {text}")
    return tuple(dict.fromkeys(map(int, parts)))


def gpus_expected(there: int) -> str:
    """Return, for an error, how many GPUs a job may ask for on a server with so many."""
    if not there:
        return "0: the server has no GPUs"
    return f"0 to {there}, which is how many GPUs the server has"


def first_gpus(count: int, *, what: str) -> tuple[int, ...]:
    """Return so many GPUs: the first of those that this process may use, where it is told which.

    Args:
        count: how many.
        what: said so, for an error.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names fewer, or names them by something else.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return tuple(range(count))
    if len(here := gpus_here()) < count:
        raise UsageError(
            f"{what}: more than this process may use",
            found=f"CUDA_VISIBLE_DEVICES={visible!r:.200}",
            hint="name them by their numbers, or ask for fewer",
        )
    return here[:count]


def gpus_here() -> tuple[int, ...]:
    """Return the numbers of NVIDIA's GPUs of this machine that this process may use.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES names them by something else.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        names = (device.name.removeprefix("nvidia") for device in Path("/dev").glob("nvidia[0-9]*"))
        return tuple(sorted(int(name) for name in names if name.isdecimal()))
    parts = [part.strip() for part in visible.split(",")]
    if visible.strip() in _NONE:
        return ()
    numbers = [part for part in parts if part]
    if not all(part.isascii() and part.isdecimal() for part in numbers):
        raise UsageError(
            "CUDA_VISIBLE_DEVICES cannot be read",
            expected="numbers",
            found=f"{visible!r:.200}",
            hint="name the GPUs by --gpus 0,1 or, in the configuration, gpus: [0, 1]",
        )
    return tuple(dict.fromkeys(map(int, numbers)))
