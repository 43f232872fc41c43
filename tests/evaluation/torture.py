"""Kill a real server and what it starts, at random moments, and see that nothing is lost.

    make torture-eval TORTURE="--rounds 100 --seed 7"

Each round is a training of its own: two of its sharded checkpoints are merged and evaluated with
`retries: 0`, and one victim gets SIGKILL or SIGTERM, within the first 100 ms of its life or at a
random moment later; the server and the group (the server and all of its processes) up to three
times. A server that has ended is started again, as systemd does it. Then every job must be
completed once, its number must be right, every slot free, and nothing be left: no process, pin,
staging directory or entry of the spool. Waits between attempts are skipped; all else is real.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from evaluation.repetition import busy
from evaluation.running import whole_model
from evaluation.servers import Live, free_port
from evaluation.victims import KINDS, Victim, Watch, children, state_of
from ranks import save_ranks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
VICTIMS = ("server", *KINDS, "group")
SPOOLED, POSTED, PROBE = STEPS = (1, 2, 3)  # by a trainer; by a client; a job for all GPUs
EARLY_S = 0.1
LATE_S = {"server": 3.0, "group": 3.0, "merge worker": 1.0, "supervisor": 0.7, "evaluator": 0.4}
DEADLINE_S = 240.0
OF_RUN = "run IN (SELECT run FROM run_calls WHERE text = ?)"
SYSTEMD_S = 10.0  # from SIGTERM to SIGKILL

# Refuses to share a GPU with another, or to evaluate a step twice at the same time; so does its
# child, which leaves the group.
EVALUATOR = """
import fcntl, json, os, pathlib, sys, time, zlib
model, output, control, _, step, _ = sys.argv[1:]
gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
for name in [f"gpu-{gpu}" for gpu in gpus] + [f"{pathlib.Path(output).parent.parent.name}"]:
    fd = os.open(os.path.join(control, name), os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
time.sleep(0.3)
data = (pathlib.Path(model) / "model.safetensors").read_bytes()
begin = 8 + int.from_bytes(data[:8], "little")
found = {"task": {"crc": zlib.crc32(data[begin:])}}
pathlib.Path(output, "results.json").write_text(json.dumps(found))
"""


class MissedError(Exception):
    """All jobs were done before the victim could be hit."""


@dataclass(frozen=True)
class Plan:
    """Who gets which signal in a round, and when."""

    number: int
    signal: signal.Signals
    victim: str
    is_early: bool
    delays_s: tuple[float, ...]
    born: str

    @classmethod
    def of(cls, seed: int, number: int, again: int) -> "Plan":
        drawn = random.Random(f"{seed} {number} {again}")
        victim = VICTIMS[number // 2 % len(VICTIMS)]
        is_early = number // (2 * len(VICTIMS)) % 2 == 0
        aims: tuple[str, ...] = (
            "server",
            "server",
            "server",
            *KINDS,
        )  # at their births; of a server, or later
        if victim in KINDS or (victim == "server" and is_early):
            aims = (victim,)
        aim = drawn.choice(aims)
        is_at_birth = is_early or (aim in KINDS and aim != victim)
        most = EARLY_S if is_at_birth else LATE_S[victim]
        times = 1 if aim in KINDS else drawn.randint(1 + is_early, 3)
        delays = tuple(drawn.uniform(0, most) for _ in range(times))
        return cls(number, SIGNALS[number % 2], victim, is_early, delays, aim)

    def __str__(self) -> str:
        delays = ", ".join(f"{1000 * delay_s:.0f} ms" for delay_s in self.delays_s)
        return f"{self.signal.name} to {self.victim}, {delays} after the start of {self.born}"


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.02)


class World:
    """A server with its directories, and the checkpoints that are evaluated."""

    def __init__(self, directory: Path) -> None:
        self.server = Live(directory)
        self.server.configure(EVALUATOR, gpus=2, port=free_port())
        self.root, self.work = self.server.root, self.server.work
        self.watch = Watch(self.work)
        self.model = whole_model(self.root / "model")
        self.crcs = {PROBE: zlib.crc32(bytes(12))}
        for step in (SPOOLED, POSTED):
            tensor = torch.randn(1_000_000, generator=torch.Generator().manual_seed(step))
            self.crcs[step] = zlib.crc32(tensor.numpy().tobytes())
            place = directory / "checkpoints" / f"checkpoint-{step}"
            save_ranks(place / "pytorch_model_fsdp_0", {"weight": tensor}, 2)
            (place / "config.json").write_text('{"model_type": "qwen2"}')
        self.checkpoints = directory / "checkpoints"

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self.server.process is not None
        return self.server.process

    def revive(self) -> None:
        """Start the server if it has ended, and wait until it listens."""
        if self.server.process is None or self.process.poll() is not None:
            self.server.launch()
        self.server.wait()

    def end_server(self, number: signal.Signals) -> None:
        """Send the server a signal, and wait for its end."""
        is_listening = self.server.is_listening()
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        early = set() if is_listening else {-number, 128 + number}
        assert code in ({0} | early if number == signal.SIGTERM else {-number}), code

    def end_group(self, number: signal.Signals) -> None:
        """End the server and all of its processes at once, as systemd ends a service."""
        self._send_all(number)
        end = time.monotonic() + SYSTEMD_S
        while self.process.poll() is None or self.watch.look():
            if number == signal.SIGKILL or time.monotonic() > end:
                self._send_all(signal.SIGKILL)
            time.sleep(0.002)

    def _send_all(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        for one in self.watch.look():
            one.send(number)

    def rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.work / "jobs.sqlite", timeout=60)) as connection:
            found = connection.execute(query, values).fetchall()
            connection.commit()
        return found

    def hurry(self) -> None:
        """Make every job due at once that waits for its next attempt."""
        self.rows("UPDATE jobs SET not_before = 0 WHERE status = 'queued' AND not_before > 0")


class Round:
    """A training whose evaluations are disturbed once."""

    def __init__(self, world: World, plan: Plan, name: str) -> None:
        self.world, self.plan, self.name = world, plan, name
        self.run = world.root / name
        shutil.copytree(world.checkpoints, self.run)
        world.watch.close()
        world.watch = Watch(world.work)

    def perform(self) -> int:
        """Return how many attempts there were."""
        world = self.world
        world.revive()
        config = EvalConfig(world.server.url, "script", ("task",), run=self.name, poll_interval=0.1)
        trainer = Submitter(config, self.run)
        try:
            assert trainer.submit(self.run / f"checkpoint-{SPOOLED}", SPOOLED)
            self._post(self.run / f"checkpoint-{POSTED}", POSTED)
            is_missed = not self._strike()
            world.revive()
            until(lambda: self._is_done(trainer), "the results")
        finally:
            trainer.close(5.0)
        if is_missed:
            raise MissedError
        self._probe_slots()
        self._judge()
        until(lambda: self.left() == [], "an end without leftovers")
        return int(
            str(world.rows("SELECT SUM(attempts) FROM jobs WHERE " + OF_RUN, self.name)[0][0])  # noqa: S608
        )

    def _strike(self) -> bool:
        """Send the signal; return whether its victim was there."""
        world, plan = self.world, self.plan
        if plan.victim in KINDS:
            return self._hit(plan.victim, lambda one: one.send(plan.signal))
        end = world.end_server if plan.victim == "server" else world.end_group
        if plan.born in KINDS:
            return self._hit(plan.born, lambda _: end(plan.signal))
        for delay_s in plan.delays_s:  # the first server runs already, the next ones are new
            time.sleep(delay_s)
            end(plan.signal)
            world.server.launch()
        return True

    def _hit(self, kind: str, strike: Callable[[Victim], object]) -> bool:
        """Wait for the births of a kind until one was there when its time had come."""
        (delay_s,) = self.plan.delays_s
        for born in self.world.watch.births(kind):
            if born is not None:
                time.sleep(max(0.0, born.seen_at + delay_s - time.monotonic()))
                if state_of(born.pid) not in "ZX" and strike(born) is not False:
                    return True
                delay_s /= 2
            elif self._statuses() == {"completed": 2}:
                return False
        return False

    def _statuses(self) -> dict[str, int]:
        found = self.world.rows("SELECT status FROM jobs WHERE " + OF_RUN, self.name)  # noqa: S608
        return Counter(str(row[0]) for row in found)

    def _is_done(self, trainer: Submitter) -> bool:
        self.world.hurry()
        assert set(self._statuses()) <= {"queued", "running", "completed"}, self._statuses()
        return not trainer.pending() and self._statuses() == {"completed": 2}

    def _post(self, checkpoint: Path, step: int, **more: object) -> None:
        """Submit a checkpoint without a pin: the server makes one."""
        body = {"checkpoint": str(checkpoint), "profile": "script", "tasks": ["task"], **more}
        url = f"{self.world.server.url}/api/v1/jobs"
        answer = httpx.post(url, json={**body, "run": self.name, "step": step}, timeout=60)
        answer.raise_for_status()

    def _probe_slots(self) -> None:
        """Evaluate a model that needs all GPUs: none of them may have stayed taken."""
        self._post(self.world.model, PROBE, num_gpus=2)
        until(lambda: self._statuses() == {"completed": 3}, "a job that needs both GPUs")

    def _judge(self) -> None:
        """Compare what was recorded with what was to be measured."""
        world = self.world
        found = world.rows(
            "SELECT step, failures, value, (SELECT COUNT(*) FROM attempts WHERE job_id = jobs.id"  # noqa: S608
            " AND outcome = 'completed'), (SELECT COUNT(*) FROM events WHERE job_id = jobs.id"
            " AND status = 'completed') FROM jobs JOIN results ON results.job_id = jobs.id"
            f" WHERE {OF_RUN} ORDER BY step",
            self.name,
        )
        assert found == [(step, 0, crc, 1, 1) for step, crc in sorted(world.crcs.items())], found
        lines = (self.run / "_unshard/results.jsonl").read_text().splitlines()
        told = sorted((line["step"], *line["metrics"].values()) for line in map(json.loads, lines))
        assert told == [(SPOOLED, world.crcs[SPOOLED])], told

    def left(self) -> list[str]:
        """Return what should not be there any more."""
        world = self.world
        places = [self.run / "_unshard/pins", world.root / "_unshard/pins", world.work / "merged"]
        places += [path for path in self.run.glob("_unshard/spool/*") if path.is_dir()]
        left = [path for place in places if place.exists() for path in place.iterdir()]
        left += [*world.work.rglob("*.partial"), *self.run.rglob("*.partial")]
        for (job_id,) in world.rows("SELECT id FROM jobs WHERE " + OF_RUN, self.name):  # noqa: S608
            attempts = list((world.work / "jobs" / str(job_id)).iterdir())
            left += attempts if len(attempts) > 1 else []
        found = [str(path) for path in left]
        found += [f"{one.kind} {one.pid}" for one in world.watch.look()]
        found += [f"zombie {pid}" for pid in children(world.process.pid) if state_of(pid) == "Z"]
        query = "SELECT job_id, number FROM attempts WHERE ended_at IS NULL"
        return found + [f"open attempt {row}" for row in world.rows(query)]


def describe(one: Round, seed: int, since: int) -> str:
    """Return what is needed to find out why a round failed, and to repeat it."""
    query = "SELECT jobs.step, jobs.status, jobs.error, attempts.* FROM jobs JOIN attempts"
    query += f" ON job_id = id WHERE {OF_RUN} ORDER BY jobs.number, attempts.number"
    rows = "\n".join(map(str, one.world.rows(query, one.name)))
    again = f'make torture-eval TORTURE="--seed {seed} --only {one.plan.number}"'
    log = one.world.server.told(since)
    return f"{rows}\nLeft over: {one.left()}\nThe server's log:\n{log}\nTo repeat it: {again}"


def torture(world: World, seed: int, numbers: list[int]) -> int:
    """Perform rounds; return how many failed."""
    failed, disturbed = 0, 0
    for number in numbers:
        for again in range(5):
            plan, log = Plan.of(seed, number, again), world.server.log
            since = log.stat().st_size if log.exists() else 0
            begin = time.monotonic()
            one = Round(world, plan, f"run-{number}-{again}")
            try:
                attempts = one.perform()
            except MissedError:
                shutil.rmtree(one.run)
                continue
            except Exception:  # noqa: BLE001  (the others are performed, too)
                failed += 1
                print(f"{number}: {plan}: FAILED\n{traceback.format_exc()}")
                print(describe(one, seed, since), flush=True)
            else:
                disturbed += attempts > len(STEPS)
                seconds = time.monotonic() - begin
                print(f"{number}: {plan}: {attempts} attempts, {seconds:.1f} s", flush=True)
                shutil.rmtree(one.run)
            break
        else:
            failed += 1
            print(f"{number}: {plan}: FAILED: its victim was never there in time", flush=True)
    print(f"{len(numbers)} rounds, seed {seed}: {failed} failed; {disturbed} lost an attempt")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="of each signal")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--only", type=int, nargs="*", help="numbers of rounds")
    parser.add_argument("--busy", type=int, default=0, help="how many busy loops run meanwhile")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="unshard-torture-"))
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    logging.basicConfig(filename=directory / "trainer.log", format="%(asctime)s %(message)s")
    world = World(directory)
    try:
        with busy(given.busy):
            failed = torture(world, given.seed, given.only or list(range(2 * given.rounds)))
    finally:
        if world.server.process is not None:
            world.end_group(signal.SIGKILL)
    if failed:
        print(f"all files are in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
