"""Fixtures: torch processes for the whole session, and the function that writes a checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from oracle.saving import truth_file
from oracle.workers import WorkerPool
from oracle.writers import SCENARIOS

WriteCheckpoint = Callable[[str, int, Path], dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Yield the pool; its processes start when a scenario first needs them."""
    pool = WorkerPool(max_world=8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def write_checkpoint(worker_pool: WorkerPool) -> WriteCheckpoint:
    """Return `write_checkpoint(scenario_name, world_size, directory)`.

    It creates the directory, writes one rank file per rank into it and nothing else anywhere, and
    returns the whole tensors by name: contiguous, on the CPU, in the order of the state dict.
    """

    def write(scenario_name: str, world_size: int, directory: Path) -> dict[str, torch.Tensor]:
        directory.mkdir(parents=True, exist_ok=True)
        worker_pool.run(SCENARIOS[scenario_name], world_size, directory)
        truth: dict[str, torch.Tensor] = torch.load(truth_file(directory))
        truth_file(directory).unlink()
        return truth

    return write
