"""Compare submissions to servers whose queues are 100, 1,000 and 10,000 jobs long.

Each server has its own queue; the rounds interleave them, so that a noisy machine slows all of them
alike. 50 clients submit at once, each one job after the other and each with its own pin, as
trainers do. The submitted jobs are cancelled after each round, so the queues keep their lengths. A
trainer gives up after 10 s, which is the limit to compare the 99th percentile with.

    python benchmarks/submissions.py --rounds 3 --each 10
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

from trainer_step import free_port, server

from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.jobs import Request
from unshard.evaluate.pins.pin import Pin, Quota, pin_checkpoint
from unshard.evaluate.server.store.store import Store

_QUEUES = (100, 1_000, 10_000)
_TRAINERS_TIMEOUT_S = 10.0


@dataclass
class Contender:
    """A server with a long queue, and the seconds that were measured."""

    work: Path
    url: str
    store: Store
    rounds: list[float] = field(default_factory=list)
    submissions: list[float] = field(default_factory=list)


def checkpoint(run: Path) -> Pin:
    """Make a small checkpoint, and return its pin."""
    place = run / "checkpoint-1"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return pin_checkpoint(place, quota=Quota(), step=1, run=run)


def fill(store: Store, first: Path, length: int) -> None:
    """Queue jobs behind one whose evaluator sleeps; their checkpoints are never read."""
    store.submit(Request(str(first), "sleeps", ("nothing",), 0, "first"), pin=None)
    for step in range(length):
        request = Request(f"/none/{step}", "sleeps", ("nothing",), step, f"run-{step % 100}")
        store.submit(request, pin=f"/none/{step}/_unshard/pins/name/checkpoint")


def one_round(contender: Contender, pins: Sequence[Pin], steps: Sequence[int]) -> None:
    """Let one client per pin submit these steps, and take back what it submitted."""

    def submit(pin: Pin) -> list[tuple[str, float]]:
        found = []
        with EvalClient(contender.url) as client:
            for step in steps:
                begin = time.perf_counter()
                job = client.submit(
                    str(pin.checkpoint), step, "sleeps", ["nothing"], pin=str(pin.path)
                )
                found.append((str(job["id"]), time.perf_counter() - begin))
        return found

    with ThreadPoolExecutor(len(pins)) as clients:
        begin = time.perf_counter()
        done = [one for found in clients.map(submit, pins) for one in found]
        contender.rounds.append(time.perf_counter() - begin)
    contender.submissions += [seconds for _, seconds in done]
    for job, _ in done:
        contender.store.cancel(job)


def measure(work: Path, options: argparse.Namespace) -> dict[int, Contender]:
    """Return what was measured by the length of the queue."""
    found: dict[int, Contender] = {}
    with ExitStack() as stack:
        for length in _QUEUES:
            place = work / str(length)
            first = checkpoint(place / "first").checkpoint
            store = stack.enter_context(closing(Store(place / "server" / "jobs.sqlite")))
            fill(store, first, length)
            url = stack.enter_context(server(place, free_port()))
            found[length] = Contender(place, url, store)
            stack.callback(_end_first, url)
        pins = {
            length: [checkpoint(one.work / f"client-{number}") for number in range(options.clients)]
            for length, one in found.items()
        }
        steps = count()
        for _ in range(options.rounds + 1):
            new = [next(steps) for _ in range(options.each)]
            for length, contender in found.items():
                one_round(contender, pins[length], new)
    for contender in found.values():  # the first round warmed up
        del contender.rounds[0], contender.submissions[: options.clients * options.each]
    return found


def _end_first(url: str) -> None:
    """End the evaluator that sleeps."""
    with EvalClient(url) as client:
        for job in client.jobs(run="first"):
            client.cancel(str(job["id"]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--each", type=int, default=10, help="submissions of a client per round")
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(Path(folder), options)
    print(f"{options.clients} clients, {options.rounds} rounds of {options.each} submissions each:")
    print("queued jobs  submissions/s   median      p99  p99 / timeout  p99 / shortest queue's")
    shortest = None
    for length, one in found.items():
        seconds = sorted(one.submissions)
        p99 = seconds[int(0.99 * len(seconds))]
        shortest = shortest or p99
        rate = options.clients * options.each / median(one.rounds)
        print(
            f"{length:>11,}  {rate:>13.0f}"
            f"  {1000 * median(seconds):>4.0f} ms  {1000 * p99:>4.0f} ms"
            f"  {p99 / _TRAINERS_TIMEOUT_S:>13.3f}  {p99 / shortest:>22.2f}"
        )


if __name__ == "__main__":
    main()
