"""Who moves the bytes of a plan: the threads of this process, or all processes of a torchrun."""

import logging
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unshard.engines.threads import RunPlan, run_plan

__all__ = ["Crew", "crew", "is_launcher", "is_started_by_torchrun"]

_log = logging.getLogger(__name__)

_SCRIPTS = frozenset({"torchrun", "accelerate", "accelerate-launch"})
_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_WITH_VALUE = frozenset({"-W", "-X"})  # options of the interpreter that take the next word
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Crew:
    """Those who work on one output.

    Attributes:
        leads: whether this process reads, plans, verifies, commits and reports. The others have
            done their share of the bytes by the time they learn that they do not.
        engine: makes the files of a plan.
    """

    leads: bool = True
    engine: RunPlan = run_plan


@contextmanager
def crew() -> Iterator[Crew]:
    """Yield the crew: of all processes if torchrun started this one, else of this process alone.

    Raises:
        UnshardError: another process of the crew failed or died.
    """
    if not is_started_by_torchrun(os.environ):
        yield Crew()
        return
    from unshard.engines.torchrun import follow, joined, lead

    with joined() as group:
        if group.rank == 0:
            with lead(group) as engine:
                yield Crew(engine=engine)
        else:
            follow(group)
            yield Crew(leads=False)


def is_started_by_torchrun(environment: Mapping[str, str]) -> bool:
    """Tell whether torchrun started this very process.

    What a training process starts inherits the environment of torchrun, too, and must not wait for
    other processes to join: the parent must be torchrun itself.
    """
    if not all(name in environment for name in _VARIABLES):
        return False
    if is_launcher(_parent_command()):
        return True
    if environment["WORLD_SIZE"] != "1":
        _log.warning(
            "torchrun's variables are set, but it did not start this process: working alone"
        )
    return False


def is_launcher(command: Sequence[str]) -> bool:
    """Tell whether a command line is torchrun's: by its script, or the module after `-m`."""
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
        shown = subprocess.run(  # noqa: S603 (no shell, and nothing but a number)
            ["/bin/ps", "-ww", "-o", "command=", "-p", str(parent)],
            capture_output=True,
            check=False,
        )
        words = shown.stdout.split()
    return [os.fsdecode(word) for word in words]
