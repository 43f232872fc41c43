import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.running import is_running, largest_file, wait_until
from unshard.evaluate.server.processes import supervise
from unshard.evaluate.server.processes.bounded_log import BoundedLog
from unshard.evaluate.server.processes.launching import Child, start_supervisor
from unshard.evaluate.server.processes.supervise import Exit, Order, read_exit, was_stopped
from unshard.evaluate.server.processes.table import identify, kill_group
from waiting import LIMIT_S

SLEEP = "import time; time.sleep(600)"


def order(directory: Path, script: str, **changed: object) -> Order:
    values = {"timeout_s": LIMIT_S, "grace_s": 0.3} | changed
    command = [sys.executable, "-I", "-S", "-c", script]
    return Order(command, dict(os.environ), str(directory), **values)  # type: ignore[arg-type]


def begin(directory: Path, script: str, **changed: object) -> Child:
    child = start_supervisor(gpus=(), directory=directory)
    child.give(order(directory, script, **changed))
    return child


def run(directory: Path, script: str, **changed: object) -> Exit:
    begin(directory, script, **changed).reap()
    done = read_exit(directory)
    assert done is not None
    return done


@pytest.mark.parametrize(
    ("script", "returncode"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_the_exit_code_outlives_everybody(tmp_path: Path, script: str, returncode: int) -> None:
    done = run(tmp_path, script)
    assert (done.reason, done.returncode) == ("exited", returncode)


def test_both_outputs_go_into_the_log(tmp_path: Path) -> None:
    run(tmp_path, "import sys; print('out', flush=True); print('err', file=sys.stderr)")
    assert (tmp_path / "log.txt").read_text() == "out\nerr\n"


def test_an_evaluator_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    child = start_supervisor(gpus=(), directory=tmp_path)
    child.give(Order(["/nowhere"], {}, str(tmp_path), 60, 0.3))
    child.reap()
    done = read_exit(tmp_path)
    assert done is not None
    assert done.reason == "not started"
    assert "/nowhere" in done.error


def test_why_it_cannot_be_started_is_kept_even_where_nothing_can_be_logged(tmp_path: Path) -> None:
    with BoundedLog(tmp_path / "log.txt") as log:
        lowest = os.dup(0)
        os.close(lowest)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with largest_file(0):
                done = supervise.supervise(order(tmp_path, ""), log, lambda: False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (done.reason, done.errno) == ("not started", errno.EMFILE)


def test_a_timeout_ends_what_does_not_want_to(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(15, signal.SIG_IGN)\n"
        "open('ignores', 'x'); time.sleep(600)"
    )
    for timeout_s in (0.5, 5, 50):  # on a busy machine it does not even begin in half a second
        directory = tmp_path / str(timeout_s)
        directory.mkdir()
        done = run(directory, script, timeout_s=timeout_s)
        assert done.reason == "timeout"
        if (directory / "ignores").exists():
            break
    assert done.returncode == -signal.SIGKILL


def test_children_that_an_evaluator_leaves_behind_end_with_it(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)\n"
        "while not (pathlib.Path('pid').exists() and pathlib.Path('pid').read_text()): pass\n"
    )
    assert run(tmp_path, script).returncode == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_an_evaluator_that_prints_a_gigabyte_fills_nothing(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "os.write(1, b'first\\n')\n"
        "line = b'x' * 99 + b'\\n'\n"
        "for _ in range(1000): os.write(1, line * 10000)\n"
        "status = f'/proc/{os.getppid()}/status'\n"
        "lines = open(status).readlines() if os.path.exists(status) else []\n"
        "peaks = [line.split()[1] for line in lines if line.startswith('VmHWM')]\n"
        "open('peak', 'w').write((peaks or ['0'])[0])\n"
        "os.write(1, b'last\\n')\n"
    )
    assert run(tmp_path, script).returncode == 0
    log = tmp_path / "log.txt"
    assert log.stat().st_size <= 10_001_000
    content = log.read_bytes()
    assert content.startswith(b"first\n")
    assert content.endswith(b"last\n")
    assert b"bytes left out" in content
    assert int((tmp_path / "peak").read_text()) < 100_000  # KiB, of the supervisor


def test_a_log_that_cannot_be_written_does_not_end_the_evaluation(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    child = start_supervisor(gpus=(), directory=tmp_path)
    if sys.platform == "linux":
        resource.prlimit(child.popen.pid, resource.RLIMIT_FSIZE, (1000, hard))
    child.give(order(tmp_path, "print('x' * 50_000); open('done', 'w').close()"))
    child.reap()
    done = read_exit(tmp_path)
    assert done is not None
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == soft


def test_without_an_order_nothing_is_run(tmp_path: Path) -> None:
    child = start_supervisor(gpus=(), directory=tmp_path)
    child.reap()
    assert child.popen.returncode == 1
    half = start_supervisor(gpus=(), directory=tmp_path)
    assert half.popen.stdin is not None
    half.popen.stdin.write(json.dumps({"command": ["touch", "x"]}).encode()[:-3])
    half.reap()
    assert half.popen.returncode == 1
    assert read_exit(tmp_path) is None
    assert {path.name for path in tmp_path.iterdir()} == {"supervisor.txt"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_order_ends_it_as_stopped_and_nothing_is_run(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = start_supervisor(gpus=(), directory=tmp_path)
    os.kill(child.process.pid, number)  # while the interpreter starts
    child.give(order(tmp_path, "open('ran', 'w').close()"))
    child.reap()
    done = read_exit(tmp_path)
    assert done is not None
    assert done.reason == "stopped"
    assert not (tmp_path / "ran").exists()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_an_evaluator_can_be_interrupted(tmp_path: Path) -> None:
    script = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    run(tmp_path, script)
    assert (tmp_path / "log.txt").read_text() == "set()\n"


PID = "import os, pathlib; pathlib.Path('pid').write_text(str(os.getpid()));"


def pid_in(directory: Path) -> int:
    path = directory / "pid"
    wait_until(lambda: path.exists() and path.read_text() != "", "the evaluator")
    return int(path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_an_evaluator_ends_with_its_supervisor(tmp_path: Path) -> None:
    child = begin(tmp_path, PID + SLEEP)
    pid = pid_in(tmp_path)
    child.popen.kill()
    child.reap()
    wait_until(lambda: not is_running(pid), "the evaluator's end")
    assert read_exit(tmp_path) is None


def test_a_stopped_group_says_so(tmp_path: Path) -> None:
    child = begin(tmp_path, PID + SLEEP)
    pid_in(tmp_path)
    assert kill_group(child.process, grace_s=20)
    child.reap()
    done = read_exit(tmp_path)
    assert done is not None
    assert done.reason == "stopped"


@pytest.mark.parametrize(
    ("returncode", "signals", "expected"),
    [
        (-15, [False, False, True], True),
        (143, [False, False, True], True),
        (1, [True], True),
        (1, [False], False),
        (0, [True], False),
    ],
)
def test_an_evaluator_may_be_faster_than_the_signal_to_its_supervisor(
    returncode: int, signals: list[bool], *, expected: bool
) -> None:
    seen = iter(signals)
    assert was_stopped(returncode, lambda: next(seen, signals[-1])) is expected


def test_how_it_ended_is_written_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_AGAIN_S", 0)
    place, done = tmp_path / "attempt", Exit("exited", 0, "", 1.0)
    rounds = iter([None, None, place.mkdir])

    def later() -> bool:
        act = next(rounds)
        if act is not None:
            act()
        return False

    supervise.write_exit(place, done, later)
    assert read_exit(place) == done
    supervise.write_exit(tmp_path / "nowhere", done, lambda: True)
    assert list(place.iterdir()) == [place / "exit.json"]


def begin_and_lose(directory: Path, script: str, *, lose: bool = True) -> Child:
    """Start a supervisor that finds its directory gone after half a second without it."""
    run_in = "from unshard.evaluate.server.processes import supervise\nsupervise._GONE_S = 0.5\n"
    run_in += (
        "supervise._LOOK_S = 0.1\nsupervise._AGAIN_S = 0.1\nraise SystemExit(supervise.main())"
    )
    directory.mkdir()
    with (directory.parent / "supervisor.txt").open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-c", run_in],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    child = Child(identify(popen.pid, gpus=(), directory=str(directory)), popen)
    child.give(order(directory, script))
    wait_until((directory.parent / "pid").exists, "the evaluator")
    if lose:
        shutil.rmtree(directory)
    return child


NOTE = "import os, time; open('../pid', 'w').write(str(os.getpid())); "


@pytest.mark.parametrize("script", ["time.sleep(600)", "time.sleep(1)"], ids=["runs", "ends"])
def test_a_supervisor_whose_directory_is_gone_ends(tmp_path: Path, script: str) -> None:
    child = begin_and_lose(tmp_path / "attempt", NOTE + script)
    child.popen.wait(LIMIT_S)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "attempt").exists()


def test_a_directory_that_comes_back_is_not_gone(tmp_path: Path) -> None:
    place, away = tmp_path / "attempt", tmp_path / "away"
    child = begin_and_lose(place, NOTE + "time.sleep(2)", lose=False)
    for _ in range(5):  # a network file system is not there for a moment, again and again
        place.rename(away)
        time.sleep(0.2)
        away.rename(place)
        time.sleep(0.2)
    child.popen.wait(LIMIT_S)
    done = read_exit(place)
    assert done is not None
    assert (done.reason, done.returncode) == ("exited", 0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reason": "exited"}', "\udcff"])
def test_an_exit_that_is_not_whole_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "exit.json").write_bytes(os.fsencode(content))
    assert read_exit(tmp_path) is None


def test_the_supervisor_imports_nothing_heavy() -> None:
    script = (
        "import sys, unshard.evaluate.server.processes.supervise\n"
        "print(sorted({'numpy', 'torch', 'sqlite3', 'safetensors', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


GRANDCHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open("pids", "w") as file: file.write(f"{os.getpid()} {child.pid} \\n")
time.sleep(600)
"""


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
