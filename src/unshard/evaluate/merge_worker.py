"""The process that merges one checkpoint: `python -m unshard.evaluate.merge_worker`.

Reads one line of JSON from stdin, which stays open while the server lives: at its end the worker
and all that it started are gone. Writes `merge.json` into its working directory.
"""

import json
import os
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from unshard.errors import OutputError, UnshardError
from unshard.fronts import Command

__all__ = ["ANSWER_NAME", "main"]

ANSWER_NAME = "merge.json"


def main() -> int:
    """Merge what stdin says."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the server is gone
        return 1
    threading.Thread(target=_die_with_server, daemon=True).start()
    order = json.loads(line)
    answer: dict[str, object]
    try:
        _merge(order["checkpoint"], order["output"], order["options"])
        answer = {"error": None, "may_pass": False}
    except UnshardError as error:
        error.front = Command({}, f"unshard merge {shlex.quote(order['checkpoint'])} OUTPUT")
        answer = {"error": str(error), "may_pass": isinstance(error, OutputError)}
    except (OSError, MemoryError) as error:
        answer = {"error": f"{order['checkpoint']}: {error!r}", "may_pass": True}
    draft = Path(f"{ANSWER_NAME}.partial")
    try:
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(ANSWER_NAME)
    except OSError as error:
        with suppress(OSError):  # the log is on the same disk
            os.write(2, f"the answer {answer} cannot be written: {error}\n".encode())
        return os.EX_TEMPFAIL
    return 0


def _merge(checkpoint: str, output: str, options: dict[str, object]) -> None:
    from unshard.api.merging import merge_with
    from unshard.api.options import MergeOptions
    from unshard.progress import ignore

    merge_with(checkpoint, output, MergeOptions(**options), ignore)  # type: ignore[arg-type]  # JSON


def _die_with_server() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be missed when the interpreter ends
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
