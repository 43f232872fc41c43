"""How a trainer has its checkpoints evaluated: YAML of lmms-engine's form, and our own keys.

    trainer_args:
      eval_strategy: steps
      eval_steps: 500
      save_steps: 500
      eval_config:
        server_url: http://evaluator:8000
        tasks: [mmmu_val]
        profile: qwen            # ours; else `model` names the profile
        weights: [model, ema]    # ours, as are run, path_map, token_file, quota, flush_timeout

`eval_config` alone, or its keys at the top, are taken as well. What lies where it does not belong
is lifted with a warning: `num_gpus` and `batch_size` inside `model_args` crash models of lmms-eval.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Self

import yaml

from unshard.errors import UsageError
from unshard.evaluate.arguments import Arguments
from unshard.evaluate.credentials import read_token
from unshard.evaluate.pins.pin import DEFAULT_QUOTA, Quota
from unshard.evaluate.trainer.config_values import (
    a_mapping,
    a_number,
    a_quota,
    a_text,
    a_text_or_whole,
    a_url,
    a_whole,
    an_interval,
    names,
    paths,
    scalars,
)
from unshard.evaluate.values import Scalar

__all__ = ["EvalConfig"]

_TRAINER = ("eval_strategy", "eval_steps", "save_steps")
_LIFTED = (
    "num_gpus",
    "batch_size",
    "num_fewshot",
    "limit",
    "gen_kwargs",
    "device",
    "log_samples",
    "predict_only",
)
_UNUSED = ("device", "log_samples", "predict_only", "output_dir")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """What is evaluated, when, and by which server.

    Attributes:
        server_url: URL of the evaluation server; it may contain user and password.
        profile: the evaluator that the server is configured with.
        tasks: names of the tasks to evaluate.
        weights: "model", "ema", or both.
        poll_interval: seconds between two polls of all pending jobs.
        eval_strategy: "no" for none, "steps" to follow `eval_steps`, else every checkpoint.
        eval_steps: steps between evaluations; None: every checkpoint that is saved.
        save_steps: steps between checkpoints, if known.
        checkpoint_key: the name of the checkpoint among `model_args`, from which it is removed,
            because the server sets it.
        model_args, num_fewshot, batch_size, limit, gen_kwargs, num_gpus, seed: see `Arguments`.
        run: the name of the training run; None: the name of its directory.
        path_map: beginnings of paths on this machine, each with the server's path for it.
        token_file: a file with the server's token, read when it is needed.
        quota: limits of the run's pins.
        flush_timeout: seconds to wait for results when training ends.

    Raises:
        UsageError: `poll_interval` is not a number above 0.
    """

    server_url: str = field(repr=False)
    profile: str
    tasks: tuple[str, ...]
    weights: tuple[str, ...] = ("model",)
    poll_interval: float = 20.0
    eval_strategy: str = "steps"
    eval_steps: int | None = None
    save_steps: int | None = None
    checkpoint_key: str = "model"
    model_args: Mapping[str, Scalar] = field(default_factory=dict)
    num_fewshot: int | None = None
    batch_size: int | str | None = None
    limit: float | None = None
    gen_kwargs: str | None = None
    num_gpus: int | None = None
    seed: int | None = None
    run: str | None = None
    path_map: Mapping[str, str] = field(default_factory=dict)
    token_file: Path | None = None
    quota: Quota = DEFAULT_QUOTA
    flush_timeout: float = 600.0

    def __post_init__(self) -> None:
        an_interval({"poll_interval": self.poll_interval}, "poll_interval")

    @classmethod
    def of(cls, source: "EvalConfig | Mapping[str, object] | str | Path") -> "EvalConfig":
        """Return a configuration from whatever a user gave: see `from_yaml`, `from_dict`."""
        if isinstance(source, EvalConfig):
            return source
        return cls.from_dict(source) if isinstance(source, Mapping) else cls.from_yaml(source)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Read a file, or the text of one.

        Raises:
            UsageError: it is not there, no YAML, or says too little.
        """
        try:
            is_text = isinstance(source, str) and _is_text(source)
            text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
            found = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{source}: cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise UsageError("an evaluation's configuration is a mapping", found=repr(found)[:100])
        return cls.from_dict(found)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> Self:
        """Read what YAML says; see the module.

        Raises:
            UsageError: something is missing, or is not what it should be.
        """
        flat = _flat(given)
        model_args = a_mapping(flat, "model_args")
        _lift(model_args, _LIFTED, flat, "model_args")
        key = a_text(flat, "checkpoint_key") or "model"
        model_args.pop(key, None)
        profile = a_text(flat, "profile") or a_text(flat, "model")
        url = a_url(flat, "server_url")
        tasks = names(flat, "tasks")
        if not profile or not url or not tasks:
            needed = {"server_url": url, "profile (or model)": profile, "tasks": tasks}
            missing = [name for name, value in needed.items() if not value]
            raise UsageError(
                f"the evaluation's configuration says too little: {', '.join(missing)} missing",
                expected=", ".join(needed),
                found=", ".join(sorted(flat)) or "nothing",
            )
        _warn_of_unknown(flat)
        config = cls(
            server_url=url,
            profile=profile,
            tasks=tasks,
            checkpoint_key=key,
            model_args=scalars(model_args, "model_args"),
            **_optional(flat),  # type: ignore[arg-type]  # each is checked where it is read
        )
        _warn_of_steps(config)
        return config

    @property
    def arguments(self) -> Arguments:
        """What is chosen of the evaluator."""
        return Arguments(**{name: getattr(self, name) for name in Arguments.model_fields})

    def is_due(self, step: int, previous: int | None) -> bool:
        """Return whether a checkpoint is to be evaluated.

        Every one is that is the first at or after an evaluation step.

        Args:
            step: of the checkpoint.
            previous: the step of the one before it; None if there is none.
        """
        if self.eval_strategy == "no":
            return False
        if self.eval_strategy != "steps" or not self.eval_steps:
            return True
        before = 0 if previous is None else previous // self.eval_steps
        return step // self.eval_steps > before

    def served(self, path: str) -> str:
        """Return what the server calls a path; the longest beginning that fits counts.

        A beginning fits without its symbolic links, too: those of a pin are resolved.
        """
        here = PurePosixPath(path)
        for ours in sorted(self.path_map, key=len, reverse=True):
            for start in (ours, str(Path(ours).resolve())):
                if here.is_relative_to(start):
                    return str(PurePosixPath(self.path_map[ours]) / here.relative_to(start))
        return path

    def token(self) -> str | None:
        """Return the server's token, if a file of it is named.

        Raises:
            UsageError: the file cannot be read, or does not contain a token.
        """
        if self.token_file is None:
            return None
        return read_token(self.token_file, what=f"token_file {self.token_file}")


def _is_text(source: str) -> bool:
    """Return whether a text is YAML itself, not the name of a file: that may hold a colon, too."""
    return "\n" in source or (":" in source and not Path(source).is_file())


def _steps(given: Mapping[str, object], key: str) -> int | None:
    """Return a number of steps; a ratio of all steps (transformers) is left out with a warning."""
    found = given.get(key)
    if isinstance(found, float) and 0 < found < 1:
        log.warning("%s %s: a ratio of all steps means nothing here, left out", key, found)
        return None
    return a_whole(given, key)


_READ = {
    "poll_interval": an_interval,
    "eval_strategy": a_text,
    "eval_steps": _steps,
    "save_steps": _steps,
    "num_fewshot": a_whole,
    "batch_size": a_text_or_whole,
    "limit": a_number,
    "gen_kwargs": a_text,
    "num_gpus": a_whole,
    "seed": a_whole,
    "run": a_text,
    "path_map": paths,
    "weights": names,
    "quota": a_quota,
    "flush_timeout": a_number,
}


def _optional(flat: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {
        key: read(flat, key) for key, read in _READ.items() if flat.get(key) is not None
    }
    if file := a_text(flat, "token_file"):
        found["token_file"] = Path(file)
    sets = names(flat, "weights")
    if "weights" in found and not (sets and {*sets} <= {"model", "ema"}):
        raise UsageError("weights", expected="model, ema", found=str(flat["weights"]))
    return found


def _flat(given: Mapping[str, object]) -> dict[str, object]:
    """Return all keys of `eval_config`, with those of the trainer that matter, in one mapping."""
    trainer = a_mapping(given, "trainer_args") if "trainer_args" in given else dict(given)
    if "eval_config" not in trainer and "eval_config" in given:
        log.warning("eval_config belongs in trainer_args; using the one at the top level")
        trainer["eval_config"] = given["eval_config"]
    if "eval_config" not in trainer:
        return trainer if trainer == dict(given) else _ours(trainer)
    flat = a_mapping(trainer, "eval_config")
    ours = {key: value for key, value in _ours(trainer).items() if key != "eval_config"}
    _lift(ours, tuple(key for key in ours if key not in _TRAINER), flat, "trainer_args")
    return {**flat, **{key: trainer[key] for key in _TRAINER if key in trainer}}


def _ours(trainer: Mapping[str, object]) -> dict[str, object]:
    """Return those of a trainer's many arguments that can only mean an evaluation."""
    meant = {"server_url", "tasks", "checkpoint_key", "poll_interval", "profile", "path_map"}
    return {key: value for key, value in trainer.items() if key in meant | set(_TRAINER)}


def _lift(source: dict[str, object], keys: tuple[str, ...], to: dict[str, object], of: str) -> None:
    """Move misplaced keys; a key in the right place wins."""
    for key in keys:
        if key not in source:
            continue
        value = source.pop(key)
        log.warning("%s belongs in eval_config itself, not in %s", key, of)
        if to.get(key) is None:
            to[key] = value


def _warn_of_unknown(flat: Mapping[str, object]) -> None:
    known = {one.name for one in fields(EvalConfig)} | {"model", *_UNUSED}
    if unknown := sorted(set(flat) - known):
        log.warning("keys of eval_config that are ignored: %s", ", ".join(unknown))
    if unused := sorted(set(flat) & set(_UNUSED)):
        log.info("the server decides by itself: %s", ", ".join(unused))


def _warn_of_steps(config: EvalConfig) -> None:
    if config.eval_steps and config.save_steps and config.eval_steps != config.save_steps:
        log.warning(
            "eval_steps %s differs from save_steps %s: only saved checkpoints can be evaluated, "
            "the first at or after each evaluation step",
            config.eval_steps,
            config.save_steps,
        )
