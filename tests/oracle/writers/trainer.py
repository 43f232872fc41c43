"""Scenarios of a real `Trainer` with FSDP on the CPU; the truth is the model after step 2."""

from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.writers.accelerate import launched
from oracle.writers.hub_models import full_state, leave_logits, shards_state
from oracle.writers.saving import leave_truth
from tiny_models import tiny_model, tiny_tokenizer, with_adapter

__all__ = [
    "Sentences",
    "arguments",
    "trainer_fsdp1",
    "trainer_fsdp2",
    "trainer_full",
    "trainer_goes_on",
    "trainer_lora",
    "trainer_runs",
]

_Place = tuple[int, int, Path]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __init__(self, vocabulary: int = 37) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def trainer_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP2 and save shards at steps 1 and 2; any world size."""
    _train((rank, world, directory), tiny_model(), version=2, kind="SHARDED_STATE_DICT")


def trainer_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP1 and save shards at steps 1 and 2; any world size."""
    _train((rank, world, directory), tiny_model(), version=1, kind="SHARDED_STATE_DICT")


def trainer_full(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP2 and save whole models, as a Trainer does by default; any world size."""
    _train((rank, world, directory), tiny_model(), version=2, kind="FULL_STATE_DICT")


def trainer_lora(rank: int, world: int, directory: Path) -> None:
    """Train an adapter of peft with FSDP2, and save it; any world size."""
    model = with_adapter(tiny_model())
    _train((rank, world, directory), model, version=2, kind="SHARDED_STATE_DICT")


class _Loaded(TrainerCallback):
    """Saves what a Trainer has when its training begins, from rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        del control
        model, optimizer = given["model"], given["optimizer"]
        whole = StateDictOptions(full_state_dict=True)
        found = {
            "model": full_state(model),
            "optimizer": get_optimizer_state_dict(model, optimizer.optimizer, options=whole),
            "scheduler": given["lr_scheduler"].state_dict(),
            "step": state.global_step,
        }
        if args.process_index == 0:
            torch.save(found, self.path)


def trainer_goes_on(
    rank: int, world: int, directory: Path, *, config: Path | None, step: int, resume: bool
) -> None:
    """Train with FSDP2 to one step after `step`, where it saves, with 12 sentences a step.

    `config` has the model's, by default a tiny one. To resume, `resharded/checkpoint-STEP` is
    loaded. What is loaded is left in `loaded-WORLD.pt`, the model after the last step in
    `went-on-WORLD.pt`.
    """
    with launched(rank, world):
        settings = arguments(directory / "run", 2, "SHARDED_STATE_DICT")
        settings.max_steps, settings.save_steps = step + 1, step
        settings.per_device_train_batch_size = 12 // world
        torch.manual_seed(world)
        model: Any = tiny_model()
        if config is not None:
            model = type(model)(AutoConfig.from_pretrained(config))
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=Sentences(model.config.vocab_size),
            callbacks=[_Loaded(directory / f"loaded-{world}.pt")],
        )
        place = directory / "resharded" / f"checkpoint-{step}"
        trainer.train(resume_from_checkpoint=str(place) if resume else None)
        after = full_state(trainer.model_wrapped)
        if rank == 0:
            torch.save(after, directory / f"went-on-{world}.pt")


def trainer_runs(rank: int, world: int, directory: Path, *, version: int, code: str) -> None:
    """Have a Trainer that keeps one checkpoint, and run a page's code; any world size."""
    _train(
        (rank, world, directory),
        tiny_model(),
        version=version,
        kind="SHARDED_STATE_DICT",
        code=code,
        save_total_limit=1,
    )


def _train(
    place: _Place,
    model: Any,
    *,
    version: int,
    kind: str,
    code: str = "trainer.train()",
    **more: Any,
) -> None:
    rank, world, directory = place
    with launched(rank, world), chdir(directory.parent):
        trainer = Trainer(
            model=model,
            args=arguments(directory, version, kind, **more),
            train_dataset=Sentences(),
            processing_class=tiny_tokenizer() if more else None,
        )
        exec(code, {"trainer": trainer})  # noqa: S102
        model = trainer.model_wrapped
        leave_logits(place, model)
        leave_truth(place, full_state(model) if version == 2 else shards_state(model))


def arguments(
    directory: Path,
    version: int,
    kind: str,
    of: type[TrainingArguments] = TrainingArguments,
    **more: Any,
) -> TrainingArguments:
    fsdp: dict[str, Any] = {
        "version": version,
        "state_dict_type": kind,
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    }
    if version == 1:
        fsdp["sync_module_states"] = "false"  # looks for an accelerator
    return of(
        str(directory),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},  # that of `launched`
        fsdp=True,  # type: ignore[arg-type]  # a string is deprecated
        fsdp_config=fsdp,
        max_steps=2,
        save_steps=1,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
