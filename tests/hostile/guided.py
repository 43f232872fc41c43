"""Fuzz one parser, guided by the coverage of unshard's code.

A program of its own, because code is instrumented as it is imported:
`python -m hostile.guided TARGET RUNS SECONDS SEEDS`, where SEEDS is a directory of files to begin
with. It needs atheris. It ends with an error at the first input that ends the parser in anything
but its own errors, and leaves that input in the current directory.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["unshard"]):
    from hostile.fuzzing import try_input

_LONGEST = 8192  # bytes; the longest seed is a rank file of 5,000


def main() -> None:
    """Fuzz, in directories that are removed in the end."""
    target, runs, seconds, seeds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as corpus:
        place = Path(scratch)
        (place / "run").mkdir()
        limits = f"-runs={runs} -max_total_time={seconds} -max_len={_LONGEST} -rss_limit_mb=2048"
        atheris.Setup(
            [sys.argv[0], corpus, seeds, *limits.split()],
            lambda data: try_input(target, data, place),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
