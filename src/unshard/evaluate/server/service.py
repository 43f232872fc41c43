"""The server's operations, for every protocol: take jobs, show them, cancel them, read logs."""

import asyncio
import json
import logging
import re
import secrets
import shlex
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from unshard.api.options import MergeOptions
from unshard.console import counted
from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import BASE_STEP, Job, Request, Status, TrainingRun, WeightsName
from unshard.evaluate.pins.files import ExpiredError, read_stamps, time_written
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.server.admission import check_request
from unshard.evaluate.server.attempts.merge_worker import MergeOrder
from unshard.evaluate.server.attempts.merging import CheckpointGoneError, merge_in_process
from unshard.evaluate.server.evaluators.installed import UnknownTasks
from unshard.evaluate.server.evaluators.profiles import base_of, profile_named, resolve_name
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.health import HealthCheck
from unshard.evaluate.server.joblog import log_event, log_refusal
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.placing import RunFinder, place
from unshard.evaluate.server.processes.bounded_log import read_log
from unshard.evaluate.server.queue.scheduler import Scheduler
from unshard.evaluate.server.roots import (
    check_links,
    check_merged,
    check_there,
    resolve_checkpoint,
)
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.store.store import Store
from unshard.read.finding.versions import fingerprint
from unshard.read.step_names import step_of
from unshard.stores.remote_path import RemotePath, path_of
from unshard.write.dirfd import write_whole

_log = logging.getLogger(__name__)
_MOST_FILES = 1000
_SHORT_ID = re.compile(r"[0-9a-f]{4,15}", re.ASCII)
_SHOWN_IDS = 20
_RETRIED = frozenset({Status.FAILED, Status.CANCELLED, Status.EXPIRED})


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """The operations, and the objects that the protocols need.

    Attributes:
        work_dir: with the database, the logs and the merged models.
        merging: held during a merge for a client: one at a time.
        stopping: set when the server must end.
    """

    store: Store
    scheduler: Scheduler
    config: ServerConfig
    pins: Pins
    health: HealthCheck
    unknown: UnknownTasks
    slots: Slots
    finder: RunFinder
    work_dir: Path
    merging: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """The profiles, by name."""
        return self.config.profiles

    def submit(self, request: Request, pin: str | None) -> tuple[Job, bool]:
        """Queue a job, or refuse it, and log that. See `_submit`."""
        try:
            job, is_new = self._submit(request, pin)
        except UnshardError as error:
            log_refusal(request, str(error))
            raise
        tasks = f"{job.request.profile}: {','.join(job.request.tasks)} of {job.request.checkpoint}"
        suffix = "" if job.pin is not None or job.status.is_final else ", not pinned"
        event = f"accepted: {tasks}" if is_new else f"submitted again: it is {job.status}"
        log_event(job, f"{event}{suffix}")
        return job, is_new

    def _submit(self, request: Request, pin: str | None) -> tuple[Job, bool]:
        """Queue a job; return it, and whether it is new.

        A checkpoint that its client has not pinned is pinned here, if that is possible. A missing
        checkpoint of an existing run becomes a job that expires.

        Raises:
            UnhealthyError: no job can be stored now.
            UnshardError: the request is refused.
            sqlite3.OperationalError: the database cannot be written.
        """
        self.health.check()
        name = resolve_name(self.profiles, request.profile)
        profile = profile_named(self.profiles, name)
        request = replace(request, profile=name)
        profiles = {**self.profiles, request.profile: profile}
        check_request(request, self.config.model_copy(update={"profiles": profiles}))
        self.unknown.check(base_of(name), request.tasks)
        resolved = resolve_checkpoint(request.checkpoint, self.config.roots)
        placed = place(replace(request, checkpoint=str(resolved)))
        request, run = self.finder.add_run(placed), placed.folder
        checkpoint = resolve_checkpoint(request.checkpoint, self.config.roots)
        check_merged(checkpoint, is_direct=profile.weights == "direct")
        client_pin = None if pin is None else self.pins.find_client_pin(pin)
        request = self._stamp(request, client_pin)
        if is_done := self.store.status_of(request) is Status.COMPLETED:
            client_pin = None
        elif client_pin is not None:
            check_links(Path(client_pin), Path(client_pin).parent, self.config.roots)
        else:  # without the lock: it lists a directory, which may take long
            if pin is None:
                check_there(checkpoint, is_step=request.step is not None)
            check_links(checkpoint, run, self.config.roots)
        with self.pins.lock:
            own_pin = None if is_done else self._pin(request, run, client_pin)
            job, is_new = self._store(request, own_pin)
            if own_pin is not None and job.pin != own_pin:
                job = self._repin(job, own_pin)
            # Older jobs whose files were rewritten in place can only fail, or have failed: hard
            # links do not protect against that.
            for other in self.store.alike(job.request):
                if other.id != job.id and self.pins.list_changed(other):
                    self.scheduler.supersede(other.id, job.id)
            self.scheduler.arrange(job)
        if is_new and job.request.step:
            self._abandon(job, is_from_training=pin is not None)
        self.scheduler.wake()
        return job, is_new

    def _abandon(self, job: Job, *, is_from_training: bool) -> None:
        """Hide the results of the branch that training has left, if a job shows that it has.

        A user may submit a copy of an old checkpoint, or a model made of one. So only submissions
        of trainers and `watch` count, which pin checkpoints, and checkpoints that have been saved
        again since they were first submitted.
        """
        written_at, hiding = time_written(job.request.stamps), self.store.hiding
        hidden = hiding.hide_with_others(job)
        is_sure = hiding.is_saved_again(job)
        if written_at is not None and (is_from_training or is_sure):
            hidden += hiding.abandon(job, written_at, is_sure=is_sure)
        for job_id in hidden:
            if (other := self.store.get(job_id)) is not None:
                log_event(other, f"hidden: {other.hidden}")

    def retry(self, job: Job) -> Job:
        """Queue an ended job again; return it, or the job of the files that are there now.

        A completed job keeps its results: another job evaluates its checkpoint again.

        Raises:
            UsageError: it has not ended.
            UnshardError: see `_submit`.
        """
        if job.status is Status.COMPLETED:
            return self.submit(replace(job.request, again=secrets.token_hex(4)), None)[0]
        is_skipped = job.status is Status.SUPERSEDED and job.superseded_by is None
        if not is_skipped and job.status not in _RETRIED:
            raise UsageError(
                f"job {job.id} cannot be retried",
                expected="a job that has ended",
                found=job.status,
            )
        has_pin = job.pin is not None and Path(job.pin).exists()
        return self.submit(job.request, job.pin if has_pin else None)[0]

    def see_run(self, directory: str) -> TrainingRun:
        """Record the run of a directory, which may have been moved or adopted; return it.

        Raises:
            UsageError: it is not a known run, or outside the roots.
        """
        path = resolve_checkpoint(directory, self.config.roots)
        if not self.finder.is_known(path):
            raise UsageError(f"{path}: not a known run")
        return self.finder.at(path)

    def drain(self, user: str = "") -> int:
        """Begin no more jobs, and end the server when none runs; return how many run now.

        Jobs are still accepted: they stay in the queue for the next server.
        """
        self.scheduler.drain()
        count = len(self.store.running())
        suffix = f" for {user}" if user else ""
        _log.info("draining%s: %s to end, then the server ends", suffix, counted(count, "job"))
        return count

    def _store(self, request: Request, pin: str | None) -> tuple[Job, bool]:
        """Queue a job; remove our pin if that is not possible."""
        try:
            return self.store.submit(request, pin=pin)
        except sqlite3.Error:
            if pin is not None:
                with suppress(sqlite3.Error):
                    self.pins.remove_unneeded(pin)
            raise

    def _pin_of_job(self, request: Request) -> str | None:
        """Return the pin of a request's waiting job, if it keeps the checkpoint.

        A second pin, made and removed, would change the ctime of files that are being merged.
        """
        for job in self.store.alike(request):
            if job.request.key == request.key and not job.status.is_final and self._is_kept(job):
                return job.pin
        return None

    def _is_kept(self, job: Job) -> bool:
        return job.pin is not None and Path(job.pin).exists() and not self.pins.list_changed(job)

    def _repin(self, job: Job, pin: str) -> Job:
        """Give a job the pin of its newer submission, if its own no longer keeps the files."""
        if job.status.is_final or self._is_kept(job):
            self.pins.remove_unneeded(pin)
            return job
        self.store.repin(job.id, pin)
        return replace(job, pin=pin)

    def _stamp(self, request: Request, client_pin: str | None) -> Request:
        """Add the checkpoint's fingerprint; if it is gone, that of the last job like it."""
        if stamps := read_stamps(path_of(client_pin or request.checkpoint)):
            return replace(request, fingerprint=fingerprint(stamps), stamps=stamps)
        for job in self.store.alike(request):
            last = job.request
            return replace(request, fingerprint=last.fingerprint, stamps=last.stamps)
        return request

    def _pin(self, request: Request, run: Path, client_pin: str | None) -> str | None:
        """Return the client's pin of a checkpoint, or else ours; None if neither is possible."""
        checkpoint = path_of(request.checkpoint)
        is_base = request.step == BASE_STEP and step_of(checkpoint.name) is None
        if is_base or isinstance(checkpoint, RemotePath):
            return None  # no trainer removes a base model
        if client_pin is not None:
            if Path(client_pin).exists():
                return client_pin
            check_links(checkpoint, run, self.config.roots)  # the pin was removed since its check
        try:
            return self._pin_of_job(request) or self.pins.ensure_pin(checkpoint, request.step, run)
        except ExpiredError:
            return None

    def merge(self, checkpoint: str, weights: WeightsName) -> Path:
        """Merge a checkpoint into `_unshard/merged` of its run; return the path of the model.

        Raises:
            UsageError: it, or a file of it, is outside the roots.
            CheckpointGoneError: it does not exist.
            GivenUpError: the server ends.
            UnshardError: it cannot be merged.
        """
        path = resolve_checkpoint(checkpoint, self.config.roots)
        if isinstance(path, RemotePath):
            raise UsageError(
                f"{path}: the server merges no checkpoint of an object store into its run",
                hint=f"submit it, or: unshard merge {shlex.quote(str(path))} OUTPUT",
            )
        if not path.exists():
            raise CheckpointGoneError(f"{path} does not exist")
        placed = place(Request(str(path), "", (), weights=weights))
        request, run = placed.request, placed.folder
        check_links(Path(request.checkpoint), run, self.config.roots)
        parts = Path(request.checkpoint).relative_to(run).parts
        name = "-".join(parts if weights == "model" else (*parts, weights))
        # Never in a checkpoint: rotation goes by mtimes.
        target = resolve_checkpoint(str(RunFolder(run).state / "merged" / name), self.config.roots)
        options = MergeOptions(weights=weights, overwrite=True, extra_state=False)
        with TemporaryDirectory(prefix="unshard-merge-") as directory:
            order = MergeOrder(str(path), str(target), asdict(options))
            merge_in_process(order, directory=Path(directory), is_given_up=self.stopping.is_set)
        return target

    def results_file(self, job: Job) -> str | None:
        """Return a file of a job's results in the form of lmms-eval's; None if it has none.

        lmms-eval's own file has this form; for other programs one is written.
        """
        if job.status is not Status.COMPLETED or job.results is None:
            return None
        profile = self.profiles.get(base_of(job.request.profile))
        if profile is None or profile.is_lmms_form:
            return job.results
        path = self.scheduler.directory_of(job) / "lmms_results.json"
        try:
            if not path.is_file():
                write_whole(path, json.dumps({"results": group_by_task(job.metrics)}).encode())
        except OSError as error:
            _log.warning("job %s: its results cannot be written again: %s", job.id, error)
            return job.results
        return str(path)

    def sample_files(self, job: Job) -> list[str]:
        """Return the files of a job's samples, by both evaluators' pattern, 1,000 at most."""
        output = self.scheduler.directory_of(job) / "output"
        return sorted(map(str, islice(output.rglob("*samples_*.jsonl"), _MOST_FILES)))

    def job(self, job_id: str) -> Job | None:
        """Return a job by its id, or by the first letters, four or more; UsageError for several."""
        job = self.store.get(job_id)
        if job is not None or not _SHORT_ID.fullmatch(job_id):
            return job
        ids = self.store.ids_like(job_id, _SHOWN_IDS)
        if len(ids) > 1:
            raise UsageError(
                f"job {job_id}: ambiguous id", expected="more letters", found=", ".join(ids)
            )
        return self.store.get(ids[0]) if ids else None

    def log(self, job: Job, offset: int) -> tuple[str, int, bool]:
        """Return text of a job's last log from an offset, the next offset, and whether it ended."""
        file = self.scheduler.directory_of(job) / "log.txt"
        try:
            text, after = read_log(file, offset)
        except OSError:
            text, after = "", offset
        return text, after, job.status.is_final and not text


def group_by_task(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return numbers by task and "metric,filter", as both evaluators write them."""
    by_task: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        task, _, metric = key.partition("/")
        by_task.setdefault(task, {})[metric if "," in metric else f"{metric},none"] = value
    return by_task
