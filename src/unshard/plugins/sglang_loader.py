"""The load format `unshard` of SGLang: its model loader, which reads training shards.

Interfaces of SGLang 0.5.23: at the start, a loader's `load_model` makes a model and loads what
`_get_weights_iterator` returns. For `/update_weights_from_disk` there is a new loader, without the
configuration of the first; the path in the request is the path of its source. What the iterator
raises then is an answer, and nothing was changed. After what `load_weights_and_postprocess` raises,
SGLang loads "the original weights", but from the new path; if that fails as well, the engine ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import BaseModelLoader, DefaultModelLoader
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor, distributed, nn

from unshard.errors import UnshardError, UsageError
from unshard.keywords import EngineKeywords
from unshard.plugins.serving import (
    Shapes,
    check_config,
    check_shapes,
    checked,
    weights_of,
)
from unshard.plugins.sglang_check import reason_against, verify
from unshard.read import model_config as ours

_CHECKPOINT = "checkpoint"

if not hasattr(DefaultModelLoader, "_get_weights_iterator"):
    raise ImportError("SGLang's DefaultModelLoader has no _get_weights_iterator")


@dataclass(frozen=True, slots=True)
class _Start:
    """What an engine of this process was started with."""

    options: EngineKeywords
    shapes: Shapes
    refusal: str | None
    """Why other weights cannot be loaded into it."""


_started: WeakKeyDictionary[ModelConfig, _Start] = WeakKeyDictionary()


class UnshardLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang has no types where mypy runs
    """Loads a checkpoint of training with the tensors that `unshard merge` would write.

    Args:
        load_config: SGLang's; `model_loader_extra_config` may have "checkpoint" and the options of
            `unshard.open_checkpoint`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        # Not that of the default loader, which allows no options but its own.
        BaseModelLoader.__init__(self, load_config)
        given: Mapping[str, object] = load_config.model_loader_extra_config
        self._checkpoint = given.get(_CHECKPOINT)
        self._options = checked({name: one for name, one in given.items() if name != _CHECKPOINT})
        self._starting = self._agreed = False
        self._shapes: Shapes = {}

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: a checkpoint is where it is."""

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Load the model of an engine that starts."""
        self._starting = True
        model: nn.Module = super().load_model(
            model_config=model_config, device_config=device_config
        )
        refusal = reason_against(model, model_config)
        _started[model_config] = _Start(self._options, self._shapes, refusal)
        return model

    def load_weights_and_postprocess(
        self, model: nn.Module, weights: Iterator[tuple[str, Tensor]], target_device: torch.device
    ) -> None:
        """Load tensors into a model; if it is a running engine's, compare it with the checkpoint.

        Raises:
            UnshardError: the model holds other values.
        """
        DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
        if not self._starting:
            with weights_of(str(self._checkpoint), self._options) as again:
                verify(again, model)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source, **_: object
    ) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors with their names on the hub; the checkpoint has been checked then."""
        tensors = self._tensors(source)
        try:
            first = next(tensors)
        except Exception as error:
            self._agree(str(error))
            raise
        self._agree(None)
        return chain([first], tensors)

    def _tensors(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, Tensor]]:
        config = source.model_config
        if config is None or config.is_draft_model:
            raise UsageError(
                f"--load-format unshard: {source.model_or_path} is not the engine's own model",
                hint="give a draft model its own format: --speculative-draft-load-format auto",
            )
        if self._starting:
            self._start_from(str(source.model_or_path))
        else:
            self._go_on_to(str(source.model_or_path), config)
        with weights_of(str(self._checkpoint), self._options) as weights:
            stated = ours.ModelConfig(config.hf_config.to_dict())
            hint = "start it with `unshard sglang`, which gives the engine the config that fits"
            check_config(weights, stated, hint=hint)
            if self._starting:
                self._shapes = weights.shapes
            else:
                check_shapes(weights, _started[config].shapes)
            if weights.step is not None:  # a run may have a newer one when it is compared
                self._options["step"] = weights.step
            yield from weights.tensors.items()

    def _start_from(self, path: str) -> None:
        """Find the checkpoint around the model's directory, unless it is named."""
        if self._checkpoint is None and not Path(path).exists():
            raise UsageError(
                f"--load-format unshard: {path} is not a local directory, and no checkpoint is "
                "named",
                hint="""name it: --model-loader-extra-config '{"checkpoint": "DIR"}'""",
            )
        self._checkpoint = self._checkpoint or path

    def _go_on_to(self, path: str, config: ModelConfig) -> None:
        """Mean the checkpoint of a request, with the options of the start, except the step."""
        started = _started.get(config)
        if started is None:
            reason: str | None = "it was not started with --load-format unshard"
        elif get_spec().speculative_algorithm is not None:
            reason = "SGLang would load the checkpoint into its draft model as well"
        else:
            reason = started.refusal
        if started is None or reason is not None:
            raise UsageError(
                f"the engine cannot take another checkpoint: {reason}", hint="start a new engine"
            )
        self._checkpoint, self._options = path, started.options.copy()
        self._options.pop("step", None)

    def _agree(self, problem: str | None) -> None:
        """Refuse an update in all workers of tensor parallelism if one of them refuses it.

        SGLang answers a request with what the first worker says, and the others would have other
        weights. When it loads again after an error, it does so in one worker alone.
        """
        if self._starting or self._agreed:
            return
        self._agreed = True
        group = get_parallel().tp_group.cpu_group
        found: list[str | None] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(found, problem, group=group)
        others = [one for one in found if one is not None]
        if problem is None and others:
            raise UnshardError(f"another worker cannot load the checkpoint: {others[0]}")
