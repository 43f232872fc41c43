import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from damage import in_time
from evaluation.running import is_running, wait_until
from unshard.evaluate.process import Process
from unshard.evaluate.server.processes.table import (
    MARK,
    boot_id,
    identify,
    is_alive,
    kill_group,
    list_members,
)
from waiting import LIMIT_S

# A tree: a child that ignores SIGTERM, one in a session of its own, and an orphan of such a one.
TREE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def note(name):
    (folder / f"{name}.partial").write_text(str(os.getpid()))
    (folder / f"{name}.partial").rename(folder / name)
def live():
    while True: time.sleep(60)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN); note("stubborn"); live()
if os.fork() == 0:
    os.setsid(); note("apart"); live()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN); note("orphan"); live()
    os._exit(0)
note("leader"); live()
"""
NAMES = ("stubborn", "apart", "orphan", "leader")


@contextmanager
def tree(folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Process, dict[str, int]]]:
    command = [sys.executable, "-I", "-S", "-c", TREE, str(folder)]
    child = subprocess.Popen(command, start_new_session=True, env={MARK: str(folder)})
    pids: dict[str, int] = {}
    try:
        wait_until(lambda: all((folder / name).exists() for name in NAMES), "the tree")
        pids = {name: int((folder / name).read_text()) for name in NAMES}
        yield child, identify(child.pid, gpus=(), directory=str(folder)), pids
    finally:
        child.kill()
        child.wait()
        for pid in pids.values():
            with suppress(ProcessLookupError):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found by /proc")
def test_the_whole_tree_ends_with_its_group(tmp_path: Path) -> None:
    with tree(tmp_path) as (child, process, pids):
        assert {entry.pid for entry in list_members(process)} == set(pids.values())
        assert is_alive(process)
        assert kill_group(process, grace_s=0.2)
        assert not any(is_running(pid) for pid in pids.values())
        assert not is_alive(process)  # though it is a zombie still
        child.wait()
        assert not is_alive(process)


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found by /proc")
def test_what_outlives_its_leader_is_found(tmp_path: Path) -> None:
    with tree(tmp_path) as (child, process, pids):
        child.kill()
        child.wait()
        assert {entry.pid for entry in list_members(process)} == set(pids.values()) - {child.pid}
        assert kill_group(process, grace_s=0)
        assert not any(is_running(pid) for pid in pids.values())


@pytest.mark.skipif(sys.platform != "linux", reason="marks are seen in /proc")
def test_a_process_that_loses_its_mark_while_it_is_ended_is_awaited(tmp_path: Path) -> None:
    # As every process does for a moment when it ends: it gives its memory back first.
    forget = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.execve(sys.executable, [sys.executable, '-I', "
        "'-S', '-c', 'import time; time.sleep(600)'], {}))\n"
        "print(flush=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-I", "-S", "-c", forget]
    marked = {**os.environ, MARK: str(tmp_path)}
    with subprocess.Popen(["true"], start_new_session=True) as leader:
        process = identify(leader.pid, gpus=(), directory=str(tmp_path))
    with subprocess.Popen(command, env=marked, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the handler is there
        try:
            assert kill_group(process, grace_s=2)
            assert not is_running(child.pid)
        finally:
            child.kill()


def test_another_process_with_the_same_number_is_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True) as child:
        own = identify(child.pid, gpus=(), directory=str(tmp_path))
        for other in (replace(own, started=own.started - 1), replace(own, boot="another")):
            assert not is_alive(other)
            assert list_members(other) == []
            assert kill_group(other, grace_s=0)
        assert is_alive(own)
        child.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="marks are seen in /proc")
def test_a_foreign_group_whose_leader_has_ended_is_left_alone(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 600 >&- 2>&- & echo $!"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        stranger = int(shell.stdout.read())
    try:
        once = Process(shell.pid, 1, boot_id(), (), str(tmp_path))  # had the number of the shell
        assert list_members(once) == []
        assert kill_group(once, grace_s=0)
        assert is_running(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_process_that_ends_by_itself_when_asked_is_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True) as child:
        process = identify(child.pid, gpus=(), directory=str(tmp_path))
        with in_time():
            assert kill_group(process, grace_s=10 * LIMIT_S)
        assert child.wait() == -signal.SIGTERM


def test_a_child_that_is_dead_and_not_reaped_has_an_identity() -> None:
    """A signal may end it before the server has looked at it."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    ) as one:
        before = identify(one.pid, gpus=(), directory="")
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert identify(one.pid, gpus=(), directory="") == before
        assert not is_alive(before)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own number is in /proc")
def test_a_process_is_known_by_the_ticks_at_which_the_kernel_started_it() -> None:
    """A server of another version finds the same number in the database."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    assert identify(os.getpid(), gpus=(), directory="").started == int(fields[19])


def test_who_is_not_there_has_no_identity() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as child:
        child.wait()
    with pytest.raises(ProcessLookupError):
        identify(child.pid, gpus=(), directory="")
    assert boot_id()
