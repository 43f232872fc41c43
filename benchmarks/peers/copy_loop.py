"""The floor: copy the pieces of a merge one after another, in one thread, and nothing else.

    copy_loop.py PIECES.json OUTPUT

The pieces were found before, and are copied as they are: nothing is parsed, cast or checked.
"""

import json
import os
import sys
from pathlib import Path


def main(pieces: Path, output: Path) -> None:
    """Copy (source, its offset, the output's offset, length) with the kernel's own copy."""
    sources: dict[str, int] = {}
    with output.open("wb") as target:
        for path, start, place, length in json.loads(pieces.read_bytes()):
            if path not in sources:
                sources[path] = os.open(path, os.O_RDONLY)
            done = 0
            while done < length:
                done += os.copy_file_range(
                    sources[path], target.fileno(), length - done, start + done, place + done
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
