"""Experts that vLLM fuses into one parameter, which some kernels store in another order.

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
"""Kernels whose order can be computed on the CPU."""


def has_experts(module: nn.Module) -> bool:
    """Return whether a module has fused experts that are not quantised."""
    return isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)


@contextmanager
def packing(model: Any) -> Iterator[None]:
    """Make a reload pack the experts for CPUs again.

    vLLM packs them only when it makes their kernel. After a reload with an existing kernel they
    would be in the order of the checkpoint, and the engine would compute nonsense.
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
    """Return the object that packs a module's experts; None if the kernel's order is unknown.

    It may be missing during a reload.
    """
    method = module.quant_method
    return method.moe_kernel.fused_experts if method.unquantized_backend in _COMPARED else None


def packed_experts(
    module: Any, experts: Any, loaded: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield names of parameters, their expected values, and the rows of these values.

    Args:
        module: with experts.
        experts: the result of `experts_of`.
        loaded: the parameters that the model's loaders made from a checkpoint, by name; NaN where
            nothing was loaded. Missing parameters count as NaN.
    """
    touched = torch.stack([~values.isnan().flatten(1).all(1) for values in loaded.values()]).any(0)
    rows = touched.nonzero().flatten()
    recorded, _ = get_layerwise_info(module).restore_metadata
    packed = nn.Module()
    for name, parameter in recorded.items():
        if name in loaded:
            values = loaded[name][rows]
        else:
            shape = (len(rows), *parameter.shape[1:])
            values = torch.full(shape, torch.nan, dtype=parameter.dtype)
        packed.register_parameter(name, nn.Parameter(values, requires_grad=False))
    _pack(module.quant_method, experts, packed)
    for name in loaded:
        yield name, getattr(packed, name).detach(), rows


def _pack(method: Any, experts: Any, module: Any) -> None:
    """Put experts into the order of their kernel, with vLLM's own functions."""
    module.w13_weight.data, module.w2_weight.data = convert_to_unquantized_kernel_format(
        method.unquantized_backend, method.moe, module.w13_weight.data, module.w2_weight.data
    )
    if method.unquantized_backend is _CPU and not getattr(experts, "_use_zentorch", False):
        experts.process_weights_after_loading(module)
