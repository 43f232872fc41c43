"""The options of a merge as one value, and a decorator that adds options to a signature."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from unshard.convert.outputs import dtype_choice, select_names
from unshard.engines.threads import MIN_BUFFER, Resources, default_workers
from unshard.errors import UnshardError, UsageError
from unshard.fronts import PYTHON, Call, Python, Text, spell
from unshard.keywords import (
    CHOICES,
    DEFAULTS,
    OPTIONS,
    DtypeLike,
    Engine,
    Lora,
    Names,
    Quantize,
    Verify,
    Weights,
)
from unshard.plan.layout import size_in_bytes
from unshard.read.format import EVERY_ROLE, ROLES, Choice, ReadOptions
from unshard.stores.remote_path import as_given, path_of

P = ParamSpec("P")
Returned = TypeVar("Returned")

_KINDS: Mapping[object, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    "REGEX": (str, "a regular expression, as text"),
}
_CHECKPOINTS = ("checkpoint", "path", "run", "against")  # parameters that are checkpoints
_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def given_path(path: str | Path, what: str) -> Path:
    """Return a path from a caller; `what` is its name in the error: "the checkpoint"."""
    if path == "":  # `Path("")` is the current directory
        raise UsageError(f"{what} is an empty path", hint="for the current directory, give .")
    return path_of(path)


def given_output(path: str | Path) -> Path:
    """Return the output directory from a caller."""
    output = given_path(path, "the output")
    if output.suffix in _FILES and not output.is_dir():
        raise UsageError(
            f"{output}: the output is a directory, and this is the name of a file",
            hint=f"give {output.with_suffix('')}; the weights are written into it",
        )
    return output


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MergeOptions:
    """The options of a merge; `merge` explains each.

    `dtype` is normalised to a name: "bfloat16" for "bf16" or `torch.bfloat16`.

    Raises:
        UsageError: a value is invalid, or options exclude each other.
    """

    dtype: DtypeLike = DEFAULTS["dtype"]
    keep_fp32: str | None = None
    quantize: Quantize | None = None
    names: Names = DEFAULTS["names"]
    base: str | Path | None = None
    allow_missing: bool = False
    allow_unexpected: bool = False
    include: str | None = None
    exclude: str | None = None
    lora: Lora | None = None
    lora_alpha: float | None = None
    weights: Weights | None = None
    role: str | None = None
    step: int | None = None
    config: str | Path | None = None
    also: Sequence[str | Path] = ()
    max_shard_size: str | int | None = None
    workers: int | None = None
    memory: str | int = DEFAULTS["memory"]
    assume_dim0: bool = False
    ep_size: int | None = None
    allow_globals: Sequence[str] = ()
    engine: Engine | None = None
    verify: Verify = DEFAULTS["verify"]
    checksums: bool = False
    extra_state: bool = True
    optimizer: bool = False
    overwrite: bool | Literal["all"] = False
    resume: bool = False
    reuse: bool = False
    dry_run: bool = False
    push_to_hub: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_choice(self.dtype))
        self._check_types()
        if "" in (self.base, self.config, *self.also):
            raise UsageError(
                "a value of ⟦--base⟧, ⟦--config⟧ or ⟦--also⟧ is an empty path",
                hint="give a path, or leave the option out",
            )
        for option, choices in CHOICES.items():
            value = getattr(self, option)
            if value != DEFAULTS.get(option) and value not in choices:
                expected = ", ".join(choices)
                raise UsageError(f"⟦--{option} {value}⟧: unknown", expected=expected)
        self._check_numbers()
        self._check_names()
        if self.optimizer:
            self._check_optimizer()
        if self.overwrite not in (False, True, "all"):
            raise UsageError(
                Text(f"⟦--overwrite={self.overwrite}⟧: unknown"), expected="no value, or all"
            )
        if self.checksums and self.reuse:
            raise UsageError(
                "⟦--checksums⟧ and ⟦--reuse⟧ exclude each other: a reused output keeps its record",
                hint="leave ⟦--checksums⟧ out, and print them: unshard checksums OUTPUT",
            )
        if self.private and self.push_to_hub is None:
            raise UsageError("⟦--private⟧ applies only to ⟦--push-to-hub⟧")

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the names that `include` and `exclude` select."""
        return select_names(names, self.include, self.exclude)

    def _check_types(self) -> None:
        """Refuse values of the wrong type, such as a text for a list."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            kind, expected = _KINDS.get(option.kind) or _KINDS.get(option.metavar) or (object, "")
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name}: invalid value {value!r}", expected=expected)
        for name in ("also", "allow_globals"):
            value = getattr(self, name)
            if isinstance(value, str | PathLike):
                raise UsageError(
                    f"{name}: expected a list, got {str(value)!r}",
                    hint=f"give a list: [{str(value)!r}]",
                )
            if not isinstance(value, Sequence):  # an iterator could be read only once
                object.__setattr__(self, name, tuple(value or ()))

    def _check_numbers(self) -> None:
        for option, value, least in (("ep-size", self.ep_size, 2), ("workers", self.workers, 1)):
            if value is not None and value < least:
                raise UsageError(f"⟦--{option} {value}⟧: at least {least} is needed")
        if self.resources.memory_bytes < MIN_BUFFER:
            raise UsageError(
                f"⟦--memory {self.memory}⟧: too little", expected=f"at least {MIN_BUFFER} bytes"
            )

    def _check_names(self) -> None:
        """Refuse options that do not fit the names of the output."""
        if self.names == "training" and self.base is not None:
            raise UsageError("⟦--names training⟧ excludes ⟦--base⟧, which has the names of the hub")
        if self.lora == "keep" and self.names != "training":
            raise UsageError("⟦--lora keep⟧ needs ⟦--names training⟧")
        if self.names == "training" and self.quantize is not None:
            what = f"⟦--quantize {self.quantize}⟧ needs the names of the hub"
            raise UsageError(f"{what}: it excludes ⟦--names training⟧")

    def _check_optimizer(self) -> None:
        """Refuse options that exclude an optimizer's state."""
        never = ("quantize", "push_to_hub", "ep_size")
        excluded = [name for name in never if getattr(self, name) is not None]
        excluded += ["lora"] if self.lora not in (None, "fuse", "ignore") else []
        if excluded:
            option = excluded[0].replace("_", "-")
            raise UsageError(f"⟦--optimizer⟧ and ⟦--{option}⟧ exclude each other")
        if self.weights not in (None, "model"):
            kind = "EMA" if self.weights == "ema" else self.weights
            raise UsageError(f"⟦--optimizer⟧: {kind} weights have no optimizer state")

    def __repr__(self) -> str:
        """Return the options that differ from their defaults."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.chosen.items())
        return f"MergeOptions({chosen})"

    @property
    def chosen(self) -> dict[str, object]:
        """The options that differ from their defaults, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def choice(self) -> Choice:
        """The step, role and weights to choose."""
        if self.role == EVERY_ROLE:
            raise UsageError(
                "⟦--role all⟧ selects several models, and this needs a single model",
                hint="choose a role, or merge each model: `unshard merge` and unshard.merge_all "
                "take ⟦--role all⟧",
            )
        role = None if self.role is None else ROLES.get(self.role, self.role)
        return Choice(self.step, role, self.weights)

    @property
    def needs_config(self) -> bool:
        """Whether the output is a model for transformers, which needs a config."""
        is_model = self.names == "hub" and self.lora != "adapter"
        return is_model and self.config != "none"

    @property
    def resources(self) -> Resources:
        """Workers and memory."""
        return Resources(self.workers or default_workers(), size_in_bytes(str(self.memory)))

    @property
    def reading(self) -> ReadOptions:
        """The options for reading the checkpoint."""
        return ReadOptions(
            None if self.config in (None, "none") else path_of(self.config),
            self.assume_dim0,
            self.ep_size,
            frozenset(self.allow_globals),
            selects=not (self.include is self.exclude is None),
        )

    @property
    def allowed(self) -> dict[str, bool]:
        """Whether tensors may be missing, and whether there may be unexpected tensors."""
        names = ("allow_missing", "allow_unexpected")
        return {name: bool(getattr(self, name)) for name in names}

    @property
    def recorded(self) -> dict[str, object]:
        """The options that determine the output, for its record; without paths."""
        chosen = {name: value for name, value in self.chosen.items() if OPTIONS[name].shapes}
        if self.base is not None:
            base = path_of(self.base)
            chosen["base"] = base.name if base.is_dir() else str(self.base)
        return {"dtype": self.dtype, "names": self.names, **chosen}


def accepting(
    keywords: type, *, others: bool = False, **defaults: object
) -> Callable[[Callable[P, Returned]], Callable[P, Returned]]:
    """Return a decorator that lists a function's options in its signature, and refuses others.

    Args:
        keywords: the options, a TypedDict.
        others: whether the function also takes any other keyword.
        defaults: defaults that differ from those of `MergeOptions`.
    """
    default_of = {field.name: field.default for field in fields(MergeOptions)} | defaults
    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default_of[name], annotation=kind
        )
        for name, kind in keywords.__annotations__.items()
    ]

    def decorate(function: Callable[P, Returned]) -> Callable[P, Returned]:
        *own, rest = inspect.signature(function).parameters.values()
        parameters = [*own, *options, *([rest] if others else [])]
        signature = inspect.signature(function).replace(parameters=parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Returned:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            try:
                return function(*args, **kwargs)
            except UnshardError as error:
                if error.front is PYTHON:
                    error.front = _front_of(function, bound)
                raise

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _front_of(function: Callable[..., object], bound: inspect.BoundArguments) -> Python:
    """Return a front with a function's parameters and call, to which hints add options."""
    values, own = dict(bound.arguments), bound.signature.parameters
    values |= values.pop("kwargs", {})  # for transformers
    options = {name: _literal(name, value) for name, value in values.items()}
    checkpoint = next((options[name] for name in _CHECKPOINTS if name in options), "checkpoint")
    shared = {name: options[name] for name in OPTIONS if name in options}
    positional = [name for name, one in own.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    arguments = [options.pop(name) for name in takewhile(values.__contains__, positional)]
    itself = Call(f"unshard.{function.__name__}", arguments, options)
    merging = Call("unshard.merge", (checkpoint, "output"), shared)
    return Python({*map(spell, own)}, merging, itself)


def _literal(name: str, value: object) -> str:
    """Return the Python literal of an argument, or the name of its parameter if it has none."""
    items = value if isinstance(value, list | tuple) else [value]
    texts = [as_given(item) if isinstance(item, str | Path) else item for item in items]
    is_plain = all(item is None or isinstance(item, str | int | float) for item in texts)
    return name if not is_plain else repr(texts if items is value else texts[0])
