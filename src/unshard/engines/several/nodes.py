"""Run a plan with the processes of a torchrun on several nodes.

Every node makes whole output files, because network file systems do not merge what two nodes write
into one page. The first process of all is the command. It divides the files by their bytes, and
sends the plan once to the first process of each other node, which makes its files with the
processes of its node, as `torchrun` does, and flushes them to disk.

If a process dies, all end: what was connected with it notices. The first process removes what was
made; if it has died itself, the others do.
"""

import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unshard import signals
from unshard.engines.several.links import Link, Office
from unshard.engines.several.torchrun import SIGNALS, Leader, died
from unshard.engines.threads import Finished, Overflows, Resources
from unshard.errors import UnshardError
from unshard.plan.operations import Plan
from unshard.progress import Advanced, Event, Listener
from unshard.signals import uninterrupted
from unshard.write.staging.recovery import recover

_TERMINATED = 143
_LOOKS = 100
_LOOK_S = 0.05  # between looks for the lock of a process that is about to end


@dataclass(frozen=True, slots=True)
class _Make:
    """Make the files of a plan; answer with bytes written, `_Whole`, and `_Made` or an error."""

    plan: Plan
    directory: Path
    resources: Resources


@dataclass(frozen=True, slots=True)
class _Whole:
    """A file has all its bytes, on disk; what became infinite in it."""

    number: int
    overflows: Overflows


@dataclass(frozen=True, slots=True)
class _Made:
    """All files are made; how many values became infinite, by the name of the tensor."""

    overflows: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Stop:
    """Stop making files: another process has failed."""


class _StoppedError(Exception):
    """The work of this node was stopped."""


class Chief:
    """The process that is the command, with those of its own node, and the first of each other."""

    def __init__(self, leader: Leader, nodes: int) -> None:
        self._leader = leader
        self._office = Office(nodes - 1)
        self._others: list[Link] = []

    def run_plan(
        self,
        plan: Plan,
        directory: Path,
        resources: Resources,
        listener: Listener,
        finished: Finished,
    ) -> dict[str, int]:
        """Make the output files as `threads.run_plan` does, on all nodes.

        The resources are those of each node.
        """
        self._others += self._office.accept()
        own, *parts = divided(plan, len(self._others) + 1)
        work = _Work(self._others, listener, finished)
        orders = [_Make(part, directory, resources) for part in parts]
        nodes = [
            threading.Thread(target=work.follow, args=one, daemon=True)
            for one in zip(self._others, orders, strict=True)
            if one[1].plan.numbers
        ]
        try:
            for node in nodes:
                node.start()
            made = self._leader.run_plan(own, directory, resources, work.told, work.finished)
            for node in nodes:
                node.join()
        except BaseException:
            with uninterrupted():  # no node may write into what is about to be removed
                work.stop()
                for node in nodes:
                    if node.ident is not None:
                        node.join()
            raise
        work.check()
        return made | work.made

    def dismiss(self, exit_code: int) -> None:
        """Let all others end with the exit code of this process, also those that connect late."""
        signals.end_at_once()
        if exit_code < SIGNALS:
            with suppress(UnshardError):
                self._others += self._office.accept()
        signals.ignore()
        self._office.close()
        for other in self._others:
            with suppress(OSError):
                other.send(exit_code)
        self._leader.dismiss(exit_code)


def divided(plan: Plan, count: int) -> list[Plan]:
    """Divide a plan into whole output files, of about as many bytes each; some may have none."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    files = plan.layout.files
    for number in sorted(plan.numbers, key=lambda number: -files[number].size):
        least = sizes.index(min(sizes))
        parts[least].append(number)
        sizes[least] += files[number].size
    return [plan.only(part) for part in parts]


class _Work:
    """What the other nodes do and report, for the threads of the chief.

    Attributes:
        made: what became infinite there, by the name of the tensor.
    """

    def __init__(self, nodes: Sequence[Link], listener: Listener, finished: Finished) -> None:
        self.made: dict[str, int] = {}
        self._nodes = nodes
        self._listener = listener
        self._finished = finished
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def follow(self, node: Link, order: _Make) -> None:
        """Send an order to a node, and take its answers to the last."""
        try:
            answer = _answered(node, order)
            while not isinstance(answer, _Made):
                self._take(answer)
                answer = _answered(node)
            self.made |= answer.overflows
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 (raised by the main thread)
            self._errors.append(error)
            self.stop()

    def _take(self, answer: object) -> None:
        match answer:
            case int():
                self.told(Advanced(answer))
            case _Whole(number, overflows):
                self.finished(number, overflows)
            case BaseException():
                raise answer

    def told(self, event: Event) -> None:
        """Pass an event on, from one thread at a time; end a thread of this node after an error."""
        with self._lock:
            self._listener(event)
        self.check()

    def finished(self, number: int, overflows: Overflows) -> None:
        """Record a file that is whole."""
        self._finished(number, overflows)

    def check(self) -> None:
        """Raise the first error of another node, if there is one."""
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Let all nodes stop; each answers when it has."""
        for node in self._nodes:
            with suppress(OSError):
                node.send(_Stop())


def _answered(node: Link, order: _Make | None = None) -> object:
    """Return the next answer of a node, after an order if there is one.

    Raises:
        Interrupted: the node's process has died.
    """
    try:
        if order is not None:
            node.send(order)
        return node.receive()
    except (OSError, EOFError) as error:
        raise died() from error


class _Inbox:
    """What the chief sends, which is read also while there is work: it may be to stop."""

    def __init__(self, chief: Link) -> None:
        self._chief = chief
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        stop = threading.Event()
        try:
            while not isinstance(message := self._chief.receive(), int):
                if isinstance(message, _Make):
                    stop = threading.Event()
                    self._messages.put((message, stop))
                else:
                    stop.set()
        except (OSError, EOFError) as error:
            message = error
        stop.set()
        self._messages.put(message)

    def next(self) -> object:
        """Return an order and the event that stops it, an exit code, or why there is none."""
        return self._messages.get()


def serve(chief: Link, leader: Leader) -> int:
    """Make what the chief orders, with the processes of this node; return the exit code."""
    inbox = _Inbox(chief)
    directory: Path | None = None
    try:
        while True:
            match inbox.next():
                case int() as code:
                    leader.dismiss(code)
                    return code
                case (_Make() as order, threading.Event() as stop):
                    directory = order.directory
                    chief.send(_made(chief, leader, order, stop))
                case OSError() | EOFError() as error:
                    raise error
    except (OSError, EOFError):
        _remove_what_is_left(directory, has_ended=True)
        leader.dismiss(_TERMINATED)
        return _TERMINATED  # what torchrun is about to do to all that are left
    except KeyboardInterrupt:
        with uninterrupted():
            _remove_what_is_left(directory, has_ended=False)
        raise


def _made(chief: Link, leader: Leader, order: _Make, stop: threading.Event) -> _Made | Exception:
    """Make the files of an order, and flush them; return the last answer to it."""
    files = order.plan.layout.files

    def told(event: Event) -> None:
        if stop.is_set():
            raise _StoppedError
        if isinstance(event, Advanced):
            chief.send(event.written_bytes)

    def finished(number: int, overflows: Overflows) -> None:
        flush(order.directory / files[number].filename)
        chief.send(_Whole(number, overflows))

    try:
        made = leader.run_plan(order.plan, order.directory, order.resources, told, finished)
        for number in order.plan.numbers:
            flush(order.directory / files[number].filename)
    except (UnshardError, OSError, MemoryError, _StoppedError) as error:
        return error
    return _Made(made)


def flush(path: Path) -> None:
    """Flush a file to disk: another node cannot."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_what_is_left(directory: Path | None, *, has_ended: bool) -> None:
    """Remove what a chief that has died was making; a living one does that itself.

    Its connection has ended, so its process has, on whichever host; its lock is free soon.
    """
    if directory is None:
        return
    staging = directory.parent
    for _ in range(_LOOKS if has_ended else 1):
        recover(staging.parent, ended=staging.name if has_ended else "")
        if not staging.exists():
            return
        time.sleep(_LOOK_S)
