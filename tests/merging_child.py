"""A process that merges again and again, each time in a fork of itself: it starts quickly.

Reads "checkpoint output" from its input, and perhaps more options as JSON without blanks; prints
the number of the process that merges, then its exit status. `UNSHARD_TEST_LEAST_PART` is the
least size of the parts that a store copies, bytes.
"""

import importlib
import json
import os
import sys
from typing import Any

import unshard
from unshard.engines import uploads
from unshard.progress import ignore

OPTIONS: dict[str, Any] = {"max_shard_size": "100B", "lora": "both", "verify": "full"}
OPTIONS["config"] = "none"


def tell(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for name in (
        "unshard.engines.uploads",
        "obstore.store",
        "boto3",
    ):
        importlib.import_module(name)
    if least := os.environ.get("UNSHARD_TEST_LEAST_PART"):
        setattr(uploads, "LEAST_PART", int(least))  # noqa: B010 (it is imported there)
    for line in sys.stdin:
        checkpoint, output, *more = line.split()
        pid = os.fork()
        if pid == 0:
            chosen = OPTIONS | (json.loads(more[0]) if more else {})
            unshard.merge(checkpoint, output, listener=ignore, **chosen)
            os._exit(0)
        tell(pid)
        tell(os.waitpid(pid, 0)[1])
