"""The processes of a server's attempts: seen when they are born, and sent signals."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.server.processes.table import MARK

KINDS = ("supervisor", "evaluator", "merge worker")
_MODULES = {
    b"unshard.evaluate.server.processes.supervise": "supervisor",
    b"unshard.evaluate.server.attempts.merge_worker": "merge worker",
}
_PROC = Path("/proc")


@dataclass(frozen=True)
class Victim:
    """A process; its descriptor means it, even if another process gets its number later."""

    pid: int
    kind: str
    handle: int
    seen_at: float

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether the process was alive."""
        if state_of(self.pid) in "ZX":
            return False
        try:
            signal.pidfd_send_signal(self.handle, number)
        except ProcessLookupError:
            return False
        return True


def children(parent: int) -> list[int]:
    """Return the children of a process that live or were not reaped yet."""
    found = []
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(") ")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def state_of(pid: int) -> str:
    """Return the state of a process as /proc/<pid>/stat has it; X where there is none."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


class Watch:
    """Finds the processes of all attempts below a work directory, the new ones within milliseconds.

    Until it has replaced its image a process has the environment of its parent: whoever is young
    is looked at again.
    """

    def __init__(self, work: Path) -> None:
        self._mark = f"{MARK}={work}/".encode()
        self._strangers: dict[int, float] = {}
        self._ours: dict[int, Victim] = {}

    def close(self) -> None:
        for one in self._ours.values():
            os.close(one.handle)

    def look(self) -> list[Victim]:
        """Return the processes that live now, the oldest first."""
        pids = [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208
        for pid in pids:
            if pid not in self._ours and time.monotonic() - self._strangers.get(pid, 1e18) < 1:
                self._look_at(pid)
        return [one for one in self._ours.values() if state_of(one.pid) not in "ZX"]

    def births(self, kind: str) -> Iterator[Victim | None]:
        """Yield each process of a kind that is born from now on; None where there is none yet."""
        known = {one.pid for one in self.look()}
        while True:
            new = [one for one in self.look() if one.kind == kind and one.pid not in known]
            known.update(one.pid for one in new)
            yield from new
            if not new:
                yield None
                time.sleep(0.002)

    def _look_at(self, pid: int) -> None:
        self._strangers.setdefault(pid, time.monotonic())
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
            if not any(entry.startswith(self._mark) for entry in environment.split(b"\0")):
                return
            command = (_PROC / str(pid) / "cmdline").read_bytes()
            is_leader = os.getpgid(pid) == pid
            handle = os.pidfd_open(pid)
        except OSError:
            return
        kind = "a child of an evaluator" if is_leader else "evaluator"
        for module, name in _MODULES.items():
            kind = name if is_leader and module in command else kind
        self._ours[pid] = Victim(pid, kind, handle, time.monotonic())
