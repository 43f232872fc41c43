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

from unshard.evaluate.process import Process

MARK = "UNSHARD_ATTEMPT"
"""Names the attempt's directory in every process of it, so that they can be found again."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSE_S = 0.02
_ROUNDS = 500


@dataclass(frozen=True, slots=True)
class _ProcessInfo:
    """One process, itself as psutil has it; `started` as in `Process`."""

    pid: int
    parent: int
    group: int
    started: int
    is_zombie: bool
    itself: psutil.Process


def boot_id() -> str:
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
    return Process(pid, found.started, boot_id(), gpus, directory)


def is_alive(process: Process) -> bool:
    """Return whether the leader of an attempt still runs; a zombie does not."""
    return process.boot == boot_id() and any(
        entry.started == process.started and not entry.is_zombie
        for entry in _entries([process.pid])
    )


def list_members(process: Process) -> list[_ProcessInfo]:
    """Return all living processes of an attempt that can be found, except this one.

    A group without its leader may belong to another process that got the leader's number since.
    """
    if process.boot != boot_id():
        return []
    entries = [entry for entry in _entries(psutil.pids()) if not entry.is_zombie]
    # An attempt began with its leader: older processes, which may be thousands, are not of it.
    young = (entry for entry in entries if entry.started >= process.started)
    found = {entry.pid for entry in young if _is_marked(entry, process)}
    leader = next((entry for entry in entries if entry.pid == process.pid), None)
    # macOS hides the environment, and thus the mark, of its own programs: a group without a leader
    # is taken to be the attempt's there.
    is_ours = sys.platform != "linux" if leader is None else leader.started == process.started
    if is_ours:
        found |= {entry.pid for entry in entries if entry.group == process.pid}
    size = -1
    while size != len(found):  # then there are no more descendants
        size = len(found)
        found |= {entry.pid for entry in entries if entry.parent in found}
    return [entry for entry in entries if entry.pid in found and entry.pid != os.getpid()]


def kill_group(process: Process, *, grace_s: float) -> bool:
    """End every process of an attempt: ask, wait, then kill; return whether none is left.

    The leader may have ended already.
    """
    seen: set[tuple[int, int]] = set()

    def list_left() -> list[_ProcessInfo]:
        # A process that is ending loses its environment, and thus its mark, before it closes its
        # files and gives back its GPUs: what was found once is watched until it is gone.
        seen.update((one.pid, one.started) for one in list_members(process))
        known = _entries({pid for pid, _ in seen})
        return [one for one in known if (one.pid, one.started) in seen and not one.is_zombie]

    send(list_left(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not list_left():
            return True
        time.sleep(_PAUSE_S)
    for _ in range(_ROUNDS):  # a child that was born since is found in the next round
        if not (left := list_left()):
            return True
        send(left, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return False


def send(entries: Iterable[_ProcessInfo], number: signal.Signals) -> None:
    """Send a signal to processes, except those that have ended or belong to another user."""
    for entry in entries:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(entry.pid, number)


def _is_marked(entry: _ProcessInfo, process: Process) -> bool:
    try:
        return bool(entry.itself.environ().get(MARK) == process.directory)
    except psutil.Error:  # it has ended, or is another user's
        return False


def _entries(pids: Iterable[int]) -> Iterator[_ProcessInfo]:
    """Yield those of the processes that exist, zombies too."""
    for pid in pids:
        with suppress(psutil.Error, ProcessLookupError, PermissionError):  # ended, or hidden
            found = psutil.Process(pid)
            with found.oneshot():
                # Setting the clock changes both times, but not their difference.
                seconds: float = found.create_time() - psutil.boot_time()
                started, is_zombie = round(seconds * _TICKS_PER_S), found.status() in _DEAD
                group = os.getpgid(pid)
                yield _ProcessInfo(pid, found.ppid(), group, started, is_zombie, found)
