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

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from unshard.errors import UnshardError
from unshard.evaluate.process import Process
from unshard.evaluate.settings import Settings
from unshard.evaluate.values import LARGEST, Scalar, Whole, expects

BASE_STEP = 0
"""The step of the results of the model that training began with."""

_LONGEST = 4000
_AUTO = r"^auto(:[1-9][0-9]{0,3})?$"
_IN_EVERY_KEY = ("num_fewshot", "batch_size", "limit", "gen_kwargs")
_MOST_METADATA = 64
_TEMPLATE = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"  # no template, and no path of one

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
        AfterValidator(lambda one: int(one) if one.is_integer() else one),
    ],
    expects("a number above 0; below 1 it is a share"),
]
Seed = Annotated[  # of numpy, which takes the smallest
    int, Field(ge=0, lt=2**32), expects("a whole number, 0 to 4294967295")
]
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
        apply_chat_template: whether prompts are put into the model's chat template, or into that of
            this name, if its tokenizer has several.
        system_instruction: the system's message; without a template it precedes the prompt.
        fewshot_as_multiturn: whether few-shot examples are turns of the conversation.
        max_batch_size: the largest that "auto" may choose.
        metadata: what tasks are given, such as the lengths of RULER (`max_seq_lengths`).
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
        """Return what was chosen, by name."""
        # Not `model_dump`, which warns of what an older server accepted.
        values = {name: getattr(self, name) for name in type(self).model_fields}
        defaults = {name: one.default for name, one in type(self).model_fields.items()}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def options(self) -> dict[str, object]:
        """Return the chosen options that are one plain value for both evaluators, by name."""
        return {name: value for name, value in self.given().items() if name in OPTIONS}


OPTIONS = frozenset(Arguments.model_fields) - {"model_args", "gen_kwargs", "num_gpus", "metadata"}
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
    apply_chat_template: bool | str | None
    system_instruction: str | None
    fewshot_as_multiturn: bool | None
    max_batch_size: int | None
    metadata: dict[str, Scalar | list[Scalar]] | None


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for.

    Attributes:
        checkpoint: path, as the server sees it; sharded, or a Hugging Face directory.
        profile: the name of an evaluator that the server is configured with.
        tasks: what to evaluate.
        step: the training step it belongs to; None if it is not known.
        run: the name of the training run, which several runs may have.
        weights: "model" or "ema".
        arguments: what the client chose of the evaluator.
        fingerprint: of the checkpoint's files: a training may begin anew in the same place.
        stamps: what the fingerprint was made of: see `pins.files.read_stamps`.
        run_id: of the training run.
        directory: of the training run, where the checkpoint is not in it (a base model).
        again: what distinguishes a request to evaluate again what has been evaluated.
        user: the name of the user who submitted it, where tokens have names.
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
        """What makes two requests the same: checkpoint, weights, profile, tasks, arguments.

        The checkpoint is known by run, step and fingerprint. Its path counts only where the step
        is not known: a pinned checkpoint has another one. How many GPUs are used does not count.
        """
        place, chosen = self.checkpoint if self.step is None else "", self.arguments
        parts: list[object] = [
            self.run_id or self.run,
            self.step,
            self.fingerprint,
            self.weights,
            self.profile,
        ]
        parts += [sorted(self.tasks), place, dict(sorted(chosen.model_args.items()))]
        parts += [getattr(chosen, name) for name in _IN_EVERY_KEY]
        # Arguments that were added later count only if given: older databases keep their keys.
        later = chosen.options().keys() - set(_IN_EVERY_KEY)
        parts += [[name, getattr(chosen, name)] for name in sorted(later)]
        if chosen.metadata:
            parts.append(["metadata", sorted(chosen.metadata.items())])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def alike(self) -> str:
        """What requests share that differ in the fingerprint at most: the `key` without it."""
        return replace(self, fingerprint="").key


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training run: its directory.

    Attributes:
        id: what stays when the directory is moved or renamed.
        name: what the user calls it, which need not be unique.
        directory: where it was seen last; or its address in an object store.
        label: the name, told apart from other runs of this name.
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
        attempts: how many were begun.
        failures: how many of them failed since the job was last submitted; an attempt that was
            lost with the server is none.
        process: of the attempt that is running.
        error: why it failed, was expired, or the last attempt did.
        metrics: by "task/metric", or "task/metric,filter" where the filter is not "none".
        stderr: the standard errors of those metrics that have one.
        results: the evaluator's own file, on the server.
        superseded_by: the id of the job that has come in its place; None if it was skipped.
        run: the training run.
        settings: what it is, or was, measured with; None: it has not begun.
        hidden: why its results are left out of curves and tables; None: they are shown.
        was_hidden: why they were, before somebody had them shown again.
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
        """What is equal for jobs whose numbers can be compared."""
        return "" if self.settings is None else self.settings.id


@dataclass(frozen=True, slots=True)
class Filters:
    """Which jobs or results are meant; None means any.

    `run` is a run's id, label or directory, or else a name: of all that are, or were, called so.
    """

    status: Status | None = None
    run: str | None = None
    step: int | None = None
    weights: str | None = None
    profile: str | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One number, where it belongs, and what it was measured with.

    Attributes:
        number: higher for what is completed later.
        run: the label of the training run; `run_id` is what stays of it.
        stderr: its standard error, if the evaluator gave it.
        higher_is_better: the direction, if the evaluator gave it.
        settings: equal for numbers that can be compared: see `Settings`.
        arguments, revision, evaluator: see `Settings`.
        task_version, n_shot, n_samples: of the task, if the evaluator gave them.
        hidden: why it is left out of curves and tables; None: it is not.
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
        """What one line of a plot shows of a metric: run, weights, profile, settings."""
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
    """Return how long to wait after a failure: doubled with each of the failures before it."""
    return min(first_s * 2.0 ** min(failures, 32), most_s)
