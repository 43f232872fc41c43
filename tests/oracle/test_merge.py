"""Merges of checkpoints of real torch processes, against the unsharded tensors, bit for bit."""

from pathlib import Path

import pytest
import torch

import unshard
from oracle.conftest import WriteCheckpoint
from ranks import Tensors, assert_same, bits, merged, rank_path, snapshot
from unshard import NotMergeableError
from unshard.keywords import Cast

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]  # one pool of them is enough

CASES = [
    *[("fsdp2", world) for world in (1, 2, 3, 4, 7)],
    ("fsdp2_hsdp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_tp_uneven", 4),
    ("fsdp1_mesh", 1),
    ("fsdp1_mesh", 2),
    ("experts", 4),
    ("hsdp_tp", 8),
    ("lone_strided", 3),
    ("noncontiguous", 3),
    ("out_of_order", 4),
    ("plain_equal", 2),
]


@pytest.mark.parametrize(("scenario", "world"), CASES)
def test_a_merge_gives_the_unsharded_tensors_bit_for_bit(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str, world: int
) -> None:
    truth = write_checkpoint(scenario, world, tmp_path / "ckpt")
    before = snapshot(tmp_path / "ckpt")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), truth)
    assert report.tensors == len(truth) > 0
    assert snapshot(tmp_path / "ckpt") == before


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_dtype_and_dimension_is_merged(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, world: int
) -> None:
    truth = write_checkpoint("dtensor_dtypes", world, tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", memory="140KB", workers=1, config="none")
    assert_same(merged(tmp_path / "out"), truth)
    dtypes = {tensor.dtype for tensor in truth.values()}
    assert len(dtypes) >= 12
    assert {tensor.ndim for tensor in truth.values()} >= {0, 1, 2, 3}


CASTS: dict[Cast, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.parametrize("scenario", ["fsdp2", "dtensor_dtypes"])
def test_a_cast_gives_what_torch_casts_to(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str, dtype: Cast
) -> None:
    truth = write_checkpoint(scenario, 3, tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", dtype=dtype, config="none")
    cast = {
        name: tensor.to(CASTS[dtype]) if tensor.dtype in CASTABLE else tensor
        for name, tensor in truth.items()
    }
    assert_same(without_nan_payloads(merged(tmp_path / "out")), without_nan_payloads(cast))


def without_nan_payloads(tensors: Tensors) -> dict[str, torch.Tensor]:
    """NaN stays NaN in every cast, but its payload may differ between libraries."""
    return {
        name: torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        if tensor.dtype in CASTABLE
        else tensor
        for name, tensor in tensors.items()
    }


def test_tied_weights_are_both_written_and_equal(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint("fsdp2", 3, tmp_path / "ckpt")
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    found = merged(tmp_path / "out")
    groups = unshard.inspect(tmp_path / "ckpt").shared
    assert groups
    for names in groups:
        assert len({bits(found[name]) for name in names}) == 1


def test_any_one_replica_of_hsdp_is_enough(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    truth = write_checkpoint("fsdp2_hsdp", 4, tmp_path / "ckpt")
    for rank in (1, 2):
        rank_path(tmp_path / "ckpt", 4, rank).unlink()
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), truth)


def test_a_pending_reduction_is_refused(write_checkpoint: WriteCheckpoint, tmp_path: Path) -> None:
    write_checkpoint("partial", 2, tmp_path / "ckpt")
    with pytest.raises(NotMergeableError, match=r"Partial\(sum\) is a pending reduction"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_torch_lost_on_a_mesh_out_of_order_are_not_made_up(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint("out_of_order_uneven", 4, tmp_path / "ckpt")
    with pytest.raises(NotMergeableError, match=r"tensor rows: rank \d[\s\S]*its local shape is"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


def test_plain_tensors_that_differ_are_refused(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint("plain_differ", 2, tmp_path / "ckpt")
    with pytest.raises(NotMergeableError, match="differs between ranks"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


def test_a_plain_buffer_that_sorts_first_does_not_decide_for_the_others(
    write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    truth = write_checkpoint("fsdp2", 4, tmp_path / "ckpt")
    first = min(truth)
    assert unshard.inspect(tmp_path / "ckpt").placements["plain"] >= 1
    assert first == "a_buffer"
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert merged(tmp_path / "out")[first].shape == truth[first].shape
