"""One engine of a real vLLM evaluates checkpoints one after the other, with lm-eval itself."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from evaluation.local_tasks import OFFLINE, surprise_task
from evaluation.running import child_environment, wait_for
from ranks import save_ranks
from tiny_models import tiny_model, tiny_tokenizer
from unshard.evaluate.jobs import Job, Request, Status, WeightsName
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.attempts.attempt import Limits
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.queue.scheduler import Scheduler, SchedulerSettings
from unshard.evaluate.server.store.store import Store
from vllm_runs import PYTHON, called_vllm, needs_vllm
from waiting import LIMIT_S

pytestmark = [
    needs_vllm,
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),  # an engine takes two cores
]

TASK = "colours_surprise"
SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's attention on CPUs has
}


def save_steps(run: Path) -> list[Path]:
    """Save two steps as lmms-engine does, the second with other weights, and with EMA weights."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), **SIZES)
    steps = [run / "checkpoint-1", run / "checkpoint-2"]
    for number, step in enumerate(steps, 1):
        for folder, factor in (("pytorch_model_fsdp_0", 1.0), ("pytorch_ema_model_fsdp_0", 0.75)):
            with torch.no_grad():
                state = {
                    name: tensor * number * factor for name, tensor in model.state_dict().items()
                }
            save_ranks(step / folder, state, 2)
        model.config.save_pretrained(step)
        tokenizer.save_pretrained(step)
    return steps


def profile(tasks: Path, packages: Path, **changed: object) -> LmEvalProfile:
    environment = {
        **OFFLINE,
        "PYTHONPATH": os.pathsep.join([child_environment()["PYTHONPATH"], str(packages)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    chosen: dict[str, object] = {
        "interpreter": PYTHON,
        "environment": environment,
        "include_paths": (tasks,),
        "model": "vllm",
        "model_args": {"dtype": "float32", "enforce_eager": True, "max_model_len": 64},
        "timeout": LIMIT_S,
        "retries": 0,
        "launcher": "none",
    }
    return LmEvalProfile(**chosen | changed)  # type: ignore[arg-type]  # its own fields


def submit(pins: Pins, checkpoint: Path, profile: str, weights: WeightsName = "model") -> Job:
    step = int(checkpoint.name[-1])
    request = Request(str(checkpoint), profile, (TASK,), step, "run", weights=weights)
    pin = pins.ensure_pin(checkpoint, step, checkpoint.parent)
    assert pin is not None
    return pins.store.submit(request, pin=pin)[0]


def test_the_numbers_are_those_of_merged_models_and_the_engine_starts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer removes the checkpoints before their jobs begin."""
    caplog.set_level(logging.INFO)
    first, second = save_steps(tmp_path / "run")
    tasks = surprise_task(tmp_path / "tasks")
    packages = called_vllm(tmp_path / "packages")
    profiles: dict[str, Profile] = {
        "direct": profile(tasks, packages, weights="direct"),
        "merged": profile(tasks, packages),
    }
    work = tmp_path / "work"
    store = Store(work / "jobs.sqlite")
    pins = Pins(store, (tmp_path,), Quota())
    settings = SchedulerSettings(work, Limits(grace_s=30.0))
    server = Scheduler(store, Slots(()), profiles, pins, settings)
    copy = Path(shutil.copytree(second, tmp_path / "copy" / second.name))
    kinds: tuple[WeightsName, ...] = ("model", "ema")
    jobs = [submit(pins, step, "direct", kind) for step in (first, second) for kind in kinds]
    for step in (first, second):  # the trainer's rotation
        shutil.rmtree(step)
    server.start()
    try:
        done = [wait_for(store, job.id, Status.COMPLETED) for job in jobs]
        assert list((work / "merged").iterdir()) == []
        assert not [path for path in work.rglob("*") if path.suffix in {".safetensors", ".bin"}]
        # Its engine needs the one slot that there is: the kept engine ends.
        merged = submit(pins, copy, "merged", "ema")
        truth = wait_for(store, merged.id, Status.COMPLETED)
        assert list((work / "engines").iterdir()) == []
    finally:
        server.stop(end=True)
    assert [job.attempts for job in done] == [1, 1, 1, 1]
    started = [text for text in caplog.messages if "started: " in text and "engine" in text]
    assert ["running" in text for text in started] == [False, True, True, True]
    found = [job.metrics for job in done]
    assert found[3] == truth.metrics
    assert len({metrics[f"{TASK}/perplexity"] for metrics in found}) == 4
    logs = [(server.directory_of(job) / "log.txt").read_text() for job in done]
    assert ["the engine has the weights of" in log for log in logs] == [False, True, True, True]
