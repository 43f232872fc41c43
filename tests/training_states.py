"""Write training state with real torch, as each writer lays it out, next to a small model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ranks import save_ranks, some_tensors

__all__ = ["WRITERS", "Saved", "draw", "seeded"]


@dataclass(frozen=True)
class Saved:
    """What one rank saves; `devices` are states of its own device, or of all that it sees."""

    scheduler: object = None
    devices: dict[str, object] = field(default_factory=dict)
    cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    numpy: object = field(default_factory=lambda: np.random.get_state())  # noqa: NPY002, PLW0108
    python: object = field(default_factory=random.getstate)


def seeded(number: int, scheduler: object = None, **devices: object) -> Saved:
    """Return what a rank saves whose generators were seeded by a number and used a little."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - trainers save the state of the old global generator
    random.seed(number)
    draw()
    return Saved(scheduler, devices)


def draw() -> tuple[list[float], ...]:
    """Draw from all three generators; `gauss` and `randn` leave a second number behind."""
    return (
        torch.randn(3).tolist(),
        np.random.randn(3).tolist(),  # noqa: NPY002
        [random.gauss(0, 1) for _ in range(3)],
    )


def verl(run: Path, ranks: Sequence[Saved]) -> Path:
    step = run / "global_step_7"
    save_ranks(step / "actor", some_tensors(), len(ranks))
    for rank, saved in enumerate(ranks):
        rng = {"cpu": saved.cpu, "numpy": saved.numpy, "random": saved.python, **saved.devices}
        name = f"extra_state_world_size_{len(ranks)}_rank_{rank}.pt"
        torch.save({"lr_scheduler": saved.scheduler, "rng": rng}, step / "actor" / name)
    return step


def lmms_engine(run: Path, ranks: Sequence[Saved]) -> Path:
    step = run / "checkpoint-7"
    save_ranks(step / "pytorch_model_fsdp_0", some_tensors(), len(ranks))
    (step / "extra_state").mkdir()
    for rank, saved in enumerate(ranks):
        extra_state = {
            "lr_scheduler_state": saved.scheduler,
            "rng": {"cpu": saved.cpu, "numpy": saved.numpy, "random": saved.python} | saved.devices,
            "total_tokens": 12345,
            "accumulated_grad_steps": 0,
            "compute_tracker": {"total_flops": 1e18, "start_time": 1.5},
        }
        name = f"extra_state_world_size_{len(ranks)}_rank_{rank}.pt"
        torch.save(extra_state, step / "extra_state" / name)
    return step


def trainer(run: Path, ranks: Sequence[Saved]) -> Path:
    step = run / "checkpoint-7"
    step.mkdir(parents=True)
    save_file(some_tensors(), step / "model.safetensors")
    torch.save(ranks[0].scheduler, step / "scheduler.pt")
    for rank, saved in enumerate(ranks):
        rng = {"python": saved.python, "numpy": saved.numpy, "cpu": saved.cpu, **saved.devices}
        name = "rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth"
        torch.save(rng, step / name)
    return step


def accelerate(run: Path, ranks: Sequence[Saved]) -> Path:
    step = run / "checkpoint_7"
    step.mkdir(parents=True)
    save_file(some_tensors(), step / "model.safetensors")
    torch.save(ranks[0].scheduler, step / "scheduler.bin")
    for rank, saved in enumerate(ranks):
        states = {
            "step": 7,
            "random_state": saved.python,
            "numpy_random_seed": saved.numpy,
            "torch_manual_seed": saved.cpu,
        }
        seeds = {f"torch_{device}_manual_seed": one for device, one in saved.devices.items()}
        torch.save(states | seeds, step / f"random_states_{rank}.pkl")
    return step


WRITERS: dict[str, Callable[[Path, Sequence[Saved]], Path]] = {
    "verl": verl,
    "lmms-engine": lmms_engine,
    "HF Trainer": trainer,
    "accelerate": accelerate,
}
