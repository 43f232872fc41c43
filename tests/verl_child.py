"""A run of verl's own checkpoint manager: train and save on 2 ranks, then load and go on with 3.

    python verl_child.py DIRECTORY [model | lora | rotate COPIES OUTPUTS]

Between the two it writes a line, and waits for one. With a second word it trains a model, or an
adapter of peft, saves it, leaves its truth and its logits, and ends; with `rotate` it saves many
steps and keeps one, as `oracle.writers.rotating` describes. The package is imported once;
the ranks are forks of this process, connected by gloo. The model is one of transformers with FSDP2,
as verl wraps it; verl's workers are left out, which need its rollouts.
"""

import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from oracle.writers.hub_models import full_state, leave_logits
from oracle.writers.resuming import save_whole
from oracle.writers.rotating import STEPS, Copies
from oracle.writers.saving import leave_truth
from tiny_models import tiny_model, tiny_tokenizer, with_adapter

_Parts = tuple[Any, AdamW, LambdaLR]


def _parts(*, drawn: bool, lora: bool) -> _Parts:
    model = tiny_model("qwen2", num_hidden_layers=1)
    if lora:
        model = with_adapter(model)
    if not drawn:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in next(one for one in model.modules() if isinstance(one, nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = AdamW(trained, lr=0.01, weight_decay=0.1)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _train(parts: _Parts, step: int) -> None:
    model, optimizer, scheduler = parts
    ids = torch.randint(3, 37, (6, 5), generator=torch.Generator().manual_seed(step))
    model(input_ids=ids).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def _draws() -> list[float]:
    """Return what each generator gives next."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]  # noqa: NPY002


def _run(action: str, directory: Path, rank: int, world: int) -> None:
    where = directory / f"{action}.store"
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
    parts = _parts(drawn=action != "resume", lora=action == "lora")
    kinds = ["model", "optimizer", "extra"]
    contents = {"load_contents": kinds, "save_contents": kinds}
    manager = FSDPCheckpointManager(
        *parts, processing_class=tiny_tokenizer(), checkpoint_config=contents
    )
    if action == "rotate":
        _rotate(manager, parts, directory)
        return
    if action != "resume":
        for step in range(2):
            _train(parts, step)
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002 (the state that verl saves)
        torch.manual_seed(rank)
        manager.save_checkpoint(str(directory / "global_step_2" / "actor"), global_step=2)
    else:
        manager.load_checkpoint(str(directory / "resharded"))
    if action in {"model", "lora"}:
        leave_logits((rank, world, directory), parts[0])
        leave_truth((rank, world, directory), full_state(parts[0]))
        return
    torch.save(_draws(), directory / f"{action}-draws-{rank}.pt")
    save_whole(rank, parts, directory / f"{action}-before.pt")
    _train(parts, 2)
    save_whole(rank, parts, directory / f"{action}-after.pt")
    dist.barrier()


def _rotate(manager: FSDPCheckpointManager, parts: _Parts, directory: Path) -> None:
    """Train and save, with what verl's trainer does next to its manager."""
    copies = Copies(*map(Path, sys.argv[3:]))
    for step in range(1, STEPS + 1):
        _train(parts, step)
        step_dir = directory / f"global_step_{step}"
        manager.save_checkpoint(str(step_dir / "actor"), global_step=step, max_ckpt_to_keep=1)
        if dist.get_rank() == 0:
            torch.save({}, step_dir / "data.pt")
            (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
        copies.take(step_dir, step)


def _fork(action: str, directory: Path, world: int) -> None:
    children = []
    for rank in range(world):
        child = os.fork()
        if not child:
            try:
                _run(action, directory, rank, world)
            except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(ended):
        sys.exit(1)


def main() -> None:
    directory = Path(sys.argv[1])
    if len(sys.argv) > 2:
        _fork(sys.argv[2], directory, 2)
        return
    _fork("train", directory, 2)
    sys.stdout.write("trained\n")
    sys.stdout.flush()
    input()
    _fork("resume", directory, 3)


if __name__ == "__main__":
    main()
