"""The options of a merge as one value, and the options of each function in its signature."""

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
from unshard.fronts import PYTHON, Call, Python, spell
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
_PLACES = ("checkpoint", "path", "run", "against")  # what functions call a checkpoint
_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def given_path(path: str | Path, what: str) -> Path:
    """Return a path that a caller gave; `what` names it in the error: "the checkpoint"."""
    if path == "":  # `Path` would take it for the current directory
        raise UsageError(f"{what} is an empty path", hint="for the current directory, give .")
    return path_of(path)


def given_output(path: str | Path) -> Path:
    """Return the directory that a caller wants the output in."""
    output = given_path(path, "the output")
    if output.suffix in _FILES and not output.is_dir():
        raise UsageError(
            f"{output}: the output is a directory, and this is the name of a file",
            hint=f"give {output.with_suffix('')}; the weights are written into it",
        )
    return output


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MergeOptions:
    """Everything that can be chosen for a merge; `merge` explains each.

    `dtype` becomes the name of what was given: "bfloat16" for "bf16" or `torch.bfloat16`.

    Raises:
        UsageError: a value is not known, or options exclude each other.
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
            what = "a value of ⟦--base⟧, ⟦--config⟧ or ⟦--also⟧ is an empty path"
            raise UsageError(what, hint="give a path, or leave the option out")
        for option, choices in CHOICES.items():
            value = getattr(self, option)
            if value != DEFAULTS.get(option) and value not in choices:
                expected = ", ".join(choices)
                raise UsageError(f"⟦--{option} {value}⟧: unknown", expected=expected)
        if self.ep_size is not None and self.ep_size < 2:
            raise UsageError(f"⟦--ep-size {self.ep_size}⟧: at least 2 is needed")
        self._check_resources()
        self._check_names()
        if self.optimizer:
            self._check_optimizer()
        if self.overwrite not in (False, True, "all"):
            raise UsageError(
                f"⟦--overwrite={self.overwrite}⟧: unknown", expected="no value, or all"
            )
        if self.checksums and self.reuse:
            raise UsageError(
                "⟦--checksums⟧ and ⟦--reuse⟧ exclude each other: an output that is used keeps its "
                "record",
                hint="leave ⟦--checksums⟧ out, and print them: unshard checksums OUTPUT",
            )
        if self.private and self.push_to_hub is None:
            raise UsageError("⟦--private⟧ applies to ⟦--push-to-hub⟧, which was not given")

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the names that `include` and `exclude` leave."""
        return select_names(names, self.include, self.exclude)

    def _check_types(self) -> None:
        """Refuse what would be ignored or taken for something else, as a text for a list."""
        for name, one in OPTIONS.items():
            value = getattr(self, name)
            kind, expected = _KINDS.get(one.kind) or _KINDS.get(one.metavar) or (object, "")
            if value is not None and not isinstance(value, kind):
                what = f"{name}: {value!r} is not a value of this option"
                raise UsageError(what, expected=expected)
        for name in ("also", "allow_globals"):
            value = getattr(self, name)
            if isinstance(value, str | PathLike):
                raise UsageError(
                    f"{name}: {str(value)!r} is one value, and not a list of them",
                    hint=f"give a list: [{str(value)!r}]",
                )
            if not isinstance(value, Sequence):  # an iterator could be read only once
                object.__setattr__(self, name, tuple(value or ()))

    def _check_resources(self) -> None:
        if self.resources.memory_bytes < MIN_BUFFER:
            raise UsageError(
                f"⟦--memory {self.memory}⟧: too little", expected=f"at least {MIN_BUFFER} bytes"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"⟦--workers {self.workers}⟧: at least 1 is needed")

    def _check_names(self) -> None:
        """Refuse what the names of the hub, or those of training, cannot be written with."""
        if self.names == "training" and self.base is not None:
            raise UsageError(
                "⟦--names training⟧ excludes ⟦--base⟧, whose names are those of the hub"
            )
        if self.lora == "keep" and self.names != "training":
            raise UsageError(
                "⟦--lora keep⟧ keeps the names of training: it needs ⟦--names training⟧"
            )
        if self.names == "training" and self.quantize is not None:
            what = f"⟦--quantize {self.quantize}⟧ needs the names of the hub"
            raise UsageError(f"{what}: it excludes ⟦--names training⟧")

    def _check_optimizer(self) -> None:
        """Refuse what an optimizer's state cannot be written with."""
        never = ("quantize", "push_to_hub", "ep_size")
        excluded = [name for name in never if getattr(self, name) is not None]
        excluded += ["lora"] if self.lora not in (None, "fuse", "ignore") else []
        if excluded:
            what = excluded[0].replace("_", "-")
            raise UsageError(f"⟦--optimizer⟧ and ⟦--{what}⟧ exclude each other")
        if self.weights not in (None, "model"):
            what = "EMA" if self.weights == "ema" else self.weights
            raise UsageError(
                f"⟦--optimizer⟧: {what} weights have none; its state is of the model's"
            )

    def __repr__(self) -> str:
        """Return the options that differ from their defaults."""
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.chosen.items())
        return f"MergeOptions({chosen})"

    @property
    def chosen(self) -> dict[str, object]:
        """The options that differ from their defaults, by name."""
        values = {one.name: (getattr(self, one.name), one.default) for one in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def choice(self) -> Choice:
        """Which checkpoint of several is meant."""
        if self.role == EVERY_ROLE:
            raise UsageError(
                "⟦--role all⟧ means several models, and one is needed here",
                hint="choose one of them, or merge each: `unshard merge` and unshard.merge_all "
                "take ⟦--role all⟧",
            )
        role = None if self.role is None else ROLES.get(self.role, self.role)
        return Choice(self.step, role, self.weights)

    @property
    def needs_config(self) -> bool:
        """Whether the output is to be a model that transformers loads, which needs a config."""
        is_model = self.names == "hub" and self.lora != "adapter"
        return is_model and self.config != "none"

    @property
    def resources(self) -> Resources:
        """Workers and memory."""
        return Resources(self.workers or default_workers(), size_in_bytes(str(self.memory)))

    @property
    def reading(self) -> ReadOptions:
        """How to read the checkpoint."""
        return ReadOptions(
            None if self.config in (None, "none") else path_of(self.config),
            self.assume_dim0,
            self.ep_size,
            frozenset(self.allow_globals),
            selects=not (self.include is self.exclude is None),
        )

    @property
    def allowed(self) -> dict[str, bool]:
        """Whether tensors may be missing, and whether there may be others."""
        names = ("allow_missing", "allow_unexpected")
        return {name: bool(getattr(self, name)) for name in names}

    @property
    def recorded(self) -> dict[str, object]:
        """What shapes the output, for its record: without paths."""
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
        others: whether the function takes any other keyword too.
        defaults: those that differ from the defaults of `MergeOptions`.
    """
    known = {one.name: one.default for one in fields(MergeOptions)} | defaults
    listed = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=known[name], annotation=kind
        )
        for name, kind in keywords.__annotations__.items()
    ]

    def shown(function: Callable[P, Returned]) -> Callable[P, Returned]:
        *own, rest = inspect.signature(function).parameters.values()
        parameters = [*own, *listed, *([rest] if others else [])]
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

    return shown


def _front_of(function: Callable[..., object], bound: inspect.BoundArguments) -> Python:
    """Return a function's parameters and its call, to be written again with more options."""
    given, own = dict(bound.arguments), bound.signature.parameters
    given |= given.pop("kwargs", {})  # of transformers
    options = {name: _write(name, value) for name, value in given.items()}
    place = next((options[name] for name in _PLACES if name in options), "checkpoint")
    shared = {name: options[name] for name in OPTIONS if name in options}
    positional = [name for name, one in own.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    arguments = [options.pop(name) for name in takewhile(given.__contains__, positional)]
    itself = Call(f"unshard.{function.__name__}", arguments, options)
    return Python({*map(spell, own)}, Call("unshard.merge", (place, "output"), shared), itself)


def _write(name: str, value: object) -> str:
    """Write an argument as Python does; what has no such form is called like its parameter."""
    parts = value if isinstance(value, list | tuple) else [value]
    texts = [as_given(one) if isinstance(one, str | Path) else one for one in parts]
    is_plain = all(one is None or isinstance(one, str | int | float) for one in texts)
    return name if not is_plain else repr(texts if parts is value else texts[0])
