"""Engines that are kept, for tests of who has them and when they end: the engine is a stand-in.

Everything else is real: the worker's own loop and socket, its supervisor, clients, the scheduler.
The stand-in has a process for which Python would wait at its exit. It notes each job in
`CONTROL/jobs` with its processes, waits while `CONTROL/hold` exists, refuses to be given a second
checkpoint where `CONTROL/refuse` exists, and measures the step.
"""

import json
import os
import sys
import time
from pathlib import Path

from evaluation.running import child_environment, is_running, script_profile, wait_until
from unshard.evaluate.jobs import Arguments, Job, Request
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.attempts.attempt import Limits
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.queue.scheduler import Scheduler, SchedulerSettings
from unshard.evaluate.server.store.store import Store
from waiting import LIMIT_S

__all__ = ["Place", "noted", "processes_of", "submit"]

STAND_IN = """
import json, multiprocessing, os, pathlib, sys, time
import yaml
from unshard.evaluate.server.warm.worker import ReplaceError, run
control = pathlib.Path(os.environ["CONTROL"])
jobs = 0
engine = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
engine.start()
def evaluate(arguments):
    global jobs
    jobs += 1
    config = yaml.safe_load(pathlib.Path(arguments[1].partition("=")[2]).read_text())
    model = pathlib.Path(config["model_args"]["pretrained"])
    place = json.loads((model / "weights.json").read_text())
    pids = {"pid": os.getpid(), "parent": os.getppid(), "engine": engine.pid}
    note = {**pids, "jobs": jobs, "cwd": os.getcwd(), **place}
    with (control / "jobs").open("a") as file:
        file.write(json.dumps(note) + "\\n")
    print("evaluating", place["checkpoint"], flush=True)
    if jobs > 1 and (control / "refuse").exists():
        raise ReplaceError("other values")
    while (control / "hold").exists():
        time.sleep(0.01)
    step = float(place["checkpoint"].rpartition("-")[2])
    results = {"results": {task: {"acc,none": step} for task in config["tasks"]}}
    output = pathlib.Path(config["output_path"])
    output.with_name("results_now.json").write_text(json.dumps(results))
    if (control / "exit").exists():
        sys.exit(int((control / "exit").read_text()))
run(evaluate, float(sys.argv[-1]))
"""


class Place:
    """A directory with a work directory, and what the stand-in notes and obeys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self.control = root / "control"
        self.control.mkdir(parents=True, exist_ok=True)
        program, python = root / "stand_in.py", root / "python"
        program.write_text(STAND_IN)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        python.chmod(0o755)

    def profile(self, **changed: object) -> LmEvalProfile:
        environment = {
            "CONTROL": str(self.control),
            "PYTHONPATH": child_environment()["PYTHONPATH"],
        }
        chosen: dict[str, object] = {
            "interpreter": str(self.root / "python"),
            "environment": environment,
            "model": "vllm",
            "weights": "direct",
            "timeout": LIMIT_S,
            "idle_timeout": LIMIT_S,
            "retries": 0,
            "gpus": 1,
        }
        return LmEvalProfile(**chosen | changed)  # type: ignore[arg-type]  # its own fields

    def scheduler(
        self, *, gpus: str = "0", script: str = "done(acc=1)", **profile: object
    ) -> tuple[Store, Scheduler]:
        """Return a store and a scheduler, not started; "script" is a profile without engines."""
        known = {"warm": self.profile(**profile), "script": script_profile(script)}
        store = Store(self.work / "jobs.sqlite")
        settings = SchedulerSettings(self.work, Limits(grace_s=5.0, poll_s=0.02), backoff_s=0.05)
        slots = Slots(filter(None, gpus.split(",")))
        pins = Pins(store, (), Quota())
        return store, Scheduler(store, slots, known, pins, settings)

    def hold(self) -> Path:
        """Have jobs wait until the file that is returned is removed."""
        path = self.control / "hold"
        path.touch()
        return path


def submit(store: Store, checkpoint: Path, profile: str = "warm", **model_args: str) -> Job:
    step = int(checkpoint.name.rpartition("-")[2])
    arguments = Arguments(model_args=dict(model_args))
    request = Request(str(checkpoint), profile, ("task",), step, "run", arguments=arguments)
    return store.submit(request, pin=None)[0]


def noted(place: Place, count: int) -> list[dict[str, object]]:
    """Wait until the stand-ins have begun so many jobs, and return their notes."""
    path = place.control / "jobs"

    def lines() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    wait_until(lambda: len(lines()) >= count, f"{count} jobs")
    return [json.loads(line) for line in lines()]


def processes_of(note: dict[str, object]) -> list[int]:
    """Return the worker that ran a job, its supervisor, and the process of its engine."""
    return [int(str(note[name])) for name in ("pid", "parent", "engine")]


def are_gone(note: dict[str, object]) -> bool:
    return not any(map(is_running, processes_of(note)))


def serve(root: str) -> None:
    """Run a scheduler, to be killed."""
    _, server = Place(Path(root)).scheduler()
    server.start()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    serve(*sys.argv[1:])
    os._exit(0)
