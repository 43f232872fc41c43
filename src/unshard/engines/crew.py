"""What moves the bytes of a plan: the threads of this process, or all processes of a torchrun."""

import os
import signal
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from unshard import signals
from unshard.engines.sockets import connect, remove_meeting_place
from unshard.errors import UsageError

if TYPE_CHECKING:
    from unshard.engines.threads import RunPlan
    from unshard.engines.torchrun import Leader

__all__ = ["as_one_of_torchrun", "crew"]

_TERMINATED = 128 + signal.SIGTERM
_LEADER: "ContextVar[Leader | None]" = ContextVar("leader", default=None)


def crew() -> "RunPlan":
    """Return what runs a plan: all processes of a torchrun if this one leads, else threads."""
    from unshard.engines.threads import run_plan

    leader = _LEADER.get()
    return run_plan if leader is None else leader.run_plan


def as_one_of_torchrun(command: Callable[[], int]) -> int:
    """Run a command in the first process of a torchrun, and work for it in the others.

    Args:
        command: returns its exit code.

    Returns:
        The exit code, the same in all processes.

    Raises:
        UsageError: they run on several nodes.
        OutputError: they cannot meet.
    """
    size = int(os.environ["WORLD_SIZE"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) != size:
        raise UsageError(
            "torchrun on several nodes: the processes must be on one",
            hint="run it on one node that sees all files: torchrun --nproc_per_node=N",
        )
    if size == 1:
        return command()
    if os.environ["RANK"] != "0":
        return _follow()
    from unshard.engines.torchrun import Leader

    leader = Leader(size)
    _LEADER.set(leader)
    code = command()
    leader.dismiss(code)
    return code


def _follow() -> int:
    """Work for the leader; return its exit code. Only the leader prints.

    Neither numpy nor anything that needs it is imported before there is work for this process.
    """
    signals.raise_them()
    try:
        leader = connect()
        message = leader.receive()
        if isinstance(message, int):
            return message
        from unshard.engines.torchrun import follow

        return follow(leader, message)
    except (OSError, EOFError):
        remove_meeting_place()
        return _TERMINATED  # what torchrun is about to do to all that are left
    except KeyboardInterrupt as error:
        return signals.exit_code(error)
