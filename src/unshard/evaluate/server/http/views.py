"""The models of requests and answers of `/api/v1`, for validation and the OpenAPI description."""

import secrets
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from unshard.evaluate.jobs import (
    Arguments,
    Job,
    Request,
    Settings,
    Status,
    TrainingRun,
    WeightsName,
)
from unshard.evaluate.server.http.answers import BoundedText, Tasks
from unshard.evaluate.server.queue.job_files import JobFile
from unshard.evaluate.values import LARGEST, Whole, expects

Number = Annotated[int, Field(ge=0, le=LARGEST)]
_OF_REQUEST = "run step weights profile tasks checkpoint fingerprint again user".split()
_OF_JOB = (
    "id status phase created_at started_at completed_at attempts error superseded_by metrics"
    " stderr hidden was_hidden"
).split()


class Drain(BaseModel):
    """A draining server: the number of running jobs, and of jobs queued for the next server."""

    running: int
    queued: int


class Submission(Arguments):
    """A job to queue, with the arguments for its evaluator."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: BoundedText
    profile: BoundedText
    tasks: Tasks
    step: Whole | None = None
    run: BoundedText = ""
    weights: WeightsName = "model"
    pin: BoundedText | None = None
    directory: Annotated[str, Field(pattern=r"^(?:(?:/|[a-z0-9]+://).{0,4095})?$")] = ""
    """Of the run, if the checkpoint is outside; an absolute path, or an address."""
    again: Annotated[
        Annotated[bool, Field(strict=True)]
        | Annotated[str, Field(pattern=r"^[0-9a-zA-Z_-]{1,64}$")],
        expects("true, false, or at most 64 letters, digits, `-` and `_`", or_boolean=True),
    ] = False
    """Evaluate a completed job again; requests with the same text are the same job."""

    def request(self) -> Request:
        """Return it as a request."""
        values = self.model_dump(exclude={"pin", "again"})
        arguments = Arguments(**{name: values.pop(name) for name in Arguments.model_fields})
        again = secrets.token_hex(4) if self.again is True else self.again or ""
        return Request(
            **{**values, "tasks": tuple(self.tasks), "again": again}, arguments=arguments
        )


class SettingsView(BaseModel):
    """The settings of a measurement; numbers with equal `settings` can be compared.

    `arguments` are the profile's, updated with the submission's. `revision` is a digest of
    everything else in the profile that can change a number; empty for measurements of an earlier
    version.
    """

    settings: str
    arguments: dict[str, JsonValue]
    revision: str
    evaluator: str | None

    @classmethod
    def of(cls, settings: Settings) -> "SettingsView":
        """Return the view of settings."""
        return cls.model_validate({"settings": settings.id, **asdict(settings)})


class Reason(BaseModel):
    """Why results are hidden."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[
        str,
        Field(max_length=1000),
        expects(
            "one line of text, at most 1,000 characters",
            lambda text: text.strip() != "" and text.isprintable(),
        ),
    ]


class Place(BaseModel):
    """The directory of a run."""

    model_config = ConfigDict(extra="forbid")

    directory: BoundedText


class JobView(BaseModel):
    """A job and its state; times are seconds since the epoch.

    `stderr` has the standard errors of the `metrics`, where known.

    `superseded_by` is the job for the files that its trainer has saved in the same place since;
    a superseded job without it was skipped, because newer steps wait (`max_lag`).
    `waits_for`: the requirement that a queued job lacks, other than its turn: a part of the
    server's configuration, or GPUs that other processes use.
    `pinned`: whether hard links keep the checkpoint, which may otherwise be removed while it waits.
    `run` is as submitted; `run_label` is unique among the runs of this name, and `run_id` does not
    change when the run's directory is moved.
    `arguments` are the submission's, `measured_with` has the resulting settings.
    `hidden`: why its results are left out of curves and tables; `was_hidden`: the reason before.
    `user`: the name of the submission's token; empty: without a name, or without a token.
    """

    id: str
    status: Status
    phase: str | None
    run: str
    step: int | None
    weights: str
    profile: str
    tasks: list[str]
    checkpoint: str
    fingerprint: str
    created_at: float
    started_at: float | None
    completed_at: float | None
    attempts: int
    error: str | None
    superseded_by: str | None
    pinned: bool
    position: int | None
    waits_for: str | None
    metrics: dict[str, float]
    stderr: dict[str, float]
    run_id: str
    run_label: str
    run_directory: str
    arguments: dict[str, JsonValue]
    again: str
    measured_with: SettingsView | None
    hidden: str | None
    was_hidden: str | None
    user: str

    @classmethod
    def of(cls, job: Job, position: int | None, waits_for: str | None) -> "JobView":
        """Return the view of a job."""
        fields = {name: getattr(job.request, name) for name in _OF_REQUEST}
        fields |= {name: getattr(job, name) for name in _OF_JOB}
        fields |= {f"run_{name}": getattr(job.run, name) for name in ("id", "label", "directory")}
        fields |= {"position": position, "pinned": job.pin is not None, "waits_for": waits_for}
        settings = None if job.settings is None else SettingsView.of(job.settings)
        fields |= {"arguments": job.request.arguments.given(), "measured_with": settings}
        return cls.model_validate(fields)


class ResultPage(BaseModel):
    """Which results to list, and where to continue; `hidden`: also hidden results."""

    run: BoundedText | None = None
    step: Number | None = None
    weights: WeightsName | None = None
    profile: BoundedText | None = None
    hidden: bool = False
    after: Number = 0
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000


class JobPage(BaseModel):
    """Which jobs to list, and where to continue."""

    run: BoundedText | None = None
    step: Number | None = None
    weights: WeightsName | None = None
    profile: BoundedText | None = None
    status: Status | None = None
    before: BoundedText | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class JobList(BaseModel):
    """Jobs, the newest first; `next` is the `before` of the next page, if there is one."""

    jobs: list[JobView]
    next: str | None


class ResultView(BaseModel):
    """One number of a job; results that arrive later have a higher `number`.

    `settings`, `arguments` and `revision` are as in `SettingsView`; `higher_is_better`, `n_shot`,
    `n_samples` and `task_version` are null unless the evaluator reports them.
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
    stderr: float | None
    higher_is_better: bool | None
    run_id: str
    settings: str
    arguments: dict[str, JsonValue]
    revision: str
    evaluator: str | None
    task_version: str | None
    n_shot: int | None
    n_samples: int | None
    hidden: str | None


class ResultList(BaseModel):
    """Results, by number; `next` is the `after` of the next page, if there is one."""

    results: list[ResultView]
    next: int | None


class RunView(BaseModel):
    """A training run; `label` is its name, made unique among the runs of this name."""

    id: str
    name: str
    directory: str
    label: str

    @classmethod
    def of(cls, run: TrainingRun) -> "RunView":
        """Return the view of a run."""
        return cls.model_validate(asdict(run))


class RunList(BaseModel):
    """The labels of training runs, and their details in the same order."""

    runs: list[str]
    details: list[RunView]


class LogPart(BaseModel):
    """A part of a job's log; the next part begins at byte `offset`."""

    text: str
    offset: int
    ended: bool


class FileList(BaseModel):
    """Files by their paths below the evaluator's output; files that are not kept were too large."""

    files: list[JobFile]


class ProfileView(BaseModel):
    """An evaluator in the server's configuration; `revision` is as in `SettingsView`.

    `order` and `max_lag`: which of a run's waiting steps is first, and how many may wait.
    """

    name: str
    kind: str
    gpus: int
    order: Literal["oldest", "newest"]
    max_lag: int | None
    revision: str


class ProfileList(BaseModel):
    """The profiles."""

    profiles: list[ProfileView]
