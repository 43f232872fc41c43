"""transformers' Trainer with our callback as a process, to be killed: saves each step.

Given the run, what to follow with and the number of steps, it waits after each save for a file
`go-STEP` next to the run.
"""

import sys
from pathlib import Path
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.writers.trainer import Sentences
from tiny_models import tiny_model
from unshard.integrations.transformers import UnshardCallback
from waiting import wait_until

__all__ = ["plain_arguments"]


def plain_arguments(run: Path, steps: int, **more: Any) -> TrainingArguments:
    """Return the arguments of a training in one process that saves each step."""
    saving = {"save_strategy": "steps", "save_steps": 1, **more}
    return TrainingArguments(
        output_dir=str(run),
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **saving,
    )


class _Waiting(TrainerCallback):
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del control
        wait_until(Path(str(args.output_dir)).with_name(f"go-{state.global_step}").exists)


def main(run: str, follow: str, steps: str) -> None:
    callbacks = [UnshardCallback(follow), _Waiting()]
    arguments = plain_arguments(Path(run), int(steps))
    Trainer(tiny_model(), arguments, train_dataset=Sentences(), callbacks=callbacks).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
