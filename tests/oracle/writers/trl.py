"""A real SFTTrainer of TRL with FSDP2 on the CPU; the truth is the model after step 2."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oracle.writers.accelerate import launched
from oracle.writers.hub_models import full_state, leave_logits
from oracle.writers.saving import leave_truth
from oracle.writers.trainer import Sentences, arguments
from tiny_models import tiny_model, tiny_tokenizer

__all__ = ["trl_sft"]


def trl_sft(rank: int, world: int, directory: Path) -> None:
    """Fine-tune `started-from`, next to the run, and save shards at steps 1 and 2; any world."""
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    start = directory.parent / "started-from"
    if rank == 0:
        tiny_model().save_pretrained(start)
        tiny_tokenizer().save_pretrained(start)
    dist.barrier()
    with launched(rank, world):
        more: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
        given = arguments(directory, 2, "SHARDED_STATE_DICT", trl.SFTConfig, **more)
        sentences = Sentences()
        tokens = [sentences[row]["input_ids"].tolist() for row in range(len(sentences))]
        rows = datasets.Dataset.from_dict({"input_ids": tokens})
        trainer = trl.SFTTrainer(str(start), args=given, train_dataset=rows)
        trainer.train()
        place = rank, world, directory
        leave_logits(place, trainer.model_wrapped)
        leave_truth(place, full_state(trainer.model_wrapped))
