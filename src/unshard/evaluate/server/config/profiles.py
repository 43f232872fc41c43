"""The evaluators that a server is configured with (profiles), and which one a client's name means.

Everything that decides which program runs, with which code, is on the server; a client only chooses
a profile by its name. A profile is what server.yaml has below that name. When a file is read, it is
pydantic's context: relative paths start at its directory, and programs must exist.
"""

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from unshard.errors import CheckpointError, UsageError
from unshard.evaluate.jobs import Arguments
from unshard.evaluate.values import Scalar, expected, expects, whole
from unshard.read.model_config import read_config
from unshard.stores.remote_path import is_url, path_of


def drop_nulls(value: object) -> object:
    """Leave out keys without a value, but for `keep_days`, where null means no limit."""
    if isinstance(value, BaseModel):
        return value
    if not isinstance(value, dict):
        raise expected("a mapping")
    # Keys become texts, because YAML makes a boolean of a bare `on`.
    return {str(key): one for key, one in value.items() if one is not None or key == "keep_days"}


def _list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _absolute(value: object, info: ValidationInfo[Path | None]) -> Path:
    if isinstance(value, Path):
        return value
    if info.context is None or not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return info.context.absolute().parent / Path(value).expanduser()


def _absolute_or_address(value: object, info: ValidationInfo[Path | None]) -> Path:
    """Return a directory, or an address in an object store."""
    return path_of(value) if isinstance(value, str) and is_url(value) else _absolute(value, info)


def find_program(text: str, info: ValidationInfo[Path | None]) -> str:
    """Return a program that exists. A link is not resolved: it is what names an environment."""
    if info.context is None:
        return text
    program = str(_absolute(text, info)) if "/" in text else text
    if shutil.which(program) is None:
        raise expected("a program that can be run")
    return program


def _placed(command: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return a command whose program, if it is a path, starts at the file's directory."""
    if info.context is None or not command or "/" not in command[0]:
        return command
    return (str(_absolute(command[0], info)), *command[1:])


def _as_text(value: object) -> object:
    """Return a number as text; not a boolean, because YAML makes one of yes, no, on and off."""
    return str(value) if type(value) in {int, float} else value


def _is_model_config(path: Path) -> bool:
    try:
        read_config(path / "config.json" if path.is_dir() else path)
    except (CheckpointError, OSError):
        return False
    return True


def _are_folders(paths: tuple[Path, ...]) -> bool:
    return all(path.is_dir() for path in paths)


Bare = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
NonEmptyText = Annotated[Bare, expects("a string that is not empty")]
Texts = Annotated[tuple[Bare, ...], BeforeValidator(_list), expects("a list of strings")]
Place = Annotated[Path, BeforeValidator(_absolute), expects("a string that is not empty")]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list), expects("a list of strings")]
Root = Annotated[
    Path, BeforeValidator(_absolute_or_address), expects("a directory, or s3://bucket/folder")
]
Roots = Annotated[tuple[Root, ...], BeforeValidator(_list), expects("a list of strings")]
Folders = Annotated[Places, expects("directories that exist", _are_folders)]
Environment = Annotated[
    Mapping[
        Annotated[str, Field(strict=True, pattern=r"^[^=\x00]+$")],
        Annotated[str, BeforeValidator(_as_text), Field(strict=True, pattern=r"^[^\x00]*$")],
    ],
    expects('a mapping of names to strings or numbers (`"true"` in quotes)'),
]
ModelConfig = Annotated[
    Place,
    expects("a config.json, or a directory with config.json and tokenizer", _is_model_config),
]
ModelArgs = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], Scalar],
    expects("a mapping of names to strings, numbers or booleans"),
]
PlacedCommand = Annotated[Texts, expects("a list of arguments"), AfterValidator(_placed)]


class Weights(StrEnum):
    """How an evaluator gets the weights of a checkpoint; which of its weights, a request says."""

    MERGED = "merged"
    """It loads a merged model from the server's disk."""
    DIRECT = "direct"
    """It reads them from the shards, and nothing is merged."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A process that loads one checkpoint after another, and is kept between a profile's jobs.

    Attributes:
        command: its command line; it ends by itself, too, when it has no jobs.
        idle_s: how long it waits for the next job.
        environment: variables that it gets in addition to the server's.
    """

    command: tuple[str, ...]
    idle_s: float
    environment: Mapping[str, str]


def _needed(metric: str | None, info: ValidationInfo) -> str | None:
    if metric is None and info.data.get("keep") == "best":
        because = "TASK/METRIC, because of `keep: best`"
        raise PydanticCustomError("missing", "missing", {"expected": because})
    return metric


class Profile(BaseModel):
    """The keys of every profile, and what the server asks each kind of evaluator.

    Keys that a kind does not have are refused. The answers here are those of most kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    needs_config: ClassVar[bool] = True
    """Whether it evaluates no model without a config."""
    is_lmms_form: ClassVar[bool] = False
    """Whether its results have the form of those of lmms-eval."""
    trial: ClassVar[Arguments] = Arguments()
    """The arguments of the shortest evaluation, which `unshard eval doctor` runs."""

    kind: str
    environment: Environment = {}
    """Variables that the evaluator gets in addition to the server's."""
    allowed_tasks: Texts = ()
    """Shell patterns, one of which a task must match; empty: every task may run."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")] = (
        24 * 3600.0
    )
    """Seconds after which an attempt is ended."""
    retries: Annotated[int, whole(0, 100)] = 1
    """How many more attempts a failed one gets."""
    gpus: Annotated[int, whole(0)] = 0
    """How many a job gets that does not choose; in a file: 1, if the server has any."""
    order: Annotated[Literal["oldest", "newest"], expects("oldest, newest")] = "oldest"
    """Which of a run's queued steps is first: that which was submitted first, or the highest."""
    max_lag: Annotated[int, whole(1)] | None = None
    """How many steps of a run wait at most: lower ones are skipped; None: none is skipped."""
    weights: Annotated[Weights, expects(", ".join(Weights))] = Weights.MERGED
    """Whether the checkpoint is merged, or read by the evaluator itself."""
    keep: Annotated[Literal["none", "best", "all"], expects("none, best, all")] = "none"
    """Which merged models are kept after evaluation."""
    best_metric: Annotated[
        NonEmptyText | None, Field(validate_default=True), AfterValidator(_needed)
    ] = None
    """What "best" is measured by, "task/metric"; after a "-" the lowest value is the best."""
    config: ModelConfig | None = None
    """A config.json, or a directory with config and tokenizer, for checkpoints without one; None:
    only a command can evaluate those."""
    results_bytes: Annotated[int, whole(1)] = 64 << 20
    """The largest file of results that is read, in bytes."""

    @property
    @abstractmethod
    def start(self) -> tuple[str, ...]:
        """The beginning of its command line: the program, and a script if there is one."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its program, a Python, must have; none: it is any program."""
        return ()

    @property
    def is_direct(self) -> bool:
        """Whether it reads the shards itself, so that nothing is merged for it."""
        return self.weights is Weights.DIRECT

    @property
    def engine(self) -> Engine | None:
        """The engine that is kept between its jobs; None: each job loads its model."""
        return None

    @property
    def client_model(self) -> str | None:
        """The type of model by which clients may name it; None: its own name only."""
        return None

    @abstractmethod
    def list_unfitting(self, chosen: Arguments) -> Iterator[UsageError]:
        """Yield which arguments of a request it does not allow."""

    def check(self, where: str, *, is_on_cluster: bool) -> None:
        """Raise if its keys do not fit together, or not the executor; `where` begins the error."""
        del is_on_cluster
        if self.is_direct:
            raise UsageError(
                f"{where}: weights: direct is not possible: an evaluator of this kind loads a "
                "model from files",
                expected="kind lm-eval, or `weights: merged`",
                found=f"kind {self.kind}",
            )

    def allows_model(self, model: str) -> bool:
        """Return whether a client may choose a type of model."""
        del model
        return False

    def with_model(self, model: str, *, name: str) -> Self:
        """Return the profile of this name with a type of model that a client chose.

        Raises:
            UsageError: it does not allow the type.
        """
        found = f"{name}:{model}"
        raise UsageError(f"profile {name}: its model cannot be chosen", found=f"{found!r:.200}")


def base_of(name: str) -> str:
    """Return the profile's own name in "profile:type", which names a type of model, too."""
    return name.partition(":")[0]


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is a profile of lmms-eval with another type of model.

    Raises:
        UsageError: no profile has this name, or it does not allow the type.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"unknown profile {base!r:.200}", expected=f"one of: {known}")
    return profiles[base] if name == base else profiles[base].with_model(model, name=base)


def resolve_name(profiles: Mapping[str, Profile], name: str) -> str:
    """Return the profile that a name means: its own, or "profile:type" for a type of model.

    lmms-engine and lmms-eval's clients name a type of model: then the best is a profile for
    lmms-eval of this type, else one that allows it.

    Raises:
        UsageError: no profile fits.
    """
    if ":" in name or name in profiles:
        return name
    fitting = [key for key, profile in profiles.items() if profile.client_model == name]
    fitting += [f"{key}:{name}" for key, profile in profiles.items() if profile.allows_model(name)]
    if fitting:
        return fitting[0]
    known = ", ".join(sorted(profiles)) or "none"
    lmms = any(profile.client_model is not None for profile in profiles.values())
    raise UsageError(
        f"unknown profile {name!r:.200}"
        + (", and no profile for lmms-eval allows this type of model" if lmms else ""),
        expected=f"one of: {known}",
        hint="a profile can allow more types of model by `allowed_models`" if lmms else "",
    )
