"""`FSDP2Merger`: merge a sharded checkpoint into a Hugging Face directory in bfloat16."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unshard.errors import UsageError, front_of_errors
from unshard.fronts import Call, Python
from unshard.keywords import Weights
from unshard.merger.saving import SavesItself, as_file, as_transformers_saves
from unshard.progress import Chosen, Event, Listener, Warned

if TYPE_CHECKING:
    from unshard.api import MergeOptions

CheckpointType = Literal["regular", "ema"]
_WEIGHTS: Mapping[str, Weights] = {"regular": "model", "ema": "ema"}

log = logging.getLogger("unshard.merger")
log.addHandler(logging.NullHandler())  # otherwise Python prints each warning a second time


def merge_options(checkpoint_type: str) -> "MergeOptions":
    """Return the options for a merge like that of lmms-engine."""
    from unshard.api import MergeOptions

    return MergeOptions(
        dtype="bfloat16", weights=_WEIGHTS[checkpoint_type], overwrite=True, extra_state=False
    )


class CheckpointMerger(ABC):
    """lmms-engine's base class for mergers."""

    @abstractmethod
    def merge(self, checkpoint_path: Path, output_path: Path | None = None) -> Path:
        """Merge a checkpoint and return the directory of the model.

        Args:
            checkpoint_path: the sharded checkpoint.
            output_path: the output directory; None: `checkpoint_path`.
        """


class FSDP2Merger(CheckpointMerger):
    """Merge FSDP2 checkpoints, like the class of lmms-engine.

    Args:
        checkpoint_type: "regular", or "ema" for the averaged weights in
            `pytorch_ema_model_fsdp_0/`.
        listener: called with progress events and warnings. By default warnings are Python's
            `UnshardWarning`, and a terminal or a notebook shows a progress bar. The logger
            `unshard.merger` also gets the warnings, and the name of the checkpoint.

    Raises:
        ValueError: the type is neither.
    """

    def __init__(
        self,
        checkpoint_type: CheckpointType = "regular",
        *,
        listener: Listener | None = None,
    ) -> None:
        if checkpoint_type not in _WEIGHTS:
            raise ValueError(f"checkpoint_type: {checkpoint_type!r} is neither regular nor ema")
        self.checkpoint_type = checkpoint_type
        self._listener = listener

    def merge(
        self,
        checkpoint_path: str | Path,
        output_path: str | Path | None = None,
        model_cls: type | None = None,
        config: SavesItself | str | Path | None = None,
        model_general_type: str | None = None,  # noqa: ARG002 (no model is built by it)
    ) -> Path:
        """Merge a checkpoint into bfloat16 safetensors, with config and tokenizer.

        Weights of an earlier merge are replaced, other files stay; integers keep their dtype.

        Args:
            checkpoint_path: a checkpoint, or a directory of `checkpoint-N`, whose highest step is
                merged. If that step is incomplete, nothing is merged: pass an older one.
            output_path: the output directory; default: `checkpoint_path`.
            model_cls: a class of transformers, which may be an Auto class. It is built on the meta
                device, and must have a parameter or buffer for every tensor (extra `torch`).
            config: the output's config.json; default: the checkpoint's own.
            model_general_type: ignored: merging builds no model.

        Returns:
            The output directory.

        Raises:
            UnshardError: any error of `unshard.errors`; the output is then unchanged.
        """
        if "" in map(str, (checkpoint_path, output_path)):  # `Path("")` is the current directory
            raise UsageError("an empty path", hint="for the current directory, give .")
        from unshard.api.making import PlannedMerge
        from unshard.api.merging import merge_checkpoint
        from unshard.console import listener_or_default
        from unshard.write.verification.load import check_class

        def check(prepared: PlannedMerge) -> PlannedMerge:
            # The default output is this path, and an output must not be inside a checkpoint.
            step = prepared.checkpoint.location.step_dir
            if checkpoint.resolve() not in (step, *step.parents):
                raise UsageError(
                    f"{checkpoint} is inside a checkpoint",
                    hint=f"pass the checkpoint itself: {step}",
                )
            if model_cls is not None:
                check_class(model_cls, prepared.config, prepared.tensors)
            return as_transformers_saves(prepared)

        checkpoint = Path(checkpoint_path)
        target = checkpoint if output_path is None else Path(output_path)
        options = merge_options(self.checkpoint_type)
        chosen = {name: repr(value) for name, value in options.chosen.items()}
        call = Call("unshard.merge", (repr(str(checkpoint)), repr(str(target))), chosen)
        front = Python({"config"}, call)
        events = listener_or_default(self._listener)
        with front_of_errors(front), as_file(config) as file, events as heard:
            options = replace(options, config=file or "none")
            listener = _add_log(heard)
            merge_checkpoint(checkpoint, target, options, listener, before=check, pass_over=False)
        return target


def _add_log(listener: Listener) -> Listener:
    """Return a listener that also logs the name of the checkpoint, and every warning."""

    def logged(event: Event) -> None:
        match event:
            case Chosen(message):
                log.info(message)
            case Warned():
                log.warning(event.message)
        listener(event)

    return logged
