"""Commands in forks of a process whose calls of the system can be made to fail.

`Faults` starts the process with the library made of `faults.c`. A call is counted if it is named in
`CALLS` (or in what the caller names) and is about a file below the directory under test.
"""

import ctypes
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

__all__ = [
    "CALLS",
    "KILL",
    "REWRITE",
    "SOCKETS",
    "TRUNCATE",
    "UNLINK",
    "Fault",
    "Faults",
    "Result",
    "compiler",
]

CALLS = "write pwrite copy_file_range fsync rename exchange link read truncate mkdir create open"
KILL, TRUNCATE, UNLINK, REWRITE = -1, -2, -3, -4
SOCKETS = "socket:"
_NEVER = 2**31 - 1
_MODULES = (
    *("unshard.cli.main", "unshard.api.merging", "unshard.api.averaging"),
    *("unshard.api.resharding", "unshard.api.verifying", "unshard.engines.threads"),
    *("unshard.api.unmerged.virtual", "huggingface_hub.hf_api"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Attributes:
        action: an errno; or KILL, or TRUNCATE, UNLINK, REWRITE of the file, before the call.
        at: the first call that is hit, from 0; -1 is none.
        calls: which calls are counted, separated by blanks.
        lasting: all later calls are hit, too.
        under: only files below this directory count; "" is the directory under test, SOCKETS are
            sockets.
        files: how many files may be open; 0 is no limit.
        jumps: seconds by which the time of day jumps to and fro.
    """

    action: int = 0
    at: int = -1
    calls: str = CALLS
    lasting: bool = False
    under: str = ""
    files: int = 0
    jumps: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a command: its exit code (-9 if it was killed), stderr, and calls counted."""

    code: int
    message: str
    seen: int


def compiler() -> str | None:
    """Return the C compiler of this machine."""
    return shutil.which("cc") or shutil.which("gcc")


class Faults:
    """Runs commands with faults; make it with `Faults.started`."""

    def __init__(self, process: subprocess.Popen[str], under: Path) -> None:
        self._process = process
        self._under = under

    @classmethod
    @contextmanager
    def started(cls, under: Path) -> Iterator["Faults"]:
        """Compile the library and start the process; files below `under` are under test."""
        with tempfile.TemporaryDirectory() as place:
            library = Path(place, "faults.so")
            source = Path(__file__).with_suffix(".c")
            subprocess.run(
                [compiler() or "cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"],
                check=True,
            )
            paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
            environment = os.environ | {
                "LD_PRELOAD": str(library),
                "PYTHONPATH": paths,
                "XDG_STATE_HOME": str(under / "state"),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "hostile.faults", place],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            with process:
                yield cls(process, under)
                _stream(process.stdin).close()

    def run(self, arguments: Sequence[str | Path], fault: Fault = Fault()) -> Result:
        """Run a command with a fault."""
        given = asdict(fault) | {"under": fault.under or str(self._under)}
        order = {"arguments": list(map(str, arguments)), "fault": given}
        into = _stream(self._process.stdin)
        into.write(json.dumps(order) + "\n")
        into.flush()
        return Result(**json.loads(_stream(self._process.stdout).readline()))


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def main() -> None:
    """Run a command for each line of JSON on stdin, in a fork; answer with a line."""
    for name in _MODULES:
        importlib.import_module(name)
    library, messages = ctypes.CDLL(None), Path(sys.argv[1], "messages")
    for line in sys.stdin:
        order = json.loads(line)
        fault = Fault(**order["fault"])
        pid = os.fork()
        if pid == 0:
            _run(order["arguments"], fault, library, messages)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        text = messages.read_text(errors="replace")
        sys.stdout.write(json.dumps(asdict(Result(code, text, library.fault_seen()))) + "\n")
        sys.stdout.flush()


def _run(arguments: list[str], fault: Fault, library: ctypes.CDLL, messages: Path) -> None:
    from unshard.__main__ import main as command_line

    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(os.open(messages, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if fault.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (fault.files, fault.files))
    sys.argv[1:] = arguments
    library.fault_jump(fault.jumps)
    last = _NEVER if fault.lasting else fault.at + 1
    under, calls = fault.under.encode(), f" {fault.calls} ".encode()
    library.fault_arm(under, calls, fault.at if fault.at >= 0 else _NEVER, last, fault.action)
    code = 1
    try:
        command_line()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 (it must not return into the loop)
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
