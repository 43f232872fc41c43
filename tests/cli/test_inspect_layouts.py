"""What `unshard inspect` tells people and programs, of each format."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from command import unshard
from ranks import as_rank, save_ranks, shard, some_tensors
from unshard.cli.main import app

WORLD = 4


def verl(run: Path) -> Path:
    place = run / "global_step_7" / "actor"
    save_ranks(
        place,
        some_tensors(),
        WORLD,
        mesh_shape=(2, 2),
        mesh_names=("ddp", "fsdp"),
        extra={"note": "text"},
    )
    (place / "optim_world_size_4_rank_0.pt").write_bytes(b"")
    (place / "huggingface").mkdir()
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    (place / "huggingface" / "config.json").write_text(json.dumps(config))
    return run


def trainer(run: Path) -> Path:
    """DCP with pieces of four ranks, next to what a Trainer saves."""
    place = run / "checkpoint-7" / "pytorch_model_fsdp_0"
    for rank in range(WORLD):
        with as_rank(rank, WORLD):
            mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
            state = {name: shard(value, mesh, None) for name, value in some_tensors().items()}
            writer = FileSystemWriter(place, sync_files=False, overwrite=True)
            save({"model": state, "step": 7}, storage_writer=writer, use_collectives=False)
    (run / "checkpoint-7" / "trainer_state.json").write_text("{}")
    (run / "checkpoint-7" / "rng_state_0.pth").write_bytes(b"")
    return run


def torchtitan(run: Path) -> Path:
    moments = {f"state.{number}": torch.ones(2) for number in range(12)}
    state = {**some_tensors(), "optimizer": moments, "train_state": {"step": 7}}
    alone(state, FileSystemWriter(run / "step-7", sync_files=False, _extensions=[ZStandard()]))
    return run


def hub_shards(run: Path) -> Path:
    alone(some_tensors(), HuggingFaceStorageWriter(str(run / "step-7"), save_distributed=True))
    (run / "step-7" / "config.json").write_text('{"transformers_version": "5", "dtype": "float32"}')
    return run


def whole(run: Path) -> Path:
    (run / "checkpoint-7").mkdir(parents=True)
    save_file(some_tensors(), run / "checkpoint-7" / "model.safetensors")
    return run


def nested(run: Path) -> Path:
    run.mkdir()
    weight = torch.ones(3, 2)
    state = {"a": weight, "b": weight, "c": torch.ones(3).bfloat16()}
    torch.save({"epoch": 3, "state_dict": state}, run / "last.pt")
    return run / "last.pt"


def alone(state: Any, writer: FileSystemWriter) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(state, storage_writer=writer, no_dist=True)


Make = Callable[[Path], Path]

NOTHING = (
    "nothing: no config.json was found in or next to {{}}{}: transformers needs one to load the "
    "weights"
)
SAID: dict[Make, dict[str, str]] = {
    verl: {
        "checkpoint": "{}/global_step_7/actor (actor, model weights)",
        "format": "FSDP rank files, written by verl",
        "step": "7",
        "world size": "4",
        "meshes": "ddp=2, fsdp=2 (3 tensors)",
        "placements": "Replicate(), Shard(0) (3 tensors)",
        "dtypes": "float32 (3 tensors)",
        "parameters": "162 in 3 tensors, 648 B",
        "config": "dtype bfloat16",
        "companions": "config.json",
        "not weights": "training state: optim_world_size_4_rank_0.pt",
        "merge writes": "{}/merged/global_step_7: 1 file, 648 bytes",
        "left out": "note: not a tensor: str",
    },
    trainer: {
        "checkpoint": "{}/checkpoint-7/pytorch_model_fsdp_0 (model weights)",
        "format": "torch DCP, written by HF Trainer (accelerate)",
        "world size": "4",
        "placements": "cut 4 x 1 (2 tensors); cut 3 (1 tensor)",
        "companions": "none",
        "not weights": "training state: rng_state_0.pth, trainer_state.json",
        "merge writes": NOTHING.format("/checkpoint-7/pytorch_model_fsdp_0"),
        "left out": "step: not model weights: object",
    },
    torchtitan: {
        "checkpoint": "{}/step-7 (model weights)",
        "format": "torch DCP, written by torchtitan",
        "world size": "1",
        "placements": "plain (3 tensors)",
        "left out": "optimizer.*: not model weights: 12 tensors",
    },
    hub_shards: {
        "format": "sharded safetensors, written by transformers",
        "step": "7",
        "placements": "plain (3 tensors)",
        "config": "dtype float32",
        "companions": "config.json",
    },
    whole: {
        "format": "whole files, written by unknown",
        "merge writes": NOTHING.format("/checkpoint-7"),
    },
    nested: {
        "format": "whole files, written by unknown",
        "step": "unknown",
        "dtypes": "float32 (2 tensors); bfloat16 (1 tensor)",
        "parameters": "15 in 3 tensors, 54 B",
        "tied": "a = b",
        "left out": "epoch: not the model's weights, which were taken from state_dict",
        "warning": "last.pt: the weights were taken from state_dict",
        "merge writes": NOTHING.format(""),
    },
}


def inspect(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


@pytest.mark.parametrize("make", SAID)
def test_people_are_told_what_happens(tmp_path: Path, make: Make) -> None:
    run = tmp_path / "run"
    lines = [(line[:13].strip(), line[14:]) for line in inspect(make(run)).splitlines()]
    for expected in SAID[make].items():
        assert (expected[0], expected[1].format(run)) in lines
    assert len(set(lines)) == len(lines)  # nothing is reported twice
    silent = {"config", "EMA", "LoRA", "tied", "not weights", "missing"} - SAID[make].keys()
    assert not silent & {name for name, _ in lines}


@pytest.mark.parametrize("make", SAID)
def test_programs_are_told_what_people_are_told(tmp_path: Path, make: Make) -> None:
    said, run = SAID[make], tmp_path / "run"
    found = json.loads(inspect(make(run), "--json"))
    assert f"{found['format']}, written by {found['writer']}" == said["format"]
    assert found["weights"] == "model"
    assert found["step"] == (None if said.get("step") == "unknown" else 7)
    if "merge writes" in said:
        assert found["would_write"] == said["merge writes"].format(run)
    for field in ("dtypes", "placements"):
        assert sum(found[field].values()) == len(found["tensors"])
        if field in said:
            assert all(
                f"{name} ({count} tensor" in said[field] for name, count in found[field].items()
            )


def test_every_tensor_is_listed_with_its_pieces(tmp_path: Path) -> None:
    found = json.loads(inspect(trainer(tmp_path / "run"), "--json"))
    assert {one["name"]: (one["shape"], one["chunks"]) for one in found["tensors"]} == {
        "model.embed_tokens.weight": ([13, 6], 4),
        "model.norm.weight": ([6], 3),
        "lm_head.weight": ([13, 6], 4),
    }
    assert found["size_bytes"] == 648


def test_columns_are_told_from_rows(tmp_path: Path) -> None:
    """Two pieces side by side, as a DCP of tensor parallelism has them."""
    value = torch.arange(12.0).reshape(3, 4)
    for rank in range(2):
        known = f'{{"w": {{"saved_offsets": [0, {2 * rank}]}}}}'
        path = tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        part = {"w": value[:, 2 * rank : 2 * rank + 2].contiguous()}
        save_file(part, path, metadata={"DCP_SHARDING_INFO": known})
    assert "cut 1 x 2 (1 tensor)" in inspect(tmp_path)


def test_what_there_is_very_much_of_is_cut(tmp_path: Path) -> None:
    """One line does not list the rates of all groups, nor one hint all folders."""
    run = save_ranks(tmp_path / "run", {}, 1, plain=[{"a.weight": torch.ones(50)}])
    groups: list[dict[str, object]] = [{"lr": at, "params": []} for at in range(50)]
    groups[0]["params"] = [0]
    state = {0: {"exp_avg": torch.ones(50)}}
    torch.save({"state": state, "param_groups": groups}, run / "optim_world_size_1_rank_0.pt")
    said = unshard("inspect", run).stdout
    assert "50 parameter groups (lr 0, 1, 2," in said
    assert "18, 19 and 30 more)" in said
    for number in range(13):
        save_ranks(tmp_path / "step_5" / f"part{number}", {"a.weight": torch.ones(5)}, 1)
    said = unshard("inspect", tmp_path / "step_5").stderr
    assert "has 13 sets of weights" in said
    assert "--role" not in said
    assert str(tmp_path / "step_5" / "part0") in said
