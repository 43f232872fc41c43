"""The oracle itself: what it writes, what it returns, and how it fails.

That torch reads each rank file back and gathers the truth from it is checked by every scenario in
every rank as it saves; here it is enough to run them. Other layouts stand in `test_layouts.py`.
"""

import os
from pathlib import Path

import pytest
import torch

from oracle.writers.samples import Samples
from oracle.writers.scenarios import RANK_FILES
from oracle.writers.tensor import DTYPES
from oracle.writers.workers import RankError, WorkerPool

pytestmark = pytest.mark.xdist_group("torch processes")  # one pool of them is enough

WORLDS = {
    "dtensor_dtypes": (1, 3),
    "experts": (4,),
    "fsdp1_flat_sharded": (3,),
    "fsdp1_hybrid_no_mesh": (4,),
    "fsdp1_local": (2,),
    "fsdp1_local_flat": (2,),
    "fsdp1_mesh": (1, 2),
    "fsdp1_sharded": (1, 5),
    "fsdp2": (1, 2, 3, 4, 7),
    "fsdp2_hsdp": (4,),
    "fsdp2_tp": (4,),
    "fsdp2_tp_uneven": (4,),
    "hsdp_tp": (8,),
    "lone_strided": (2,),
    "noncontiguous": (1, 3),
    "out_of_order": (4,),
    "out_of_order_uneven": (4,),
    "partial": (2,),
    "plain_differ": (2, 3),
    "plain_equal": (1, 2),
}
CASES = [(name, world) for name, worlds in WORLDS.items() for world in worlds]


def raise_on_last_rank(rank: int, world: int, directory: Path) -> None:
    """Fail as a scenario with a bug does."""
    if rank == world - 1:
        raise ValueError(f"a bug for {directory.name}")


def die_on_last_rank(rank: int, world: int, directory: Path) -> None:
    """Fail as a process does that the kernel kills."""
    if rank == world - 1:
        os._exit(len(directory.name))


def test_every_scenario_of_rank_files_is_tried() -> None:
    assert WORLDS.keys() == RANK_FILES.keys()


@pytest.mark.parametrize(("name", "world"), CASES)
def test_scenario_writes_one_file_per_rank_and_nothing_else(
    samples: Samples, name: str, world: int
) -> None:
    written = samples.write(name, world)
    expected = {f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)}
    assert {path.name for path in written.directory.iterdir()} == expected
    assert {path.name for path in written.directory.parent.iterdir()} == {"run", "run.truth"}
    assert written.truth
    assert all(type(tensor) is torch.Tensor for tensor in written.truth.values())


def test_fsdp2_truth_has_names_shapes_and_dtypes(samples: Samples) -> None:
    truth = samples.write("fsdp2", 3).truth
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in truth.items()}
    assert found == {
        "scale": ((1,), torch.float32),
        "narrow": ((2, 5), torch.float32),
        "a_buffer": ((7,), torch.float32),
        "inverse_frequency": ((5,), torch.float32),
        "counter": ((), torch.int64),
        "mask": ((2, 3), torch.bool),
        "nothing": ((0, 3), torch.float32),
        "embed.weight": ((37, 10), torch.float32),
        "block.linear.weight": ((13, 10), torch.float32),
        "block.linear.bias": ((13,), torch.float32),
        "block.norm.weight": ((13,), torch.float32),
        "bfloat16_layer.weight": ((6, 10), torch.bfloat16),
        "bfloat16_layer.bias": ((6,), torch.bfloat16),
        "float16_layer.weight": ((5, 9), torch.float16),
        "float16_layer.bias": ((5,), torch.float16),
        "head.weight": ((37, 10), torch.float32),
    }
    assert torch.equal(truth["head.weight"], truth["embed.weight"])


def test_the_same_scenario_gives_the_same_truth(samples: Samples) -> None:
    two, three = samples.write("fsdp2", 2).truth, samples.write("fsdp2", 3).truth
    assert two.keys() == three.keys()
    assert all(torch.equal(two[name], three[name]) for name in two)


def test_dtensor_dtypes_covers_every_dtype(samples: Samples) -> None:
    truth = samples.write("dtensor_dtypes", 3).truth
    assert {tensor.dtype for tensor in truth.values()} == set(DTYPES)


def test_a_rank_that_raises_is_reported_with_its_traceback(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*ValueError: a bug for here"):
        worker_pool.run(raise_on_last_rank, 2, _directory(tmp_path, "here"))


def test_a_rank_that_dies_is_reported_and_the_pool_recovers(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    with pytest.raises(RankError, match="rank 1: the process died with exit code 4"):
        worker_pool.run(die_on_last_rank, 2, _directory(tmp_path, "four"))
    worker_pool.run(RANK_FILES["plain_equal"], 2, _directory(tmp_path, "again"))
    assert len(list((tmp_path / "again").iterdir())) == 2


def test_more_ranks_than_the_pool_has_are_refused(tmp_path: Path, worker_pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="expected 1 to 8 ranks, got 9"):
        worker_pool.run(raise_on_last_rank, 9, tmp_path)


def _directory(parent: Path, name: str) -> Path:
    directory = parent / name
    directory.mkdir()
    return directory
