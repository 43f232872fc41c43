"""What does the work: the threads of this process, all processes of a torchrun, or a Ray cluster.

Every command imports this to learn whether torchrun started it, so it imports little.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unshard import signals

if TYPE_CHECKING:
    from unshard.engines.compare import Measure
    from unshard.engines.several.nodes import Chief
    from unshard.engines.several.over_ray import Upload
    from unshard.engines.several.torchrun import Leader
    from unshard.engines.threads import RunPlan, VerifyFull

_SCRIPTS = frozenset({"torchrun", "accelerate", "accelerate-launch"})
_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)
_WITH_VALUE = frozenset({"-W", "-X"})  # options of the interpreter that take the next word
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TERMINATED = 128 + signal.SIGTERM
_LEADER: "ContextVar[Leader | Chief | None]" = ContextVar("leader", default=None)


@dataclass(frozen=True, slots=True)
class Crew:
    """What does the work.

    Attributes:
        run_plan: makes the files of a plan.
        measure: compares tensors.
        verify_full: reads sources and output again.
        upload: uploads the files of a plan into a store; None: this process does.
    """

    run_plan: "RunPlan"
    measure: "Measure"
    verify_full: "VerifyFull"
    upload: "Upload | None" = None


@contextmanager
def crew(engine: str | None = None) -> Iterator[Crew]:
    """Yield what does the work: the nodes of a Ray cluster for "ray".

    Without a choice it is all processes of a torchrun if this one leads, else threads.

    Raises:
        UsageError: there is no cluster, or two engines.
    """
    leader = _LEADER.get()
    if leader is not None:
        _refuse_nodes()
    if engine == "ray":
        from unshard.engines.several.cluster import connected
        from unshard.engines.several.over_ray import OverRay
        from unshard.errors import UsageError

        if leader is not None:
            what = "--engine ray: torchrun has started several processes for this command"
            raise UsageError(what, hint="start it without torchrun, or leave out --engine ray")
        with connected() as cluster:
            ray = OverRay(cluster)
            yield Crew(ray.run_plan, ray.measure, ray.verify_full, ray.upload)
        return
    from unshard.engines.compare import measure_pairs
    from unshard.engines.threads import run_plan, verify_full

    yield Crew(run_plan if leader is None else leader.run_plan, measure_pairs, verify_full)


def _refuse_nodes() -> None:
    """Raise an error if paths on the nodes of a Ray cluster were read: others cannot read them."""
    from unshard.stores.nodes.connection import is_connected

    if is_connected():
        from unshard.errors import UsageError

        raise UsageError(
            "node:// paths are read over Ray, and torchrun has started several processes",
            hint="start the command once, without torchrun, and add --engine ray",
        )


def as_one_of_torchrun(command: Callable[[], int]) -> int:
    """Run a command in the first process of a torchrun, and work for it in the others.

    Returns:
        The exit code of the command, the same in all processes.

    Raises:
        OutputError: they cannot meet.
    """
    size, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if size == 1:
        return command()
    if os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
        return _follow()
    if os.environ["RANK"] != "0":
        return _serve(here)
    leader = _make_leader(here, several_nodes=here != size)
    _LEADER.set(leader)
    code = command()
    leader.dismiss(code)
    return code


def _make_leader(here: int, *, several_nodes: bool) -> "Leader | Chief":
    from unshard.engines.several.torchrun import Leader

    leader = Leader(here)
    if not several_nodes:
        return leader
    from unshard.engines.several.nodes import Chief

    return Chief(leader, int(os.environ["GROUP_WORLD_SIZE"]))


def _serve(here: int) -> int:
    """Work for the first process of all nodes, with the processes of this one."""
    from unshard.engines.several.links import connect_to_office
    from unshard.engines.several.nodes import serve
    from unshard.engines.several.torchrun import Leader

    signals.raise_them()
    try:
        leader = Leader(here)
        return serve(connect_to_office(), leader)
    except KeyboardInterrupt as error:
        return signals.exit_code(error)


def _follow() -> int:
    """Work for the leader; return its exit code. Only the leader prints.

    Neither numpy nor anything that needs it is imported before there is work for this process.
    """
    from unshard.engines.several.sockets import connect, remove_meeting_place

    signals.raise_them()
    try:
        leader = connect()
        message = leader.receive()
        if isinstance(message, int):
            return message
        from unshard.engines.several.torchrun import follow

        return follow(leader, message)
    except (OSError, EOFError):
        remove_meeting_place()
        return _TERMINATED  # what torchrun is about to do to all that are left
    except KeyboardInterrupt as error:
        return signals.exit_code(error)


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
