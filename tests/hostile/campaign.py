"""Fuzz every parser, guided by coverage: `python -m hostile.campaign RUNS SECONDS`.

RUNS inputs for each parser, within so many seconds of its own. It needs atheris, prints a line for
each parser, and ends with 1 if one of them ended in anything but its own errors; that input is left
in the current directory.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from hostile.fuzzing import TARGETS
from hostile.seeds import seeds_of

_DONE = re.compile(r"^Done (\d+) runs", re.MULTILINE)


def main() -> None:
    """Fuzz one parser after the other, each in a process of its own."""
    runs, seconds = sys.argv[1:3]
    failed, total = [], 0
    for target in TARGETS:
        with tempfile.TemporaryDirectory() as name:
            place, seeds = Path(name, "place"), Path(name, "seeds")
            place.mkdir()
            seeds.mkdir()
            for number, seed in enumerate(seeds_of(target, place)):
                (seeds / str(number)).write_bytes(seed)
            command = [sys.executable, "-m", "hostile.guided", target, runs, seconds, str(seeds)]
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        tried = int(found[1]) if (found := _DONE.search(ended.stderr)) else 0
        total += tried
        say(f"{target}: {tried} inputs")
        if ended.returncode:
            failed.append(target)
            say(ended.stderr[-4000:])
    say(f"{total} inputs, {len(failed)} parsers failed: {', '.join(failed) or 'none'}")
    sys.exit(1 if failed else 0)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
