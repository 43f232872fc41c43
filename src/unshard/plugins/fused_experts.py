"""Experts that vLLM fuses into one parameter, which some of its kernels store in another order.

Interfaces of vLLM 0.32: a module with experts has a `quant_method`; if that is an
`UnquantizedFusedMoEMethod`, its parameters are `w13_weight` and `w2_weight`, and perhaps biases,
whose first dimension counts the experts of this worker.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    convert_to_unquantized_kernel_format,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_CPU = UnquantizedMoeBackend.CPU
_COMPARED = {
    UnquantizedMoeBackend.TRITON,
    UnquantizedMoeBackend.BATCHED_TRITON,
    UnquantizedMoeBackend.FLASHINFER_CUTLASS,
    _CPU,
}
"""Kernels whose order can be made of tensors on the CPU."""


def has_experts(module: nn.Module) -> bool:
    """Return whether a module has fused experts that are not quantised."""
    return isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)


@contextmanager
def packing(model: Any) -> Iterator[None]:
    """Let a reload pack the experts of CPUs, as a start does.

    vLLM packs them when it makes their kernel, and only then. After a reload with the kernel in
    place they would be in the order of the checkpoint, and the engine would compute nonsense.
    """
    kernels = {
        module.quant_method: module.quant_method.moe_kernel
        for module in model.modules()
        if has_experts(module) and module.quant_method.unquantized_backend is _CPU
    }
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:  # its experts were not loaded
                method.moe_kernel = kernel


def experts_of(module: Any) -> Any:
    """Return what packs the experts of a module for their kernel; None if their order is not known.

    During a reload it may not be in place.
    """
    method = module.quant_method
    return method.moe_kernel.fused_experts if method.unquantized_backend in _COMPARED else None


def packed_experts(
    module: Any, experts: Any, loaded: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names of parameters, what they must be, and in which rows.

    Args:
        module: with experts.
        experts: what `experts_of` returned.
        loaded: what the model's loaders made of a checkpoint, by the names of the parameters; NaN
            where nothing was loaded. What is not in it counts as NaN.
    """
    touched = torch.stack([~one.isnan().flatten(1).all(1) for one in loaded.values()]).any(0)
    rows = touched.nonzero().flatten()
    recorded, _ = get_layerwise_info(module).restore_metadata
    made = nn.Module()
    for name, one in recorded.items():
        if name in loaded:
            values = loaded[name][rows]
        else:
            values = torch.full((len(rows), *one.shape[1:]), torch.nan, dtype=one.dtype)
        made.register_parameter(name, nn.Parameter(values, requires_grad=False))
    _store(module.quant_method, experts, made)
    for name in loaded:
        yield name, getattr(made, name).detach(), rows


def _store(method: Any, experts: Any, made: Any) -> None:
    """Put experts into the order of their kernel, as vLLM does."""
    made.w13_weight.data, made.w2_weight.data = convert_to_unquantized_kernel_format(
        method.unquantized_backend, method.moe, made.w13_weight.data, made.w2_weight.data
    )
    if method.unquantized_backend is _CPU and not getattr(experts, "_use_zentorch", False):
        experts.process_weights_after_loading(made)
