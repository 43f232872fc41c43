"""Commands under torchrun: the process of rank 0 is the command, and the others have nothing to do.

Threads of one process saturate a disk, so more processes would not be faster. Every command imports
this module before anything else, so it imports little.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.errors import IncompleteError, UnknownFormatError, UnshardError

_SCRIPTS = frozenset({"torchrun", "accelerate", "accelerate-launch"})
_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_WITH_VALUE = frozenset({"-W", "-X"})  # options of the interpreter that take the next word
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_THREADS = "OMP_NUM_THREADS"


def begin() -> bool:
    """Prepare this process; return whether it is a command: of a torchrun's, rank 0 is."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_started_by_torchrun():
        _undo_thread_limit()
        return is_first
    if not is_first and all(name in os.environ for name in _VARIABLES):
        import logging

        logging.getLogger(__name__).warning(
            "torchrun's variables are set, but it did not start this process: working alone"
        )
    return True


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started this very process.

    The parent must be torchrun itself: whatever a training process starts inherits torchrun's
    environment too, and is a command of its own.
    """
    return all(name in environment for name in _VARIABLES) and is_launcher(_parent_command())


def is_launcher(command: Sequence[str]) -> bool:
    """Return whether a command line is torchrun's: by its script, or the module after `-m`."""
    if command and Path(command[0]).name in _SCRIPTS:
        return True
    words = iter(command[1:])
    for word in words:
        if word == "-m":
            return next(words, "") in _MODULES
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return Path(word).name in _SCRIPTS
    return False


def advise(error: UnshardError, environment: Mapping[str, str] = os.environ) -> None:
    """Add to the hint of an error that files of the checkpoint may be on torchrun's other nodes."""
    if not isinstance(error, IncompleteError | UnknownFormatError):
        return
    if not is_started_by_torchrun(environment):
        return
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:  # several nodes
        others = (
            "only rank 0 of this torchrun reads; if files are on the disks of other nodes, start "
            "the command once, without torchrun, with ⟦--engine ray⟧ and node:///PATH"
        )
        error.hint = error.hint + f"; {others}" if error.hint else others


def _undo_thread_limit() -> None:
    """Remove the limit of one thread that torchrun sets for several processes, if nobody else did.

    The sums of a LoRA fuse depend on the number of threads of the BLAS library.
    """
    with suppress(OSError):  # not Linux
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        is_set = any(one.startswith(f"{_THREADS}=".encode()) for one in variables)
        if not is_set and os.environ.get(_THREADS) == "1":
            del os.environ[_THREADS]


def _parent_command() -> list[str]:
    """Return the command line of the process that started this one."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:  # not Linux
        import subprocess

        shown = subprocess.run(  # noqa: S603 (no shell, and nothing but a number)
            ["/bin/ps", "-ww", "-o", "command=", "-p", str(parent)],
            capture_output=True,
            check=False,
        )
        words = shown.stdout.split()
    return [os.fsdecode(word) for word in words]
