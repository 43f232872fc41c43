"""What workers of vLLM do for us: a reload that is checked, against the checkpoint itself.

Each tensor is read once. While vLLM loads it, some tensors are also loaded into scratch memory, by
the model's own loaders, and of what comes out a checksum is kept. After the reload, what the engine
computes with must have the same one; once in 2^32 times a difference has. Where the CPU backend of
vLLM has packed a matrix and dropped it, the packed one is read by multiplying it with one-hot rows,
which is exact.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from unshard.engines.into_torch import RecycledMemory
from unshard.errors import UnshardError, UsageError
from unshard.plugins.fused_experts import experts_of, has_experts, packed_experts, packing
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import Weights, check_shapes, weights_of
from unshard.plugins.vllm_loader import check_config, fed, options_of_reload, point_to, shapes_in
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
            comparison = _Comparison(weights, model, config)
            fed[model] = comparison.tensors()
            try:
                with packing(model):
                    self.reload_weights(weights_path=checkpoint)
            finally:
                fed.pop(model, None)
            _refresh_tied(model)
            return comparison.finish()


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


@dataclass(frozen=True, slots=True, eq=False)
class _Scratch:
    """What the loaders made of a parameter.

    Attributes:
        live: the parameter when the `_ScratchModel` was made.
        values: NaN where nothing was written.
    """

    module: nn.Module
    name: str
    live: Tensor
    values: Tensor


class _ScratchModel:
    """A model whose parameters are as they were before vLLM processed them, without memory.

    Args:
        model: of a running engine; not while it is loaded.
        memory: for what the loaders write.
    """

    def __init__(self, model: Any, memory: RecycledMemory) -> None:
        self._model, self._memory = model, memory
        self._written: dict[tuple[int, str], _Scratch] = {}
        self._shadows = [
            (module, {name: self._shadow(module, name) for name in module._parameters})
            for module in model.modules()
        ]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[_Scratch]:
        """Return what the loaders make of tensors, for each parameter into which they write."""
        saved = [(one, dict(one._parameters), dict(one._buffers)) for one, _ in self._shadows]
        try:
            for (module, shadows), (_, _, buffers) in zip(self._shadows, saved, strict=True):
                # What is written into buffers is not compared.
                lost = {n: None if b is None else b.to("meta") for n, b in buffers.items()}
                _replace(module, shadows, lost)
            self._model.load_weights(iter(tensors))
        finally:
            for before in saved:
                _replace(*before)
        written, self._written = self._written, {}
        return list(written.values())

    def _shadow(self, module: nn.Module, name: str) -> Tensor | None:
        """Return a parameter on the meta device, whose loader writes into scratch memory."""
        recorded, _ = get_layerwise_info(module).restore_metadata
        live = module._parameters[name]
        if live is None:
            return None
        shadow = restore_layer_refs(to_meta_tensor(recorded.get(name, live)), module)
        load: Any = getattr(shadow, "weight_loader", default_weight_loader)
        while load.__name__ == "online_process_loader":  # an earlier reload has left it there
            load = load.__wrapped__
        key, original = (id(module), name), to_meta_tensor(shadow)  # with the loader as it was

        def load_scratch(*args: object, **given: object) -> object:
            if key not in self._written:
                self._written[key] = _Scratch(module, name, live, self._materialize(original))
            values = self._written[key].values
            if "param" in given:
                return load(*args, **{**given, "param": values})
            return load(values, *args[1:], **given)

        shadow.weight_loader = load_scratch  # vLLM's attribute
        made: Tensor = shadow
        return made

    def _materialize(self, shadow: Tensor) -> Tensor:
        with torch.device("cpu"):
            values: Tensor = materialize_meta_tensor(shadow)
        memory = torch.from_numpy(self._memory((values.nbytes,), np.dtype(np.uint8)))
        values.data = memory.view(values.dtype).reshape(values.shape)
        if values.is_floating_point():
            values.data.fill_(torch.nan)  # what is not written is not compared
        return values


def _replace(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    for present, other in ((module._parameters, parameters), (module._buffers, buffers)):
        present.clear()
        present.update(other)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """How many values of a parameter are compared, and whether the engine has them."""

    title: str
    count: int
    is_held: Callable[[], bool]


def _kept(title: str, values: Tensor, held: Callable[[], Tensor]) -> _Part:
    """Keep a digest of the values that are known, which are not NaN, for what the engine has."""
    count, bits = values.numel(), None
    if values.is_floating_point() and values.sum().isnan():  # several times faster than isnan
        known = ~values.isnan()
        count, bits = int(known.count_nonzero()), np.packbits(known.numpy())
    digest = _digest(values, bits)
    return _Part(title, count, lambda: _digest(held(), bits) == digest)


def _digest(values: Tensor, known: Any) -> tuple[object, ...]:
    """Return dtype, shape, and the CRC-32 of those values for which there is a bit, or of all."""
    shape, values = values.shape, values.detach().to("cpu").contiguous().flatten()
    if known is not None:
        values = values[torch.from_numpy(np.unpackbits(known, count=len(values)).view(np.bool_))]
    return values.dtype, shape, zlib.crc32(values.view(torch.uint8).numpy().data)


class _Comparison:
    """Compares what an engine holds after a reload with the tensors that were loaded.

    Args:
        weights: of the checkpoint.
        model: of the engine, before the reload.
        config: of the engine.
    """

    def __init__(self, weights: Weights, model: Any, config: VllmConfig) -> None:
        self._weights, self._config = weights, config
        self._scratch = _ScratchModel(model, weights.memory)
        self._groups = {group[0]: group for group in choose_probes(weights.shapes)}
        self._keeper = ThreadPoolExecutor(1)
        self._parts: dict[str, Future[list[_Part]]] = {}
        self._written, self._unchecked = set[str](), set[str]()
        # As they are now: a reload takes them out of their places for a while.
        modules = list(model.modules())
        self._experts = {one: experts_of(one) for one in modules if has_experts(one)}
        self._users: dict[int, list[nn.Module]] = {}
        for user in modules:
            if hasattr(user, "cpu_linear"):  # a tied head has its own packed matrix
                self._users.setdefault(id(user._parameters.get("weight")), []).append(user)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors with their names, and keep what some of them become."""
        first_of = {name: first for first, group in self._groups.items() for name in group}
        waiting: dict[str, dict[str, Tensor]] = {first: {} for first in self._groups}
        for name, tensor in self._weights.read(self._weights.tensors):
            if (first := first_of.get(name)) is not None:
                waiting[first][name] = tensor
                if len(waiting[first]) == len(self._groups[first]):
                    self._keep(first, waiting.pop(first).items())
            yield name, tensor

    def _keep(self, first: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep what the tensors of a group become; another thread makes the digests."""
        with set_current_vllm_config(self._config), torch.no_grad():
            written = self._scratch.load(tensors)
            expected = list(self._expected(written))
        if written:
            self._written.add(first)
        for before in [*self._parts.values()][-1:]:
            before.result()  # the scratch memory of one group is in use at a time, and of the next
        self._parts[first] = self._keeper.submit(lambda: [_kept(*one) for one in expected])

    def finish(self) -> dict[str, object]:
        """Compare, after the reload; return what was compared.

        Raises:
            UnshardError: the engine holds other values, or nothing was compared.
        """
        for first in self._groups.keys() - self._parts.keys():  # vLLM did not ask for them
            self._keep(first, self._weights.read(self._groups[first]))
        parts = {first: self._parts[first].result() for first in self._groups}
        path, found = self._weights.path, [(first, one) for first in parts for one in parts[first]]
        problems = [f"{part.title} for {first}" for first, part in found if not part.is_held()]
        problems += [
            f"nothing of {first} can be compared"
            for first in self._written
            if not any(part.count for part in parts[first])
        ]
        elements = sum(part.count for _, part in found)
        if problems or not elements:
            shown = ", ".join(problems[:_SHOWN])
            raise UnshardError(
                f"{path}: the engine does not hold this checkpoint after the reload",
                found=f"{counted(len(problems), 'other parameter')}: {shown}",
                hint="end the engine: what it holds is not known",
            )
        known = {"path": path, "step": self._weights.step, "unchecked": sorted(self._unchecked)}
        return {**known, "parameters": len(found), "elements": elements}

    def _expected(
        self, written: Iterable[_Scratch]
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """Yield what a parameter is called, its values or a part of them, and how to get the same.

        Parameters of which nothing is yielded are added to those that are not compared.
        """
        fused: dict[nn.Module, dict[str, Tensor]] = {}
        for one in written:
            if has_experts(one.module):
                fused.setdefault(one.module, {})[one.name] = one.values
                continue
            title, found = f"{type(one.module).__name__}.{one.name}", False
            for values, held in self._pairs(one):
                found = True
                yield title, values, held
            if not found:
                self._unchecked.add(title)
        for module, loaded in fused.items():
            titles = {name: f"{type(module).__name__}.{name}" for name in loaded}
            experts = self._experts[module]
            if experts is not None:
                for name, values, rows in packed_experts(module, experts, loaded):
                    yield titles.pop(name), values, partial(_held, module, name, rows)
            self._unchecked.update(titles.values())

    def _pairs(self, scratch: _Scratch) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Yield the values of a scratch tensor, or a part of them, and how to get the same."""
        module, name, values, live = scratch.module, scratch.name, scratch.values, scratch.live
        method = getattr(module, "quant_method", None)
        if not (method is None or isinstance(method, _UNQUANTIZED)):
            return  # vLLM may have changed the order of the values
        if live.shape == values.shape and live.dtype == values.dtype:
            yield values, partial(_held, module, name)
        if name == "weight" and values.ndim == 2:
            for user in self._users.get(id(live), ()):
                chosen = _columns(values.shape[1])
                # The multiplication makes 0 of -0.
                yield values[:, chosen] + 0, partial(_unpack, user, values.shape[1], values.dtype)


def _held(module: nn.Module, name: str, rows: Tensor | None = None) -> Tensor:
    """Return what a module computes with, or rows of it."""
    live = module.get_parameter(name).detach()
    return live if rows is None else live[rows.to(live.device)]


def _columns(columns: int) -> Tensor:
    """Return which columns of a packed matrix are compared: all, or those at even distances."""
    return torch.arange(0, columns, max(1, columns // _COLUMNS))


def _unpack(module: nn.Module, columns: int, dtype: torch.dtype) -> Tensor:
    """Return columns of a packed matrix."""
    chosen = _columns(columns)
    inputs = torch.zeros(len(chosen), columns, dtype=dtype)
    inputs[torch.arange(len(chosen)), chosen] = 1
    multiply: Any = module.cpu_linear
    found: Tensor = multiply(inputs, module.weight, None)
    return found.T.to(dtype) + 0
