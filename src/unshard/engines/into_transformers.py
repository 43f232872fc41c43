"""Into transformers: its own `from_pretrained`, on tensors that are read when it asks for them.

transformers decides everything about the model in memory: devices, dtypes, quantisation, names
inside. This module gives it the class, the config and the tensors, and compares what it reports.
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

    from unshard.engines.into_torch import StoredTensor

GENERATION_NAME = "generation_config.json"
_FIRST_LAZY = 5  # the first version that reads tensors of a state dict by indexing them
# Of these, `from_pretrained` makes more than a field of the config: it must get them itself.
_NOT_FOR_CONFIG = ("dtype", "torch_dtype", "quantization_config")

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """What transformers gets when it indexes a tensor: it calls `to` next, and that reads.

    So a tensor that is cast is never in memory as a whole in the dtype in which it is stored.

    Attributes:
        stored: the tensor.
        selection: what is taken of it.
        failures: gets what reading raises, because transformers makes another error of it.
    """

    stored: "StoredTensor"
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


class Loader(Protocol):
    """A model class of transformers, or an Auto class."""

    def from_pretrained(self, name: None, **options: object) -> object:
        """Build a model, and load tensors into it."""


def need_lazy_loading() -> None:
    """Check that torch and a version of transformers that reads lazy tensors are installed.

    Raises:
        UsageError: they are not.
    """
    need_transformers("from_pretrained")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < _FIRST_LAZY:
        raise UsageError(
            f"from_pretrained needs transformers {_FIRST_LAZY} or later, which reads tensors one "
            "by one",
            found=f"transformers {transformers.__version__}",
            hint="update transformers, or merge the checkpoint and load the merged model; "
            "unshard.load_into fills a model that you have built",
        )


def config_object(given: object) -> "PreTrainedConfig | None":
    """Return a config that a caller gave, if it is an object of transformers and not a path.

    Raises:
        UsageError: it is neither.
    """
    from transformers import PreTrainedConfig

    if given is None or isinstance(given, PreTrainedConfig):
        return given
    if isinstance(given, str | Path):
        return None
    raise UsageError(
        f"config: a {type(given).__name__} is not a config",
        expected="a path, or a config object of transformers",
    )


def choose_loader(
    auto_class: object, config: "ModelConfig | PreTrainedConfig", options: Options
) -> "tuple[Loader, PreTrainedConfig, Options]":
    """Return the class that loads a model, its config, and the keywords that are left for it.

    Args:
        auto_class: a class with `from_pretrained`; None for the class that the config names.
        config: the model's config, or an object to use as it is.
        options: keywords for transformers' `from_pretrained`.

    Raises:
        UsageError: transformers cannot use the config, or `auto_class` does not fit it.
    """
    trusted = options.get("trust_remote_code") is True
    if not isinstance(config, ModelConfig):
        stated = config.architectures or []
        return _choose_class(auto_class, config, stated, trusted=trusted), config, options
    known = _read_config(config, trusted=trusted)
    named = config.fields.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    loader = _choose_class(auto_class, known, names, trusted=trusted)
    return loader, *_make_config(loader, known, config, options)


def load_pretrained(
    loader: Loader,
    tensors: Mapping[str, object],
    config: "PreTrainedConfig",
    options: Options,
) -> "tuple[PreTrainedModel, LoadingInfo]":
    """Let transformers load tensors into a model; return it, and the differences that it reports.

    Args:
        loader: the class, by `choose_loader`.
        tensors: by names of the hub; indexing one with `...` reads it.
        config: of the model, by `choose_loader`.
        options: other keywords for transformers' `from_pretrained`.
    """
    ours = {
        "config": config,
        "state_dict": dict(tensors),
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # `refuse_differences` names them with all others
    }
    loaded = loader.from_pretrained(None, **{**options, **ours})
    model, found = cast("tuple[PreTrainedModel, LoadingInfo]", loaded)
    if options.get("ignore_mismatched_sizes") is True:
        found = {**found, "mismatched_keys": ()}
    return model, found


def _read_config(config: ModelConfig, *, trusted: bool) -> "PreTrainedConfig":
    """Return the config as transformers reads it, which knows its class and where its code is."""
    import transformers

    place = config.path.parent if config.path.name == "config.json" else config.path
    try:
        found: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=trusted
        )
    except Exception as error:
        what = f"{config.path}: transformers {transformers.__version__} cannot use it: {error}"
        raise UsageError(what) from error
    return found


def _choose_class(
    auto_class: object, known: "PreTrainedConfig", architectures: Sequence[str], *, trusted: bool
) -> Loader:
    """Return the class that loads the model: an Auto class chooses by the config."""
    import torch
    import transformers

    chosen = auto_class
    if chosen is None:
        chosen = _remote_class(known, architectures) if trusted else None
        chosen = chosen or named_class(architectures) or transformers.AutoModelForCausalLM
    name = getattr(chosen, "__name__", repr(chosen))
    if not callable(getattr(chosen, "from_pretrained", None)):
        raise UsageError(
            f"auto_class: {name} has no from_pretrained",
            hint="give the class itself: from transformers import AutoModelForCausalLM",
        )
    from_config = getattr(chosen, "from_config", None)
    if from_config is None:
        return cast("Loader", chosen)
    try:
        with torch.device("meta"):
            return cast("Loader", type(from_config(known, trust_remote_code=trusted)))
    except Exception as error:
        named = f"the config names {architectures[0]}" if architectures else ""
        raise UsageError(
            f"auto_class: {name} has no model for this config: {error}",
            hint="; ".join(filter(None, [named, "give a class that fits: auto_class=…"])),
        ) from error


def _remote_class(known: "PreTrainedConfig", architectures: Sequence[str]) -> object:
    """Return the Auto class for which a config names code of its own; None if it names none."""
    import transformers

    for auto, code in (getattr(known, "auto_map", None) or {}).items():
        if str(code).rpartition(".")[2] in architectures[:1]:
            return getattr(transformers, auto, None)
    return None


def _make_config(
    loader: Loader, known: "PreTrainedConfig", config: ModelConfig, options: Options
) -> "tuple[PreTrainedConfig, Options]":
    """Return the config for a class, with the fields that options change, and the other options.

    This is what transformers does with the keywords of an Auto class's `from_pretrained`. The class
    may be of the text model inside a larger one, and then has its config.
    """
    kind: type[PreTrainedConfig] = getattr(loader, "config_class", None) or type(known)
    own = (one for one in config.nested if one.get("model_type") == kind.model_type)
    kept = {name: value for name, value in options.items() if name in _NOT_FOR_CONFIG}
    passed = {name: value for name, value in options.items() if name not in kept}
    made: object = kind.from_dict(
        copy.deepcopy(dict(next(own, config.fields))), return_unused_kwargs=True, **passed
    )
    built, unused = cast("tuple[PreTrainedConfig, dict[str, object]]", made)
    return built, {**unused, **kept}


def refuse_differences(
    model: "PreTrainedModel", found: LoadingInfo, *, allow_missing: bool, allow_unexpected: bool
) -> None:
    """Compare the names and shapes that were loaded with those of the model.

    Raises:
        ConversionError: they differ; all that do are named.
    """
    loading = loading_of(type(model), found)
    missing = () if allow_missing else loading.missing
    unexpected = () if allow_unexpected else loading.unexpected
    hints = [
        *(["⟦+--allow-missing⟧ lets transformers initialise what is missing"] if missing else []),
        *(["⟦+--allow-unexpected⟧ leaves out what the model does not have"] if unexpected else []),
        "auto_class=… names another class",
    ]
    left = replace(loading, missing=missing, unexpected=unexpected)
    refuse_misfits(left, hint="; ".join(hints))


def set_generation(model: "PreTrainedModel", file: Path) -> None:
    """Give a model the generation config of a file, as it gets it from a directory.

    The file is the generation config, or the model's config.json: old ones have such fields.
    """
    from transformers import GenerationConfig

    if model.can_generate():
        read = partial(GenerationConfig.from_pretrained, file.parent, file.name)
        is_own = file.name == GENERATION_NAME
        model.generation_config = read() if is_own else read(_from_model_config=True)
