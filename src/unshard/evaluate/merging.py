"""From a job to a Hugging Face directory: merged in a process of its own, or taken as it is."""

import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.errors import UnshardError
from unshard.evaluate.jobs import EvaluationError, Job
from unshard.evaluate.launching import start_module
from unshard.evaluate.merge_worker import ANSWER_NAME, Order
from unshard.evaluate.processes import identify, kill_group
from unshard.evaluate.profiles import Kind, Profile
from unshard.read.discover import discover
from unshard.read.format import Request as Wanted
from unshard.write.stage import recover

__all__ = [
    "CrashedError",
    "GivenUpError",
    "GoneError",
    "Merger",
    "PassingError",
    "merge_in_process",
    "source_of",
]

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_WHOLE = ("model*.safetensors", "pytorch_model*.bin")
_LOG_NAME = "merge.log"


class GoneError(EvaluationError):
    """The checkpoint is not there any more."""


class PassingError(EvaluationError):
    """A merge failed for something that may pass: no space, a process killed by a signal."""


class CrashedError(EvaluationError):
    """The process of a merge crashed, or took too long: a failed attempt."""


class GivenUpError(EvaluationError):
    """A merge was interrupted because nobody wants it any more."""


def source_of(job: Job) -> Path:
    """Return where a job's checkpoint lies: its pin, where there is one."""
    if job.pin is not None and Path(job.pin).exists():
        return Path(job.pin)
    return Path(job.request.checkpoint)


class Merger:
    """Merges checkpoints, so many at once, each in a process of its own.

    Args:
        directory: where the merged models lie, each named after its job.
        options: of every merge, but for the weights, which the job says.
        at_once: how many merges run at the same time; the others wait.
    """

    def __init__(self, directory: Path, options: MergeOptions, *, at_once: int) -> None:
        self._directory = directory.absolute()
        self._options = options
        self._turns = threading.Semaphore(at_once)
        directory.mkdir(parents=True, exist_ok=True)

    def merged(self, job_id: str) -> Path:
        """Return where a job's merged model lies, if there is one."""
        return self._directory / job_id

    def model_of(self, job: Job) -> Path:
        """Return the model that a job's evaluator was given."""
        merged = self.merged(job.id)
        return merged if merged.exists() else source_of(job).absolute()

    def kept(self) -> list[str]:
        """Return the jobs whose merged models are there."""
        return [path.name for path in self._directory.iterdir() if path.name[:1] not in "._"]

    def remove(self, job_id: str) -> None:
        """Remove a job's merged model, if there is one."""
        shutil.rmtree(self.merged(job_id), ignore_errors=True)

    def recover(self) -> None:
        """Remove what merges that were killed have left."""
        recover(self._directory)

    def prepare(
        self, job: Job, profile: Profile, *, directory: Path, is_given_up: Callable[[], bool]
    ) -> Path:
        """Return a Hugging Face directory of a job's checkpoint.

        Args:
            job: what to merge; its own directory is returned where it holds a whole model.
            profile: says how long the merge itself may take, and which config a checkpoint gets
                that has none; without one, only a command can evaluate it.
            directory: of the attempt.
            is_given_up: asked often, while waiting too.

        Raises:
            GoneError: the checkpoint is not there, or went away meanwhile.
            PassingError: it may be tried again.
            CrashedError: its process made a mistake, or took longer than `timeout_s`.
            GivenUpError: `is_given_up`.
            UnshardError: it cannot be merged.
        """
        source = source_of(job).absolute()
        try:
            if _is_whole(source, job.request.weights):
                return source
            self.remove(job.id)
            self._merge_in_turn(source, job, profile, directory, is_given_up)
        except (UnshardError, OSError) as error:
            if source.exists() or isinstance(error, GivenUpError):
                raise
            raise _gone(source) from error
        return self.merged(job.id)

    def _merge_in_turn(
        self,
        source: Path,
        job: Job,
        profile: Profile,
        directory: Path,
        is_given_up: Callable[[], bool],
    ) -> None:
        if not source.exists():
            raise _gone(source)
        while not self._turns.acquire(timeout=_POLL_S):
            if is_given_up():
                raise GivenUpError(f"{source}: not wanted any more")
        options = replace(self._options, weights=job.request.weights)
        order = Order(
            str(source),
            str(self.merged(job.id)),
            asdict(options),
            None if profile.config is None else str(profile.config),
            needs_config=profile.kind is not Kind.COMMAND,
        )
        in_time = _in_time(is_given_up, profile.timeout_s)
        try:
            merge_in_process(order, directory=directory, is_given_up=in_time)
        finally:
            self.recover()
            self._turns.release()


def merge_in_process(order: Order, *, directory: Path, is_given_up: Callable[[], bool]) -> None:
    """Merge a checkpoint in a process of its own.

    Args:
        order: what to merge, how, and where to.
        directory: where the process works and leaves its log and its answer.
        is_given_up: asked often; the process is then ended.

    Raises:
        PassingError: it may be tried again.
        GivenUpError: `is_given_up`.
        CrashedError: its process made a mistake.
        EvaluationError: it cannot be merged.
    """
    log = directory / _LOG_NAME
    with start_module("unshard.evaluate.merge_worker", directory=directory, log=log) as worker:
        if worker.stdin is None:
            raise RuntimeError("the worker has no stdin")
        process = identify(worker.pid, gpus=(), directory=str(directory))
        try:
            worker.stdin.write(json.dumps(asdict(order), default=str).encode() + b"\n")
            worker.stdin.flush()
            _wait(worker, is_given_up)
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # what was not written cannot be written now
                worker.stdin.close()
            worker.wait()
        finally:
            if not kill_group(process, grace_s=0) and worker.poll() is None:
                _log.error("process %d cannot be ended; it is left behind", worker.pid)
                worker.returncode = -signal.SIGKILL  # do not wait for it: its disk may be dead
    _judge(order.checkpoint, directory, worker.returncode)


def _in_time(is_given_up: Callable[[], bool], timeout_s: float) -> Callable[[], bool]:
    """Return what asks the same, and raises CrashedError when the time is up."""
    deadline = time.monotonic() + timeout_s

    def asked() -> bool:
        if time.monotonic() > deadline:
            raise CrashedError(
                f"the merge took more than {timeout_s:g} s",
                hint="does the disk of the checkpoint answer? a slow merge needs a longer "
                "`timeout` in the profile",
            )
        return is_given_up()

    return asked


def _gone(source: Path) -> GoneError:
    return GoneError(
        f"{source}: is gone, or never was there",
        hint="check the path; pin checkpoints when they are submitted, or let more of them stay",
    )


def _wait(worker: "subprocess.Popen[bytes]", is_given_up: Callable[[], bool]) -> None:
    while True:
        try:
            worker.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if is_given_up():
                raise GivenUpError("the merge is not wanted any more") from None
        else:
            return


def _judge(source: str, directory: Path, returncode: int) -> None:
    """Raise what a worker answered, if it failed."""
    try:
        answer = json.loads((directory / ANSWER_NAME).read_bytes())
    except FileNotFoundError:
        log = (directory / _LOG_NAME).read_text(errors="replace")[-2000:]
        may_pass = returncode < 0 or returncode == os.EX_TEMPFAIL
        died = PassingError if may_pass else CrashedError
        raise died(
            f"{source}: the process that merged it ended with code {returncode}", found=log
        ) from None
    if answer["error"] is not None:
        kind = PassingError if answer["may_pass"] else EvaluationError
        raise kind(answer["error"])


def _is_whole(source: Path, weights: str) -> bool:
    """Tell whether a directory is a whole model already, with its config and nothing sharded."""
    if weights != "model" or not (source / "config.json").is_file():
        return False
    if not any(any(source.glob(pattern)) for pattern in _WHOLE):
        return False
    at = discover(source, Wanted(None, None, weights))[0]
    return not at.format.sharded and at.weights_dir == source.resolve()
