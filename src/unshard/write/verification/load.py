"""Verify that transformers loads every tensor of an output: `verify --load`.

The model class of config.json is built on the meta device and loads tensors without data.
transformers' own loading checks names and shapes, because it handles renamings, ties and buffers.
No weights are read, and no code of the output runs.

Only this module, `engines.into_transformers` and `engines.into_torch` import torch or transformers
(the extra `torch`), when they are used.
"""

import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from unshard.convert.outputs import ConvertedTensor
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


class LoadingInfo(TypedDict):
    """The loading info of transformers."""

    missing_keys: Iterable[str]
    unexpected_keys: Iterable[str]
    mismatched_keys: Iterable[tuple[str, Shape, Shape]]


def forms_of(tensors: Iterable[ConvertedTensor]) -> dict[str, tuple[DType, Shape]]:
    """Return dtype and shape of every tensor, by name."""
    return {tensor.name: (tensor.dtype, shape_of(tensor.recipe)) for tensor in tensors}


def verify_load(directory: Path, tensors: Mapping[str, tuple[DType, Shape]]) -> Loading:
    """Load names, dtypes and shapes into the model class of a directory's config.json.

    Raises:
        UsageError: torch or transformers is not installed.
        OutputError: config.json is missing, has no class of transformers, or does not fit it.
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
    """Yield a local directory with the config.json of one that may be in an object store."""
    if not isinstance(directory, RemotePath):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        (Path(scratch) / "config.json").write_bytes((directory / "config.json").read_bytes())
        yield Path(scratch)


def check_class(
    model_class: object, config: ModelConfig | None, tensors: Iterable[ConvertedTensor]
) -> None:
    """Compare every name and shape of an output with the user's model class.

    A model class of transformers, or an Auto class, is built on the meta device from the config of
    the output.

    Raises:
        ConversionError: names or shapes differ; lists all differences.
        UsageError: torch or transformers is not installed, there is no config, or `model_class` is
            not a model class.
        OutputError: the class cannot be built.
    """
    if not isinstance(model_class, type):
        raise UsageError(
            f"model_cls: {model_class!r} is not a class",
            hint="give the class itself: from transformers import Qwen2ForCausalLM",
        )
    if config is None:
        raise UsageError("model_cls: there is no config to build it from", hint="pass config=…")
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config.fields), encoding="utf-8")
        loading = _load_as(model_class, Path(scratch), forms_of(tensors))
    refuse_misfits(loading)


def refuse_misfits(loading: Loading, hint: str = "") -> None:
    """Raise ConversionError if names or shapes differ from those of a model; list all of them."""
    problems = [
        *(f"{name}: is missing" for name in loading.missing),
        *(f"{name}: is not in the model" for name in loading.unexpected),
        *(f"{m.name}: shape {list(m.found)}, not {list(m.expected)}" for m in loading.mismatched),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConversionError(
            f"the checkpoint does not fit {loading.model_class} ({len(problems)} problems)",
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
            if hasattr(model_class, "from_config"):  # an Auto class selects the class by config
                model_class = type(model_class.from_config(config))
        if issubclass(model_class, PreTrainedModel):
            with _silence():
                return _placed(model_class, config, tensors)
    except Exception as error:
        raise OutputError(
            f"{model_class.__name__}: cannot be built from the config, or loaded: {error}"
        ) from error
    raise UsageError(
        f"model_cls: {model_class.__name__} is not a model class of transformers",
        expected="a subclass of PreTrainedModel, or an AutoModelFor class",
    )


def _placed(
    model_class: "type[PreTrainedModel]",
    config: "PreTrainedConfig",
    tensors: Mapping[str, tuple[DType, Shape]],
) -> Loading:
    """Let transformers match every tensor to a parameter."""
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
    _, info = cast("tuple[object, LoadingInfo]", loaded)
    return loading_of(model_class, info)


def loading_of(model_class: type, info: LoadingInfo) -> Loading:
    """Return the sorted report of a loading."""
    return Loading(
        model_class.__name__,
        tuple(sorted(info["missing_keys"])),
        tuple(sorted(info["unexpected_keys"])),
        tuple(
            Mismatch(name, tuple(shape), tuple(expected))
            for name, shape, expected in sorted(info["mismatched_keys"])
        ),
    )


def need_modules(subject: str, *modules: str) -> None:
    """Check that modules of the extra `torch`, which the subject of a message needs, are installed.

    Raises:
        UsageError: one of them is not.
    """
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        packages = " ".join(modules).replace("_", "-")
        hint = how_to_install(packages, "torch")
        raise UsageError(f"{subject}{error.name} is not installed", hint=hint) from error


def need_transformers(option: str) -> None:
    """Check that transformers, and torch for its models, are installed; raise as `need_modules`."""
    need_modules(f"{option}: ", "torch", "transformers")


def named_class(architectures: Sequence[str]) -> "type[PreTrainedModel] | None":
    """Return a config's first architecture as a class of transformers; None if it has none."""
    import transformers

    for name in architectures[:1]:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class
    return None


def _model_class(directory: Path, architectures: list[str]) -> "type[PreTrainedModel]":
    import transformers

    if (model_class := named_class(architectures)) is not None:
        return model_class
    raise OutputError(
        f"{directory}/config.json: has no model class of transformers {transformers.__version__}",
        expected="architectures: [a class of transformers]",
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
