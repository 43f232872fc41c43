"""How the evaluation server is configured: its roots, GPUs and evaluators (profiles).

Everything that decides which program runs, with which code, stands here, on the server; a client
only chooses a profile by its name.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import yaml

from unshard.errors import UsageError
from unshard.evaluate.server.config.gpus import as_gpus, first_gpus, gpus_expected, gpus_here
from unshard.evaluate.server.config.harmless import MODEL_TYPES
from unshard.evaluate.server.config.profile_settings import (
    read_command,
    read_environment,
    read_include_paths,
    read_interpreter,
    read_model_args,
    read_model_config,
    read_results,
)
from unshard.evaluate.server.config.settings import Settings
from unshard.evaluate.values import Scalar

__all__ = [
    "Keep",
    "Kind",
    "Launcher",
    "Profile",
    "ServerConfig",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", re.ASCII)


class Kind(StrEnum):
    """Which evaluators there are."""

    LM_EVAL = "lm-eval"
    LMMS_EVAL = "lmms-eval"
    COMMAND = "command"


class Keep(StrEnum):
    """Which merged checkpoints stay after their evaluation."""

    NONE = "none"
    BEST = "best"
    ALL = "all"


class Launcher(StrEnum):
    """How a job with several GPUs uses them.

    Attributes:
        ACCELERATE: one process per GPU, each with the whole model and a part of the data.
        NONE: one process, whose model spreads over them by itself (vllm).
    """

    ACCELERATE = "accelerate"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Profile:
    """An evaluator, as the server is configured with it.

    Attributes:
        name: what clients call it.
        kind: which program's command line and results it has.
        interpreter: the Python that has the evaluator installed.
        environment: variables it gets beside the server's own.
        include_paths: directories with further tasks.
        model: the type of model, as the evaluator calls it.
        checkpoint_key: the argument of the model that takes the checkpoint.
        model_args: arguments of the model that no client can change.
        allowed_model_args: shell patterns of the arguments, of the model and of generation, that
            clients may choose beside those known to be harmless.
        allowed_models: kind lmms-eval: shell patterns of the other types of model that clients may
            choose.
        allowed_tasks: shell patterns, one of which a task must match; empty: every task may run.
        timeout_s: seconds after which an attempt is ended.
        retries: how many more attempts a failed one gets.
        gpus: how many a job needs that does not say itself.
        keep: which merged models stay after evaluation.
        best_metric: what "best" is measured by, "task/metric"; with a "-" before it, the lowest
            value is the best.
        launcher: how several GPUs are used.
        command: kind command: the arguments, with {checkpoint}, {output}, {tasks}, {step},
            {weights} and {run}; no shell reads them.
        config: a config.json, or a directory with config and tokenizer, for checkpoints that have
            none; None: only `kind: command` can evaluate those.
        results: kind command: the file below {output} that it writes its numbers to.
        results_bytes: the largest file of results that is read.
    """

    name: str
    kind: Kind
    interpreter: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    include_paths: tuple[Path, ...] = ()
    model: str = "hf"
    checkpoint_key: str = "pretrained"
    model_args: Mapping[str, Scalar] = field(default_factory=dict)
    allowed_model_args: tuple[str, ...] = ()
    allowed_models: tuple[str, ...] = MODEL_TYPES
    allowed_tasks: tuple[str, ...] = ()
    timeout_s: float = 24 * 3600.0
    retries: int = 1
    gpus: int = 0
    keep: Keep = Keep.NONE
    best_metric: str | None = None
    launcher: Launcher = Launcher.ACCELERATE
    config: Path | None = None
    command: tuple[str, ...] = ()
    results: str = "results.json"
    results_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's configuration.

    Attributes:
        roots: checkpoints must lie under one of these; none: no checkpoint is accepted.
        gpus: the GPUs that jobs may have, by number or id.
        host, port: where it listens.
        token_file: the file with the token that clients must show.
        work_directory: where jobs have their directories; None: the server's default.
        pin_count, pin_bytes: how many checkpoints of a run, and how much of its disk, are kept from
            rotation at most; None: no limit.
        keep_days: how long the directories of ended jobs are kept, with their logs; None: for ever.
        profiles: the evaluators, by name.
    """

    roots: tuple[Path, ...] = ()
    gpus: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    work_directory: Path | None = None
    pin_count: int | None = 8
    pin_bytes: int | None = None
    keep_days: int | None = 30
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    @classmethod
    def default(cls, gpus: tuple[str, ...] | None = None) -> "ServerConfig":
        """Return what holds without a file: this machine's GPUs, and a profile of every kind.

        lm-eval and lmms-eval are those of this Python, where it has them; the command measures the
        weights themselves. There are no roots: the caller must name some.

        Args:
            gpus: others than this machine's.
        """
        gpus = gpus_here() if gpus is None else gpus
        return cls(gpus=gpus, profiles=_default_profiles(gpus))

    @classmethod
    def from_yaml(cls, path: Path, gpus: tuple[str, ...] | None = None) -> "ServerConfig":
        """Read a configuration file; what it does not say is as in `default`.

        Relative paths start at the file's directory.

        Args:
            path: of the file.
            gpus: others than the file's.

        Raises:
            UsageError: the file cannot be read, or a key is unknown or has a wrong value.
        """
        settings = Settings(
            _load(path), known=_SERVER_KEYS, where=str(path), base=path.absolute().parent
        )
        return _server(settings, gpus)


_SERVER_KEYS = frozenset(
    "roots gpus host port token_file work_directory pin_quota keep_days profiles".split()
)
_COMMON_KEYS = frozenset(
    "kind environment allowed_tasks timeout retries gpus keep best_metric results_bytes"
    " config".split()
)
_HARNESS_KEYS = _COMMON_KEYS | set(
    "interpreter include_paths model checkpoint_key model_args allowed_model_args launcher".split()
)
_PROFILE_KEYS: Mapping[Kind, frozenset[str]] = {
    Kind.LM_EVAL: _HARNESS_KEYS,
    Kind.LMMS_EVAL: _HARNESS_KEYS | {"allowed_models"},
    Kind.COMMAND: _COMMON_KEYS | {"command", "results"},
}
_MODELS: Mapping[Kind, str] = {Kind.LM_EVAL: "hf", Kind.LMMS_EVAL: "huggingface"}


def _default_profiles(gpus: tuple[str, ...]) -> dict[str, Profile]:
    count = min(1, len(gpus))
    harnesses = [
        Profile(kind.value, kind, model=model, gpus=count) for kind, model in _MODELS.items()
    ]
    program = (sys.executable, "-m", "unshard.evaluate.server.evaluators.weights")
    own = Profile(
        Kind.COMMAND.value,
        Kind.COMMAND,
        command=(*program, "{checkpoint}", "{output}/results.json", "{tasks}"),
        allowed_tasks=("size", "values"),
    )
    return {one.name: one for one in (*harnesses, own)}


def _load(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error


def _server(settings: Settings, given: tuple[str, ...] | None) -> ServerConfig:
    default = ServerConfig()
    gpus = _gpus(settings) if given is None else given
    quota = Settings(
        settings.raw("pin_quota"),
        known=("count", "bytes"),
        where=f"{settings.where}: pin_quota",
        base=settings.base,
    )
    return ServerConfig(
        roots=settings.paths("roots"),
        gpus=gpus,
        host=settings.text("host", default.host),
        port=settings.count("port", default.port, most=65535),
        token_file=settings.path("token_file"),
        work_directory=settings.path("work_directory"),
        pin_count=quota.limit("count", default.pin_count),
        pin_bytes=quota.limit("bytes", default.pin_bytes),
        keep_days=settings.limit("keep_days", default.keep_days, least=1),
        profiles=_profiles(settings, gpus),
    )


def _gpus(settings: Settings) -> tuple[str, ...]:
    value = settings.raw("gpus")
    if value is None:
        return gpus_here()
    if not isinstance(value, list):
        count = settings.count("gpus", 0, most=1024)
        return first_gpus(count, what=f"{settings.where}: gpus {count}")
    gpus = as_gpus(map(str, value)) if all(type(one) in {int, str} for one in value) else None
    if gpus is None:
        raise settings.wrong("gpus", expected="how many, or a list of their numbers or ids")
    return gpus


def _profiles(settings: Settings, gpus: tuple[str, ...]) -> dict[str, Profile]:
    if "profiles" not in settings:
        return _default_profiles(gpus)
    profiles = {}
    for name, value in settings.mapping("profiles").items():
        where = f"{settings.where}: profiles.{name}"
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{where} cannot be a name", expected="letters, digits, and `_`, `.`, `-`"
            )
        any_kind = frozenset[str]().union(*_PROFILE_KEYS.values())
        loose = Settings(value, known=any_kind, where=where, base=settings.base)
        if "kind" not in loose:
            raise loose.wrong("kind", expected=", ".join(Kind))
        kind = loose.choice("kind", Kind.LM_EVAL)
        where = f"{where} (kind {kind})"
        strict = Settings(value, known=_PROFILE_KEYS[kind], where=where, base=settings.base)
        profiles[name] = _profile(name, kind, strict, gpus)
    return profiles


def _profile(name: str, kind: Kind, settings: Settings, gpus: tuple[str, ...]) -> Profile:
    default = Profile(name, kind)
    keep = settings.choice("keep", default.keep)
    if keep is Keep.BEST and "best_metric" not in settings:
        raise settings.wrong("best_metric", expected="TASK/METRIC, because of `keep: best`")
    return Profile(
        name=name,
        kind=kind,
        interpreter=read_interpreter(settings, default.interpreter),
        environment=read_environment(settings),
        include_paths=read_include_paths(settings, most=1 if kind is Kind.LMMS_EVAL else 100),
        model=settings.text("model", _MODELS.get(kind, default.model)),
        checkpoint_key=settings.text("checkpoint_key", default.checkpoint_key),
        model_args=read_model_args(settings),
        allowed_model_args=settings.texts("allowed_model_args"),
        allowed_models=settings.texts("allowed_models")
        if "allowed_models" in settings
        else default.allowed_models,
        allowed_tasks=settings.texts("allowed_tasks"),
        timeout_s=settings.seconds("timeout", default.timeout_s),
        retries=settings.count("retries", default.retries, most=100),
        gpus=_job_gpus(settings, len(gpus)),
        keep=keep,
        best_metric=settings.text("best_metric", "") or None,
        launcher=settings.choice("launcher", default.launcher),
        config=read_model_config(settings),
        command=read_command(settings, needed=kind is Kind.COMMAND),
        results=read_results(settings, default.results),
        results_bytes=settings.count("results_bytes", default.results_bytes, least=1),
    )


def _job_gpus(settings: Settings, there: int) -> int:
    """Return how many GPUs a job gets, of those that are there."""
    count = settings.count("gpus", min(1, there))
    if count > there:
        raise settings.wrong("gpus", expected=gpus_expected(there))
    return count
