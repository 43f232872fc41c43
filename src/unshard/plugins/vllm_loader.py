"""The model loader of vLLM's load format `unshard`, which reads training shards.

Interfaces of vLLM 0.32: a loader's `get_all_weights` yields (name on the hub, tensor), at the start
and in `reload_weights`, which sets `model_config.model` to the path of the reload.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from unshard.keywords import EngineKeywords
from unshard.plugins import serving
from unshard.plugins.serving import OPTIONS, EngineWeights, Shapes, checked, weights_of
from unshard.read import model_config as ours

_CHECKPOINT = "checkpoint"
_STARTED_AS = "started_as"

Extra = dict[str, object]

if not hasattr(DefaultModelLoader, "get_all_weights"):
    raise ImportError("vLLM's DefaultModelLoader has no get_all_weights")

_loaded: WeakKeyDictionary[nn.Module, Shapes] = WeakKeyDictionary()
fed: WeakKeyDictionary[nn.Module, Iterator[tuple[str, Tensor]]] = WeakKeyDictionary()
"""The tensors for a model's reload, from a checkpoint that is open and checked already."""


class UnshardLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM has no types where mypy runs
    """Loads the tensors that `unshard merge` would write from a training checkpoint.

    Args:
        load_config: vLLM's; `model_loader_extra_config` may have "checkpoint", options of
            `unshard.open_checkpoint`, and keys of vLLM's default loader.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        extra: Extra = load_config.model_loader_extra_config
        checked({name: value for name, value in extra.items() if name in OPTIONS})
        # vLLM's loader refuses unknown keys with an error, so it must not get ours.
        own = {*OPTIONS, _CHECKPOINT, _STARTED_AS}
        theirs = {name: value for name, value in extra.items() if name not in own}
        super().__init__(replace(load_config, model_loader_extra_config=theirs))
        self.load_config = load_config

    def download_model(self, model_config: ModelConfig) -> None:
        """Check that the checkpoint can be loaded; there is nothing to download."""
        with weights_of(*self._meant(model_config)) as weights:
            check_config(weights, model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the weights of an engine that starts."""
        # A reload changes the model's path, so a path that differs from this one is a reload.
        self.load_config.model_loader_extra_config.setdefault(_STARTED_AS, model_config.model)
        super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors with their names on the hub, at a start and at a reload."""
        if model in fed:
            yield from fed.pop(model)
            return
        self.counter_before_loading_weights = time.perf_counter()
        with weights_of(*self._meant(model_config)) as weights:
            check_config(weights, model_config)
            yield from weights.read(weights.tensors)
            _loaded[model] = weights.shapes

    def _meant(self, model_config: ModelConfig) -> tuple[str, EngineKeywords]:
        """Return the checkpoint to load, and its options."""
        extra: Extra = self.load_config.model_loader_extra_config
        path = str(model_config.model)
        if path not in {extra.get(_STARTED_AS, path), extra.get(_CHECKPOINT)}:
            return path, options_of_reload(extra, {})  # a reload by vLLM itself
        if _CHECKPOINT not in extra:
            serving.check_local(path)
        options = {name: value for name, value in extra.items() if name in OPTIONS}
        return str(extra.get(_CHECKPOINT, path)), checked(options)


def options_of_reload(extra: Mapping[str, object], options: Mapping[str, object]) -> EngineKeywords:
    """Return the options of a reload: its own, and those of the start except the step."""
    initial = {name: value for name, value in extra.items() if name in OPTIONS and name != "step"}
    return checked({**initial, **options})


def point_to(extra: Extra, checkpoint: str, options: EngineKeywords) -> None:
    """Change the loader's configuration to another checkpoint and options."""
    for name in OPTIONS & extra.keys():
        del extra[name]
    extra.update({_CHECKPOINT: checkpoint, **options})


def shapes_in(model: nn.Module) -> Shapes | None:
    """Return names and shapes of the tensors that this loader loaded into a model, if it did."""
    return _loaded.get(model)


def check_config(weights: EngineWeights, model_config: ModelConfig) -> None:
    """Check that the engine's config fits the weights, with `serving.check_config`."""
    config = ours.ModelConfig(model_config.hf_config.to_dict())
    hint = "start it with `unshard vllm`, which gives the engine the config that fits"
    serving.check_config(weights, config, hint=hint)
