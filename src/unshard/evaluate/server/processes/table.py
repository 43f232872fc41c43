"""Identifies, lists and ends the processes of an attempt.

After a restart a process number alone identifies nothing; with the ticks at which the kernel
started the process, and the identity of the boot, it does. An attempt's processes are its leader's
group, their descendants, and all processes with its mark in the environment: a process may leave
the group (`setsid`) or lose its parent, but rarely does both and clears its environment.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from unshard.evaluate.process import Process

MARK = "UNSHARD_ATTEMPT"
"""The variable with the attempt's directory in the environment of each of its processes."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.02
_ROUNDS = 500


class _ProcessInfo(NamedTuple):
    """One process; `started` as in `Process`."""

    pid: int
    parent: int
    group: int
    started: int
    is_zombie: bool
    handle: psutil.Process


def boot_id() -> str:
    """Return the kernel's identity of this boot."""
    try:
        # psutil knows only the time of the boot, which changes when the clock is set.
        return _BOOT_ID.read_text().strip()
    except OSError:
        return str(psutil.boot_time())


def identify(pid: int, *, gpus: tuple[str, ...], directory: str) -> Process:
    """Return the identity of a process or zombie; raise ProcessLookupError if there is none."""
    entry = next(_entries([pid]), None)
    if entry is None:
        raise ProcessLookupError(pid)
    return Process(pid, entry.started, boot_id(), gpus, directory)


def is_alive(process: Process) -> bool:
    """Return whether the leader of an attempt runs; a zombie does not."""
    return process.boot == boot_id() and any(
        entry.started == process.started and not entry.is_zombie
        for entry in _entries([process.pid])
    )


def list_members(process: Process) -> list[_ProcessInfo]:
    """Return all living processes of an attempt, except this process.

    A group without its leader may belong to a new process with the leader's number.
    """
    if process.boot != boot_id():
        return []
    entries = [entry for entry in _entries(psutil.pids()) if not entry.is_zombie]
    # An attempt begins with its leader: older processes, which may be thousands, are not of it.
    young = (entry for entry in entries if entry.started >= process.started)
    members = {entry.pid for entry in young if _is_marked(entry, process)}
    leader = next((entry for entry in entries if entry.pid == process.pid), None)
    # macOS hides the environment, and thus the mark, of its own programs: a group without a leader
    # is taken to be the attempt's there.
    is_ours = sys.platform != "linux" if leader is None else leader.started == process.started
    if is_ours:
        members |= {entry.pid for entry in entries if entry.group == process.pid}
    size = -1
    while size != len(members):  # until there are no more descendants
        size = len(members)
        members |= {entry.pid for entry in entries if entry.parent in members}
    return [entry for entry in entries if entry.pid in members and entry.pid != os.getpid()]


def kill_group(process: Process, *, grace_s: float) -> bool:
    """End every process of an attempt: ask, wait, then kill; return whether all are gone.

    The leader may have ended already.
    """
    seen: set[tuple[int, int]] = set()

    def list_alive() -> list[_ProcessInfo]:
        # A process that is ending loses its environment, and thus its mark, before it closes its
        # files and releases its GPUs. So each process that was seen is watched until it is gone.
        seen.update((entry.pid, entry.started) for entry in list_members(process))
        entries = _entries({pid for pid, _ in seen})
        return [each for each in entries if (each.pid, each.started) in seen and not each.is_zombie]

    send(list_alive(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not list_alive():
            return True
        time.sleep(_PAUSE_S)
    for _ in range(_ROUNDS):  # the next round finds a child that was started since
        if not (alive := list_alive()):
            return True
        send(alive, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return False


def send(entries: Iterable[_ProcessInfo], number: signal.Signals) -> None:
    """Send a signal to processes; skip ended processes and those of other users."""
    for entry in entries:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(entry.pid, number)


def _is_marked(entry: _ProcessInfo, process: Process) -> bool:
    try:
        return bool(entry.handle.environ().get(MARK) == process.directory)
    except psutil.Error:  # it has ended, or is another user's
        return False


def _entries(pids: Iterable[int]) -> Iterator[_ProcessInfo]:
    """Yield the processes that exist, including zombies."""
    for pid in pids:
        with suppress(psutil.Error, ProcessLookupError, PermissionError):  # ended, or hidden
            handle = psutil.Process(pid)
            with handle.oneshot():
                # Setting the clock changes both times, but not their difference.
                seconds: float = handle.create_time() - psutil.boot_time()
                started, is_zombie = round(seconds * _TICKS_PER_S), handle.status() in _DEAD
                group = os.getpgid(pid)
                yield _ProcessInfo(pid, handle.ppid(), group, started, is_zombie, handle)
