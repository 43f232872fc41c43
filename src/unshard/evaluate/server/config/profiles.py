"""The configuration of the evaluation server as values: its roots, GPUs and evaluators (profiles).

Everything that decides which program runs, with which code, is here, on the server; a client only
chooses a profile by its name.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.server.config.harmless import CHECKPOINT_KEYS, GUARDED_TYPES, MODEL_TYPES
from unshard.evaluate.server.gpus import find_gpus
from unshard.evaluate.values import Scalar

__all__ = [
    "Keep",
    "Kind",
    "Launcher",
    "Profile",
    "ServerConfig",
    "default_profiles",
    "model_of",
    "profile_named",
    "resolve_name",
]

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)


class Kind(StrEnum):
    """The kinds of evaluators."""

    LM_EVAL = "lm-eval"
    LMMS_EVAL = "lmms-eval"
    COMMAND = "command"


class Keep(StrEnum):
    """Which merged checkpoints are kept after their evaluation."""

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
        environment: variables that it gets in addition to the server's.
        include_paths: directories with further tasks.
        model: the type of model, as the evaluator calls it.
        checkpoint_key: the argument of the model that takes the checkpoint.
        model_args: arguments of the model that no client can change.
        allowed_model_args: shell patterns of the arguments, of the model and of generation, that
            clients may choose in addition to those known to be harmless.
        allowed_models: kind lmms-eval: shell patterns of the other types of model that clients may
            choose.
        allowed_tasks: shell patterns, one of which a task must match; empty: every task may run.
        timeout_s: seconds after which an attempt is ended.
        retries: how many more attempts a failed one gets.
        gpus: how many a job gets that does not choose.
        keep: which merged models are kept after evaluation.
        best_metric: what "best" is measured by, "task/metric"; after a "-" the lowest value is
            the best.
        launcher: how several GPUs are used.
        command: kind command: the arguments, with {checkpoint}, {output}, {tasks}, {step},
            {weights} and {run}; no shell reads them.
        config: a config.json, or a directory with config and tokenizer, for checkpoints without
            one; None: only `kind: command` can evaluate those.
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
        roots: checkpoints must be under one of these; without any, no checkpoint is accepted.
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
        """Return the configuration without a file: this machine's GPUs, a profile of every kind.

        lm-eval and lmms-eval are those of this Python, if it has them; the command measures the
        weights themselves. It has no roots: the caller must add some. `gpus` replaces this
        machine's.
        """
        gpus = find_gpus() if gpus is None else gpus
        return cls(gpus=gpus, profiles=default_profiles(gpus))


def model_of(kind: Kind) -> str:
    """Return the type of model of a profile that does not name one."""
    return "huggingface" if kind is Kind.LMMS_EVAL else "hf"


def default_profiles(gpus: tuple[str, ...]) -> dict[str, Profile]:
    """Return a profile of every kind, for a server with these GPUs."""
    harnesses = [
        Profile(kind.value, kind, model=model_of(kind), gpus=min(1, len(gpus)))
        for kind in (Kind.LM_EVAL, Kind.LMMS_EVAL)
    ]
    program = (sys.executable, "-m", "unshard.evaluate.server.evaluators.weights")
    own = Profile(
        Kind.COMMAND.value,
        Kind.COMMAND,
        command=(*program, "{checkpoint}", "{output}/results.json", "{tasks}"),
        allowed_tasks=("size", "values"),
    )
    return {one.name: one for one in (*harnesses, own)}


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is a profile of lmms-eval with another type of model.

    Raises:
        UsageError: no profile has this name, or it does not allow the type.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"unknown profile {base!r:.200}", expected=f"one of: {known}")
    profile = profiles[base]
    if name == base:
        return profile
    if profile.kind is not Kind.LMMS_EVAL:
        raise UsageError(f"profile {base}: its model cannot be chosen", found=f"{name!r:.200}")
    if model == profile.model:
        return profile
    if not _MODEL.fullmatch(model) or not _allows_model(profile, model):
        raise UsageError(
            f"profile {base}: model {model!r:.200} is not allowed",
            expected=", ".join([profile.model, *profile.allowed_models]),
            hint="other types may run code of a checkpoint: the profile can allow them by "
            "`allowed_models`",
        )
    key = CHECKPOINT_KEYS.get(model, "pretrained")
    if not _is_trusted(profile, model):
        guarded = {**profile.model_args, "trust_remote_code": False}
        profile = replace(profile, model_args=guarded)
    return replace(profile, model=model, checkpoint_key=key)


def resolve_name(profiles: Mapping[str, Profile], name: str) -> str:
    """Return the profile that a name means: its own, or "profile:type" for a type of model.

    lmms-engine and lmms-eval's clients name a type of model: then the best is a profile for
    lmms-eval of this type, else one that allows it.

    Raises:
        UsageError: no profile fits.
    """
    if ":" in name or name in profiles:
        return name
    lmms = {key: one for key, one in profiles.items() if one.kind is Kind.LMMS_EVAL}
    fitting = [key for key, profile in lmms.items() if profile.model == name]
    fitting += [f"{key}:{name}" for key, profile in lmms.items() if _allows_model(profile, name)]
    if fitting:
        return fitting[0]
    known = ", ".join(sorted(profiles)) or "none"
    raise UsageError(
        f"unknown profile {name!r:.200}"
        + (", and no profile for lmms-eval allows this type of model" if lmms else ""),
        expected=f"one of: {known}",
        hint="a profile can allow more types of model by `allowed_models`" if lmms else "",
    )


def _allows_model(profile: Profile, model: str) -> bool:
    """Return whether a client may choose a type of model."""
    is_default = profile.allowed_models == MODEL_TYPES
    return _is_trusted(profile, model) or (is_default and model in GUARDED_TYPES)


def _is_trusted(profile: Profile, model: str) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in profile.allowed_models)
