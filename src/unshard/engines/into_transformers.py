"""transformers' own `from_pretrained`, on tensors that are read when it indexes them.

transformers decides everything about the model in memory: devices, dtypes, quantisation, inner
names. This module passes the class, the config and the tensors, and checks the loading report.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from unshard.errors import UnshardError, UsageError
from unshard.read.model_config import ModelConfig
from unshard.tensors.selection import Selection
from unshard.write.verification.load import (
    LoadingInfo,
    loading_of,
    named_class,
    need_transformers,
    refuse_misfits,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig as PreTrainedConfig
    from transformers import PreTrainedModel as PreTrainedModel

    from unshard.engines.into_torch import ReadableTensor

GENERATION_NAME = "generation_config.json"
_FIRST_LAZY = 5  # the first version that reads tensors of a state dict by indexing them
# `from_pretrained` does more with these than set a field of the config, so it must get them.
_NOT_FOR_CONFIG = ("dtype", "torch_dtype", "quantization_config")

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """The result of indexing a tensor; transformers then calls `to`, which reads.

    So a tensor that is cast is never in memory as a whole in its stored dtype.

    Attributes:
        stored: the tensor.
        selection: the indexed part.
        failures: collects errors of reading, because transformers replaces them.
    """

    stored: "ReadableTensor"
    selection: Selection
    failures: list[UnshardError]

    def to(
        self, device: "torch.device | str | int | None" = None, dtype: "torch.dtype | None" = None
    ) -> "Tensor":
        """Read the values to a device, cast by torch."""
        import torch

        is_cast = dtype is not None and str(dtype) != f"torch.{self.stored.operation.to}"
        is_here = device is None or torch.device(device).type == "cpu"
        try:
            if not is_cast or not is_here or self.selection.turned:
                return self.stored.read(self.selection).to(device=device, dtype=dtype)
            out = torch.empty(self.selection.counts, dtype=dtype, device="cpu")
            self.stored.copy_to(out, self.selection)
            return out.reshape(self.selection.shape)
        except UnshardError as error:
            self.failures.append(error)
            raise


class PretrainedClass(Protocol):
    """A model class of transformers, or an Auto class."""

    def from_pretrained(self, name: None, **options: object) -> object:
        """Build a model, and load tensors into it."""


def need_lazy_loading() -> None:
    """Check that torch, and a transformers that reads lazy tensors, are installed.

    Raises:
        UsageError: they are not.
    """
    need_transformers("from_pretrained")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < _FIRST_LAZY:
        raise UsageError(
            f"from_pretrained needs transformers {_FIRST_LAZY} or later, which reads tensors "
            "separately",
            found=f"transformers {transformers.__version__}",
            hint="update transformers, or merge the checkpoint and load the merged model; "
            "unshard.load_into fills an existing model",
        )


def config_object(config: object) -> "PreTrainedConfig | None":
    """Return the caller's config if it is an object of transformers, None if it is a path.

    Raises:
        UsageError: it is neither.
    """
    from transformers import PreTrainedConfig

    if config is None or isinstance(config, PreTrainedConfig):
        return config
    if isinstance(config, str | Path):
        return None
    raise UsageError(
        f"config: a {type(config).__name__} is not a config",
        expected="a path, or a config object of transformers",
    )


def choose_loader(
    auto_class: object, config: "ModelConfig | PreTrainedConfig", options: Options
) -> "tuple[PretrainedClass, PreTrainedConfig, Options]":
    """Return the class that loads a model, its config, and the remaining keywords.

    Args:
        auto_class: a class with `from_pretrained`; None: the class of the config.
        config: the model's config, or a config object to use unchanged.
        options: keywords for transformers' `from_pretrained`.

    Raises:
        UsageError: transformers cannot use the config, or `auto_class` does not fit it.
    """
    trusted = options.get("trust_remote_code") is True
    if not isinstance(config, ModelConfig):
        names = config.architectures or []
        return _choose_class(auto_class, config, names, trusted=trusted), config, options
    read = _read_config(config, trusted=trusted)
    architectures = config.fields.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    loader = _choose_class(auto_class, read, names, trusted=trusted)
    return loader, *_make_config(loader, read, config, options)


def load_pretrained(
    loader: PretrainedClass,
    tensors: Mapping[str, object],
    config: "PreTrainedConfig",
    options: Options,
) -> "tuple[PreTrainedModel, LoadingInfo]":
    """Let transformers load tensors into a model; return it, and the loading info.

    Args:
        loader: the class, from `choose_loader`.
        tensors: by names of the hub; indexing a tensor with `...` reads it.
        config: the model's config, from `choose_loader`.
        options: other keywords for transformers' `from_pretrained`.
    """
    ours = {
        "config": config,
        "state_dict": dict(tensors),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `refuse_differences` lists them with all others
    }
    loaded = loader.from_pretrained(None, **{**options, **ours})
    model, info = cast("tuple[PreTrainedModel, LoadingInfo]", loaded)
    if options.get("ignore_mismatched_sizes") is True:
        info = {**info, "mismatched_keys": ()}
    return model, info


def _read_config(config: ModelConfig, *, trusted: bool) -> "PreTrainedConfig":
    """Return the config as read by transformers, with its class and its remote code, if any."""
    import transformers

    path = config.path.parent if config.path.name == "config.json" else config.path
    try:
        return cast(
            "PreTrainedConfig",
            transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, trust_remote_code=trusted
            ),
        )
    except Exception as error:
        raise UsageError(
            f"{config.path}: transformers {transformers.__version__} cannot use it: {error}"
        ) from error


def _choose_class(
    auto_class: object, config: "PreTrainedConfig", architectures: Sequence[str], *, trusted: bool
) -> PretrainedClass:
    """Return the class that loads the model; an Auto class selects it by the config."""
    import torch
    import transformers

    chosen = auto_class
    if chosen is None:
        chosen = _remote_class(config, architectures) if trusted else None
        chosen = chosen or named_class(architectures) or transformers.AutoModelForCausalLM
    name = getattr(chosen, "__name__", repr(chosen))
    if not callable(getattr(chosen, "from_pretrained", None)):
        raise UsageError(
            f"auto_class: {name} has no from_pretrained",
            hint="give the class itself: from transformers import AutoModelForCausalLM",
        )
    from_config = getattr(chosen, "from_config", None)
    if from_config is None:
        return cast("PretrainedClass", chosen)
    try:
        with torch.device("meta"):
            return cast("PretrainedClass", type(from_config(config, trust_remote_code=trusted)))
    except Exception as error:
        fact = f"the config's class is {architectures[0]}" if architectures else ""
        raise UsageError(
            f"auto_class: {name} has no model for this config: {error}",
            hint="; ".join(filter(None, [fact, "give a class that fits: auto_class=…"])),
        ) from error


def _remote_class(config: "PreTrainedConfig", architectures: Sequence[str]) -> object:
    """Return the Auto class for which a config has remote code; None if it has none."""
    import transformers

    for auto, code in (getattr(config, "auto_map", None) or {}).items():
        if str(code).rpartition(".")[2] in architectures[:1]:
            return getattr(transformers, auto, None)
    return None


def _make_config(
    loader: PretrainedClass, read: "PreTrainedConfig", config: ModelConfig, options: Options
) -> "tuple[PreTrainedConfig, Options]":
    """Return the config for a class, changed by the options that are its fields, and the others.

    transformers treats the keywords of an Auto class's `from_pretrained` the same way. The class
    may be the text model of a larger model; then it gets the nested config.
    """
    kind: type[PreTrainedConfig] = getattr(loader, "config_class", None) or type(read)
    nested = (fields for fields in config.nested if fields.get("model_type") == kind.model_type)
    direct = {name: value for name, value in options.items() if name in _NOT_FOR_CONFIG}
    others = {name: value for name, value in options.items() if name not in direct}
    result: object = kind.from_dict(
        copy.deepcopy(dict(next(nested, config.fields))), return_unused_kwargs=True, **others
    )
    final, unused = cast("tuple[PreTrainedConfig, dict[str, object]]", result)
    return final, {**unused, **direct}


def refuse_differences(
    model: "PreTrainedModel", info: LoadingInfo, *, allow_missing: bool, allow_unexpected: bool
) -> None:
    """Refuse differences between the loaded names and shapes and the model's.

    Raises:
        ConversionError: they differ; lists all differences.
    """
    loading = loading_of(type(model), info)
    missing = () if allow_missing else loading.missing
    unexpected = () if allow_unexpected else loading.unexpected
    hints = ["auto_class=… selects another class"]
    if unexpected:
        hints.insert(0, "⟦+--allow-unexpected⟧ leaves out tensors that the model does not have")
    if missing:
        hints.insert(0, "⟦+--allow-missing⟧ lets transformers initialise missing tensors")
    differences = replace(loading, missing=missing, unexpected=unexpected)
    refuse_misfits(differences, hint="; ".join(hints))


def set_generation(model: "PreTrainedModel", file: Path) -> None:
    """Set a model's generation config from a file, as for a model from a directory.

    The file is the generation config, or the config.json of an old model, with such fields.
    """
    from transformers import GenerationConfig

    if model.can_generate():
        read = partial(GenerationConfig.from_pretrained, file.parent, file.name)
        is_own = file.name == GENERATION_NAME
        model.generation_config = read() if is_own else read(_from_model_config=True)
