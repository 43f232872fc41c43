"""A process that merges into a store, with the beat of a test; it writes down what it is told.

Arguments: seconds between beats, checkpoint, output, options as JSON. Each line of its output is a
stage that begins, a message of `Chosen`, or at the end `report` and whether the output was reused.
"""

import json
import sys

import unshard
from unshard.progress import Chosen, Event, Stage
from unshard.write.bucket import claim


def tell(event: Event) -> None:
    if isinstance(event, Stage | Chosen):
        say(event.name if isinstance(event, Stage) else event.message)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    claim.BEAT_S = float(sys.argv[1])
    report = unshard.merge(*sys.argv[2:4], listener=tell, **json.loads(sys.argv[4]))
    say(f"report {report.reused}")
