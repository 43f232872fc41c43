"""A real transformers Trainer with FSDP2 on two CPU processes: what torchrun starts for a test.

It saves shards (SHARDED_STATE_DICT) and keeps one checkpoint. The whole weights of every saved step
are left in `truth-N.pt`, gathered by torch. Where the order tells it to, the training
waits for a file, so that a test can do something else meanwhile; nothing of it changes by that.
"""

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import Dataset
from transformers import (
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.writers.accelerate import launched
from oracle.writers.hub_models import full_state
from tiny_models import tiny_model, tiny_tokenizer

__all__ = ["LOGGING_STEPS", "WORLD", "Order", "gate", "trained_model", "truth_of"]

WORLD, LOGGING_STEPS = 2, 2
_PATIENCE_S = 600.0
_TEXTS = ("the sky is blue", "the grass is green", "the sun is yellow", "the sea is deep")


@dataclass(frozen=True, slots=True)
class Order:
    """What to train.

    Attributes:
        run: the run's directory.
        steps, save_steps: as of the Trainer.
        evaluation: the callback's configuration; None: no callback.
        report_to: trackers.
        gates: steps after which the training waits for `gate`.
    """

    run: str
    steps: int
    save_steps: int
    evaluation: dict[str, object] | None = None
    report_to: list[str] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def gate(run: Path, step: int) -> Path:
    return run.with_name(f"{run.name}-go-{step}")


def truth_of(run: Path, step: int) -> Path:
    return run.with_name(f"{run.name}-truth-{step}.pt")


def trained_model() -> Qwen2ForCausalLM:
    model: Qwen2ForCausalLM = tiny_model(vocab_size=len(tiny_tokenizer()))
    return model


class Texts(Dataset[dict[str, torch.Tensor]]):
    """A few sentences, each cut to the same length."""

    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        self._rows = [torch.tensor(tokenizer(text)["input_ids"][:12]) for text in _TEXTS]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._rows[index % len(self._rows)]
        return {"input_ids": ids, "labels": ids}


class Watcher(TrainerCallback):
    """Leaves the truth of what is saved; waits where it should."""

    def __init__(self, order: Order, rank: int) -> None:
        self._order = order
        self._rank = rank
        self.trainer: Trainer | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, control
        if state.global_step in self._order.gates:
            _wait_for(gate(Path(self._order.run), state.global_step))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Have the last step not saved for being the last: more is logged after the last save."""
        del args
        control.should_save &= state.global_step % self._order.save_steps == 0

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        del args, control
        assert self.trainer is not None
        truth = full_state(self.trainer.model_wrapped)
        if self._rank == 0:
            torch.save(dict(truth), truth_of(Path(self._order.run), state.global_step))


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} never came")
        time.sleep(0.05)


def _arguments(order: Order) -> TrainingArguments:
    return TrainingArguments(
        order.run,
        use_cpu=True,
        accelerator_config={"use_configured_state": True},  # that of `launched`
        fsdp=True,  # type: ignore[arg-type]  # a string is deprecated
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        },
        max_steps=order.steps,
        save_steps=order.save_steps,
        save_total_limit=1,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        logging_steps=LOGGING_STEPS,
        report_to=order.report_to or "none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def train(order: Order, rank: int) -> None:
    torch.manual_seed(0)
    model = trained_model()
    watcher = Watcher(order, rank)
    callbacks: list[TrainerCallback] = [watcher]
    if order.evaluation is not None:
        from unshard.evaluate.callbacks.transformers import UnshardEvalCallback

        callbacks.append(UnshardEvalCallback(order.evaluation))
    trainer = Trainer(
        model,
        _arguments(order),
        train_dataset=Texts(),
        callbacks=callbacks,
        processing_class=tiny_tokenizer(),
    )
    watcher.trainer = trainer
    trainer.train()


def main() -> None:
    warnings.simplefilter("ignore")  # torch warns about its own future
    torch.set_num_threads(1)
    init_process_group("gloo")
    rank = torch.distributed.get_rank()
    with launched(rank, WORLD):
        train(Order(**json.loads(Path(sys.argv[1]).read_bytes())), rank)
    destroy_process_group()


if __name__ == "__main__":
    main()
