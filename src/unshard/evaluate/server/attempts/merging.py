"""From a job to a Hugging Face directory: merged in a process of its own, or taken as it is.

The directory of a job that merges nothing has everything but the weights, and names the checkpoint.
"""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from unshard.api.options import MergeOptions
from unshard.evaluate.jobs import EvaluationError, Job, Request
from unshard.evaluate.pins.pin import OF_SERVER
from unshard.evaluate.server.attempts.best_link import link_best, link_of
from unshard.evaluate.server.attempts.merge_worker import ANSWER_NAME, MergeOrder
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.processes.launching import start_module
from unshard.evaluate.server.processes.table import identify, kill_group
from unshard.stores.remote_path import RemotePath, is_url, path_of
from unshard.write.staging.recovery import recover

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_POLL_S = 0.05
_LOG_NAME = "merge.log"
_QUOTA = "set quota: {count: N, bytes: null} in the YAML of the trainer or of watch (--config)"
_PIN_QUOTA = "set pin_quota: {count: N} in server.yaml"
_UNMERGED = "model"  # in the attempt's directory


class CheckpointGoneError(EvaluationError):
    """The checkpoint is not there any more."""


class PassingError(EvaluationError):
    """A merge failed for something that may pass: no space, a process killed by a signal."""


class CrashedError(EvaluationError):
    """The process of a merge crashed, or took too long: a failed attempt."""


class GivenUpError(EvaluationError):
    """A merge was interrupted because its result is no longer needed."""


class Merger:
    """Merges checkpoints, each in its own process, `at_once` of them at a time.

    Args:
        directory: of the merged models, each named after its job.
        at_once: how many merges run at the same time; the others wait.
    """

    def __init__(self, directory: Path, *, at_once: int) -> None:
        self._directory = directory.absolute()
        self._turns = threading.Semaphore(at_once)
        directory.mkdir(parents=True, exist_ok=True)

    def merged(self, job_id: str) -> Path:
        """Return the directory of a job's merged model, which may not exist."""
        return self._directory / job_id

    def model_of(self, job: Job) -> Path:
        """Return the model that a job's evaluator was given."""
        merged = self.merged(job.id)
        return merged if merged.exists() else path_of(job.pin or job.request.checkpoint).absolute()

    def list_kept(self) -> list[str]:
        """Return the jobs whose merged models are there."""
        return [path.name for path in self._directory.iterdir() if path.name[:1] not in "._"]

    def remove(self, job_id: str) -> None:
        """Remove a job's merged model, if there is one."""
        shutil.rmtree(self.merged(job_id), ignore_errors=True)

    def link_best(self, run: str, request: Request, job_id: str | None) -> None:
        """Have the link to a run's best model lead to that of a job; see `best_link`."""
        directory = self._directory
        link = link_of(directory, run, request.profile, request.weights)
        link_best(link, directory, job_id)

    def recover(self) -> None:
        """Remove what merges that were killed have left."""
        recover(self._directory)

    def prepare(
        self, job: Job, profile: Profile, *, directory: Path, is_given_up: Callable[[], bool]
    ) -> Path:
        """Return a Hugging Face directory of a job's checkpoint: its own, if it is a whole model.

        Where the profile merges nothing, the checkpoint is checked, and the directory is one of
        this attempt, without weights.
        A model without a config can only be evaluated by a command. `is_given_up` is polled, also
        while waiting for a turn.

        Raises:
            EvaluationError: see `merge_in_process`.
        """
        self.remove(job.id)
        source = path_of(job.request.checkpoint).absolute()
        while not self._turns.acquire(timeout=_POLL_S):
            if is_given_up():
                raise GivenUpError(f"the merge of {source} was given up before it started")
        options = MergeOptions(weights=job.request.weights, extra_state=False)
        is_direct = profile.weights == "direct"
        order = MergeOrder(
            str(source),
            str(directory / _UNMERGED if is_direct else self.merged(job.id)),
            asdict(options),
            None if profile.config is None else str(profile.config),
            needs_config=profile.needs_config,
            pin=job.pin,
            may_be_whole=not (is_direct or isinstance(source, RemotePath)),
            is_direct=is_direct,
        )
        is_made = False
        try:
            model = merge_in_process(
                order, directory=directory, is_given_up=is_given_up, timeout_s=profile.timeout
            )
            is_made = True
            return model
        finally:
            self.recover()
            if not is_made:  # it may have been complete just before its process was ended
                self.remove(job.id)
            self._turns.release()


@dataclass(frozen=True, slots=True)
class _Patience:
    """How long to wait for something, from now on."""

    what: str
    timeout_s: float
    is_given_up: Callable[[], bool]
    began: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise CrashedError if it takes too long, GivenUpError if its result is not needed."""
        if time.monotonic() - self.began > self.timeout_s:
            raise CrashedError(
                f"{self.what} took more than {self.timeout_s:g} s",
                hint="does the disk of the checkpoint answer? a slow merge needs a longer "
                "`timeout` in the profile",
            )
        if self.is_given_up():
            raise GivenUpError(f"{self.what} was given up: its result is no longer needed")


def merge_in_process(
    order: MergeOrder,
    *,
    directory: Path,
    is_given_up: Callable[[], bool],
    timeout_s: float = math.inf,
) -> Path:
    """Merge a checkpoint in a separate process; return where the model is.

    The process works in `directory`, and leaves its log and its answer there.

    Raises:
        CheckpointGoneError: the checkpoint is missing, or was removed during the merge.
        PassingError: it may be tried again.
        GivenUpError: `is_given_up`.
        CrashedError: its process made a mistake, or took longer than `timeout_s`.
        EvaluationError: it cannot be merged.
    """
    log, patience = directory / _LOG_NAME, _Patience("the merge", timeout_s, is_given_up)
    with start_module(
        "unshard.evaluate.server.attempts.merge_worker",
        directory=directory,
        log=log,
        reads_store=is_url(order.checkpoint),
    ) as worker:
        if worker.stdin is None:
            raise RuntimeError("the worker has no stdin")
        process = identify(worker.pid, gpus=(), directory=str(directory))
        try:
            worker.stdin.write(json.dumps(asdict(order), default=str).encode() + b"\n")
            worker.stdin.flush()
            while worker.poll() is None:
                patience.check()
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(timeout=_POLL_S)
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # what was not written cannot be written now
                worker.stdin.close()
            worker.wait()
        finally:
            if not kill_group(process, grace_s=0) and worker.poll() is None:
                _log.error("process %d cannot be ended; it is left behind", worker.pid)
                worker.returncode = -signal.SIGKILL  # do not wait for it: its disk may not answer
    return _judge(order, directory, worker.returncode)


def ask_disk(
    ask: Callable[[], _Answer], *, timeout_s: float, is_given_up: Callable[[], bool]
) -> _Answer:
    """Return what a call returns that touches the disk of a checkpoint.

    It runs in a thread of its own, which is left behind if the disk does not answer.

    Raises:
        CrashedError: it takes longer than `timeout_s`.
        GivenUpError: `is_given_up`.
    """
    future = Future[_Answer]()

    def body() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=body, name="looking at a checkpoint", daemon=True).start()
    patience = _Patience("a look at the checkpoint", timeout_s, is_given_up)
    while not wait([future], _POLL_S).done:
        patience.check()
    return future.result()


def _judge(order: MergeOrder, directory: Path, returncode: int) -> Path:
    """Return the model that a worker answered, or raise why it failed."""
    source = order.checkpoint
    try:
        answer = json.loads((directory / ANSWER_NAME).read_bytes())
    except FileNotFoundError:
        log = (directory / _LOG_NAME).read_text(errors="replace")[-2000:]
        may_pass = returncode < 0 or returncode == os.EX_TEMPFAIL
        died = PassingError if may_pass else CrashedError
        raise died(
            f"{source}: the process that merged it ended with code {returncode}", found=log
        ) from None
    if answer["error"] is None:
        return Path(answer["model"])
    if answer["is_gone"]:
        raise CheckpointGoneError(
            f"checkpoint {answer['checkpoint']} does not exist (removed, or the path is wrong)",
            hint=_hint_for_gone(source, order.pin),
        )
    kind = PassingError if answer["may_pass"] else EvaluationError
    raise kind(answer["error"])


def _hint_for_gone(source: str, pin: str | None) -> str:
    if is_url(source):
        return "check the address; an object store has no pins: let checkpoints stay for longer"
    if pin is None:  # a trainer's own may have gone before it could be submitted
        return f"check the path; let more checkpoints stay or, if the trainer pins them, {_QUOTA}"
    is_servers = Path(pin).parent.name.startswith(OF_SERVER)
    return "its pin made room for newer ones: " + (_PIN_QUOTA if is_servers else _QUOTA)
