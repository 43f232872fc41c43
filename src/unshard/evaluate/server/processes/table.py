"""Processes of an attempt: told apart, found again, ended as a whole.

A process number alone means nothing after a restart; with the ticks at which the kernel started it,
and the identity of that boot, it does. An attempt's processes are those of its leader's group, all
who descend from it, and whoever carries its mark in the environment: a process may leave the group
(`setsid`) or lose its parent, but rarely does both and clears its environment. Where there is no
/proc, `ps` is asked, and the mark is not seen.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.jobs import Process
from unshard.evaluate.server.processes.environment import MARK

__all__ = ["Entry", "boot", "identify", "is_alive", "kill_group", "members", "send"]

_PROC = Path("/proc")
_DEAD = ("Z", "X", "x")
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
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _output("sysctl", "-n", "kern.boottime").strip()


def identify(pid: int, *, gpus: tuple[int, ...], directory: str) -> Process:
    """Return what tells this process from others of its number; a child may be dead already.

    Raises:
        ProcessLookupError: it is not there any more.
    """
    found = next(_entries([pid]), None)
    if found is None:
        raise ProcessLookupError(pid)
    return Process(pid, found.started, boot(), gpus, directory)


def is_alive(process: Process) -> bool:
    """Tell whether the leader of an attempt still runs; one that only waits to be reaped is not."""
    if process.boot != boot():
        return False
    return any(entry.started == process.started for entry in table([process.pid]))


def members(process: Process) -> list[Entry]:
    """Return all living processes of an attempt that can be found, this one excepted.

    Without its leader a group may be a stranger's that was given the number since.
    """
    if process.boot != boot():
        return []
    entries = list(table())
    found = {entry.pid for entry in entries if _is_marked(entry, process)}
    leader = next((entry for entry in entries if entry.pid == process.pid), None)
    # Where no marks are seen, a group without a leader is taken to be the attempt's.
    is_ours = sys.platform != "linux" if leader is None else leader.started == process.started
    if is_ours:
        found |= {entry.pid for entry in entries if entry.group == process.pid}
    found = _with_descendants(found, entries)
    return [entry for entry in entries if entry.pid in found and entry.pid != os.getpid()]


def kill_group(process: Process, *, grace_s: float) -> bool:
    """End every process of an attempt: ask, wait, then kill; tell whether none is left.

    Args:
        process: its leader, which may be gone already.
        grace_s: how long they may take to end by themselves.
    """
    send(members(process), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not members(process):
            return True
        time.sleep(_PAUSE_S)
    for _ in range(_ROUNDS):  # whoever was born meanwhile is found in the next round
        left = members(process)
        if not left:
            return True
        send(left, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return False


def send(entries: Iterable[Entry], number: signal.Signals) -> None:
    """Send a signal to processes; those that are gone or not ours are passed over."""
    for entry in entries:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(entry.pid, number)


def _with_descendants(found: set[int], entries: list[Entry]) -> set[int]:
    """Return processes, and all who descend from them."""
    size = -1
    while size != len(found):
        size = len(found)
        found |= {entry.pid for entry in entries if entry.parent in found}
    return found


def _is_marked(entry: Entry, process: Process) -> bool:
    try:
        variables = (_PROC / str(entry.pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, another user's, or a system without /proc
        return False
    return f"{MARK}={process.directory}".encode() in variables


def table(pids: Iterable[int] | None = None) -> Iterator[Entry]:
    """Yield all living processes, or those of these numbers."""
    return (entry for entry in _entries(pids) if not entry.is_dead)


def _entries(pids: Iterable[int] | None) -> Iterator[Entry]:
    if sys.platform != "linux":
        yield from _asked(pids)
        return
    names = os.listdir(_PROC) if pids is None else map(str, pids)  # noqa: PTH208  (names only)
    for name in names:
        if name.isdigit():
            with suppress(OSError):
                yield from _parsed(int(name), (_PROC / name / "stat").read_bytes())


def _parsed(pid: int, line: bytes) -> Iterator[Entry]:
    """Read /proc/<pid>/stat; the name, in parentheses, may hold anything (proc_pid_stat(5))."""
    fields = line[line.rindex(b")") + 2 :].split()
    is_dead = fields[0].decode() in _DEAD
    yield Entry(pid, int(fields[1]), int(fields[2]), int(fields[19]), is_dead)


def _asked(pids: Iterable[int] | None) -> Iterator[Entry]:
    """Ask `ps`; a process that started has the same second in every answer."""
    wanted = None if pids is None else set(pids)
    for line in _output("ps", "-axo", "pid=,ppid=,pgid=,state=,lstart=").splitlines():
        pid, parent, group, state, *moment = line.split()
        if wanted is None or int(pid) in wanted:
            seconds = time.mktime(time.strptime(" ".join(moment), "%a %b %d %H:%M:%S %Y"))
            is_dead = state[0] in _DEAD
            yield Entry(int(pid), int(parent), int(group), int(seconds), is_dead)


def _output(*command: str) -> str:
    environment = os.environ | {"LC_ALL": "C", "TZ": "UTC"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
    return done.stdout
