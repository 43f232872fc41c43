"""What several modules of these tests need."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest


@pytest.fixture
def backends() -> Iterator[ModuleType]:
    """lmms-engine's own backends, imported anew: what a test puts in their place goes with it."""
    pytest.importorskip("lmms_engine.eval.backends", reason="pip install --no-deps lmms_engine")
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_theirs(name)}
    yield importlib.import_module("lmms_engine.eval.backends")
    for name in [name for name in sys.modules if _is_theirs(name)]:
        del sys.modules[name]
    sys.modules.update(kept)


def _is_theirs(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] in {"lmms_engine", "lmms_eval"}
