"""Real evaluators for tests: small Python scripts, and a server to run them in a child process."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import ConfigDict
from safetensors.numpy import save_file

import unshard
import waiting
from unshard.evaluate.jobs import Arguments, EvaluationError, Filters, Job, Request, Status
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.attempts.attempt import Limits
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.work import EvalInput, Scores
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.queue.scheduler import Scheduler, SchedulerSettings
from unshard.evaluate.server.store.store import Store

TESTS = Path(__file__).parent.parent
DEADLINE_S, wait_until = waiting.LIMIT_S, waiting.wait_until

SCORE = """
import json, os, pathlib, sys, time
model, output, step = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
def done(**metrics):
    (output / "metrics.json").write_text(json.dumps({f"task/{k}": v for k, v in metrics.items()}))
"""


class ScriptProfile(CommandProfile):
    """Runs a script, which begins with `SCORE`, with the model, the output and the step."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    command: tuple[str, ...] = ("x",)
    script: str = ""

    def command_line(self, work: EvalInput) -> list[str]:
        step = str(work.request.step)
        places = [str(work.model), str(work.output)]
        return [sys.executable, "-I", "-S", "-c", SCORE + self.script, *places, step]

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        path = work.output / "metrics.json"
        if returncode != 0 or not path.exists():
            raise EvaluationError("no metrics", found=f"exit code {returncode}")
        found: dict[str, float] = json.loads(path.read_text())
        return Scores(found, {}, file=path)


def script_profile(script: str = "", **changed: object) -> ScriptProfile:
    profile = ScriptProfile(script=script, timeout=waiting.LIMIT_S, retries=0, gpus=1)
    return profile.model_copy(update=changed)


def whole_model(directory: Path) -> Path:
    """Make a Hugging Face directory, which is evaluated as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.zeros(3, np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text("{}")
    return directory


def request(checkpoint: Path, step: int = 1, **more: object) -> Request:
    chosen = {name: more.pop(name) for name in Arguments.model_fields.keys() & more.keys()}
    more["arguments"] = Arguments.model_validate(chosen)
    return Request(str(checkpoint), "script", ("task",), step, "run", **more)  # type: ignore[arg-type]


def scheduler(
    work_dir: Path,
    script: str,
    *,
    gpus: str = "0",
    profile: ScriptProfile | None = None,
    launched: Mapping[str, int] | None = None,
    **settings: object,
) -> tuple[Store, Scheduler]:
    """Return a store and a scheduler, not started, in a directory."""
    store = Store(work_dir / "jobs.sqlite")
    chosen = profile or script_profile()
    profiles = {"script": chosen.model_copy(update={"script": script})}
    pins = Pins(store, (), Quota())
    known = {"limits": Limits(grace_s=0.5, poll_s=0.02), "backoff_s": 0.05} | settings
    made = SchedulerSettings(work_dir, **known)  # type: ignore[arg-type]
    slots = Slots(filter(None, gpus.split(",")), launched=launched)
    return store, Scheduler(store, slots, profiles, pins, made)


def job_of(store: Store, job_id: str) -> Job:
    job = store.get(job_id)
    assert job is not None
    return job


def wait_for(store: Store, job_id: str, status: Status) -> Job:
    """Wait for a job's status; another final one fails at once."""

    def reached() -> bool:
        job = job_of(store, job_id)
        assert job.status is status or not job.status.is_final, job
        return job.status is status

    wait_until(reached, f"{job_id} {status}")
    return job_of(store, job_id)


def all_final(store: Store) -> bool:
    return all(job.status.is_final for job in store.jobs(Filters())) and not store.running()


def is_running(pid: int) -> bool:
    """Return whether a process is there and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def all_gone(pids: object) -> bool:
    assert isinstance(pids, list)
    return not any(is_running(pid) for pid in pids)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process and its children grow beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def hanging_worker(directory: Path) -> Path:
    """Return a program that takes its order and then hangs, as on a disk that does not answer."""
    worker = directory / "hanging"
    worker.write_text("#!/bin/sh\nread line\nexec sleep 600\n")
    worker.chmod(0o755)
    return worker


STAGING = """
import os, pathlib, sys
from unshard.write.staging.stage import Staging
Staging(pathlib.Path(sys.argv[1]), 10).__enter__()
os._exit(0)
"""


def leave_staging(directory: Path) -> Path:
    """Leave a staging directory, as a killed worker does."""
    command = [sys.executable, "-c", STAGING, str(directory / "model")]
    subprocess.run(command, env=child_environment(), check=True)
    return next(directory.glob("_unshard-partial-*"))


def child_environment() -> dict[str, str]:
    source = str(Path(unshard.__file__).parent.parent)
    inherited = {name: of for name, of in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return inherited | {"PYTHONPATH": os.pathsep.join([source, str(TESTS)])}


def start_server(work_dir: Path, script: str, *, gpus: str) -> "subprocess.Popen[bytes]":
    """Start a scheduler in a process of its own, to be killed."""
    command = [sys.executable, "-m", "evaluation.running", str(work_dir), script, gpus]
    return subprocess.Popen(command, env=child_environment())


def serve(work_dir: str, script: str, gpus: str) -> None:
    store, server = scheduler(Path(work_dir), script, gpus=gpus)
    server.start()
    (Path(work_dir) / "ready").touch()
    while True:
        time.sleep(60)
        store.counts()


if __name__ == "__main__":
    serve(*sys.argv[1:])
