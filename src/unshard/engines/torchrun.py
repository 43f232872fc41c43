"""Run a plan with the processes of a torchrun on one node.

Rank 0 leads: it reads the checkpoint, plans, makes the staging directory and the files, and sends
the operations to the others. A plan is data: the others read no pickle and decide nothing; each
moves its share of the bytes into the same files. Then all say how it went, and rank 0 verifies and
commits. gloo carries plans and results; no tensor is ever sent.

Whoever dies, dies for all: torchrun stops the others, and gloo tells them. The leader then leaves
as after Ctrl-C; if it is the leader that has died, the others remove what it was making.
"""

import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from unshard.engines.pool import MIN_BUFFER, Means, Settings, shares
from unshard.engines.threads import (
    Overflows,
    RunPlan,
    create_files,
    named_overflows,
    run_units,
)
from unshard.errors import OutputError, UnshardError, UsageError
from unshard.plan.layout import Layout
from unshard.plan.operations import Plan
from unshard.plan.work import share_of, units
from unshard.progress import Advanced, Event, Listener, ignore
from unshard.write.interrupts import uninterrupted
from unshard.write.stage import recover

__all__ = ["Group", "follow", "joined", "lead"]

_PATIENCE = timedelta(days=7)  # a large merge is no reason to give up; a death shows at once
_FAILED = 1
_TERMINATED = 143


class _DeathError(OutputError):
    """Another process is gone, and with it the connection to all of them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a torchrun: this one's rank, and how many there are."""

    rank: int
    size: int

    def broadcast(self, message: object) -> object:
        """Return what rank 0 sends; on the others the argument does not count.

        Raises:
            OutputError: a process has died.
        """
        import torch.distributed as dist

        box = [message]
        try:
            dist.broadcast_object_list(box, src=0)
        except RuntimeError as error:
            raise _death(error) from error
        return box[0]

    def gather(self, message: object) -> list[object]:
        """Return what every process says, in the order of their ranks.

        Raises:
            OutputError: a process has died.
        """
        import torch.distributed as dist

        said: list[object] = [None] * self.size
        try:
            dist.all_gather_object(said, message)
        except RuntimeError as error:
            raise _death(error) from error
        return said


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A plan to take one's share of. Its layout is left out: nobody needs the names."""

    plan: Plan
    outputs: tuple[Path, ...]
    means: Means


@dataclass(frozen=True, slots=True)
class _End:
    """There is no more to do; the processes end with the exit code, unless it is 0."""

    exit_code: int


@contextmanager
def joined() -> Iterator[Group]:
    """Join the other processes.

    Raises:
        UsageError: they run on several nodes.
    """
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) != size:
        raise UsageError(
            "torchrun on several nodes: the processes must be on one",
            hint="run it on one node that sees all files: torchrun --nproc_per_node=N",
        )
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo", timeout=_PATIENCE)
        yield Group(dist.get_rank(), size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)


def _terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
    """Leave as after Ctrl-C, so that what is being made is removed."""
    raise SystemExit(_TERMINATED)


@contextmanager
def lead(group: Group) -> Iterator[RunPlan]:
    """Yield a function that makes the files of a plan with all processes; then let the others go.

    Settings are those of all processes together.
    """

    def run(plan: Plan, directory: Path, settings: Settings, listener: Listener) -> dict[str, int]:
        outputs = create_files(plan, directory)
        each = Settings(
            max(1, settings.workers // group.size),
            max(MIN_BUFFER, settings.memory_bytes // group.size),
        )
        bare = replace(plan, layout=Layout((), {}, 0))
        work = _Work(bare, outputs, shares(each))
        group.broadcast(work)
        return named_overflows(_united(_take_part(group, work, listener)), plan)

    try:
        yield run
    except _DeathError:
        raise
    except UnshardError as error:
        _dismiss(group, error.exit_code)
        raise
    except OSError:
        _dismiss(group, _FAILED)
        raise
    # after anything else the others may wait for something else: they see this process leave
    _dismiss(group, 0)


def _dismiss(group: Group, exit_code: int) -> None:
    """Let the others go; that one of them is gone already changes nothing any more."""
    with suppress(_DeathError):
        group.broadcast(_End(exit_code))


def follow(group: Group) -> None:
    """Do this process's share of whatever the leader plans, until it says that it is over.

    That a share fails, here or elsewhere, is for the leader to say.

    Raises:
        SystemExit: the leader failed; it has said why, and ends with the same exit code, so that
            torchrun reports that one whoever ends first.
        OutputError: a process has died.
    """
    outputs: tuple[Path, ...] = ()
    try:
        while isinstance(message := group.broadcast(None), _Work):
            outputs = message.outputs
            _take_part(group, message, ignore)
    except BaseException:
        with uninterrupted():
            _remove_what_is_left(outputs)
        raise
    if isinstance(message, _End) and message.exit_code:
        raise SystemExit(message.exit_code)


def _take_part(group: Group, work: _Work, listener: Listener) -> list[object]:
    """Do this process's share, and wait for the others'; return what became of each share."""
    mine = share_of(units(work.plan, buffer_bytes=work.means.buffer_bytes), group.rank, group.size)

    def as_all(event: Event) -> None:
        """Show the progress of one as if the others had made the same."""
        if isinstance(event, Advanced):
            event = Advanced(event.written_bytes * group.size)
        listener(event)

    result: Overflows | UnshardError | OSError
    try:
        result = run_units(mine, work.outputs, work.means, as_all)
    except (UnshardError, OSError) as error:
        result = error
    return group.gather(result)


def _united(results: list[object]) -> Overflows:
    """Return what all noticed.

    Raises:
        UnshardError: the first error of any of them.
        OSError: likewise.
    """
    overflows: Overflows = Counter()
    for said in results:
        if isinstance(said, UnshardError | OSError):
            raise said
        if isinstance(said, Counter):
            overflows += said
    return overflows


def _remove_what_is_left(outputs: tuple[Path, ...]) -> None:
    """Remove what a dead leader was making; a living one does that itself."""
    if outputs:
        staging = outputs[0].parent.parent
        recover(staging.parent)


def _death(error: RuntimeError) -> _DeathError:
    return _DeathError(
        "a process of this torchrun has died: nothing was written",
        found=str(error).partition("\n")[0],
        hint="look for its own message above; if it was killed for memory, use fewer processes",
    )
