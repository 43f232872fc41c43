"""`unshard merge --follow` as a process: started next to a training, watched, and judged."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ranks import contents
from waiting import LIMIT_S, wait_until

__all__ = ["RECORD", "STATE", "Follower", "assert_whole", "following", "outputs_in", "weights"]

RECORD = "unshard.json"
STATE = "_unshard"
"""The only thing in the directory of the outputs that is no output."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A process that follows a run.

    Attributes:
        process: it; `log` has its stderr, `reports` its stdout.
        began: when it was started, by the monotonic clock.
        peaks: of its memory, in MB, the last one for the whole of its life.
    """

    process: "subprocess.Popen[bytes]"
    log: Path
    reports: Path
    began: float
    peaks: list[float]

    def steps(self) -> list[dict[str, object]]:
        """Return what it has reported so far, a step each."""
        lines = self.reports.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self) -> dict[str, float]:
        """Wait for a successful end; return CPU seconds, their share of the time, and peak MB."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        wait_until(lambda: os.waitid(os.P_PID, self.process.pid, ended), "the follower has ended")
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = code = os.waitstatus_to_exitcode(status)
        assert code == 0, f"{code}\n{self.log.read_text()}"
        cpu = usage.ru_utime + usage.ru_stime
        share = cpu / (time.monotonic() - self.began)
        return {"cpu_s": cpu, "share": share, "peak_mb": max(self.peaks)}


def _watch(pid: int, peaks: list[float]) -> None:
    """Note the peak of the memory until a process ends: that of `wait4` counts its parent's."""
    with suppress(OSError):
        while found := re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text()):
            peaks.append(int(found[1]) / 1024)
            time.sleep(0.05)


@contextmanager
def following(
    run: Path, outputs: Path, *options: str | Path, interval: float = 0.2
) -> Iterator[Follower]:
    """Follow a run in a process of its own, until the end of the block at the latest."""
    log, reports = (outputs.with_name(f"{outputs.name}.{kind}") for kind in ("log", "reports"))
    words = [run, outputs, "--follow", "--json", "--interval", str(interval), *options]
    command = [sys.executable, "-m", "unshard", "merge", *map(str, words)]
    with log.open("ab") as errors, reports.open("ab") as printed:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=printed, stderr=errors)
    follower = Follower(process, log, reports, began, [])
    watch = threading.Thread(target=_watch, args=(process.pid, follower.peaks))
    watch.start()
    try:
        yield follower
    finally:
        if process.returncode is None:
            process.kill()
            process.wait(LIMIT_S)
        watch.join()


def outputs_in(directory: Path) -> dict[str, Path]:
    """Return the outputs by name; nothing else may be there but what the follower remembers."""
    found = {path.name: path for path in directory.iterdir() if path.name != STATE}
    assert all((path / RECORD).is_file() for path in found.values()), sorted(found)
    return found


def weights(output: Path) -> dict[str, bytes]:
    """Return the bytes of every file but the record, which has paths and times."""
    return {name: data for name, data in contents(output).items() if name != RECORD}


def assert_whole(output: Path) -> None:
    """Check that an output has every file of its record, in full, and no other."""
    record = json.loads((output / RECORD).read_bytes())
    listed = {**record["output"]["files"], **(record["output"].get("companions") or {})}
    found = {name: len(data) for name, data in weights(output).items()}
    assert {name: size for name, size in found.items() if name in listed} == listed
