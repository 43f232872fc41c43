"""Jobs, requests, settings, runs and results, as plain values. Pure.

A job evaluates one checkpoint, one set of its weights, with one profile and its tasks. It belongs
to a step of a training run: its results are logged under that step, even if a later one ends first.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Literal, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from unshard.errors import UnshardError
from unshard.evaluate.process import Process
from unshard.evaluate.values import LARGEST, Scalar, Whole, expects

BASE_STEP = 0  # the step of the base model, with which training began
_LONGEST = 4000
_AUTO = r"^auto(:[1-9][0-9]{0,3})?$"
_IN_EVERY_KEY = ("num_fewshot", "batch_size", "limit", "gen_kwargs")
_MOST_METADATA = 64
_TEMPLATE = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"  # a name: neither a template's text nor a path

WeightsName = Literal["model", "ema"]
BatchSize = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | Annotated[str, Field(pattern=_AUTO)],
    expects("a whole number above 0, auto, or auto:N"),
]
Limit = Annotated[
    Annotated[int, Field(gt=0, le=LARGEST)]
    | Annotated[
        float,
        Field(gt=0, le=LARGEST),
        AfterValidator(lambda limit: int(limit) if limit.is_integer() else limit),
    ],
    expects("a number above 0; below 1 it is a share"),
]
# The range of numpy's seeds, the smallest of all generators.
Seed = Annotated[int, Field(ge=0, lt=2**32), expects("a whole number, 0 to 4294967295")]
Pairs = Annotated[str, Field(max_length=_LONGEST), expects("key=value, separated by commas")]
Count = Annotated[int, Field(ge=1, le=LARGEST), expects("a whole number above 0")]
Flag = Annotated[bool, Field(strict=True), expects("true or false", or_boolean=True)]
Template = Annotated[
    Flag | Annotated[str, Field(pattern=_TEMPLATE)],
    expects("true, false, or the name of a template in the tokenizer", or_boolean=True),
]
Instruction = Annotated[
    str,
    Field(min_length=1, max_length=_LONGEST, pattern=r"^[^\x00]*$"),
    expects(f"a text of at most {_LONGEST} characters"),
]


def _is_bounded(metadata: Mapping[str, object]) -> bool:
    try:
        text = json.dumps(metadata, allow_nan=False)
    except ValueError:
        return False
    return len(metadata) <= _MOST_METADATA and len(text) <= _LONGEST


Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1)], Scalar | list[Scalar]],
    expects(
        f"at most {_MOST_METADATA} names, each with a number, a boolean, a text or a list of "
        f"these; {_LONGEST} characters of JSON",
        _is_bounded,
    ),
]


class EvaluationError(UnshardError):
    """An evaluation is not possible, or has not given the requested results."""


class Status(StrEnum):
    """The state of a job; lmms-eval's server has the same, except for the last two."""

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
    """The phase of a running job."""

    MERGING = "merging"
    EVALUATING = "evaluating"


class Arguments(BaseModel):
    """A client's arguments for an evaluator; None: the default of the profile or the evaluator.

    A new argument is a field here and in `ArgumentFields`: the database, both evaluators, commands
    and the protocol read their arguments from here.

    Attributes:
        model_args: arguments of the evaluator's model, without the checkpoint.
        num_fewshot, batch_size, limit, gen_kwargs: as the evaluators call them.
        num_gpus: the number of GPUs for the job.
        seed: for every random generator: Python, numpy, torch, few-shot examples.
        apply_chat_template: whether prompts are put into the model's chat template; or the name
            of the template, if its tokenizer has several.
        system_instruction: the system message; without a template it precedes the prompt.
        fewshot_as_multiturn: whether few-shot examples are turns of the conversation.
        max_batch_size: the largest batch size that "auto" may choose.
        metadata: settings of tasks, such as the lengths of RULER (`max_seq_lengths`).
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_args: dict[str, Scalar] = {}
    num_fewshot: Whole | None = None
    batch_size: BatchSize | None = None
    limit: Limit | None = None
    gen_kwargs: Pairs | None = None
    num_gpus: Whole | None = None
    seed: Seed | None = None
    apply_chat_template: Template | None = None
    system_instruction: Instruction | None = None
    fewshot_as_multiturn: Flag | None = None
    max_batch_size: Count | None = None
    metadata: Metadata = {}

    def given(self) -> dict[str, object]:
        """Return the arguments that are not their default, by name."""
        # Not `model_dump`, which warns of values that an older server accepted.
        return {
            name: value
            for name, field in type(self).model_fields.items()
            if (value := getattr(self, name)) != field.default
        }

    def options(self) -> dict[str, object]:
        """Return the given arguments that are in `OPTIONS`, by name."""
        return {name: value for name, value in self.given().items() if name in OPTIONS}


OPTIONS = frozenset(Arguments.model_fields) - {"model_args", "gen_kwargs", "num_gpus", "metadata"}
"""The arguments with one plain value, which evaluators and commands take unchanged."""


class ArgumentFields(TypedDict, total=False):
    """The fields of `Arguments`, as keywords of a function."""

    model_args: dict[str, Scalar] | None
    num_fewshot: int | None
    batch_size: int | str | None
    limit: float | None
    gen_kwargs: str | None
    num_gpus: int | None
    seed: int | None
    apply_chat_template: bool | str | None
    system_instruction: str | None
    fewshot_as_multiturn: bool | None
    max_batch_size: int | None
    metadata: dict[str, Scalar | list[Scalar]] | None


@dataclass(frozen=True, slots=True)
class Request:
    """A request to evaluate a checkpoint.

    Attributes:
        checkpoint: path on the server's machine; sharded, or a Hugging Face directory.
        profile: the name of an evaluator in the server's configuration.
        step: the training step of the checkpoint; None if it is not known.
        run: the name of the training run; several runs may have it.
        fingerprint: of the checkpoint's files: another training may start in the same directory.
        stamps: the files' stamps in the fingerprint: see `pins.files.read_stamps`.
        directory: of the training run, if the checkpoint is outside (a base model).
        again: a text that makes the key unique, to evaluate again after completion.
        user: the user who submitted it, if tokens have names.
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
    run_id: str = ""
    directory: str = ""
    again: str = ""
    user: str = ""

    @property
    def key(self) -> str:
        """A hash of checkpoint, weights, profile, tasks and arguments: equal for equal requests.

        A checkpoint is identified by run, step and fingerprint, and by its path only if the step
        is not known: the path of a pin is another one. The number of GPUs does not count.
        """
        arguments = self.arguments
        parts: list[object] = [self.run_id or self.run, self.step, self.fingerprint, self.weights]
        parts += [self.profile, sorted(self.tasks), self.checkpoint if self.step is None else ""]
        parts += [dict(sorted(arguments.model_args.items()))]
        parts += [getattr(arguments, name) for name in _IN_EVERY_KEY]
        # Arguments that were added later count only if given: older databases keep their keys.
        later = arguments.options().keys() - set(_IN_EVERY_KEY)
        parts += [[name, getattr(arguments, name)] for name in sorted(later)]
        if arguments.metadata:
            parts.append(["metadata", sorted(arguments.metadata.items())])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def alike(self) -> str:
        """The `key` without the fingerprint: equal if only the checkpoint's files differ."""
        return replace(self, fingerprint="").key


NOT_SETTINGS = frozenset({"batch_size", "max_batch_size", "num_gpus"})
"""The arguments that are recorded, but do not make numbers incomparable."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        arguments: the profile's arguments for the evaluator, updated with the submission's.
        revision: a digest of everything else in the profile that can change a number; empty for
            measurements of an earlier version, which did not record it.
        evaluator: its name and version, if its results have them.
        basis: the revision without the profile's own arguments, which `arguments` has.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    revision: str = ""
    evaluator: str | None = None
    basis: str = ""

    @property
    def compared(self) -> dict[str, object]:
        """The arguments that can change a number; False is the default of every flag."""
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in self.arguments.items()
            if key not in NOT_SETTINGS and value is not False
        }

    @property
    def id(self) -> str:
        """A hash that is equal for numbers that can be compared."""
        parts = json.dumps([self.compared, self.basis or self.revision], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training run.

    Attributes:
        id: stays the same when the directory is moved or renamed.
        name: given by the user; not unique.
        directory: the last known path, or the address in an object store.
        label: the name, made unique among the runs of this name.
    """

    id: str
    name: str
    directory: str
    label: str


@dataclass(frozen=True, slots=True)
class Job:
    """A request and its state; times are seconds since the epoch.

    Attributes:
        pin: the directory of hard links that keeps the checkpoint, if there is one.
        attempts: the number of attempts that were started.
        failures: the number of failed attempts since the last submission; an attempt that was
            lost with the server does not count.
        error: why the job, or its last attempt, failed; or why it expired.
        metrics: by "task/metric", or "task/metric,filter" unless the filter is "none".
        stderr: the standard errors of the metrics, where known.
        results: the evaluator's own file, on the server.
        superseded_by: the id of the job that replaced this one; None if it was skipped.
        settings: the settings of the measurement; None: it has not started.
        hidden: why its results are left out of curves and tables; None: they are shown.
        was_hidden: the reason of a hiding that was undone.
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
    run: TrainingRun = TrainingRun("", "", "", "")
    settings: Settings | None = None
    hidden: str | None = None
    was_hidden: str | None = None

    @property
    def settings_id(self) -> str:
        """The id of the settings: numbers with an equal one can be compared."""
        return "" if self.settings is None else self.settings.id


@dataclass(frozen=True, slots=True)
class Filters:
    """A selection of jobs or results; None: any.

    `run` is a run's id, label or directory; or a name, then all runs match that have or had it.
    """

    status: Status | None = None
    run: str | None = None
    step: int | None = None
    weights: str | None = None
    profile: str | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One number, with its step and its settings.

    Attributes:
        number: rises in order of completion.
        run: the label of the training run, which may change; `run_id` does not.
        stderr: the standard error, if the evaluator reports it.
        higher_is_better: the direction, if the evaluator reports it.
        settings: equal for numbers that can be compared: see `Settings`.
        arguments, revision, evaluator: see `Settings`.
        task_version, n_shot, n_samples: of the task, if the evaluator reports them.
        hidden: why it is left out of curves and tables; None: it is shown.
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
    run_id: str = ""
    settings: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    revision: str = ""
    evaluator: str | None = None
    task_version: str | None = None
    n_shot: int | None = None
    n_samples: int | None = None
    hidden: str | None = None

    @property
    def line(self) -> tuple[str, str, str, str]:
        """The key of a line in a metric's plot: run, weights, profile, settings."""
        return self.run, self.weights, self.profile, self.settings


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change of a job; numbers rise."""

    number: int
    job_id: str
    status: Status
    phase: Phase | None
    at: float


def backoff(failures: int, *, first_s: float, most_s: float) -> float:
    """Return the seconds to wait after a failure; earlier `failures` double it each, to a limit."""
    return min(first_s * 2.0 ** min(failures, 32), most_s)
