"""The trainer of lmms-engine 0.1.4, started as a test's child: what `unshard` installs is in it.

Its module is the released one. lmms-engine asks for packages that a CPU and a small model do not
need, and for a GPU; these are stood in for here: `StatefulDataLoader` by torch's `DataLoader`, the
device mesh "cuda" by "cpu". What saves, submits, waits and logs is lmms-engine's own.
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.utils.data
from torch.distributed.device_mesh import init_device_mesh

from evaluation.fsdp_training import Texts, trained_model
from tiny_models import tiny_tokenizer
from unshard.evaluate import lmms_engine as ours

__all__ = ["Order", "begins", "import_trainer", "main", "on_the_cpu", "train", "truth_of"]

_PACKAGES = ("train", "train.fsdp2", "utils", "models", "datasets")


@dataclass(frozen=True, slots=True)
class Order:
    """What to train.

    Attributes:
        run: the run's directory.
        evaluation: `eval_config` of lmms-engine's YAML; empty: nothing is evaluated.
        report_to: trackers.
        steps, save_steps, save_total_limit: as of the trainer.
    """

    run: str
    evaluation: dict[str, object]
    report_to: str = "none"
    steps: int = 4
    save_steps: int = 2
    save_total_limit: int = 1

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def truth_of(run: Path) -> Path:
    """Where the root mean square of the weights that the run ended with is written."""
    return run.with_name(f"{run.name}-truth.json")


def begins(name: str) -> str:
    """What is printed before the training of the file of this name."""
    return f"training: {name}"


class Loader(torch.utils.data.DataLoader[dict[str, torch.Tensor]]):
    """Stands in for torchdata's `StatefulDataLoader`; nothing is resumed here."""

    def state_dict(self) -> dict[str, object]:
        return {}


def _module(name: str, **contents: object) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    return module


def import_trainer() -> ModuleType:
    """Import the trainer's module without the model zoo that its packages import."""
    package = find_spec("lmms_engine")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    for name in _PACKAGES:
        vars(_module(f"lmms_engine.{name}"))["__path__"] = [str(root.joinpath(*name.split(".")))]
    _module("deepspeed", __spec__=ModuleSpec("deepspeed", None))
    _module("torchdata")
    _module("torchdata.stateful_dataloader", StatefulDataLoader=Loader)
    _module("lmms_engine.parallel.parallelize", MODEL_TO_PARALLEL_METHOD={}, apply_parallelize=None)
    utils = vars(sys.modules["lmms_engine.utils"])
    for module, name in (("train_utils", "TrainUtilities"), ("compute_tracker", "ComputeTracker")):
        utils[name] = vars(importlib.import_module(f"lmms_engine.utils.{module}"))[name]
    vars(sys.modules["lmms_engine.datasets"])["DatasetConfig"] = object
    vars(sys.modules["lmms_engine.models"])["ModelConfig"] = object
    return importlib.import_module("lmms_engine.train.fsdp2.fsdp2_trainer")


def on_the_cpu(world: int) -> None:
    """Have what asks for a GPU answered."""
    vars(torch.cuda).update(get_device_name=lambda: "none", current_device=lambda: "cpu")
    groups = importlib.import_module("lmms_engine.parallel.process_group_manager")
    vars(groups)["init_device_mesh"] = lambda device, *rest, **more: (
        init_device_mesh("cpu", *rest, **more)  # whatever the device
        if device
        else None
    )
    vars(groups)["setup_process_group_manager"](
        tp_size=1, cp_size=1, pp_size=1, dp_size=world, ep_size=1, hsdp_shard_size=0
    )


def train(
    order: Order, trainer: ModuleType, saved: Callable[[Any, Path, int], object] = lambda *_: None
) -> None:
    """Do what `lmms_engine.launch.cli` does with a YAML file.

    `saved` is called in every rank with the trainer, each checkpoint's directory and its step.
    """
    torch.manual_seed(0)
    model = trained_model()
    config = importlib.import_module("lmms_engine.train.config")
    evaluation = vars(importlib.import_module("lmms_engine.eval"))["EvalConfig"]
    arguments = vars(config)["TrainingArguments"](
        order.run,
        use_cpu=True,
        bf16=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        max_steps=order.steps,
        save_steps=order.save_steps,
        eval_strategy="steps" if order.evaluation else "no",
        eval_steps=order.save_steps,
        save_total_limit=order.save_total_limit,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        report_to=order.report_to,
        dataloader_pin_memory=False,
        eval_config=evaluation(**order.evaluation).to_dict() if order.evaluation else None,
    )
    vars(arguments)["warmup_ratio"] = 0.0  # later transformers have none
    vars(importlib.import_module("lmms_engine.models.utils"))["setup_flops_counter"](model.config)

    # A subclass, for the trainer must hold no cycle: lmms-engine ends its trackers when it is
    # collected, and at the interpreter's end wandb's thread is gone: it would wait forever.
    class Told(vars(trainer)["FSDP2SFTTrainer"]):  # type: ignore[misc]
        def save_checkpoints(self, path: str, step: int, **more: object) -> None:
            super().save_checkpoints(path, step, **more)
            saved(self, Path(path), step)

    made = Told(model, arguments, Texts(), processing_class=tiny_tokenizer())
    made.train()
    whole = [one.full_tensor().double() for one in made.fsdp2_model.parameters()]
    squares = sum(float(one.square().sum()) for one in whole)
    rms = (squares / sum(one.numel() for one in whole)) ** 0.5
    if torch.distributed.get_rank() == 0:
        truth_of(Path(order.run)).write_text(json.dumps(rms))


def main() -> None:
    """Train what each of the files that are named says, one after the other."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    meeting = Path(sys.argv[1]).absolute().with_suffix(".meeting")
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world)
    trainer = import_trainer()
    ours.install()
    on_the_cpu(world)
    for file in map(Path, sys.argv[1:]):
        print(begins(file.stem), flush=True)  # noqa: T201  (the test reads it)
        train(Order(**json.loads(file.read_bytes())), trainer)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
