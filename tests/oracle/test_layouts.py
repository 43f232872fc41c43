"""Merges of what is not a directory of rank files full of DTensors: DCP, FSDP1, accelerate.

That torch itself loads the truth back is checked by every scenario as it saves, except those that
torch cannot read.
"""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import unshard
from oracle.conftest import WriteCheckpoint
from oracle.writers.dcp_saving import read_metadata, stored_tensors
from oracle.writers.scenarios import LAYOUTS
from ranks import assert_same, merged, snapshot
from unshard import CheckpointError, NotMergeableError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]  # one pool of them is enough

MERGED = {
    "dcp_accelerate": (2,),
    "dcp_app": (2,),
    "dcp_async": (2,),
    "dcp_composer": (2,),
    "dcp_fabric": (2,),
    "dcp_flat": (3,),
    "dcp_fsdp1": (1, 3),
    "dcp_full": (2,),
    "dcp_hsdp": (4,),
    "dcp_lightning": (2,),
    "dcp_lightning_fsdp": (2,),
    "dcp_many_files": (3,),
    "dcp_model": (1, 3),
    "dcp_model_optimizer": (3,),
    "dcp_nested": (4,),
    "dcp_no_collectives": (1, 3),
    "dcp_not_flattened": (1, 3),
    "dcp_not_flattened_plain": (1,),
    "dcp_strides": (1, 3),
    "dcp_tensors": (1, 3),
    "dcp_threads": (3,),
    "dcp_tp": (4,),
    "dcp_wrapped": (2,),
    "dcp_zstd": (2,),
    "fsdp1_flat_sharded": (1, 3),
    "fsdp1_hybrid_no_mesh": (4,),
    "fsdp1_local": (1,),  # FSDP1 does not shard for one rank, whatever it is asked for
    "fsdp1_sharded": (1, 2, 3, 5),
    "fsdp1_sharded_bin": (2,),
    "fsdp2_bin": (2,),
    "megatron": (1, 3),
}
CASES = [(name, world) for name, worlds in MERGED.items() for world in worlds]

# Some items that are not weights, by their flattened names.
BESIDE = {
    "dcp_app": ["app.optim.state.scale.exp_avg", "app.optim.param_groups.0.lr"],
    "dcp_composer": [
        "state.optimizers.AdamW.state.block.linear.weight.step",
        "state.timestamp.Timestamp.epoch",
        "state.integrations.huggingface.model.config.content.layers",
        "state.run_name",
        "rng.0.torch",
    ],
    "dcp_flat": [
        "optimizer.state.embed.weight.exp_avg_sq",
        "lr_scheduler.last_epoch",
        "train_state.step",
        "train_state.losses",
        "dataloader.dp_rank_0",
        "dataloader.world_size",
    ],
    "dcp_lightning": ["optimizer_0.state.scale.exp_avg"],
    "dcp_lightning_fsdp": ["optimizer_0.state.scale.exp_avg"],
    "dcp_model": [],
    "dcp_model_optimizer": [
        "optimizer.state.block.norm.weight.exp_avg",
        "lr_scheduler.base_lrs",
        "step",
        "best",
        "note",
        "history.0.loss",
        "history.1.loss",
    ],
    "dcp_zstd": ["step", "note"],
}

REFUSED = [
    ("dcp_not_flattened_nested", 2, "model"),
    ("fsdp1_local", 2, "LOCAL_STATE_DICT|_flat_param"),
    ("fsdp1_local_flat", 2, "LOCAL_STATE_DICT|_flat_param"),
]


def test_every_layout_is_tried() -> None:
    refused = {name for name, _, _ in REFUSED} | {"dcp_corrupt"}
    assert LAYOUTS.keys() <= MERGED.keys() | refused


@pytest.mark.parametrize(("scenario", "world"), CASES)
def test_a_merge_gives_the_unsharded_tensors_bit_for_bit(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str, world: int
) -> None:
    truth = write_checkpoint(scenario, world, tmp_path / "ckpt")
    before = snapshot(tmp_path / "ckpt")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", verify="full", config="none")
    assert_same(merged(tmp_path / "out"), truth)
    assert report.tensors == len(truth) > 0
    assert snapshot(tmp_path / "ckpt") == before


@pytest.mark.parametrize("scenario", BESIDE)
def test_what_is_not_a_weight_is_skipped_and_reported(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str
) -> None:
    truth = write_checkpoint(scenario, 2, tmp_path / "ckpt")
    items = set(read_metadata(tmp_path / "ckpt").state_dict_metadata)
    skipped = unshard.inspect(tmp_path / "ckpt").skipped
    told = [{item for item in items if stands_for(value.fqn, item)} for value in skipped]
    assert all(told)  # nothing is skipped that is not there
    assert set().union(*told) >= set(BESIDE[scenario])
    assert sum(map(len, told)) == len(set().union(*told)) == len(items) - len(truth)
    assert all(value.reason for value in skipped)


def stands_for(name: str, item: str) -> bool:
    """Return whether a skipped value is this item, or all that start as `optimizer.*` does."""
    return item.startswith(name[:-1]) if name.endswith(".*") else item == name


@pytest.mark.parametrize(("scenario", "world", "words"), REFUSED)
def test_what_cannot_be_merged_is_refused_with_what_to_do(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str, world: int, words: str
) -> None:
    write_checkpoint(scenario, world, tmp_path / "ckpt")
    with pytest.raises(NotMergeableError, match=words) as caught:
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert "hint:" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_directories_are_of_the_forms_that_they_are_named_for(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    for scenario in ("dcp_many_files", "dcp_no_collectives", "dcp_threads", "dcp_zstd"):
        write_checkpoint(scenario, 3, tmp_path / scenario)
    items = read_metadata(tmp_path / "dcp_many_files").storage_data.values()
    assert len({item.relative_path for item in items}) == len(items)
    assert not (tmp_path / "dcp_no_collectives" / ".metadata").exists()
    assert (tmp_path / "dcp_no_collectives" / "__2.metadata").exists()
    assert not all(path.stat().st_size for path in (tmp_path / "dcp_threads").iterdir())
    compressed = read_metadata(tmp_path / "dcp_zstd").storage_data.values()
    assert {tuple(item.transform_descriptors) for item in compressed} == {("stream.zstd/1",)}


def test_rows_that_torch_declared_elsewhere_than_it_stored_them_are_not_made_up(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint("dcp_corrupt", 6, tmp_path / "ckpt")
    assert disagreements(tmp_path / "ckpt") == {"model.up.weight", "model.up.bias"}
    with pytest.raises(CheckpointError, match=r"up\.(weight|bias)"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def disagreements(directory: Path) -> set[str]:
    """Names of tensors of which torch stored another shape than it declared."""
    metadata = read_metadata(directory)
    found = set()
    for index, piece in stored_tensors(directory, metadata):
        entry = metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        declared = {tuple(chunk.offsets): chunk.sizes for chunk in entry.chunks}
        if declared[tuple(index.offset or ())] != piece.shape:
            found.add(index.fqn)
    return found
