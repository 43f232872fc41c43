"""Fixtures: a store per module, and the checkpoints that torch's processes write."""

from collections.abc import Iterator

import pytest

from bucket_server import Store, serving
from oracle.conftest import samples, worker_pool, write_checkpoint

__all__ = ["samples", "served", "store", "worker_pool", "write_checkpoint"]


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
