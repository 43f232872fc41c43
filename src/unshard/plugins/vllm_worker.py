"""What workers of vLLM do for us: a reload that is checked, against the checkpoint itself.

The check reads some tensors of the checkpoint again and passes them to the model's own
`load_weights`, while scratch tensors on the CPU take the place of its parameters. So the loaders of
the model decide what becomes of a tensor: which part this rank has, and where it is in a fused
parameter. What they wrote must be equal, bit by bit, to what the engine computes with. Where the
CPU backend of vLLM has packed a matrix and dropped it, the packed one is read by multiplying it
with one-hot rows, which is exact.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from unshard.errors import UnshardError, UsageError
from unshard.plugins.fused_experts import compare_experts, has_experts, packing
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import Weights, check_shapes, weights_of
from unshard.plugins.vllm_loader import check_config, options_of_reload, point_to, shapes_in
from unshard.showing import counted

_SHOWN = 5
_COLUMNS = 64  # of a packed matrix, about: to read all of a large one takes longer than to load it
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class _Model(Protocol):
    """What is used of vLLM's models, which are modules of torch."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...

    def modules(self) -> Iterator[nn.Module]: ...


class _Runner(Protocol):
    def get_model(self) -> Any: ...


class _Worker(Protocol):
    """What is used of vLLM's worker."""

    vllm_config: VllmConfig
    model_runner: _Runner

    def reload_weights(self, *, weights_path: str) -> None: ...


class WorkerExtension:
    """Methods for vLLM's workers: `--worker-extension-cls`."""

    def unshard_reload(
        self: _Worker, checkpoint: str, options: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Load another checkpoint into the running engine, and check what it holds afterwards.

        Args:
            checkpoint: as for `unshard merge`.
            options: of `unshard.open_checkpoint`; those that are not given are as at the start.

        Returns:
            Which checkpoint it was, how many parameters and elements were compared, and the kinds
            of parameters that were not, because their order in the engine is not known.

        Raises:
            UnshardError: the checkpoint cannot be read or does not fit: nothing was changed. Or
                the engine holds other values: it must not be used any more.
        """
        config = self.vllm_config
        _refuse(config)
        model, extra = self.model_runner.get_model(), config.load_config.model_loader_extra_config
        given = options_of_reload(extra, options or {})
        with weights_of(checkpoint, given) as weights:
            check_config(weights, config.model_config)
            if (before := shapes_in(model)) is not None:
                check_shapes(weights, before)
            if weights.step is not None:  # a run may have a newer one by now
                given["step"] = weights.step
            point_to(extra, checkpoint, given)
            with packing(model):
                self.reload_weights(weights_path=checkpoint)
            _refresh_tied(model)
            with set_current_vllm_config(config), torch.no_grad():
                return _verify(weights, model)


def _refuse(config: VllmConfig) -> None:
    """Refuse engines whose weights cannot be replaced, or not be compared."""
    model, load_format = config.model_config, config.load_config.load_format
    reason = ""
    if load_format != "unshard":
        reason = f"it was started with --load-format {load_format}, not unshard"
    elif model.is_hybrid or model.has_inner_state:
        reason = (
            "it has layers with a state (Mamba and the like), which a reload by vLLM corrupts: "
            "vllm-project/vllm#48284"
        )
    elif model.quantization is not None:
        reason = (
            f"it quantises the weights ({model.quantization}), so what it holds cannot be compared"
        )
    if reason:
        raise UsageError(
            f"the engine cannot take another checkpoint: {reason}", hint="start a new engine"
        )


def _refresh_tied(model: _Model) -> None:
    """Pack again what shares its weight with another module: vLLM's reload passes over it."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or owners.setdefault(id(weight), module) is module:
            continue
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)


@dataclass
class _Scratch:
    """What the model's loaders make of a tensor, in place of a parameter."""

    module: nn.Module
    name: str
    shadow: Tensor
    values: Tensor = field(init=False)

    def __post_init__(self) -> None:
        with torch.device("cpu"):
            self.values = materialize_meta_tensor(self.shadow)
        if self.values.is_floating_point():
            self.values.data.fill_(torch.nan)  # what is not written is not compared


def _verify(weights: Weights, model: _Model) -> dict[str, object]:
    """Compare what the engine holds with the checkpoint; return what was compared."""
    parameters, elements, problems, unchecked = 0, 0, list[str](), set[str]()
    for group in choose_probes(weights.shapes):
        with _shadowed(model) as written:
            model.load_weights(weights.read(group))
        compared = 0
        for title, expected, held in _compared(model, written.values(), unchecked):
            known, is_same = _count(expected, held)
            compared, parameters = compared + known, parameters + 1
            if not is_same:
                problems.append(f"{title} for {group[0]}")
        if written and not compared:
            problems.append(f"nothing of {group[0]} can be compared")
        elements += compared
    if problems or not elements:
        raise UnshardError(
            f"{weights.path}: the engine does not hold this checkpoint after the reload",
            found=f"{counted(len(problems), 'other parameter')}: {', '.join(problems[:_SHOWN])}",
            hint="end the engine: what it holds is not known",
        )
    found = {"path": weights.path, "step": weights.step, "unchecked": sorted(unchecked)}
    return {**found, "parameters": parameters, "elements": elements}


def _count(expected: Tensor, held: Tensor) -> tuple[int, bool]:
    """Return how many values are expected, and whether they are held; NaN is not expected."""
    if torch.equal(expected, held):  # the usual case, several times faster
        return expected.numel(), True
    known = ~expected.isnan()
    return int(known.count_nonzero()), torch.equal(expected[known], held[known])


@contextmanager
def _shadowed(model: _Model) -> Iterator[dict[tuple[int, str], _Scratch]]:
    """Let what is loaded go into scratch tensors; yield those that were written.

    While it lasts, parameters are as they were before vLLM processed them, without memory.
    """
    written: dict[tuple[int, str], _Scratch] = {}
    saved = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        for module, parameters in saved:
            recorded, _ = get_layerwise_info(module).restore_metadata
            for name, live in parameters.items():
                if live is not None:
                    shadow = to_meta_tensor(recorded.get(name, live))
                    _record(written, module, name, restore_layer_refs(shadow, module))
        yield written
    finally:
        for module, parameters in saved:
            module._parameters.clear()
            module._parameters.update(parameters)


def _record(
    written: dict[tuple[int, str], _Scratch], module: nn.Module, name: str, shadow: Tensor
) -> None:
    """Put a shadow in the place of a parameter, whose loader writes into scratch memory."""
    load: Any = getattr(shadow, "weight_loader", default_weight_loader)
    while load.__name__ == "online_process_loader":  # an earlier reload has left it there
        load = load.__wrapped__
    key = (id(module), name)

    def load_scratch(*args: object, **given: object) -> object:
        if key not in written:
            written[key] = _Scratch(module, name, original)
        values = written[key].values
        if "param" in given:
            return load(*args, **{**given, "param": values})
        return load(values, *args[1:], **given)

    original = to_meta_tensor(shadow)  # with the loader as it was
    shadow.weight_loader = load_scratch  # type: ignore[attr-defined]  # vLLM's attribute
    module._parameters[name] = shadow  # type: ignore[assignment]  # of the class of a parameter


def _compared(
    model: _Model, written: Iterable[_Scratch], unchecked: set[str]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what a parameter is called, its values or a part of them, and what the engine holds.

    Parameters of which nothing is yielded are added to `unchecked`.
    """
    fused: dict[nn.Module, dict[str, Tensor]] = {}
    for one in written:
        title, found = f"{type(one.module).__name__}.{one.name}", False
        if has_experts(one.module):
            fused.setdefault(one.module, {})[one.name] = one.values
            continue
        for expected, held in _pairs(model, one):
            found = True
            yield title, expected, held
        if not found:
            unchecked.add(title)
    for module, loaded in fused.items():
        titles = {name: f"{type(module).__name__}.{name}" for name in loaded}
        for name, expected, held in compare_experts(module, loaded):
            yield titles.pop(name), expected, held
        unchecked.update(titles.values())


def _pairs(model: _Model, scratch: _Scratch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the values of a scratch tensor, or a part of them, and what the engine holds."""
    module, values = scratch.module, scratch.values
    live = module._parameters[scratch.name]
    method = getattr(module, "quant_method", None)
    if live is None or not (method is None or isinstance(method, _UNQUANTIZED)):
        return  # vLLM may have changed the order of the values
    if live.shape == values.shape and live.dtype == values.dtype:
        yield values, live.detach().to("cpu")
    if scratch.name == "weight" and values.ndim == 2:
        for user in model.modules():  # a tied head has its own packed matrix
            if user._parameters.get("weight") is live and hasattr(user, "cpu_linear"):
                yield _unpack(user, values)


def _unpack(module: nn.Module, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns of a matrix, all or at even distances, and the same of the packed one."""
    columns = values.shape[1]
    chosen = torch.arange(0, columns, max(1, columns // _COLUMNS))
    inputs = torch.zeros(len(chosen), columns, dtype=values.dtype)
    inputs[torch.arange(len(chosen)), chosen] = 1
    multiply: Any = module.cpu_linear
    found: Tensor = multiply(inputs, module.weight, None)
    return values[:, chosen], found.T.to(values.dtype)
