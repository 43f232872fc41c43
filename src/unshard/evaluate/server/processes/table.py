"""Processes of an attempt: identified, found again, ended as a whole.

A process number alone means nothing after a restart; with the ticks at which the kernel started it,
and the identity of that boot, it does. An attempt's processes are those of its leader's group,
their descendants, and all that carry its mark in the environment: a process may leave the group
(`setsid`) or lose its parent, but rarely does both and clears its environment.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from unshard.evaluate.jobs import Process
from unshard.evaluate.server.processes.environment import MARK

__all__ = ["Entry", "boot", "identify", "is_alive", "kill_group", "members", "send"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.02
_ROUNDS = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """One process; `started` as in `Process`; a dead one only waits to be reaped."""

    pid: int
    parent: int
    group: int
    started: int
    is_dead: bool


def boot() -> str:
    """Return the kernel's identity of this boot."""
    try:
        # psutil has only the time of the boot, which changes when the clock is set.
        return _BOOT_ID.read_text().strip()
    except OSError:
        return str(psutil.boot_time())


def identify(pid: int, *, gpus: tuple[str, ...], directory: str) -> Process:
    """Return what distinguishes this process from others of its number; it may be a zombie.

    Raises:
        ProcessLookupError: there is no such process.
    """
    found = next(_entries([pid]), None)
    if found is None:
        raise ProcessLookupError(pid)
    return Process(pid, found.started, boot(), gpus, directory)


def is_alive(process: Process) -> bool:
    """Return whether the leader of an attempt still runs; a zombie does not."""
    if process.boot != boot():
        return False
    return any(entry.started == process.started for entry in _living([process.pid]))


def members(process: Process) -> list[Entry]:
    """Return all living processes of an attempt that can be found, except this one.

    A group without its leader may belong to another process that got the leader's number since.
    """
    if process.boot != boot():
        return []
    entries = list(_living())
    found = {entry.pid for entry in entries if _is_marked(entry, process)}
    leader = next((entry for entry in entries if entry.pid == process.pid), None)
    # macOS hides the environment, and thus the mark, of its own programs: a group without a leader
    # is taken to be the attempt's there.
    is_ours = sys.platform != "linux" if leader is None else leader.started == process.started
    if is_ours:
        found |= {entry.pid for entry in entries if entry.group == process.pid}
    found = _with_descendants(found, entries)
    return [entry for entry in entries if entry.pid in found and entry.pid != os.getpid()]


def kill_group(process: Process, *, grace_s: float) -> bool:
    """End every process of an attempt: ask, wait, then kill; return whether none is left.

    Args:
        process: its leader, which may have ended already.
        grace_s: how long they may take to end by themselves.
    """
    send(members(process), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not members(process):
            return True
        time.sleep(_PAUSE_S)
    for _ in range(_ROUNDS):  # a child that was born since is found in the next round
        left = members(process)
        if not left:
            return True
        send(left, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return False


def send(entries: Iterable[Entry], number: signal.Signals) -> None:
    """Send a signal to processes, except those that have ended or belong to another user."""
    for entry in entries:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(entry.pid, number)


def _with_descendants(found: set[int], entries: list[Entry]) -> set[int]:
    """Return processes and all their descendants."""
    size = -1
    while size != len(found):
        size = len(found)
        found |= {entry.pid for entry in entries if entry.parent in found}
    return found


def _is_marked(entry: Entry, process: Process) -> bool:
    try:
        return bool(psutil.Process(entry.pid).environ().get(MARK) == process.directory)
    except psutil.Error:  # it has ended, or is another user's
        return False


def _living(pids: Iterable[int] | None = None) -> Iterator[Entry]:
    """Yield all living processes, or those of these numbers."""
    return (entry for entry in _entries(pids) if not entry.is_dead)


def _entries(pids: Iterable[int] | None) -> Iterator[Entry]:
    for pid in psutil.pids() if pids is None else pids:
        with suppress(psutil.Error, ProcessLookupError, PermissionError):  # ended, or hidden
            found = psutil.Process(pid)
            with found.oneshot():
                is_dead = found.status() in _DEAD
                yield Entry(pid, found.ppid(), os.getpgid(pid), _started(found), is_dead)


def _started(process: psutil.Process) -> int:
    """Return when a process started, in clock ticks since boot.

    Setting the clock changes both times that psutil returns, but not their difference.
    """
    seconds: float = process.create_time() - psutil.boot_time()
    return round(seconds * _TICKS_PER_S)
