"""Every option that shapes an output: `verify` calls what a merge with it writes equal."""

import json
from pathlib import Path
from typing import Any

import pytest

import unshard
from adapters import adapted
from optimizers import KEYS, like, save_optimizer
from ranks import as_rank, rank_path, save_ranks, some_tensors
from tiny_models import tiny_config, tiny_model
from unshard import CorruptError
from unshard.keywords import OPTIONS
from unshard.write.verification.comparison import Comparison

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

BASE = "a merge of the same"
SHAPED: dict[str, list[dict[str, Any]]] = {
    "dtype": [{"dtype": "bfloat16"}],
    "keep_fp32": [{"keep_fp32": "norm", "dtype": "float16"}],
    "quantize": [{"quantize": "fp8-block"}],
    "names": [{"names": "training"}],
    "include": [{"include": "norm"}],
    "exclude": [{"exclude": r"layers\.1"}],
    "base": [{"base": BASE}],
    "optimizer": [{"optimizer": True}],
    "lora": [
        {"lora": "fuse"},
        {"lora": "adapter"},
        {"lora": "both"},
        {"lora": "keep", "names": "training"},
    ],
    "lora_alpha": [{"lora_alpha": 3.5}],
    "ep_size": [{"ep_size": 2}],
}
GIVEN_AGAIN = {"base", "ep_size"}
"""What `verify` does not take from the record: it has no path, or depends on what is compared."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, all in one tensor, with the state of its optimizer."""
    place = tmp_path_factory.mktemp("run") / "actor"
    tensors = dict(tiny_model("qwen3_moe").state_dict())
    save_ranks(place, tensors, 2)
    tiny_config("qwen3_moe").save_pretrained(place)
    save_optimizer(place, {key: like(tensors, seed) for seed, key in enumerate(KEYS)}, 2)
    return place


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that both groups of ranks saved under one name."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    place = tmp_path_factory.mktemp("groups")
    for rank in range(4):
        with as_rank(rank, 4):
            whole = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
            group = [rank // 2 * 2, rank // 2 * 2 + 1]
            mesh = DeviceMesh("cpu", group, mesh_dim_names=("ep_fsdp",), _init_backend=False)
            part = torch.full((2, 3, 2), float(rank))
            state = {
                "model.norm.weight": DTensor.from_local(torch.ones(2), whole, [Shard(0)]),
                "layers.0.mlp.experts.down_proj": DTensor.from_local(part, mesh, [Shard(1)]),
            }
            torch.save(state, rank_path(place, 4, rank))
    return place


@pytest.mark.parametrize("option", [name for name, one in OPTIONS.items() if one.shapes])
def test_what_is_merged_with_an_option_is_verified_as_equal(
    option: str, tmp_path: Path, mixture: Path, halves: Path
) -> None:
    for number, sample in enumerate(SHAPED[option]):
        given = {"config": "none", **sample}
        checkpoint = {"ep_size": halves}.get(option, mixture)
        if option.startswith("lora"):
            checkpoint = tmp_path / "adapted"
            adapted(checkpoint, alpha=None if option == "lora_alpha" else 8.0)
        if given.get("base") is BASE:
            unshard.merge(mixture, tmp_path / "base")
            given["base"] = tmp_path / "base"
        output = tmp_path / f"out{number}"
        unshard.merge(checkpoint, output, **given)
        assert option in json.loads((output / "unshard.json").read_text())["options"]
        again = {name: value for name, value in given.items() if name in GIVEN_AGAIN}
        weights = output / "adapter_model.safetensors"  # a model is found by its directory
        written = weights if given.get("lora") == "adapter" else output
        found: Comparison = unshard.verify(written, checkpoint, **again)
        assert found.equal, given


def test_a_value_of_another_type_in_the_record_is_an_error(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", lora_alpha=None, config="none")
    path = tmp_path / "out" / "unshard.json"
    record = json.loads(path.read_text())
    for name, value in {"lora_alpha": "8", "include": 3, "names": ["hub"]}.items():
        path.write_text(json.dumps(record | {"options": {name: value}}))
        with pytest.raises(CorruptError, match=f"options.{name} is not"):
            unshard.verify(tmp_path / "out", tmp_path / "ckpt")


@pytest.mark.parametrize("none", [{"include": ""}, {"exclude": ""}, {"lora_alpha": 0}])
def test_an_empty_value_is_as_recorded(none: dict[str, Any], tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    unshard.merge(
        tmp_path / "ckpt", tmp_path / "out", include="norm", exclude="lm_head", config="none"
    )
    found: Comparison = unshard.verify(tmp_path / "out", tmp_path / "ckpt", **none)
    assert found.equal
