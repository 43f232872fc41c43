"""From a job to a Hugging Face directory: merged in a process of its own, or the checkpoint itself.

For a profile that merges nothing, the directory has no weights, and names the checkpoint.
`best/RUN/PROFILE` in the work directory is a link to the best merged model of a run.
"""

import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from unshard.api.options import MergeOptions
from unshard.evaluate.jobs import EvaluationError, Job
from unshard.evaluate.pins.pin import OF_SERVER
from unshard.evaluate.server.attempts.merge_worker import ANSWER_NAME, MergeOrder
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.processes.launching import start_module
from unshard.evaluate.server.processes.table import identify, kill_group
from unshard.stores.remote_path import RemotePath, is_url, path_of
from unshard.write.staging.recovery import recover

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_LOG_NAME = "merge.log"
_QUOTA = "set quota: {count: N, bytes: null} in the YAML of the trainer or of watch (--config)"
_PIN_QUOTA = "set pin_quota: {count: N} in server.yaml"
_UNMERGED = "model"  # in the attempt's directory
_BEST = "best"
_LONGEST_NAME = 200  # bytes


class CheckpointGoneError(EvaluationError):
    """The checkpoint no longer exists."""


class PassingError(EvaluationError):
    """A merge failed for a reason that may pass: no space, a process killed by a signal."""


class CrashedError(EvaluationError):
    """The process of a merge crashed, or took too long: a failed attempt."""


class GivenUpError(EvaluationError):
    """A merge was interrupted because its result is no longer needed."""


class Merger:
    """Merges checkpoints, each in its own process, `at_once` of them at a time.

    `directory` has the merged models, each named after its job.
    """

    def __init__(self, directory: Path, *, at_once: int) -> None:
        self.directory = directory.absolute()
        self._turns = threading.Semaphore(at_once)
        directory.mkdir(parents=True, exist_ok=True)

    def merged(self, job_id: str) -> Path:
        """Return the directory of a job's merged model, which may not exist."""
        return self.directory / job_id

    def model_of(self, job: Job) -> Path:
        """Return the model that a job's evaluator was started with."""
        merged = self.merged(job.id)
        return merged if merged.exists() else path_of(job.pin or job.request.checkpoint).absolute()

    def list_kept(self) -> list[str]:
        """Return the jobs whose merged models exist."""
        return [path.name for path in self.directory.iterdir() if path.name[:1] not in "._"]

    def remove(self, job_id: str) -> None:
        """Remove a job's merged model, if there is one."""
        shutil.rmtree(self.merged(job_id), ignore_errors=True)

    def recover(self) -> None:
        """Remove the staging directories of merges that were killed."""
        recover(self.directory)

    def prepare(
        self, job: Job, profile: Profile, *, directory: Path, is_given_up: Callable[[], bool]
    ) -> Path:
        """Return a Hugging Face directory of a job's checkpoint: its own, if it is a whole model.

        With `weights: direct` the checkpoint is checked, and the directory is in the attempt's,
        without weights. `is_given_up` is polled, also while waiting for a turn.

        Raises:
            EvaluationError: see `merge_in_process`.
        """
        self.remove(job.id)
        source = path_of(job.request.checkpoint).absolute()
        while not self._turns.acquire(timeout=_POLL_S):
            if is_given_up():
                raise GivenUpError(f"the merge of {source} was given up before it started")
        is_direct = profile.weights == "direct"
        order = MergeOrder(
            str(source),
            str(directory / _UNMERGED if is_direct else self.merged(job.id)),
            asdict(MergeOptions(weights=job.request.weights, extra_state=False)),
            None if profile.config is None else str(profile.config),
            needs_config=profile.needs_config,
            pin=job.pin,
            may_be_whole=not (is_direct or isinstance(source, RemotePath)),
            is_direct=is_direct,
        )
        model = None
        try:
            model = merge_in_process(
                order, directory=directory, is_given_up=is_given_up, timeout_s=profile.timeout
            )
            return model
        finally:
            self.recover()
            if model is None:  # it may have been complete just before its process was ended
                self.remove(job.id)
            self._turns.release()


def merge_in_process(
    order: MergeOrder,
    *,
    directory: Path,
    is_given_up: Callable[[], bool],
    timeout_s: float = math.inf,
) -> Path:
    """Merge a checkpoint in a separate process; return the path of the model.

    The process works in `directory`, and leaves its log and its answer there.

    Raises:
        CheckpointGoneError: the checkpoint is missing, or was removed during the merge.
        PassingError: another attempt may succeed.
        GivenUpError: `is_given_up`.
        CrashedError: its process crashed, or took longer than `timeout_s`.
        EvaluationError: it cannot be merged.
    """
    log, began = directory / _LOG_NAME, time.monotonic()
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
                _check_patience("the merge", began, timeout_s, is_given_up)
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(timeout=_POLL_S)
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # closing writes the buffer once more
                worker.stdin.close()
            worker.wait()
        finally:
            if not kill_group(process, grace_s=0) and worker.poll() is None:
                _log.error("process %d cannot be ended; it is left behind", worker.pid)
                worker.returncode = -signal.SIGKILL  # do not wait for it: its disk may not answer
    return _read_answer(order, directory, worker.returncode)


def _check_patience(
    subject: str, began: float, timeout_s: float, is_given_up: Callable[[], bool]
) -> None:
    if time.monotonic() - began > timeout_s:
        raise CrashedError(
            f"{subject} took more than {timeout_s:g} s",
            hint="does the disk of the checkpoint answer? a slow merge needs a longer "
            "`timeout` in the profile",
        )
    if is_given_up():
        raise GivenUpError(f"{subject} was given up: its result is no longer needed")


def ask_disk(
    ask: Callable[[], Sequence[str]], *, timeout_s: float, is_given_up: Callable[[], bool]
) -> Sequence[str]:
    """Return the result of a call that reads the disk of a checkpoint.

    It runs in a thread of its own, which is left behind if the disk does not answer.

    Raises:
        CrashedError: it takes longer than `timeout_s`.
        GivenUpError: `is_given_up`.
    """
    future, began = Future[Sequence[str]](), time.monotonic()

    def body() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=body, name="looking at a checkpoint", daemon=True).start()
    while not wait([future], _POLL_S).done:
        _check_patience("a look at the checkpoint", began, timeout_s, is_given_up)
    return future.result()


def _read_answer(order: MergeOrder, directory: Path, returncode: int) -> Path:
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
        return "check the address; an object store has no pins: keep more checkpoints there"
    if pin is None:  # a trainer may have removed its pin before the checkpoint was submitted
        return f"check the path; keep more checkpoints or, if the trainer pins them, {_QUOTA}"
    is_servers = Path(pin).parent.name.startswith(OF_SERVER)
    return "its pin made room for newer ones: " + (_PIN_QUOTA if is_servers else _QUOTA)


def link_of(merged: Path, run: str, profile: str, weights: str) -> Path:
    """Return the link to the best model of a run and profile, next to the merged models."""
    name = profile if weights == "model" else f"{profile}-{weights}"
    return merged.parent / _BEST / _as_name(run) / _as_name(name)


def link_best(link: Path, merged: Path, job_id: str | None) -> None:
    """Point a link to the merged model of a job; remove the link if there is no such model.

    The link is relative, so that the work directory can be moved, and replaced in one step. Only a
    link to a merged model of this work directory is replaced or removed; anything else, and any
    failure, is logged.
    """
    try:
        if link.is_symlink():
            ours = re.escape(f"../../{merged.name}/") + "[0-9a-f]+"
            is_free = re.fullmatch(ours, str(link.readlink())) is not None
        else:
            is_free = not os.path.lexists(link)
        if not is_free:
            _log.warning("%s: not a link to a merged model: it is left as it is", link)
            return
        if job_id is None or not (merged / job_id).is_dir():
            link.unlink(missing_ok=True)
            return
        target = Path("..", "..", merged.name, job_id)
        if link.is_symlink() and link.readlink() == target:
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        draft = link.with_name(f".{secrets.token_hex(8)}")
        draft.symlink_to(target)
        try:
            draft.replace(link)
        except OSError:
            draft.unlink()
            raise
    except OSError as error:
        _log.warning("%s: cannot be changed: %s", link, error)


def _as_name(text: str) -> str:
    """Return a file name for any text; different texts have different names."""
    name = quote(text, safe=" +=,@")
    if name.startswith(".") or not name:
        name = f"%2E{name[1:]}" if name else "%"
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        name = f"{name[:_LONGEST_NAME]}-{digest}"
    return name
