"""Random tensors, meshes and placements: real processes shard them, a merge must restore them.

The processes are the session's pool; each example is one checkpoint of many tensors, so that the
cost of a round trip is paid once.
"""

import random
from collections import OrderedDict
from math import prod
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import unshard
from oracle.writers.saving import save_rank
from oracle.writers.workers import WorkerPool
from ranks import assert_same, merged

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

SHAPES = ((2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (2, 2, 2), (1, 4), (7,))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64)


def random_placements(rng: random.Random, ndim: int, mesh_dims: int) -> list[Placement]:
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    return [rng.choice(choices) for _ in range(mesh_dims)]


def random_checkpoint(rank: int, world: int, directory: Path) -> None:
    """Save 40 random tensors on one random mesh; the directory's name is the seed."""
    seed = int(directory.parent.name.rpartition("-")[2])
    rng = random.Random(seed)
    mesh_shape = rng.choice([shape for shape in SHAPES if prod(shape) == world])
    mesh = init_device_mesh("cpu", mesh_shape)
    truth: OrderedDict[str, torch.Tensor] = OrderedDict()
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    for index in range(40):
        sizes = [rng.randint(0 if rng.random() < 0.1 else 1, 9) for _ in range(rng.randint(0, 4))]
        tensor = (torch.randn(sizes) * 100).to(rng.choice(DTYPES))
        placements = random_placements(rng, len(sizes), len(mesh_shape))
        name = f"{index}.{'x'.join(map(str, sizes))}"
        truth[name] = tensor
        state[name] = distribute_tensor(tensor, mesh, placements)
    save_rank((rank, world, directory), state, truth)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("seed", range(3))
def test_random_placements_are_restored(
    worker_pool: WorkerPool, tmp_path: Path, world: int, seed: int
) -> None:
    from oracle.writers.saving import truth_file

    directory = tmp_path / f"seed-{100 * world + seed}" / "ckpt"
    directory.mkdir(parents=True)
    worker_pool.run(random_checkpoint, world, directory)
    truth = torch.load(truth_file(directory))
    memory = ["64MB", "131072"][seed % 2]
    unshard.merge(
        directory, tmp_path / "out", memory=memory, workers=seed + 1, verify="full", config="none"
    )
    assert_same(merged(tmp_path / "out"), truth)
    assert len(truth) == 40
