"""How long a command takes that has next to nothing to do: its start, in seconds of CPU.

    python benchmarks/start.py --rounds 9 [--against OTHER_ENVIRONMENT/bin/python]

Each command runs as a process of its own, in turns with the same one of another environment, such
as that of an older version. Printed are the least and the median of all rounds, because whatever
else the machine does can only add to them.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "checkpoint"


def cpu_seconds(command: list[str]) -> float:
    """Run a command; return the seconds of CPU that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a line for each command and environment."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", metavar="PYTHON", action="append", default=[])
    given = parser.parse_args()
    taken = defaultdict[tuple[str, str], list[float]](list)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(given.rounds + 1):
            for at, python in enumerate([sys.executable, *given.against]):
                output = f"{scratch}/{number}-{at}"
                commands = {
                    "the interpreter": ["-c", ""],
                    "import numpy": ["-c", "import numpy"],
                    "unshard --help": ["-m", "unshard", "--help"],
                    "unshard inspect": ["-m", "unshard", "inspect", str(EXAMPLE)],
                    "unshard merge": ["-m", "unshard", "merge", str(EXAMPLE), output],
                }
                for name, arguments in commands.items():
                    seconds = cpu_seconds([python, *arguments])
                    if number:  # the first round may compile modules
                        taken[name, python].append(seconds)
    print(f"{'seconds of CPU':<20}{'least':>8}{'median':>8}")
    for (name, python), all_of_it in sorted(taken.items()):
        line = f"{name:<20}{min(all_of_it):>8.3f}{statistics.median(all_of_it):>8.3f}"
        print(line, "" if python == sys.executable else python)


if __name__ == "__main__":
    main()
