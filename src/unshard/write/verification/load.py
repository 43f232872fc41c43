"""Verify that transformers has a place for every tensor of an output: `verify --load`.

The class that config.json names is built on the meta device and given tensors without data. Names
and shapes are checked by transformers' own loading, which knows its renamings, ties and buffers; no
byte of the weights is read, and no code of the output runs.

This module and `engines.into_transformers` are the only ones that import transformers, and with
`engines.into_torch` the only ones that import torch (the extra `torch`); only when they are used.
"""

import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of
from unshard.errors import ConversionError, OutputError, UsageError, how_to_install
from unshard.read.model_config import ModelConfig
from unshard.stores.remote_path import RemotePath
from unshard.tensors.dtypes import DType
from unshard.write.verification.comparison import Loading, Mismatch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_SHOWN = 20

Shape = tuple[int, ...]


class Found(TypedDict):
    """What transformers reports of a loading."""

    missing_keys: Iterable[str]
    unexpected_keys: Iterable[str]
    mismatched_keys: Iterable[tuple[str, Shape, Shape]]


def forms_of(tensors: Iterable[Converted]) -> dict[str, tuple[DType, Shape]]:
    """Return dtype and shape of every tensor, by name."""
    return {one.name: (one.dtype, shape_of(one.recipe)) for one in tensors}


def verify_load(directory: Path, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Load names, dtypes and shapes into the model class that a directory's config.json names.

    Raises:
        UsageError: torch or transformers is not installed.
        OutputError: config.json is missing, names no class of transformers, or does not fit it.
    """
    need_transformers("⟦--load⟧")
    if not (directory / "config.json").is_file():
        raise OutputError(
            f"⟦--load⟧: {directory} has no config.json", hint="merge again with ⟦--config FILE|DIR⟧"
        )
    with _config_on_disk(directory) as here:
        try:
            with _silence():
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(
                    here, local_files_only=True, trust_remote_code=False
                )
                model_class = _model_class(directory, config.architectures or [])
                return _placed(model_class, config, tensors)
        except OutputError:
            raise
        except Exception as error:
            raise OutputError(f"{directory}: transformers does not load it: {error}") from error


@contextmanager
def _config_on_disk(directory: Path) -> Iterator[Path]:
    """Yield a directory on disk with the config.json of one that may be in an object store."""
    if not isinstance(directory, RemotePath):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        (Path(scratch) / "config.json").write_bytes((directory / "config.json").read_bytes())
        yield Path(scratch)


def check_class(
    model_class: object, config: ModelConfig | None, tensors: Iterable[Converted]
) -> None:
    """Compare every name and shape of an output with those of a model class that a user names.

    It is a model class of transformers or an Auto class, and is built on the meta device, from the
    config that will be written.

    Raises:
        ConversionError: they differ; all that do are named.
        UsageError: torch or transformers is not installed, or there is no config, or this is not a
            model class.
        OutputError: the class cannot be built.
    """
    if not isinstance(model_class, type):
        raise UsageError(
            f"model_cls: {model_class!r} is not a class",
            hint="give the class itself: from transformers import Qwen2ForCausalLM",
        )
    if config is None:
        raise UsageError("model_cls: there is no config to build it from", hint="give one: config")
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config.fields), encoding="utf-8")
        found = _load_as(model_class, Path(scratch), forms_of(tensors))
    refuse_misfits(found)


def refuse_misfits(found: Loading, hint: str = "") -> None:
    """Raise ConversionError if names or shapes differ from those of a model; all are named."""
    problems = [
        *(f"{name}: is missing" for name in found.missing),
        *(f"{name}: is not in the model" for name in found.unexpected),
        *(f"{m.name}: shape {list(m.found)}, not {list(m.expected)}" for m in found.mismatched),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConversionError(
            f"the checkpoint does not fit {found.model_class} ({len(problems)} problems)",
            found="; ".join(problems[:_SHOWN]) + more,
            hint=hint,
        )


def _load_as(
    model_class: type, directory: Path, tensors: Mapping[str, tuple[DType, Shape]]
) -> Loading:
    """Load names, dtypes and shapes into a class, on the meta device."""
    need_transformers("model_cls")
    import torch
    from transformers import AutoConfig, PreTrainedModel

    try:
        with _silence(), torch.device("meta"):
            config_class = getattr(model_class, "config_class", None) or AutoConfig
            config = config_class.from_pretrained(directory, local_files_only=True)
            if hasattr(model_class, "from_config"):  # an Auto class chooses by the config
                model_class = type(model_class.from_config(config))
        if issubclass(model_class, PreTrainedModel):
            with _silence():
                return _placed(model_class, config, tensors)
    except Exception as error:
        what = f"{model_class.__name__}: cannot be built from the config, or loaded: {error}"
        raise OutputError(what) from error
    raise UsageError(
        f"model_cls: {model_class.__name__} is not a model class of transformers",
        expected="a subclass of PreTrainedModel, or an AutoModelFor class",
    )


def _placed(
    model_class: "type[PreTrainedModel]",
    config: "PreTrainedConfig",
    tensors: Mapping[str, tuple[DType, Shape]],
) -> Loading:
    """Let transformers match every tensor with a parameter."""
    import torch

    empty = {
        name: torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")
        for name, (dtype, shape) in tensors.items()
    }
    loaded: object = model_class.from_pretrained(
        None,
        config=config,
        state_dict=empty,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    _, found = cast("tuple[object, Found]", loaded)
    return loading_of(model_class, found)


def loading_of(model_class: type, found: Found) -> Loading:
    """Return what transformers reports of a loading, in order."""
    return Loading(
        model_class.__name__,
        tuple(sorted(found["missing_keys"])),
        tuple(sorted(found["unexpected_keys"])),
        tuple(
            Mismatch(name, tuple(shape), tuple(expected))
            for name, shape, expected in sorted(found["mismatched_keys"])
        ),
    )


def need_transformers(option: str) -> None:
    """Check that transformers and torch are installed; `option` is what needs them.

    Raises:
        UsageError: one of them is not.
    """
    try:
        import torch  # noqa: F401 (without it, transformers offers no models)
        import transformers  # noqa: F401
    except ImportError as error:
        what = f"{option}: {error.name} is not installed"
        raise UsageError(what, hint=how_to_install("torch transformers", "torch")) from error


def named_class(architectures: Sequence[str]) -> "type[PreTrainedModel] | None":
    """Return the model class of transformers that a config names first; None if it has none."""
    import transformers

    for name in architectures[:1]:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _model_class(directory: Path, architectures: list[str]) -> "type[PreTrainedModel]":
    import transformers

    if (found := named_class(architectures)) is not None:
        return found
    raise OutputError(
        f"{directory}/config.json: names no model class of transformers {transformers.__version__}",
        expected="architectures: [a class that transformers has]",
        found=", ".join(architectures) or "no architectures",
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers' progress bars and reports from the terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # no types
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no types
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # no types
