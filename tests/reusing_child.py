"""Rounds of processes that want one output at once, forked from one that has all they import.

Reads a round from its input, as JSON in a line: the arguments of `run`; prints what became of it.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import unshard
from unshard.progress import ignore
from unshard.write.staging.finished import FINISHED_NAME
from unshard.write.staging.owners import STAGING_PREFIX
from unshard.write.staging.turns import TURN_PREFIX

OPTIONS: dict[str, Any] = {"max_shard_size": "1MB", "config": "none", "workers": 1}
REPORTS = os.pipe()


def characters() -> int:
    """How many bytes this process has read."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    return int(text.partition("rchar:")[2].split()[0])


def merge(checkpoint: str, output: str, *, dry_run: bool) -> None:
    """Merge, and tell the parent what that took."""
    before, used = characters(), resource.getrusage(resource.RUSAGE_SELF)
    options = OPTIONS | {"dry_run": dry_run}
    report = unshard.merge(checkpoint, output, reuse=True, listener=ignore, **options)
    now = resource.getrusage(resource.RUSAGE_SELF)
    fields = {
        "reused": report.reused,
        "read": characters() - before,
        "cpu_s": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
    }
    os.write(REPORTS[1], (json.dumps(fields) + "\n").encode())


def started(checkpoint: str, output: str, *, dry_run: bool = False) -> int:
    """Fork a process that merges; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        merge(checkpoint, output, dry_run=dry_run)
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 (a child must not return)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)


def has_turn(folder: Path) -> int:
    """Return the process that has the turn, 0 if none."""
    for path in folder.glob(TURN_PREFIX + "*"):
        with suppress(FileNotFoundError):
            words = path.read_text(encoding="ascii").split()
            return int(words[1]) if words else 0
    return 0


def finished(folder: Path) -> dict[str, int]:
    """Return the inodes of the files that are recorded as finished, by name."""
    lines: list[str] = []
    for staging in folder.glob(STAGING_PREFIX + "*"):
        with suppress(FileNotFoundError):
            lines += (staging / FINISHED_NAME).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line)["finished"] for line in lines if line.endswith("}")]
    return {record["name"]: record["status"][0] for record in records}


class Round:
    """Processes at work.

    Attributes:
        left: those that have not ended; statuses: how the others have ended.
        inodes: what the output was.
        kept: inodes of files that were finished when a process was killed, by name.
        killed: how many were killed before there was an output, and after.
    """

    def __init__(self, checkpoint: str, output: str, count: int) -> None:
        self.output, self.folder = Path(output), Path(output).parent
        self.left = {started(checkpoint, output) for _ in range(count)}
        self.statuses: list[int] = []
        self.inodes: set[int] = set()
        self.kept: dict[str, int] = {}
        self.killed = [0, 0]

    def reap(self) -> None:
        for pid in list(self.left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.left.remove(pid)
                self.statuses.append(status)
        with suppress(FileNotFoundError):
            self.inodes.add(self.output.stat().st_ino)
        time.sleep(0.002)

    def kill_who_works(self, after_s: float, after_files: int) -> None:
        """Kill a process that has the turn, unless the output is there by then.

        It has had it for some time, and so many files are finished.
        """
        while self.left and not self.output.exists():
            self.reap()
            pid, end = has_turn(self.folder), time.monotonic() + after_s
            while pid in self.left and not self.output.exists():
                if time.monotonic() >= end and len(finished(self.folder)) >= after_files:
                    break
                self.reap()
            if pid in self.left and has_turn(self.folder) == pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.left.remove(pid)
                is_made = self.output.exists()
                self.killed[is_made] += 1
                if not is_made:
                    self.kept |= finished(self.folder)
                return


def run(checkpoint: str, output: str, count: int, kills: int, seed: int) -> dict[str, object]:
    """Have processes want an output; kill some of them. Without any, one only plans, as all do."""
    rng, begun = random.Random(seed), time.monotonic()
    one = Round(checkpoint, output, count)
    if not count:
        unshard.merge(checkpoint, output, listener=ignore, **OPTIONS)  # imports what is needed
        one.left.add(started(checkpoint, output, dry_run=True))
    for _ in range(kills):
        one.kill_who_works(rng.uniform(0, 0.1), rng.choice((0, 0, 1, 3)))
    while one.left:
        one.reap()
    seconds = time.monotonic() - begun
    os.write(REPORTS[1], b"\n")
    reports = os.read(REPORTS[0], 1 << 16).splitlines()
    return {
        "statuses": one.statuses,
        "reports": [json.loads(line) for line in reports if line],
        "inodes": sorted(one.inodes),
        "kept": one.kept,
        "killed": one.killed,
        "seconds": seconds,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
        sys.stdout.flush()
