"""lm-eval without anything of ours: transformers saves the weights that torch gathered.

    python -m evaluation.lm_eval_by_hand TASKS TASK OUTPUT TRUTH...

writes the task's metrics for each truth, in order, as JSON.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from evaluation.fsdp_training import trained_model
from tiny_models import tiny_tokenizer


def measured(truth: str, task: str, manager: TaskManager) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        model = trained_model()
        model.load_state_dict(torch.load(truth))
        model.save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
        found: Any = lm_eval.simple_evaluate(
            HFLM(pretrained=directory, device="cpu"),
            tasks=[task],
            task_manager=manager,
            bootstrap_iters=0,
        )
    return {name: found["results"][task][f"{name},none"] for name in ("perplexity", "acc")}


def main() -> None:
    tasks, task, output, *truths = sys.argv[1:]
    manager = TaskManager(include_path=tasks)
    found = json.dumps([measured(truth, task, manager) for truth in truths])
    Path(output).write_text(found)


if __name__ == "__main__":
    main()
