"""What is evaluated, and its state: jobs, requests, results, as plain values. Pure.

A job is one checkpoint, one set of its weights, one profile and its tasks. It belongs to a step of
a training run, under which its results are logged, whenever they come.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from unshard.errors import UnshardError
from unshard.evaluate.arguments import Arguments

__all__ = [
    "EvaluationError",
    "Event",
    "Filters",
    "Job",
    "Phase",
    "Process",
    "Request",
    "Result",
    "Status",
]


class EvaluationError(UnshardError):
    """An evaluation is not possible, or did not give what was requested."""


class Status(StrEnum):
    """The state of a job, in the words of lmms-eval's server; the last two are ours."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"

    @property
    def is_final(self) -> bool:
        """Whether the job will not change by itself any more."""
        return self not in {Status.QUEUED, Status.RUNNING}


class Phase(StrEnum):
    """What a running job is doing."""

    MERGING = "merging"
    EVALUATING = "evaluating"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for.

    Attributes:
        checkpoint: path, as the server sees it; sharded, or a Hugging Face directory.
        profile: the name of an evaluator that the server is configured with.
        tasks: what to evaluate.
        step: the training step it belongs to; None if it is not known.
        run: the name of the training run.
        weights: "model" or "ema".
        arguments: what the client chose of the evaluator.
        fingerprint: of the checkpoint's files: names of runs are not unique, and a training may
            begin anew in the same place.
        stamps: what the fingerprint was made of: see `pins.files.read_stamps`.
    """

    checkpoint: str
    profile: str
    tasks: tuple[str, ...]
    step: int | None = None
    run: str = ""
    weights: str = "model"
    arguments: Arguments = field(default_factory=Arguments)
    fingerprint: str = ""
    stamps: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two requests the same: checkpoint, weights, profile, tasks, arguments.

        The checkpoint is known by run, step and fingerprint. Its path counts only where the step
        is not known: a pinned checkpoint has another one.
        """
        place = self.checkpoint if self.step is None else ""
        parts: list[object] = [self.run, self.step, self.fingerprint, self.weights, self.profile]
        parts += [sorted(self.tasks), place, *self.arguments.key_parts()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def alike(self) -> str:
        """What requests share that differ in the fingerprint at most: the `key` without it."""
        return replace(self, fingerprint="").key


@dataclass(frozen=True, slots=True)
class Process:
    """The process of an attempt, so that it can be distinguished from a later one with its number.

    Attributes:
        pid: of the leader of its process group.
        started: when the kernel says that it started, clock ticks since boot.
        boot: the kernel's identity of that boot.
        gpus: the names of those that it has.
        directory: of the attempt.
    """

    pid: int
    started: int
    boot: str
    gpus: tuple[str, ...]
    directory: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its state; times are seconds since the epoch.

    Attributes:
        pin: the directory of hard links that keeps the checkpoint, if there is one.
        attempts: how many were begun.
        failures: how many of them failed since the job was last submitted; an attempt that was
            lost with the server is none.
        process: of the attempt that is running.
        error: why it failed, was expired, or the last attempt did.
        metrics: by "task/metric", or "task/metric,filter" where the filter is not "none".
        results: the evaluator's own file, on the server.
        superseded_by: the id of the job that has come in its place.
    """

    id: str
    request: Request
    status: Status
    created_at: float
    phase: Phase | None = None
    started_at: float | None = None
    completed_at: float | None = None
    pin: str | None = None
    attempts: int = 0
    process: Process | None = None
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    results: str | None = None
    failures: int = 0
    superseded_by: str | None = None


@dataclass(frozen=True, slots=True)
class Filters:
    """Which jobs or results are meant; None means any."""

    status: Status | None = None
    run: str | None = None
    step: int | None = None
    weights: str | None = None
    profile: str | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One number, and where it belongs; what is completed later has a higher `number`."""

    number: int
    job_id: str
    run: str
    step: int | None
    weights: str
    profile: str
    task: str
    metric: str
    value: float
    completed_at: float


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a job; numbers rise."""

    number: int
    job_id: str
    status: Status
    phase: Phase | None
    at: float
