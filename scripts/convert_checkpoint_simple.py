#!/usr/bin/env python3
"""The same as `python -m unshard.compat.convert_checkpoint_simple`, where it used to be."""

import sys
from pathlib import Path

try:
    from unshard.compat.commands import run
except ImportError as error:
    if error.name == "unshard":
        clone = Path(__file__).resolve().parent.parent
        sys.exit(
            f"unshard is not installed; to install it: {sys.executable} -m pip install {clone}"
        )
    if error.name is not None:
        raise
    sys.exit(str(error))  # this Python is too old


def _main() -> None:
    from unshard.compat.convert_checkpoint_simple import main

    main()


if __name__ == "__main__":
    run(_main, failed="❌ Error: ")
