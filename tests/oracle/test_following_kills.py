"""Kills of a follower, and of the trainer that it follows, at random moments.

The checkpoints are rank files that torch saved, a version for each step and each life of the
trainer; the trainer here copies them into place, file by file, as verl does.
"""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from following import RECORD, assert_whole, outputs_in
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard.errors import CorruptError, OutputError
from waiting import wait_until

TESTS = Path(__file__).parents[1]
STEPS, KILLS = 30, 50

pytestmark = pytest.mark.slow


class Forks:
    """Starts followers quickly, one after the other."""

    def __init__(self, place: Path) -> None:
        self.printed, self.log = place / "printed", place / "log"
        self._numbers = count()
        self.killed: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "following_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, *arguments: str | Path) -> int:
        """Return the number of the new process."""
        assert self._process.stdin is not None
        self.log = self.log.with_name(f"log-{next(self._numbers)}")
        words = [str(word) for word in (self.printed, self.log, "merge", *arguments)]
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._number()

    def wait_for(self, text: str) -> None:
        """Wait until the process has told this."""
        wait_until(lambda: self.log.exists() and text in self.log.read_text(), text)

    def code(self) -> int:
        """Wait for the end of the process, and return its exit code, or minus a signal."""
        return os.waitstatus_to_exitcode(self._number())

    def kill(self, pid: int) -> None:
        """Kill it; it may have ended by itself."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if self.code() == -signal.SIGKILL:
            self.killed.add(pid)

    def reported(self) -> list[dict[str, object]]:
        """Return what all of them have printed of steps."""
        lines = self.printed.read_text().splitlines() if self.printed.exists() else []
        return [json.loads(line) for line in lines]

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path)
    yield made
    made.close()


def step_dir(run: Path, step: int) -> Path:
    return run / f"global_step_{step}"


def version(versions: Path, step: int) -> Path:
    """Save a step, once: torch's own files."""
    place = versions / str(step)
    return place if place.exists() else save_ranks(place, some_tensors(step), 2)


def write_step(run: Path, saved: Path, step: int) -> None:
    place = step_dir(run, step) / "actor"
    place.mkdir(parents=True, exist_ok=True)
    for file in sorted(saved.iterdir()):
        shutil.copyfile(file, place / file.name)
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))


class Outputs:
    """Watches what appears: each output is whole at once, and is never made again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        found = self.directory.iterdir() if self.directory.exists() else []
        for path in [path for path in found if not path.name.startswith("_unshard")]:
            status = (path / RECORD).stat()
            now = status.st_ino, status.st_ctime_ns
            if path.name not in self.records:
                assert_whole(path)
            assert self.records.setdefault(path.name, now) == now, path.name


@contextmanager
def watched(directory: Path) -> Iterator[Outputs]:
    """Look all the time, in a thread; what it finds fails the test."""
    outputs, over, problems = Outputs(directory), threading.Event(), list[BaseException]()

    def look() -> None:
        try:
            while not over.wait(0.005):
                outputs.look()
        except BaseException as problem:  # noqa: BLE001 (raised below)
            problems.append(problem)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield outputs
    finally:
        over.set()
        thread.join()
    if problems:
        raise problems[0]
    outputs.look()


@contextmanager
def training(run: Path, versions: Path, outputs: Path, *, rotates: bool) -> Iterator[None]:
    """Write all steps in a thread, not far before those that are merged."""
    over = threading.Event()
    chance = random.Random(2)

    def train() -> None:
        for step in range(1, STEPS + 1):
            write_step(run, version(versions, step), step)
            if rotates and step > 1:
                shutil.rmtree(step_dir(run, step - 1))
            patience = 1 if chance.random() < 0.3 else 100
            output = outputs / step_dir(run, step).name
            while not output.exists() and patience and not over.wait(0.02):
                patience -= 1

    for step in range(1, STEPS + 1):
        version(versions, step)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("rotates", [False, True], ids=["kept", "rotated"])
def test_kills_of_the_follower(tmp_path: Path, forks: Forks, *, rotates: bool) -> None:
    run, outputs, ran = tmp_path / "run", tmp_path / "outputs", tmp_path / "ran"
    run.mkdir()
    command = f"sh -c {shlex.quote(f'echo $0 $FOLLOWER >> {ran}')} {{step}}"
    line: list[str | Path] = [
        run,
        outputs,
        "--follow",
        "--json",
        "--interval",
        "0.02",
        "--config",
        "none",
    ]
    line += ["--exec", command]
    chance = random.Random(1)
    with watched(outputs), training(run, tmp_path / "versions", outputs, rotates=rotates):
        for _ in range(KILLS):
            pid = forks.start(*line)
            if chance.random() < 0.9:
                forks.wait_for("following")
            time.sleep(chance.uniform(0, 0.25))  # anything may be going on
            forks.kill(pid)
    assert len(forks.killed) == KILLS, forks.log.read_text()
    last = f"--until={STEPS}"
    with watched(outputs):
        pid = forks.start(*line, last)
        assert forks.code() == 0, forks.log.read_text()
    remove_nameless(outputs)
    found = outputs_in(outputs)
    steps = {int(name.removeprefix("global_step_")): path for name, path in found.items()}
    assert STEPS in steps
    assert rotates or len(steps) == STEPS
    for step, path in steps.items():
        assert_same(merged(path), some_tensors(step))
    assert_commands(ran, steps.keys(), forks.killed)


def remove_nameless(outputs: Path) -> None:
    """Remove what a process left that was killed before it named itself: a later merge does so.

    For a minute it might be another's that is just being made.
    """
    for place in outputs.glob("_unshard-partial-*"):
        if {path.name for path in place.iterdir()} <= {"owner.json.new"}:
            shutil.rmtree(place)


def assert_commands(ran: Path, steps: object, killed: set[int]) -> None:
    """Each step's command ran, and again only if the one who had it run was killed."""
    runs: dict[int, list[int]] = {}
    for line in ran.read_text().splitlines():
        step, pid = map(int, line.split())
        runs.setdefault(step, []).append(pid)
    assert runs.keys() == steps
    for step, pids in runs.items():
        assert len(set(pids)) == len(pids), (step, pids)
        assert killed.issuperset(pids[:-1]), (step, pids, killed)


LIVES = 20
ENDS = {0, CorruptError.exit_code, OutputError.exit_code}
"""Exit codes: of a follower that met a torn step, or one whose former version has the output."""
_TRAINER = """
import json, os, signal, sys
run, left, steps = json.loads(sys.argv[1])
for step, saved in steps:
    print("begun", step, flush=True)
    place = os.path.join(run, f"global_step_{step}", "actor")
    os.makedirs(place, exist_ok=True)
    for name in sorted(os.listdir(saved)):
        with open(os.path.join(saved, name), "rb") as file:
            data = file.read()
        with open(os.path.join(place, name), "wb", buffering=0) as file:
            for start in range(0, len(data), 1000):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                file.write(data[start : start + 1000])
                left -= 1
    with open(os.path.join(run, "latest_checkpointed_iteration.txt"), "w") as file:
        file.write(str(step))
    print("saved", step, flush=True)
"""
"""Saves steps as verl does, in place, and is killed in the middle of a file, after some writes."""


def live(run: Path, versions: dict[int, Path], writes: int) -> dict[int, bool]:
    """Have the trainer save some steps; return those that it began, and whether it saved them."""
    given = json.dumps([str(run), writes, [(step, str(saved)) for step, saved in versions.items()]])
    command = [sys.executable, "-I", "-S", "-c", _TRAINER, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGKILL if writes >= 0 else 0), done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    return {int(step): word == "saved" for word, step in words}


def test_kills_of_the_trainer(tmp_path: Path, forks: Forks) -> None:
    """Each next trainer goes back some steps and saves them again, with other values.

    It starts when what was saved is merged: where a step is mixed from two lives, and each of its
    files is whole, nothing shows it.
    """
    run, outputs, saved = tmp_path / "run", tmp_path / "outputs", tmp_path / "saved"
    run.mkdir()
    line: list[str | Path] = [
        run,
        outputs,
        "--follow",
        "--json",
        "--interval",
        "0.05",
        "--config",
        "none",
    ]
    chance, latest = random.Random(3), 0
    final = dict[int, int]()  # the version of each step; 0: torn
    with watched(outputs):
        pid = forks.start(*line)
        for life in range(1, LIVES + 2):
            first = max(1, latest - chance.randrange(3))
            seeds = {step: 1000 * life + step for step in range(first, first + 4)}
            versions = {step: version(saved, seed) for step, seed in seeds.items()}
            size = sum(-(-file.stat().st_size // 1000) for file in versions[first].iterdir())
            writes = chance.randrange(1, 4 * size) if life <= LIVES else -1
            lived = live(run, versions, writes)
            final |= {step: seeds[step] if is_saved else 0 for step, is_saved in lived.items()}
            latest = max([latest, *(step for step in lived if lived[step])])
            for step in range(1, latest + 1):
                wait_until((outputs / f"global_step_{step}").exists, f"step {step} is merged")
        os.kill(pid, signal.SIGTERM)
        assert forks.code() in ENDS
        forks.start(*line, f"--until={latest}")
        assert forks.code() in ENDS
    made = {
        int(name.removeprefix("global_step_")): path for name, path in outputs_in(outputs).items()
    }
    assert made.keys() == set(range(1, latest + 1))
    told = {one["step"] for one in forks.reported() if "failed" in one}
    older = {step for step, output in made.items() if seed_of(output, step) != final[step]}
    assert older <= told | {step for step in older if not final[step]}
    assert older & told


def seed_of(output: Path, step: int) -> int:
    """Return which version of a step an output has, all of it."""
    found = merged(output)
    for seed in (1000 * life + step for life in range(1, LIVES + 2)):
        with suppress(AssertionError):
            assert_same(found, some_tensors(seed))
            return seed
    raise AssertionError(f"{output} is of no version of its step")
