"""Run a plan with the processes of a torchrun on one node.

Rank 0 leads: it is the command. It reads the checkpoint, plans, makes the staging directory and the
files, verifies and commits. Each of the others is one more worker of its pool: it is sent a few
units of work at a time, moves those bytes into the same files and reports the result. It reads
neither checkpoint nor plan, and decides nothing.

If one process dies, all end: torchrun stops the others, and their connections close. The leader
leaves as after Ctrl-C; if the leader itself has died, the others remove what it was making.
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from unshard import signals
from unshard.engines.several.sockets import Connection, MeetingPlace
from unshard.engines.threads import (
    Finished,
    Finishing,
    Overflows,
    Resources,
    Share,
    create_files,
    divide,
    in_turn,
    named_overflows,
    work_off,
)
from unshard.errors import UnshardError
from unshard.plan.operations import Plan
from unshard.plan.work import Unit, unit_bytes, units_by_file
from unshard.progress import Listener
from unshard.signals import Interrupted, uninterrupted
from unshard.write.execute import Executor
from unshard.write.staging.recovery import recover

SIGNALS = 128
"""Exit codes from here on are those of signals."""
_BATCH_BYTES = 4 * 1024 * 1024
"""Small units are sent together, so that moving them takes longer than asking for them."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """Open files to fill. Lists of units of work follow, and at the end an `_Enough`."""

    outputs: tuple[Path, ...]
    share: Share


@dataclass(frozen=True, slots=True)
class _Enough:
    """Close the files."""


_Done = tuple[int, Overflows]
"""The answer to each: bytes written, and what became infinite."""
_NOTHING: _Done = (0, Overflows())


def died() -> Interrupted:
    """Return what ends the work when another process has died."""
    return Interrupted(
        signal.SIGTERM,
        "error: a process of this torchrun has died: no output was made\n"
        "  hint:     look for its own message above; if it was killed for memory, use "
        "fewer processes",
    )


class Leader:
    """The process that is the command, and its connections to the others: `size` in all."""

    def __init__(self, size: int) -> None:
        self._meeting_place = MeetingPlace(size - 1)
        self._others: list[Connection] = []

    def run_plan(
        self,
        plan: Plan,
        directory: Path,
        resources: Resources,
        listener: Listener,
        finished: Finished,
    ) -> dict[str, int]:
        """Make the output files as `threads.run_plan` does, with all processes that have connected.

        The resources are those of all processes together: if there are more processes than
        workers, some have nothing to do.
        """
        # A process that is still starting is not waited for: it joins the next plan.
        self._others += self._meeting_place.accept(wait=False)
        outputs = create_files(plan, directory)
        share = divide(resources)
        files = units_by_file(plan, buffer_bytes=share.buffer_bytes)
        batches = ((_batches(copies), _batches(made)) for copies, made in files)
        others = iter(self._others[: share.workers - 1])
        finishing = Finishing(plan, finished)

        def worker() -> _Recorded:
            other = next(others, None)
            return _Recorded(
                _Here(outputs, share) if other is None else _There(other, outputs, share), finishing
            )

        work_off(in_turn(batches, behind=share.workers), listener, share.workers, worker)
        return named_overflows([finishing.overflows], plan)

    def dismiss(self, exit_code: int) -> None:
        """Let the others end with the exit code of this process, also those that connect late.

        A process that is gone already is ignored. After a signal this does not wait for any:
        torchrun ends them all.
        """
        signals.end_at_once()
        self._others += self._meeting_place.accept(wait=exit_code < SIGNALS)
        signals.ignore()
        self._meeting_place.close()
        for other in self._others:
            with suppress(OSError):
                other.send(exit_code)


class _Here:
    """Does the work in this process."""

    def __init__(self, outputs: tuple[Path, ...], share: Share) -> None:
        self._executor = Executor(
            outputs, open_files=share.open_files, buffer_bytes=share.buffer_bytes
        )

    def do(self, batch: list[Unit]) -> _Done:
        """Do units of work."""
        done = sum(map(self._executor.do, batch))
        self._executor.finish()
        return done, self._executor.take_overflows()

    def close(self) -> None:
        """Close all files."""
        self._executor.close()


class _There:
    """Lets another process do the work."""

    def __init__(self, other: Connection, outputs: tuple[Path, ...], share: Share) -> None:
        self._other = other
        self._ask(_Begin(outputs, share))

    def do(self, batch: list[Unit]) -> _Done:
        """Let the other process do units of work.

        Raises:
            UnshardError: as `Executor.do` raised it there.
            OSError: likewise.
            Interrupted: the process has died.
        """
        return self._ask(batch)

    def close(self) -> None:
        """Let the other process close its files."""
        self._ask(_Enough())

    def _ask(self, message: object) -> _Done:
        """Return the answer to a message."""
        try:
            self._other.send(message)
            answer = self._other.receive()
        except (OSError, EOFError) as error:
            raise died() from error
        if isinstance(answer, UnshardError | OSError | MemoryError):
            raise answer
        return cast("_Done", answer)


class _Recorded:
    """A worker of the pool, whose work `finishing` takes note of."""

    def __init__(self, worker: _Here | _There, finishing: Finishing) -> None:
        self._worker = worker
        self._finishing = finishing
        self.close = worker.close

    def do(self, batch: list[Unit]) -> int:
        """Do units of work; return the bytes written."""
        done, overflows = self._worker.do(batch)
        self._finishing.did(batch, overflows)
        return done


def _batches(work: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Yield the units in lists that have the bytes of a batch, or more."""
    batch: list[Unit] = []
    size = 0
    for unit in work:
        batch.append(unit)
        size += unit_bytes(unit)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def follow(leader: Connection, message: object) -> int:
    """Do the work that the leader sends, from its first message to its exit code; return that.

    Raises:
        OSError, EOFError: the leader has died; what it was making is removed.
        Interrupted: a signal ended this process.
    """
    outputs: tuple[Path, ...] = ()
    worker: _Here | None = None
    answer: object = _NOTHING
    try:
        while not isinstance(message, int):
            match message:
                case _Begin(outputs, share):
                    worker, answer = _Here(outputs, share), _NOTHING
                case list() if worker is not None:
                    try:
                        answer = worker.do(message)
                    except (UnshardError, OSError, MemoryError) as error:
                        answer = error  # the leader raises it
                case _Enough() if worker is not None:
                    worker.close()
                    answer = _NOTHING
            leader.send(answer)
            message = leader.receive()
    except (OSError, EOFError):
        leader.wait_for_death()
        _remove_what_is_left(outputs)
        raise
    except KeyboardInterrupt:
        with uninterrupted():
            _remove_what_is_left(outputs)
        raise
    return message


def _remove_what_is_left(outputs: tuple[Path, ...]) -> None:
    """Remove what a leader that has died was making; a living one does that itself."""
    if outputs:
        staging = outputs[0].parent.parent
        recover(staging.parent)
