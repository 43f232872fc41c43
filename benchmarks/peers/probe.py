"""Run one command and print, as JSON, what it took.

    probe.py LOG OUTPUT COMMAND...

A program of its own that imports next to nothing: Linux counts the memory of the process that
starts a command as the command's own, so that one must be small.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(log: str, output: str, command: list[str]) -> None:
    """Run the command, then flush the files of its output directory; print both times."""
    started = time.perf_counter()
    to_log = (os.POSIX_SPAWN_OPEN, 1, log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    actions = [to_log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    child = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    seconds = time.perf_counter() - started
    # Of a process that has ended and is not reaped, with all of its children.
    lines = Path(f"/proc/{child}/io").read_text(encoding="ascii").splitlines()
    moved = dict(line.split(": ") for line in lines)
    _, status, usage = os.wait4(child, 0)
    started = time.perf_counter()
    flush(output)
    taken = {
        "seconds": seconds,
        "flush_seconds": time.perf_counter() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "bytes_read": int(moved["rchar"]),
        "bytes_written": int(moved["wchar"]),
        "exit_code": os.waitstatus_to_exitcode(status),
    }
    print(json.dumps(taken))


def flush(directory: str) -> None:
    """Make a directory and all files in it durable."""
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):  # noqa: PTH118
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
