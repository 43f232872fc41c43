#!/usr/bin/env python3
"""The same as `python -m unshard.compat.convert_checkpoint_simple`, where it used to be."""

import sys

try:
    from unshard import signals
except ImportError as error:
    if error.name == "unshard":
        from pathlib import Path

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
    signals.end_at_once()
    from unshard.compat.commands import run

    run(_main, failed="❌ Error: ")
