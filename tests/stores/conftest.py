"""Fixtures: a store per module, and the checkpoints that torch's processes write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import unshard
from bucket_server import Store, serving
from oracle.conftest import samples, worker_pool, write_checkpoint

__all__ = ["samples", "served", "store", "truth", "worker_pool", "write_checkpoint"]


@pytest.fixture(scope="module")
def served() -> Iterator[Store]:
    """Run a store for the tests of a module."""
    with serving() as store:
        yield store


@pytest.fixture
def store(served: Store) -> Store:
    """Return the module's store, without faults."""
    served.forget_requests()
    return served


@pytest.fixture(scope="module")
def truth(local: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights that a merge of a module's checkpoint `local` writes to disk."""
    output = tmp_path_factory.mktemp("truth") / "out"
    unshard.merge(local, output, config="none")
    return (output / "model.safetensors").read_bytes()
