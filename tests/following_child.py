"""A process that runs the command line again and again, each time in a fork: it starts quickly.

Reads the arguments as JSON, a line each time, and two files for what is printed; prints the number
of the process, which is in its environment as FOLLOWER too, then its exit status.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from unshard.__main__ import main

_IMPORTED_ONCE = ("unshard.cli.main", "unshard.api", "pydantic.type_adapter", "numpy.ma")


def _be(printed: str, log: str, arguments: list[str]) -> NoReturn:
    """Be a process that a shell has started."""
    os.environ["FOLLOWER"] = str(os.getpid())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, printed), (2, log)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.argv = ["unshard", *arguments]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def _tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)
    for line in sys.stdin:
        printed, log, *arguments = json.loads(line)
        Path(printed).parent.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            _be(printed, log, arguments)
        _tell(pid)
        _tell(os.waitpid(pid, 0)[1])
