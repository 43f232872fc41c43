"""The extension of vLLM's workers: a reload that is verified against the checkpoint.

Each tensor is read once. While vLLM loads it, the model's own loaders also load some tensors into
scratch memory, and a checksum of the result is kept. After the reload, the engine's parameters must
have the same checksum (CRC-32, which misses one difference in 2^32). If vLLM's CPU backend has
packed a matrix and dropped the original, the packed matrix is read by multiplying it with one-hot
rows, which is exact.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

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

from unshard.console import counted
from unshard.engines.into_torch import RecycledMemory
from unshard.errors import UnshardError, UsageError
from unshard.plugins.fused_experts import experts_of, has_experts, packed_experts, packing
from unshard.plugins.probes import choose_probes
from unshard.plugins.serving import EngineWeights, check_shapes, weights_of
from unshard.plugins.vllm_loader import check_config, fed, options_of_reload, point_to, shapes_in

_SHOWN = 5
_COLUMNS = (
    64  # about as many columns of a packed matrix are read; all would take longer than a load
)
_UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class _EngineModel(Protocol):
    """The used interface of vLLM's models, which are modules of torch."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> object: ...

    def modules(self) -> Iterator[nn.Module]: ...


class _ModelRunner(Protocol):
    def get_model(self) -> Any: ...


class _EngineWorker(Protocol):
    """The used interface of vLLM's worker."""

    vllm_config: VllmConfig
    model_runner: _ModelRunner

    def reload_weights(self, *, weights_path: str) -> None: ...


class WorkerExtension:
    """Methods for vLLM's workers: `--worker-extension-cls`."""

    def unshard_reload(
        self: _EngineWorker, checkpoint: str, options: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Load another checkpoint into the running engine, and verify its weights.

        Args:
            checkpoint: as for `unshard merge`.
            options: of `unshard.open_checkpoint`; by default as at the start.

        Returns:
            The checkpoint, the numbers of compared parameters and elements, and the kinds of
            parameters that were not compared, because their order in the engine is unknown.

        Raises:
            UnshardError: the checkpoint cannot be read or does not fit, and nothing was changed; or
                the engine has other values, and must not be used any more.
        """
        config = self.vllm_config
        _refuse(config)
        model, extra = self.model_runner.get_model(), config.load_config.model_loader_extra_config
        keywords = options_of_reload(extra, options or {})
        with weights_of(checkpoint, keywords) as weights:
            check_config(weights, config.model_config)
            if (before := shapes_in(model)) is not None:
                check_shapes(weights, before)
            if weights.step is not None:  # a run may have a newer step later
                keywords["step"] = weights.step
            point_to(extra, checkpoint, keywords)
            check = _ReloadCheck(weights, model, config)
            fed[model] = check.tensors()
            try:
                with packing(model):
                    self.reload_weights(weights_path=checkpoint)
            finally:
                fed.pop(model, None)
            _refresh_tied(model)
            return check.finish()


def _refuse(config: VllmConfig) -> None:
    """Refuse engines whose weights cannot be replaced or compared."""
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
        reason = f"it quantises the weights ({model.quantization}), so they cannot be compared"
    if reason:
        raise UsageError(
            f"the engine cannot take another checkpoint: {reason}", hint="start a new engine"
        )


def _refresh_tied(model: _EngineModel) -> None:
    """Repack modules that share their weight with another module: vLLM's reload skips them."""
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
    """A parameter as the loaders wrote it.

    Attributes:
        module: its module.
        name: its name there.
        live: the engine's parameter when the `_ScratchModel` was made.
        values: the written values; NaN where nothing was written.
    """

    module: nn.Module
    name: str
    live: Tensor
    values: Tensor


class _ScratchModel:
    """A model with parameters in their form before vLLM's processing, without memory.

    Args:
        model: of a running engine; not during a load.
        memory: for the values that the loaders write.
    """

    def __init__(self, model: Any, memory: RecycledMemory) -> None:
        self._model, self._memory = model, memory
        self._written: dict[tuple[int, str], _Scratch] = {}
        self._shadows = [
            (module, {name: self._shadow(module, name) for name in module._parameters})
            for module in model.modules()
        ]

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[_Scratch]:
        """Return the parameters that the loaders write for some tensors."""
        saved = [(m, dict(m._parameters), dict(m._buffers)) for m, _ in self._shadows]
        try:
            for (module, shadows), (_, _, buffers) in zip(self._shadows, saved, strict=True):
                # Buffers are not compared, so writes into them are discarded.
                meta = {n: None if b is None else b.to("meta") for n, b in buffers.items()}
                _replace(module, shadows, meta)
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
        while load.__name__ == "online_process_loader":  # left by an earlier reload
            load = load.__wrapped__
        key, original = (id(module), name), to_meta_tensor(shadow)  # with the original loader

        def load_scratch(*args: object, **keywords: object) -> object:
            if key not in self._written:
                self._written[key] = _Scratch(module, name, live, self._materialize(original))
            values = self._written[key].values
            if "param" in keywords:
                return load(*args, **{**keywords, "param": values})
            return load(values, *args[1:], **keywords)

        shadow.weight_loader = load_scratch  # vLLM's attribute
        return cast("Tensor", shadow)

    def _materialize(self, shadow: Tensor) -> Tensor:
        with torch.device("cpu"):
            values: Tensor = materialize_meta_tensor(shadow)
        memory = torch.from_numpy(self._memory((values.nbytes,), np.dtype(np.uint8)))
        values.data = memory.view(values.dtype).reshape(values.shape)
        if values.is_floating_point():
            values.data.fill_(torch.nan)  # marks values that are not written, and not compared
        return values


def _replace(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any]) -> None:
    for current, other in ((module._parameters, parameters), (module._buffers, buffers)):
        current.clear()
        current.update(other)


@dataclass(frozen=True, slots=True, eq=False)
class _ParameterCheck:
    """The number of compared values of a parameter, and whether the engine has them."""

    title: str
    count: int
    is_held: Callable[[], bool]


def _check_of(title: str, values: Tensor, live: Callable[[], Tensor]) -> _ParameterCheck:
    """Return the comparison of the engine's values with a digest of these, except NaN."""
    count, bits = values.numel(), None
    if values.is_floating_point() and values.sum().isnan():  # several times faster than isnan
        written = ~values.isnan()
        count, bits = int(written.count_nonzero()), np.packbits(written.numpy())
    digest = _digest(values, bits)
    return _ParameterCheck(title, count, lambda: _digest(live(), bits) == digest)


def _digest(values: Tensor, bits: Any) -> tuple[object, ...]:
    """Return dtype, shape, and the CRC-32 of the values with a set bit, or of all values."""
    shape, values = values.shape, values.detach().to("cpu").contiguous().flatten()
    if bits is not None:
        values = values[torch.from_numpy(np.unpackbits(bits, count=len(values)).view(np.bool_))]
    return values.dtype, shape, zlib.crc32(values.view(torch.uint8).numpy().data)


class _ReloadCheck:
    """Compares an engine's parameters after a reload with the tensors that were loaded.

    Args:
        weights: of the checkpoint.
        model: of the engine, before the reload.
        config: of the engine.
    """

    def __init__(self, weights: EngineWeights, model: Any, config: VllmConfig) -> None:
        self._weights, self._config = weights, config
        self._scratch = _ScratchModel(model, weights.memory)
        self._groups = {group[0]: group for group in choose_probes(weights.shapes)}
        self._digester = ThreadPoolExecutor(1)
        self._checks: dict[str, Future[list[_ParameterCheck]]] = {}
        self._written, self._unchecked = set[str](), set[str]()
        # Recorded now, because a reload removes them temporarily.
        modules = list(model.modules())
        self._experts = {module: experts_of(module) for module in modules if has_experts(module)}
        self._users: dict[int, list[nn.Module]] = {}
        for user in modules:
            if hasattr(user, "cpu_linear"):  # a tied head has its own packed matrix
                self._users.setdefault(id(user._parameters.get("weight")), []).append(user)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors with their names, and record the expected values of some."""
        first_of = {name: first for first, group in self._groups.items() for name in group}
        waiting: dict[str, dict[str, Tensor]] = {first: {} for first in self._groups}
        for name, tensor in self._weights.read(self._weights.tensors):
            if (first := first_of.get(name)) is not None:
                waiting[first][name] = tensor
                if len(waiting[first]) == len(self._groups[first]):
                    self._record(first, waiting.pop(first).items())
            yield name, tensor

    def _record(self, first: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Record the expected values of a group; another thread computes the digests."""
        with set_current_vllm_config(self._config), torch.no_grad():
            written = self._scratch.load(tensors)
            expected = list(self._expected(written))
        if written:
            self._written.add(first)
        for before in [*self._checks.values()][-1:]:
            before.result()  # bounds the scratch memory to this group and the one before
        self._checks[first] = self._digester.submit(lambda: [_check_of(*one) for one in expected])

    def finish(self) -> dict[str, object]:
        """Compare after the reload; return the checkpoint and the numbers of compared values.

        Raises:
            UnshardError: the engine has other values, or nothing was compared.
        """
        for first in self._groups.keys() - self._checks.keys():  # tensors that vLLM did not read
            self._record(first, self._weights.read(self._groups[first]))
        groups = {first: self._checks[first].result() for first in self._groups}
        checks = [(first, check) for first, group in groups.items() for check in group]
        problems = [f"{check.title} for {first}" for first, check in checks if not check.is_held()]
        problems += [
            f"no value of {first} can be compared"
            for first in self._written
            if not any(check.count for check in groups[first])
        ]
        path, elements = self._weights.path, sum(check.count for _, check in checks)
        if problems or not elements:
            shown = ", ".join(problems[:_SHOWN])
            raise UnshardError(
                f"{path}: the engine does not hold this checkpoint after the reload",
                found=f"{counted(len(problems), 'other parameter')}: {shown}",
                hint="end the engine: its weights are undefined",
            )
        return {
            "path": path,
            "step": self._weights.step,
            "unchecked": sorted(self._unchecked),
            "parameters": len(checks),
            "elements": elements,
        }

    def _expected(
        self, written: Iterable[_Scratch]
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """Yield title, comparable values, and a function that returns the engine's values.

        Parameters without comparable values are added to `_unchecked`.
        """
        fused: dict[nn.Module, dict[str, Tensor]] = {}
        for scratch in written:
            if has_experts(scratch.module):
                fused.setdefault(scratch.module, {})[scratch.name] = scratch.values
                continue
            title = f"{type(scratch.module).__name__}.{scratch.name}"
            pairs = list(self._pairs(scratch))
            yield from ((title, *pair) for pair in pairs)
            if not pairs:
                self._unchecked.add(title)
        for module, loaded in fused.items():
            titles = {name: f"{type(module).__name__}.{name}" for name in loaded}
            experts = self._experts[module]
            if experts is not None:
                for name, values, rows in packed_experts(module, experts, loaded):
                    yield titles.pop(name), values, partial(_live, module, name, rows)
            self._unchecked.update(titles.values())

    def _pairs(self, scratch: _Scratch) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Yield comparable values of a parameter, and a function that returns the engine's."""
        module, name, values, live = scratch.module, scratch.name, scratch.values, scratch.live
        method = getattr(module, "quant_method", None)
        if not (method is None or isinstance(method, _UNQUANTIZED)):
            return  # vLLM may have changed the order of the values
        if live.shape == values.shape and live.dtype == values.dtype:
            yield values, partial(_live, module, name)
        if name == "weight" and values.ndim == 2:
            for user in self._users.get(id(live), ()):
                chosen = _columns(values.shape[1])
                # Adding 0 turns -0 into 0, as the multiplication does.
                yield values[:, chosen] + 0, partial(_unpack, user, values.shape[1], values.dtype)


def _live(module: nn.Module, name: str, rows: Tensor | None = None) -> Tensor:
    """Return a parameter of the engine, or rows of it."""
    live = module.get_parameter(name).detach()
    return live if rows is None else live[rows.to(live.device)]


def _columns(columns: int) -> Tensor:
    """Return the columns of a packed matrix to compare: all, or evenly spaced columns."""
    return torch.arange(0, columns, max(1, columns // _COLUMNS))


def _unpack(module: nn.Module, columns: int, dtype: torch.dtype) -> Tensor:
    """Return columns of a packed matrix."""
    chosen = _columns(columns)
    inputs = torch.zeros(len(chosen), columns, dtype=dtype)
    inputs[torch.arange(len(chosen)), chosen] = 1
    multiply: Any = module.cpu_linear
    outputs: Tensor = multiply(inputs, module.weight, None)
    return outputs.T.to(dtype) + 0
