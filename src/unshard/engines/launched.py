"""Whether torchrun started this process. Imports little: every command asks."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["is_launcher", "is_started_by_torchrun"]

_SCRIPTS = frozenset({"torchrun", "accelerate", "accelerate-launch"})
_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_WITH_VALUE = frozenset({"-W", "-X"})  # options of the interpreter that take the next word
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started this very process.

    The parent must be torchrun itself: whatever a training process starts inherits torchrun's
    environment too, and must not wait for other processes to join.
    """
    if not all(name in environment for name in _VARIABLES):
        return False
    if is_launcher(_parent_command()):
        return True
    if environment["WORLD_SIZE"] != "1":
        import logging

        logging.getLogger(__name__).warning(
            "torchrun's variables are set, but it did not start this process: working alone"
        )
    return False


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
