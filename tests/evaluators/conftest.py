"""These tests need an evaluator, a tracker, a browser or another package of `.venv-eval`."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("evaluators")
