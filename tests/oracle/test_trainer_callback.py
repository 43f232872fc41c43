"""The callback of transformers' Trainer in two processes with FSDP: one of them follows the run."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from following import outputs_in
from oracle.writers.saving import equal_bits, logits_file
from oracle.writers.trainer import trainer_followed
from oracle.writers.workers import WorkerPool
from tiny_models import logits, tiny_tokenizer

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),  # what transformers says
]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_the_last_step_is_a_model_when_training_has_ended(
    worker_pool: WorkerPool, tmp_path: Path, version: int
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    worker_pool.run(partial(trainer_followed, version=version, follow=str(out)), 2, run)
    (left,) = run.glob("checkpoint-*")
    assert not list(left.rglob("*config*.json"))  # as the Trainer leaves it
    output = outputs_in(out)[left.name]
    hub: Any = import_module("transformers")
    model, report = hub.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(report.values()), report
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert equal_bits(logits(model), torch.load(logits_file(run)))
    found = hub.AutoTokenizer.from_pretrained(output)
    assert found.get_vocab() == tiny_tokenizer().get_vocab()
    log = (run / "_unshard" / "follow.log").read_text()
    assert log.count("saved to ") == len(outputs_in(out))
