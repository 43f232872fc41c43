"""Evaluate the checkpoints of a Hugging Face Trainer while it trains.

    from unshard.evaluate.callbacks.transformers import UnshardEvalCallback

    trainer = Trainer(..., callbacks=[UnshardEvalCallback("eval.yaml")])

Results go to `<output_dir>/_unshard/results.jsonl` and to the trackers that `report_to` opened.
transformers calls `on_save` after it has removed old checkpoints; the new one is still there,
because rotation spares the newest (transformers 5.23, `rotate_checkpoints`: by mtime, so nothing
here may change the mtime of an old one). If neither the checkpoint nor the run has a config, config
and tokenizer are written into the run's directory.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from unshard.api.hinting import write_hint
from unshard.evaluate.sinks.base import PacedSink, Sink
from unshard.evaluate.sinks.open import open_sinks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from unshard.integrations.harmless import ignoring_errors
from unshard.integrations.transformers import write_companions
from unshard.read.beside.companions import companions_in

__all__ = ["UnshardEvalCallback"]

_GENERATION = "generation_config.json"

log = logging.getLogger(__name__)


class UnshardEvalCallback(TrainerCallback):
    """Submits the Trainer's checkpoints, and logs the results, also to further `sinks`.

    `config` is a YAML file, its text, a mapping, or an `EvalConfig`.
    """

    def __init__(
        self,
        config: EvalConfig | Mapping[str, object] | str | Path,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.config = EvalConfig.of(config)
        self.submitter: Submitter | None = None
        self._sinks = tuple(sinks)
        self._has_looked = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin, and continue with what an earlier process submitted."""
        del control
        is_first, run = state.is_world_process_zero, Path(args.output_dir or ".")
        with ignoring_errors("checkpoints are not evaluated"):
            if self.submitter is not None:  # of a training that was interrupted
                self.submitter.close(0.0)
            sinks: list[Sink] = []
            paced: list[PacedSink] = []
            if is_first:
                with ignoring_errors("trackers get no results"):
                    sinks, paced = open_sinks(tensorboard_dir=_tensorboard_dir(args))
            sinks = [*sinks, *self._sinks]
            self.submitter = Submitter(self.config, run, sinks=sinks, paced=paced, acts=is_first)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: object = None,
        processing_class: object = None,
        **_: object,
    ) -> None:
        """Submit the checkpoint that was just saved."""
        del control
        if self.submitter is not None and state.is_world_process_zero:
            run = Path(args.output_dir or ".")
            checkpoint = run / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            with ignoring_errors("the evaluated model may lack its config"):
                if not self._has_looked and companions_in(checkpoint).config is None:
                    write_companions(run, model, processing_class)
                files = {*companions_in(checkpoint).files, *companions_in(run).files}
                if not files - {_GENERATION} and not self._has_looked:
                    log.warning("no tokenizer in %s: give the Trainer one (processing_class)", run)
            self._has_looked = True
            self.submitter.submit(checkpoint, state.global_step)
            with ignoring_errors("no MERGE.txt"):
                write_hint(checkpoint)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Log at most one result in the trainer's own run."""
        del args, state, control
        if self.submitter is not None:
            self.submitter.tick()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Wait for the last results, for as long as the configuration allows."""
        del args, state, control
        if self.submitter is not None:
            self.submitter.close()


def _tensorboard_dir(args: TrainingArguments) -> Path | None:
    """Return where transformers' own callback writes event files, if it does."""
    if "tensorboard" not in (args.report_to or ()):
        return None
    # transformers 4.x has args.logging_dir.
    logs = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
    return Path(logs or Path(args.output_dir or ".") / "runs")
