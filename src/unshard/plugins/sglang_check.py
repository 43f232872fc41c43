"""Verification that a running engine of SGLang has loaded a checkpoint.

Some tensors are read again and passed to the model's own `load_weights`, while scratch memory on
the CPU replaces the parameters that it writes. So the model's loaders decide which part of a tensor
this rank has, and where it is in a fused parameter. The result must be equal, bit by bit, to the
parameters of the engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from unshard.console import counted
from unshard.errors import UnshardError
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import EngineWeights

_SHOWN = 5
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_LOADER = "weight_loader"


def reason_against(model: nn.Module, config: ModelConfig) -> str | None:
    """Return why an engine's weights cannot be compared with a checkpoint, or None."""
    if config.quantization is not None:
        return f"it quantises the weights ({config.quantization}), so they cannot be compared"
    if hasattr(model, "post_load_weights"):
        return "its model derives further weights, which cannot be compared"
    if any(getattr(module, "use_intel_amx_backend", False) for module in model.modules()):
        return "it packs the weights for AMX, so they cannot be compared"
    return None


def verify(weights: EngineWeights, model: nn.Module) -> None:
    """Compare a model's parameters with a checkpoint.

    Raises:
        UnshardError: they differ, or nothing could be compared.
    """
    compared, problems = 0, list[str]()
    for group in choose_probes(weights.shapes):
        with _into_scratch(model) as live:
            load: Any = model.load_weights
            load((name, weights.tensors[name]) for name in group)
            expected = {name: model.get_parameter(name).data for name in live}
        results = [(name, *_compare(model, name, expected[name], live[name])) for name in live]
        compared += (elements := sum(count for _, count, _ in results))
        problems += [f"{name} for {group[0]}" for name, _, is_equal in results if not is_equal]
        if results and not elements:
            problems.append(f"no value of {group[0]} can be compared")
    if problems or not compared:
        raise UnshardError(
            f"{weights.path}: the engine does not hold this checkpoint after the update",
            found=f"{counted(len(problems), 'other parameter')}: {', '.join(problems[:_SHOWN])}",
            hint="end the engine: its weights are undefined",
        )


def _compare(model: nn.Module, name: str, expected: Tensor, live: Tensor) -> tuple[int, bool]:
    """Return how many elements of a parameter were compared, and whether they are equal."""
    method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
    if not (method is None or isinstance(method, _UNQUANTIZED)):
        return 0, True  # kernels may have changed the order of the values
    written = ~torch.isnan(expected)
    return int(written.sum()), torch.equal(expected[written], live.to("cpu")[written])


@contextmanager
def _into_scratch(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let loaders write into scratch memory, which is NaN where nothing is written.

    Yields:
        The engine's own data of each parameter that was written, by name.
    """
    live: dict[str, Tensor] = {}
    lock = Lock()  # models may load experts with threads
    # Parameters with floats, whose loader is not a method of their class.
    parameters = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not hasattr(type(parameter), _LOADER)
    ]
    before = [parameter.__dict__.get(_LOADER) for _, parameter in parameters]
    try:
        for name, parameter in parameters:
            _redirect(name, parameter, live, lock)
        yield live
    finally:
        for (name, parameter), loader in zip(parameters, before, strict=True):
            if name in live:
                parameter.data = live[name]
            if loader is None:
                del parameter.__dict__[_LOADER]
            else:
                parameter.__dict__[_LOADER] = loader


def _redirect(name: str, parameter: Any, live: dict[str, Tensor], lock: Lock) -> None:
    load = getattr(parameter, _LOADER, default_weight_loader)

    def load_into_scratch(*args: object, **keywords: object) -> object:
        with lock:
            if name not in live:
                scratch = torch.full_like(parameter.data, torch.nan, device="cpu")
                live[name], parameter.data = parameter.data, scratch
        return load(*args, **keywords)

    parameter.weight_loader = load_into_scratch
