"""The model loader of SGLang's load format `unshard`, which reads training shards.

Interfaces of SGLang 0.5.23: at the start, a loader's `load_model` makes a model and loads the
tensors of `_get_weights_iterator`. For `/update_weights_from_disk` there is a new loader, without
the configuration of the first; the path in the request is the path of its source. An error of the
iterator becomes the answer, and nothing has changed. After an error of
`load_weights_and_postprocess`, SGLang loads "the original weights", but from the new path; if that
fails as well, the engine ends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
    check_local,
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
    """The start of an engine in this process.

    Attributes:
        options: of the checkpoint.
        shapes: of its tensors.
        refusal: why other weights cannot be loaded; None if they can.
    """

    options: EngineKeywords
    shapes: Shapes
    refusal: str | None


_started: WeakKeyDictionary[ModelConfig, _Start] = WeakKeyDictionary()


class UnshardLoader(DefaultModelLoader):  # type: ignore[misc]  # SGLang has no types where mypy runs
    """Loads the tensors that `unshard merge` would write from a training checkpoint.

    Args:
        load_config: SGLang's; `model_loader_extra_config` may have "checkpoint" and options of
            `unshard.open_checkpoint`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        # Not the default loader's constructor, which refuses options other than its own.
        BaseModelLoader.__init__(self, load_config)
        extra: Mapping[str, object] = load_config.model_loader_extra_config
        self._checkpoint = extra.get(_CHECKPOINT)
        options = {name: value for name, value in extra.items() if name != _CHECKPOINT}
        self._options = checked(options)
        self._starting = self._agreed = False
        self._shapes: Shapes = {}

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing, because there is nothing to download."""

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
        """Load tensors into a model; in a running engine, compare it with the checkpoint.

        Raises:
            UnshardError: the model has other values.
        """
        DefaultModelLoader.load_weights_and_postprocess(model, weights, target_device)
        if not self._starting:
            with weights_of(str(self._checkpoint), self._options) as expected:
                verify(expected, model)

    def _get_weights_iterator(
        self, source: DefaultModelLoader.Source, **_: object
    ) -> Iterator[tuple[str, Tensor]]:
        """Return all tensors with their names on the hub, after the checkpoint was checked."""
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
        path = str(source.model_or_path)
        if not self._starting:
            self._update_to(path, config)
        elif self._checkpoint is None:
            check_local(path)
            self._checkpoint = path
        with weights_of(str(self._checkpoint), self._options) as weights:
            engine_config = ours.ModelConfig(config.hf_config.to_dict())
            hint = "start it with `unshard sglang`, which gives the engine the config that fits"
            check_config(weights, engine_config, hint=hint)
            if self._starting:
                self._shapes = weights.shapes
            else:
                check_shapes(weights, _started[config].shapes)
            if weights.step is not None:  # a run may have a newer step when it is compared
                self._options["step"] = weights.step
            yield from weights.tensors.items()

    def _update_to(self, path: str, config: ModelConfig) -> None:
        """Switch to the checkpoint of a request, with the initial options except the step."""
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

        SGLang answers a request with the first worker's result, and the other workers would have
        other weights. After an error, it loads again in one worker only.
        """
        if self._starting or self._agreed:
            return
        self._agreed = True
        group = get_parallel().tp_group.cpu_group
        answers: list[str | None] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(answers, problem, group=group)
        others = [answer for answer in answers if answer is not None]
        if problem is None and others:
            raise UnshardError(f"another worker cannot load the checkpoint: {others[0]}")
