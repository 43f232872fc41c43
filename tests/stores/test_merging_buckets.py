"""A merge of a checkpoint in a bucket: the bytes of a merge of the same files on disk."""

import json
from pathlib import Path

import pytest
import torch

import unshard
from bucket_server import Store
from merged_layouts import LAYOUTS, contents, make_layout
from oracle.conftest import WriteCheckpoint
from ranks import save_ranks

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_a_merge_from_disk(
    store: Store, write_checkpoint: WriteCheckpoint, tmp_path: Path, layout: str
) -> None:
    checkpoint = tmp_path / "ckpt"
    options = make_layout(layout, checkpoint, write_checkpoint)
    address = store.upload(checkpoint, f"layouts/{layout.replace(' ', '_')}/ckpt")
    unshard.merge(checkpoint, tmp_path / "local", **options)
    unshard.merge(address, tmp_path / "remote", **options)
    local, remote = contents(tmp_path / "local"), contents(tmp_path / "remote")
    assert local.keys() == remote.keys()
    different = [name for name in local if local[name] != remote[name]]
    assert different in ([], ["unshard.json"])
    assert [one.method for one in store.requests if one.method not in ("GET", "HEAD")] == []


def test_a_folder_that_was_listed_is_not_asked_for_what_it_does_not_have(
    store: Store, tmp_path: Path
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"l.0.a": torch.ones(8, 8)}, 2)
    address = store.upload(checkpoint, "listed/ckpt")
    store.forget_requests()
    unshard.merge(address, tmp_path / "out", config="none")
    listings = [one.query for one in store.requests if "list-type" in one.query]
    assert 1 <= len(listings) <= 5, listings  # two of them show that nothing has changed


def test_a_fuse_gets_wide_matrices_once(store: Store, tmp_path: Path) -> None:
    """Its tiles are narrow, and the parts of their rows lie so close that all are read."""
    generator = torch.Generator().manual_seed(4)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{name}.base_layer.weight": torch.randn(256, 4096, generator=generator),
        f"{name}.lora_A.default.weight": torch.randn(2, 4096, generator=generator),
        f"{name}.lora_B.default.weight": torch.randn(256, 2, generator=generator),
    }
    checkpoint = save_ranks(tmp_path / "ckpt", tensors, 2)
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    meta = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
    (checkpoint / "lora_train_meta.json").write_text(json.dumps(meta))
    address = store.upload(checkpoint, "wide")
    store.forget_requests()
    report = unshard.merge(address, tmp_path / "out", verify="off")
    read = sum(
        last - first + 1 for one in store.requests if one.range for first, last in [one.range]
    )
    assert read < 1.3 * report.bytes_written
    unshard.merge(checkpoint, tmp_path / "local")
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "local" / weights).read_bytes()
