"""What is evaluated, with which arguments, and its state, as plain values. Pure.

A job is one checkpoint, one set of its weights, one profile and its tasks. It belongs to a step of
a training run, under which its results are logged, whenever they come.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from unshard.errors import UnshardError
from unshard.evaluate.process import Process
from unshard.evaluate.values import LARGEST, Scalar, Whole, expects

BASE_STEP = 0
"""The step of the results of the model that training began with."""

_LONGEST = 4000
_AUTO = r"^auto(:[1-9][0-9]{0,3})?$"
_IN_EVERY_KEY = ("num_fewshot", "batch_size", "limit", "gen_kwargs")

WeightsName = Literal["model", "ema"]
BatchSize = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | Annotated[str, Field(pattern=_AUTO)],
    expects("a whole number above 0, auto, or auto:N"),
]
Limit = Annotated[
    Annotated[int, Field(gt=0, le=LARGEST)] | Annotated[float, Field(gt=0, le=LARGEST)],
    expects("a number above 0; below 1 it is a share"),
]
Seed = Annotated[  # of numpy, which takes the smallest
    int, Field(ge=0, lt=2**32), expects("a whole number, 0 to 4294967295")
]
Pairs = Annotated[str, Field(max_length=_LONGEST), expects("key=value, separated by commas")]


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


class Arguments(BaseModel):
    """What a client chooses of an evaluator; None: as the profile or the evaluator says.

    A new argument is a field here and in `ArgumentFields`: the database, both evaluators, commands
    and the protocol take what is here.

    Attributes:
        model_args: arguments of the evaluator's model, without the checkpoint.
        num_fewshot, batch_size, limit, gen_kwargs: as the evaluators call them.
        num_gpus: how many GPUs the job gets.
        seed: of every random generator: Python's, numpy's, torch's, that of few-shot examples.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_args: dict[str, Scalar] = {}
    num_fewshot: Whole | None = None
    batch_size: BatchSize | None = None
    limit: Limit | None = None
    gen_kwargs: Pairs | None = None
    num_gpus: Whole | None = None
    seed: Seed | None = None

    def given(self) -> dict[str, object]:
        """Return what the client chose, by name."""
        return self.model_dump(exclude_defaults=True)

    def options(self) -> dict[str, object]:
        """Return the chosen options that are one plain value for both evaluators, by name."""
        return {name: value for name, value in self.given().items() if name in OPTIONS}


OPTIONS = frozenset(Arguments.model_fields) - {"model_args", "gen_kwargs", "num_gpus"}
"""The arguments that are one plain value, which evaluators and commands take as it is."""


class ArgumentFields(TypedDict, total=False):
    """The fields of `Arguments`, as keywords of a function."""

    model_args: dict[str, Scalar] | None
    num_fewshot: int | None
    batch_size: int | str | None
    limit: float | None
    gen_kwargs: str | None
    num_gpus: int | None
    seed: int | None


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
    weights: WeightsName = "model"
    arguments: Arguments = field(default_factory=Arguments)
    fingerprint: str = ""
    stamps: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes two requests the same: checkpoint, weights, profile, tasks, arguments.

        The checkpoint is known by run, step and fingerprint. Its path counts only where the step
        is not known: a pinned checkpoint has another one. How many GPUs are used does not count.
        """
        place, chosen = self.checkpoint if self.step is None else "", self.arguments
        parts: list[object] = [self.run, self.step, self.fingerprint, self.weights, self.profile]
        parts += [sorted(self.tasks), place, dict(sorted(chosen.model_args.items()))]
        parts += [getattr(chosen, name) for name in _IN_EVERY_KEY]
        # Arguments that were added later count only if given: older databases keep their keys.
        later = chosen.options().keys() - set(_IN_EVERY_KEY)
        parts += [[name, getattr(chosen, name)] for name in sorted(later)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def alike(self) -> str:
        """What requests share that differ in the fingerprint at most: the `key` without it."""
        return replace(self, fingerprint="").key


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
        stderr: the standard errors of those metrics that have one.
        results: the evaluator's own file, on the server.
        superseded_by: the id of the job that has come in its place; None if it was skipped.
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
    stderr: Mapping[str, float] = field(default_factory=dict)
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
    """One number, and where it belongs; what is completed later has a higher `number`.

    `stderr` is its standard error, and `higher_is_better` the direction, if the evaluator gave it.
    """

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
    stderr: float | None = None
    higher_is_better: bool | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change of a job; numbers rise."""

    number: int
    job_id: str
    status: Status
    phase: Phase | None
    at: float


def backoff(failures: int, *, first_s: float, most_s: float) -> float:
    """Return how long to wait after a failure: doubled with each of the failures before it."""
    return min(first_s * 2.0 ** min(failures, 32), most_s)
