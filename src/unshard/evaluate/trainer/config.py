"""The evaluation's configuration in a trainer: YAML of lmms-engine's form, and our own keys.

    trainer_args:
      eval_strategy: steps
      eval_steps: 500
      save_steps: 500
      eval_config:
        server_url: http://evaluator:8000
        tasks: [mmmu_val]
        profile: qwen            # ours; else `model` names the profile
        weights: [model, ema]    # ours, as are run, path_map, token_file, quota, flush_timeout

`eval_config` alone, or its keys at the top level, are accepted as well. A misplaced key is moved
with a warning: `num_gpus` and `batch_size` inside `model_args` crash models of lmms-eval.
"""

import logging
from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Self

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass

from unshard.errors import UsageError
from unshard.evaluate.credentials import read_token, split_url
from unshard.evaluate.jobs import (
    BASE_STEP,
    Arguments,
    BatchSize,
    Count,
    Flag,
    Instruction,
    Limit,
    Metadata,
    Pairs,
    Seed,
    Template,
    WeightsName,
)
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.trainer.base_model import find_base
from unshard.evaluate.values import Whole, expects, in_our_words, split_names
from unshard.evaluate.yaml_files import read_yaml

_TRAINER = ("eval_strategy", "eval_steps", "save_steps")
_UNUSED = ("device", "log_samples", "predict_only", "output_dir")
# Not `seed` and `output_dir`: models may have arguments of these names.
_LIFTED = ("num_gpus", "batch_size", "num_fewshot", "limit", "gen_kwargs", *_UNUSED[:-1])
_NEEDED = {"server_url": "server_url", "profile": "profile (or model)", "tasks": "tasks"}
# The keys that can only mean an evaluation, in `trainer_args` among a trainer's many others.
_OUR_KEYS = {*_TRAINER, *_NEEDED, "checkpoint_key", "poll_interval", "path_map"}

log = logging.getLogger(__name__)


def _subject(key: str) -> str:
    return f"{key} of the evaluation"


def _check_url(text: str) -> str:
    split_url(text, what=_subject("server_url"))
    return text


def _split_names(value: object) -> object:
    """Split a comma-separated text; return other values unchanged."""
    return tuple(split_names(value)) if isinstance(value, str) else value


def _drop_ratio(value: object, info: ValidationInfo) -> object:
    """Leave out a ratio of all steps (transformers), with a warning."""
    if isinstance(value, float) and 0 < value < 1:
        log.warning("%s %s: a ratio of all steps is not supported", info.field_name, value)
        return None
    return value


def _check_absolute(text: str) -> str:
    if not PurePosixPath(text).is_absolute():
        raise ValueError
    return text


Text = Annotated[str, expects("text")]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_names), expects("a list of names")]
WeightSets = Annotated[
    tuple[WeightsName, ...],
    Field(min_length=1),
    BeforeValidator(_split_names),
    expects("model, ema"),
]
Interval = Annotated[
    float, Field(strict=True, gt=0, allow_inf_nan=False), expects("seconds, above 0")
]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False), expects("a number")]
Steps = Annotated[Whole | None, BeforeValidator(_drop_ratio)]
# YAML 1.1 reads a bare `no` as False.
Strategy = Annotated[Text, BeforeValidator(lambda value: "no" if value is False else value)]
Url = Annotated[Text, AfterValidator(_check_url)]
Argument = Annotated[
    str | int | Annotated[float, Field(allow_inf_nan=False)] | bool,
    expects("a text, a number or a boolean", or_boolean=True),
]
Base = Annotated[Text, AfterValidator(find_base)]
Absolute = Annotated[str, AfterValidator(_check_absolute)]
PathMap = Annotated[
    dict[Absolute, Absolute],
    expects("absolute paths of this machine: the server's absolute paths"),
]
PinQuota = Annotated[Quota, expects("count and bytes, each a whole number or null for no limit")]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class EvalConfig:
    """The configuration of a run's evaluation.

    Attributes:
        server_url: the server; in the token of `http://any:TOKEN@host:8000`, `/`, `?`, `#` and `@`
            are written as `%2F`, `%3F`, `%23` and `%40`.
        profile: the name of an evaluator of the server.
        tasks: the tasks to evaluate, as a list or a comma-separated text.
        weights: the sets of weights to evaluate, each as a job.
        poll_interval: seconds between two polls of all pending jobs.
        eval_strategy: "no" for none, "steps" to follow `eval_steps`, else every checkpoint.
        eval_steps: evaluate the first checkpoint at or after every multiple; None: every
            checkpoint.
        save_steps: steps between checkpoints, only compared with `eval_steps`.
        checkpoint_key: the name of the checkpoint among `model_args`, from which it is removed,
            because the server sets it.
        model_args and the next ten: see `Arguments`.
        run: the training run's name; None: the name of its directory, or of the parent of
            `checkpoints`.
        base: the model with which training began; it is evaluated once, as step 0.
        path_map: prefixes of paths on this machine, each with the server's path; the longest
            match counts.
        token_file: a file with the server's token, read when it is needed.
        quota: limits of the run's pins.
        flush_timeout: seconds to wait for results when training ends.

    Raises:
        UsageError: a value is invalid.
    """

    server_url: Url = field(repr=False)
    profile: Text
    tasks: Names
    weights: WeightSets = ("model",)
    poll_interval: Interval = 20.0
    eval_strategy: Strategy = "steps"
    eval_steps: Steps = None
    save_steps: Steps = None
    checkpoint_key: Text = "model"
    model_args: Mapping[str, Argument] = Field(default_factory=dict)
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
    metadata: Metadata = Field(default_factory=dict)
    run: Text | None = None
    base: Base | None = None
    path_map: PathMap = Field(default_factory=dict)
    token_file: Path | None = None
    quota: PinQuota = Quota()
    flush_timeout: Seconds = 600.0

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        with in_our_words(_subject):
            return read(values)

    @classmethod
    def of(cls, source: "EvalConfig | Mapping[str, object] | str | Path") -> "EvalConfig":
        """Return a configuration from any of its forms: see `from_yaml` and `from_dict`."""
        if isinstance(source, EvalConfig):
            return source
        return cls.from_dict(source) if isinstance(source, Mapping) else cls.from_yaml(source)

    @classmethod
    def from_yaml(cls, source: str | Path) -> "EvalConfig":
        """Read a YAML file or text.

        Raises:
            UsageError: it cannot be read, or is not a configuration.
        """
        try:
            # A path may contain a colon, too.
            is_text = isinstance(source, str) and (
                "\n" in source or (":" in source and not Path(source).is_file())
            )
            values = read_yaml(str(source) if is_text else Path(source))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{source}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UsageError("an evaluation's configuration is a mapping", found=repr(values)[:100])
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> "EvalConfig":
        """Read the keys of a YAML file, in any of the places that the module's docstring lists.

        Raises:
            UsageError: a key is missing, or a value is invalid.
        """
        flat = _flatten(given)
        flat["profile"] = flat.get("profile") or flat.get("model")
        if missing := [name for name in _NEEDED if not flat.get(name)]:
            raise UsageError(
                f"the evaluation's configuration is incomplete: {', '.join(missing)} missing",
                expected=", ".join(_NEEDED.values()),
                found=", ".join(sorted(key for key in flat if flat[key])) or "nothing",
            )
        names = {field.name for field in fields(cls)}
        if unknown := sorted(flat.keys() - names - {"model", *_UNUSED}):
            log.warning("keys of eval_config that are ignored: %s", ", ".join(unknown))
        if unused := sorted(flat.keys() & set(_UNUSED)):
            log.info("keys of eval_config that the server sets itself: %s", ", ".join(unused))
        values = {key: flat[key] for key in names & flat.keys() if flat[key] is not None}
        config = cls(**values)  # type: ignore[arg-type]  # validated there
        if config.eval_steps and config.save_steps and config.eval_steps != config.save_steps:
            log.warning(
                "eval_steps %s differs from save_steps %s: only saved checkpoints can be "
                "evaluated, the first at or after each evaluation step",
                config.eval_steps,
                config.save_steps,
            )
        return config

    @property
    def arguments(self) -> Arguments:
        """The arguments for the evaluator."""
        return Arguments(**{name: getattr(self, name) for name in Arguments.model_fields})

    def is_due(self, step: int, previous: int | None) -> bool:
        """Return whether a checkpoint is the first at or after an evaluation step.

        Step 0 is not due if there is a base model, which is evaluated as that step. `previous` is
        the step of the previous checkpoint.
        """
        if self.eval_strategy == "no" or (step == BASE_STEP and self.base is not None):
            return False
        if self.eval_strategy != "steps" or not self.eval_steps:
            return True
        before = 0 if previous is None else previous // self.eval_steps
        return step // self.eval_steps > before

    def served(self, path: str) -> str:
        """Return the server's path of a path here; the longest prefix in `path_map` counts.

        A prefix also matches with its symbolic links resolved, as they are in the path of a pin.
        """
        here = PurePosixPath(path)
        for ours in sorted(self.path_map, key=len, reverse=True):
            for prefix in (ours, str(Path(ours).resolve())):
                if here.is_relative_to(prefix):
                    return str(PurePosixPath(self.path_map[ours]) / here.relative_to(prefix))
        return path

    def token(self) -> str | None:
        """Return the server's token, if there is a `token_file`.

        Raises:
            UsageError: the file cannot be read, or does not contain a token.
        """
        if self.token_file is None:
            return None
        return read_token(self.token_file, what=f"token_file {self.token_file}")


def _copy_mapping(given: Mapping[str, object], key: str) -> dict[str, object]:
    """Return a copy of the mapping under a key; without the key an empty one."""
    mapping = given.get(key)
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise UsageError(_subject(key), expected="a mapping", found=repr(mapping)[:100])
    return {str(name): value for name, value in mapping.items()}


def _flatten(given: Mapping[str, object]) -> dict[str, object]:
    """Return the keys of all levels in one mapping; a misplaced key is moved with a warning."""
    trainer = _copy_mapping(given, "trainer_args") if "trainer_args" in given else dict(given)
    if "eval_config" not in trainer and "eval_config" in given:
        log.warning("eval_config belongs in trainer_args; using the one at the top level")
        trainer["eval_config"] = given["eval_config"]
    ours = {key: value for key, value in trainer.items() if key in _OUR_KEYS}
    if "eval_config" in trainer:
        flat = _copy_mapping(trainer, "eval_config")
        schedule = {key: ours.pop(key) for key in _TRAINER if key in ours}
        _lift(ours, flat, "trainer_args")
        flat |= schedule
    else:
        flat = ours if "trainer_args" in given else trainer
    model_args = _copy_mapping(flat, "model_args")
    _lift({key: model_args.pop(key) for key in _LIFTED if key in model_args}, flat, "model_args")
    model_args.pop(str(flat.get("checkpoint_key") or "model"), None)
    return {**{str(key): value for key, value in flat.items()}, "model_args": model_args}


def _lift(misplaced: Mapping[str, object], to: dict[str, object], source: str) -> None:
    """Add misplaced keys of `source`; a key in the right place wins."""
    for key, value in misplaced.items():
        log.warning("%s belongs in eval_config itself, not in %s", key, source)
        if to.get(key) is None:
            to[key] = value
