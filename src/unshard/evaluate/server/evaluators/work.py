"""The input of an evaluator, its scores, and the base class of its configuration."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from unshard.errors import UsageError
from unshard.evaluate.jobs import NOT_SETTINGS, Arguments, Flag, Request
from unshard.evaluate.server.config.arguments import LAUNCH_PLACEHOLDERS, placeholders_in
from unshard.evaluate.server.config.keys import (
    Environment,
    ModelConfig,
    NonEmptyText,
    Texts,
    find_program,
)
from unshard.evaluate.server.evaluators.revision import digests_of, is_setting
from unshard.evaluate.values import expects, whole


@dataclass(frozen=True, slots=True)
class EvalInput:
    """The input of an evaluator in one attempt.

    Attributes:
        model: a Hugging Face directory.
        output: the directory for results, empty when the evaluator starts.
        directory: the attempt's, in which the evaluator runs, with `output`, the log and
            configuration files.
    """

    model: Path
    output: Path
    directory: Path
    request: Request
    profile: "Profile"

    @property
    def arguments(self) -> Arguments:
        """The evaluator's arguments: the profile's, overridden by the request's."""
        return self.profile.chosen(self.request.arguments)

    @property
    def gpus(self) -> int:
        """The number of GPUs of the attempt."""
        num_gpus = self.request.arguments.num_gpus
        return self.profile.gpus if num_gpus is None else num_gpus

    @property
    def program(self) -> str:
        """The evaluator's name in errors: its kind, or for a command the name of its profile."""
        return self.profile.kind if self.profile.modules else self.request.profile


class TaskFacts(NamedTuple):
    """Facts that an evaluator reports about a task; None: it does not report it.

    Attributes:
        version: of the task's definition.
        n_shot: number of examples before each question.
        n_samples: number of questions.
        group: the task whose numbers summarise this one's and others'.
    """

    version: str | None = None
    n_shot: int | None = None
    n_samples: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The finite numbers of results, by "task/metric" or "task/metric,filter".

    Attributes:
        errors: the standard errors of metrics, where known; not negative.
        directions: whether higher values are better, by metric, where known.
        file: the evaluator's file of results.
        tasks: facts about the tasks and groups that have metrics.
        evaluator: its name and version, such as "lm_eval 0.4.13", if it reports them.
    """

    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    directions: Mapping[str, bool] = field(default_factory=dict)
    file: Path | None = None
    tasks: Mapping[str, TaskFacts] = field(default_factory=dict)
    evaluator: str | None = None


class WarmEngine(NamedTuple):
    """A process that loads one checkpoint after another, and is kept between a profile's jobs.

    Attributes:
        command: its command line; without jobs it also ends by itself.
        idle_s: how long it waits for the next job.
        environment: its variables in addition to the server's.
    """

    command: tuple[str, ...]
    idle_s: float
    environment: Mapping[str, str]


LAUNCH_EXPECTED = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(LAUNCH_PLACEHOLDERS))
    + "; {{ and }} are braces"
)


def _is_launch(launch: tuple[str, ...]) -> bool:
    return placeholders_in(launch) <= LAUNCH_PLACEHOLDERS and not placeholders_in(launch[:1])


def started(launch: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return arguments whose program exists, if it is a path: names depend on the job's PATH."""
    return (find_program(launch[0], info), *launch[1:]) if "/" in "".join(launch[:1]) else launch


def _needed(metric: str | None, info: ValidationInfo) -> str | None:
    if metric is None and info.data.get("keep") == "best":
        because = "TASK/METRIC, because of `keep: best`"
        raise PydanticCustomError("missing", "missing", {"expected": because})
    return metric


class OwnArguments(Arguments):
    """The arguments of a profile, which submissions override; `gpus` is a key of the profile.

    Attributes:
        confirm_run_unsafe_code: whether tasks may run code that the model wrote (HumanEval, MBPP);
            submissions cannot choose it.
    """

    model_config = ConfigDict(extra="forbid")

    num_gpus: Annotated[None, expects("nothing: set `gpus` of the profile")] = None
    confirm_run_unsafe_code: Flag = False


class Profile(BaseModel):
    """An evaluator: the keys of every kind, and its methods with the defaults of most kinds.

    Keys that a kind does not have are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    needs_config: ClassVar[bool] = True
    """Whether it refuses a model without a config."""
    is_lmms_form: ClassVar[bool] = False
    """Whether its results have the form of lmms-eval's."""
    trial: ClassVar[Arguments] = Arguments()
    """The arguments of the shortest evaluation, which `unshard eval doctor` runs."""

    confirms_unsafe_code: ClassVar[bool] = False
    """Whether it has an option to run code that a model wrote."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """The keys of its kind whose values can change a number."""

    kind: str
    """The evaluator: lm-eval, lmms-eval, or any command."""
    arguments: OwnArguments = OwnArguments()
    """The evaluator's arguments; a submission overrides them, key by key."""
    environment: Environment = {}
    """Variables that the evaluator gets in addition to the server's."""
    allowed_tasks: Texts = ()
    """Shell patterns, one of which a task must match; empty: every task may run."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")] = (
        24 * 3600.0
    )
    """Seconds after which a merge, and then the evaluator, is ended."""
    retries: Annotated[int, whole(0, 100)] = 1
    """Further attempts after a failed one."""
    gpus: Annotated[int, whole(0)] = 0
    """The GPUs of a job whose submission does not set `num_gpus`."""
    launch: Annotated[Texts, expects(LAUNCH_EXPECTED, _is_launch), AfterValidator(started)] = ()
    """Arguments before its command, with which a cluster schedules it; none: the server runs it on
    its own machine and GPUs."""
    slots: Annotated[int, whole(1)] = 1
    """With `launch`: how many of the profile's jobs run at once."""
    order: Annotated[Literal["oldest", "newest"], expects("oldest, newest")] = "oldest"
    """Which of a run's queued steps is first: the oldest submission, or the highest step."""
    max_lag: Annotated[int, whole(1)] | None = None
    """How many steps of a run wait at most; lower ones are skipped. None: none is skipped."""
    weights: Annotated[Literal["merged", "direct"], expects("merged, direct")] = "merged"
    """Whether checkpoints are merged first, or read from their shards by the evaluator (lm-eval
    with `model` hf or vllm, without `keep`)."""
    keep: Annotated[Literal["none", "best", "all"], expects("none, best, all")] = "none"
    """Which merged models are kept; `best/RUN/PROFILE` in the work directory links to the best."""
    best_metric: Annotated[
        NonEmptyText | None, Field(validate_default=True), AfterValidator(_needed)
    ] = None
    """The metric of the best model, `task/metric`; with `-` before it, the lowest value is best."""
    config: ModelConfig | None = None
    """A config.json, or a directory with config and tokenizer, for checkpoints without one; None:
    only a command can evaluate those."""
    results_bytes: Annotated[int, whole(1)] = 64 << 20
    """The largest file of results that is read, in bytes; it has 10,000 numbers at most."""

    @property
    @abstractmethod
    def start(self) -> tuple[str, ...]:
        """The beginning of its command line: the program, and a script if there is one."""

    @property
    def starter(self) -> str:
        """The program that the server starts: that of `launch`, or its own."""
        return (*self.launch, *self.start)[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its program, a Python, must have; (): it is any program."""
        return ()

    @property
    def engine(self) -> WarmEngine | None:
        """The engine that is kept between its jobs; None: each job loads its model."""
        return None

    @property
    def client_models(self) -> tuple[str, ...]:
        """Its type of model, and shell patterns of other types that clients may choose, if any."""
        return ()

    @property
    def files(self) -> Mapping[str, Path]:
        """The files and directories whose contents can change a result, by key."""
        return {} if self.config is None else {"config": self.config}

    def chosen(self, submitted: Arguments) -> Arguments:
        """Return the arguments of the profile, overridden by those of a submission.

        `model_args` and `metadata` are merged by name. False and 0 of a submission also override.
        """
        own, over = self.arguments.given(), submitted.given()
        own.pop("confirm_run_unsafe_code", None)
        for name in ("model_args", "metadata"):
            over[name] = {**getattr(self.arguments, name), **getattr(submitted, name)}
        merged: dict[str, Any] = {**own, **over}
        if not merged.get("apply_chat_template") and submitted.fewshot_as_multiturn is None:
            merged.pop("fewshot_as_multiturn", None)  # it belongs to the template
        # Not validated: an older server may have accepted the arguments of a waiting job.
        return Arguments.model_construct(**merged)

    def revision(self, *, with_arguments: bool = True) -> str:
        """Return a digest of everything in the profile that can change a result.

        These are the program, its arguments and the contents of local files, but not their paths,
        nor times, retries and GPUs. Arguments that a submission overrides are left out of the
        digest without arguments.
        """
        own = self.list_settings()
        left_out = {*NOT_SETTINGS, "confirm_run_unsafe_code"}
        own["arguments"] = {
            name: value
            for name, value in self.arguments.given().items()
            if name not in left_out and with_arguments
        }
        own["environment"] = {
            name: value for name, value in self.environment.items() if is_setting(name, value)
        }
        parts = [self.kind, own, self.version, digests_of(self.files)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def list_settings(self) -> dict[str, object]:
        """Return the values of `settings`, without defaults, so that new keys change no digest."""
        return self.model_dump(mode="json", include=set(self.settings), exclude_defaults=True)

    @property
    def version(self) -> str | None:
        """The installed version of its evaluator; None if that is not known."""
        return None

    @property
    def versions(self) -> str:
        """The versions of its program's packages, as a text; empty if they are not known."""
        return ""

    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments of a request that it does not allow."""
        yield from self.list_untaken(self.chosen(chosen))

    def check(self, where: str) -> None:
        """Raise if its keys contradict each other; `where` begins the error."""
        self.check_launch(where)
        self.check_arguments(where)
        if self.weights == "direct":
            raise UsageError(
                f"{where}: weights: direct is not possible: an evaluator of this kind loads a "
                "merged model",
                expected="kind lm-eval, or `weights: merged`",
                found=f"kind {self.kind}",
            )

    def check_arguments(self, where: str) -> None:
        """Raise if the evaluator would not take the profile's own arguments."""
        for problem in self.list_untaken(self.arguments):
            problem.subject = f"{where}: arguments: " + problem.subject
            raise problem

    def list_untaken(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield the arguments, of a profile or a request, that the evaluator would ignore."""
        if getattr(chosen, "confirm_run_unsafe_code", False) and not self.confirms_unsafe_code:
            yield UsageError(
                "confirm_run_unsafe_code has no effect on an evaluator of this kind",
                expected="kind lm-eval",
                found=f"kind {self.kind}",
            )
        if chosen.fewshot_as_multiturn and not chosen.apply_chat_template:
            yield UsageError(
                "fewshot_as_multiturn has no effect without a chat template",
                expected="apply_chat_template as well",
                found="fewshot_as_multiturn: true",
            )

    def check_launch(self, where: str) -> None:
        """Raise if `launch` contradicts other keys; `where` begins the error."""
        if "slots" in self.model_fields_set and not self.launch:
            raise UsageError(
                f"{where}: slots has no effect without `launch`",
                expected="`launch`, the arguments by which a cluster schedules the jobs",
                hint="on the server's machine, `gpus` and `cpu_slots` limit the number of jobs",
            )
        if self.launch and self.engine:
            raise UsageError(
                f"{where}: launch is not possible with a kept engine",
                expected="`weights: merged`, another model, or no launch",
                hint="the cluster places each job on a node, and the engine would stay on its own",
            )

    def with_model(self, model: str, *, name: str) -> Self:
        """Return the profile with a client's type of model; UsageError if it is not allowed."""
        asked = f"{name}:{model}"
        raise UsageError(f"profile {name}: its model cannot be chosen", found=f"{asked!r:.200}")

    @abstractmethod
    def command_line(self, work: EvalInput) -> list[str]:
        """Return the command line of its process, and write its files into the attempt's directory.

        The caller appends an engine's worker.
        """

    @abstractmethod
    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        """Return the finite numbers; EvaluationError if it failed, or if a task has none."""
