"""Whether a running engine of SGLang holds a checkpoint that it has loaded.

Some tensors are read again and passed to the model's own `load_weights`, while scratch memory on
the CPU takes the place of the parameters that are written. So the loaders of the model decide what
becomes of a tensor: which part this rank has, and where it is in a fused parameter. What they wrote
must be equal, bit by bit, to what the engine computes with.
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

from unshard.errors import UnshardError
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import Weights
from unshard.showing import counted

_SHOWN = 5
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
_LOADER = "weight_loader"


def reason_against(model: nn.Module, config: ModelConfig) -> str | None:
    """Return why what an engine holds cannot be compared with a checkpoint, or None."""
    if config.quantization is not None:
        return f"it quantises the weights ({config.quantization}), so they cannot be compared"
    if hasattr(model, "post_load_weights"):
        return "its model makes further weights of those it loads, which cannot be compared"
    if any(getattr(module, "use_intel_amx_backend", False) for module in model.modules()):
        return "it packs the weights for AMX, so they cannot be compared"
    return None


def verify(weights: Weights, model: nn.Module) -> None:
    """Compare what a model holds with a checkpoint.

    Raises:
        UnshardError: it holds other values, or nothing could be compared.
    """
    compared, problems = 0, list[str]()
    for group in choose_probes(weights.shapes):
        with _aside(model) as held:
            load: Any = model.load_weights
            load((name, weights.tensors[name]) for name in group)
            made = {name: model.get_parameter(name).data for name in held}
        found = [(name, *_counted(model, name, made[name], held[name])) for name in held]
        compared += (known := sum(count for _, count, _ in found))
        problems += [f"{name} for {group[0]}" for name, _, same in found if not same]
        if found and not known:
            problems.append(f"nothing of {group[0]} can be compared")
    if problems or not compared:
        raise UnshardError(
            f"{weights.path}: the engine does not hold this checkpoint after the update",
            found=f"{counted(len(problems), 'other parameter')}: {', '.join(problems[:_SHOWN])}",
            hint="end the engine: what it holds is not known",
        )


def _counted(model: nn.Module, name: str, made: Tensor, held: Tensor) -> tuple[int, bool]:
    """Return how many elements of a parameter were compared, and whether they are equal."""
    method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
    if not (method is None or isinstance(method, _UNQUANTIZED)):
        return 0, True  # kernels may have changed the order of the values
    known = ~torch.isnan(made)
    return int(known.sum()), torch.equal(made[known], held.to("cpu")[known])


@contextmanager
def _aside(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Let what is loaded go into scratch memory, NaN where nothing is written.

    Yields:
        What the engine holds of each parameter that was written, by the parameter's name.
    """
    held: dict[str, Tensor] = {}
    lock = Lock()  # models may load experts with threads
    parameters = [(n, p) for n, p in model.named_parameters() if _is_plain(p)]
    before = [parameter.__dict__.get(_LOADER) for _, parameter in parameters]
    try:
        for name, parameter in parameters:
            _load_aside(name, parameter, held, lock)
        yield held
    finally:
        for (name, parameter), loader in zip(parameters, before, strict=True):
            if name in held:
                parameter.data = held[name]
            if loader is None:
                del parameter.__dict__[_LOADER]
            else:
                parameter.__dict__[_LOADER] = loader


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has floats, and its loader as an attribute, if it has one."""
    return parameter.is_floating_point() and not hasattr(type(parameter), _LOADER)


def _load_aside(name: str, parameter: Any, held: dict[str, Tensor], lock: Lock) -> None:
    load = getattr(parameter, _LOADER, default_weight_loader)

    def load_aside(*args: object, **given: object) -> object:
        with lock:
            if name not in held:
                scratch = torch.full_like(parameter.data, torch.nan, device="cpu")
                held[name], parameter.data = parameter.data, scratch
        return load(*args, **given)

    parameter.weight_loader = load_aside
