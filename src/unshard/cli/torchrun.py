"""Commands under torchrun: only the process of rank 0 works.

Threads of one process saturate a disk, so more processes would not be faster. Every command imports
this module first, so it imports little.
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
_WITH_VALUE = frozenset({"-W", "-X"})  # options of the interpreter with a value
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_THREADS = "OMP_NUM_THREADS"


def begin() -> bool:
    """Prepare this process; return whether it runs the command: under torchrun, only rank 0."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_started_by_torchrun():
        _undo_thread_limit()
        return is_first
    if not is_first and all(name in os.environ for name in _VARIABLES):
        import logging

        logging.getLogger(__name__).warning(
            "torchrun's variables are set, but torchrun did not start this process: working alone"
        )
    return True


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun is the parent of this process.

    The environment alone does not prove it: child processes of a training process inherit
    torchrun's variables, but are separate commands.
    """
    return all(name in environment for name in _VARIABLES) and is_launcher(_parent_command())


def is_launcher(command: Sequence[str]) -> bool:
    """Return whether a command line runs torchrun, as a script or as a module after `-m`."""
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
    """Add a hint to an error: files of the checkpoint may be on torchrun's other nodes."""
    if not isinstance(error, IncompleteError | UnknownFormatError):
        return
    if not is_started_by_torchrun(environment):
        return
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:  # several nodes
        hint = (
            "only rank 0 of this torchrun reads; if files are on the disks of other nodes, start "
            "the command once, without torchrun, with ⟦--engine ray⟧ and node:///PATH"
        )
        error.hint = error.hint + f"; {hint}" if error.hint else hint


def _undo_thread_limit() -> None:
    """Remove torchrun's limit of one thread per process, unless the user set it.

    The sums of a LoRA fuse depend on the number of threads of the BLAS library.
    """
    with suppress(OSError):  # not Linux
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        is_set = any(variable.startswith(f"{_THREADS}=".encode()) for variable in variables)
        if not is_set and os.environ.get(_THREADS) == "1":
            del os.environ[_THREADS]


def _parent_command() -> list[str]:
    """Return the command line of the process that started this one."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:  # not Linux
        import subprocess

        ps = subprocess.run(  # noqa: S603 (no shell, and only a number)
            ["/bin/ps", "-ww", "-o", "command=", "-p", str(parent)],
            capture_output=True,
            check=False,
        )
        words = ps.stdout.split()
    return [os.fsdecode(word) for word in words]
