"""Fixtures: torch processes for the whole session, and the checkpoints that they write."""

import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.writers.hub import LIBRARIES
from oracle.writers.samples import Samples
from oracle.writers.workers import WorkerPool

WriteCheckpoint = Callable[[str, int, Path], dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def worker_pool() -> WorkerPool:
    """Return what runs scenarios in several processes."""
    return WorkerPool(max_world=8)


@pytest.fixture(scope="session")
def samples(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return what scenarios and formats look like on disk: each is written once, for all tests."""
    return Samples(worker_pool, tmp_path_factory)


@pytest.fixture(scope="session")
def write_checkpoint(samples: Samples) -> WriteCheckpoint:
    """Return `write_checkpoint(scenario_name, world_size, directory)`.

    It makes the directory a copy of what the scenario writes, which may be changed, and returns the
    whole tensors by name.
    """

    def write(scenario_name: str, world_size: int, directory: Path) -> dict[str, torch.Tensor]:
        sample = samples.write(scenario_name, world_size)
        shutil.copytree(sample.directory, directory, dirs_exist_ok=True)
        return dict(sample.truth)

    return write


@pytest.fixture(scope="session")
def libraries(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of models of other libraries, of which `oracle.writers.libraries` tells."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when they are imported
    folder = tmp_path_factory.mktemp("libraries")
    worker_pool.run(LIBRARIES, 2, folder)
    return folder


@pytest.fixture(scope="session")
def models() -> Any:
    """Return the module that builds them: importing transformers takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when it is imported
    return import_module("oracle.writers.family_models")
