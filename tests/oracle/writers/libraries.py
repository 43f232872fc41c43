"""Models of other libraries than transformers: trained under FSDP2, and saved in every form.

They are all in one run, by name, because importing the libraries takes seconds. A model's folder:

* `ranks`: a rank file per rank, fsdp_config.json, and huggingface/ with the model's configs;
* `dcp`: DCP, with the model's tensors below `model.`;
* `saved`: what its class saves of the whole model, after the training;
* `base`: the same before it, for a component of a pipeline the complete pipeline;
* `ranks.truth`, `dcp.truth`: the whole tensors by the names of its state dict;
* `output`: what the live model, sharded as it is, makes of its inputs.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from oracle.writers.dcp_saving import save_dcp
from oracle.writers.saving import gather, save_rank, truth_file
from tiny_diffusers import (
    TINY_DIFFUSERS,
    TINY_PIPELINES,
    diffusers_adapter,
    diffusers_output,
    tiny_diffusers,
    tiny_pipeline,
)
from tiny_sentences import make_sentences, sentence_embeddings, tiny_sentences

__all__ = ["ADAPTED", "SENTENCES", "files_in", "save_libraries", "truth_of"]

ADAPTED = "sd3_lora"
"""The folder of the model of diffusers that was trained with an adapter alone."""
SENTENCES = "sentences"
"""The folder of the model of sentence-transformers."""

_Place = tuple[int, int, Path]


def truth_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a model by the names of its state dict."""
    found: dict[str, torch.Tensor] = torch.load(truth_file(folder / "ranks"))
    return found


def files_in(place: Path) -> set[str]:
    """Return the names of all files below a folder."""
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


def save_libraries(rank: int, world: int, directory: Path) -> None:
    """Train and save every model."""
    for name in TINY_DIFFUSERS:
        _save_diffusers((rank, world, directory / name), name)
    _save_adapted((rank, world, directory / ADAPTED))
    _save_sentences((rank, world, directory / SENTENCES))


def _save_diffusers(place: _Place, name: str) -> None:
    rank, world, folder = place
    model = tiny_diffusers(name)
    if rank == 0:
        whole = tiny_pipeline(name) if name in TINY_PIPELINES else model
        whole.save_pretrained(folder / "base")
    _shard(model, world)
    _train(model, lambda: diffusers_output(name, model))
    truth = _save_forms(place, model)
    _leave_output(place, lambda: diffusers_output(name, model))
    if rank == 0:
        saved = tiny_diffusers(name)
        saved.load_state_dict(truth)
        saved.save_pretrained(folder / "saved")
        saved.save_config(folder / "ranks" / "huggingface")


def _save_adapted(place: _Place) -> None:
    """Save SD3 with an adapter; `saved` is what its pipeline saves of that alone."""
    rank, world, folder = place
    model = tiny_diffusers("sd3")
    if rank == 0:
        tiny_pipeline("sd3").save_pretrained(folder / "base")
    config = diffusers_adapter()
    model.add_adapter(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    _shard(model, world)
    _train(model, lambda: diffusers_output("sd3", model))
    truth = _save_forms(place, model)
    _leave_output(place, lambda: diffusers_output("sd3", model))
    if rank == 0:
        from diffusers import StableDiffusion3Pipeline
        from diffusers.training_utils import _collate_lora_metadata

        whole = tiny_diffusers("sd3")
        whole.add_adapter(config)
        whole.load_state_dict(truth)
        layers = {
            key.replace(".default.", "."): value for key, value in truth.items() if "lora_" in key
        }
        metadata = _collate_lora_metadata({"transformer": whole})
        StableDiffusion3Pipeline.save_lora_weights(
            folder / "saved", transformer_lora_layers=layers, **metadata
        )
        whole.save_config(folder / "ranks" / "huggingface")
        trained = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": None}
        (folder / "ranks" / "lora_train_meta.json").write_text(json.dumps(trained))


def _save_sentences(place: _Place) -> None:
    rank, world, folder = place
    if rank == 0:
        make_sentences(folder / "base")
    dist.barrier()
    model = tiny_sentences(folder / "base")
    _shard(model, world)
    _train(model, lambda: sentence_embeddings(model))
    truth = _save_forms(place, model)
    _leave_output(place, lambda: sentence_embeddings(model))
    if rank == 0:
        whole = tiny_sentences(folder / "base")
        whole.load_state_dict(truth)
        whole.save_pretrained(str(folder / "saved"), create_model_card=False)
        copytree(
            folder / "saved",
            folder / "ranks" / "huggingface",
            ignore=ignore_patterns("*.safetensors"),
        )


def _shard(model: nn.Module, world: int) -> None:
    """Shard with a unit per block."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def _train(model: nn.Module, forward: Any) -> None:
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    forward().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _save_forms(place: _Place, model: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Save rank files and DCP; return the whole tensors."""
    rank, world, folder = place
    for form in ("ranks", "dcp"):
        (folder / form).mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    truth = OrderedDict(
        (name, (gather(value) if isinstance(value, DTensor) else value).detach().clone())
        for name, value in state.items()
    )
    save_rank((rank, world, folder / "ranks"), state, truth)
    if rank == 0:
        config = {"FSDP_version": 2, "world_size": world}
        (folder / "ranks" / "fsdp_config.json").write_text(json.dumps(config))
    weights = get_model_state_dict(model)
    save_dcp((rank, world, folder / "dcp"), {"model": weights}, truth, stored="model.{}".format)
    dist.barrier()
    return truth


def _leave_output(place: _Place, forward: Any) -> None:
    with torch.no_grad():
        found = forward()
    if place[0] == 0:
        torch.save(found, place[2] / "output")
