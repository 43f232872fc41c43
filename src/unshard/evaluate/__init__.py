"""Evaluate every checkpoint while training continues. Core commands never import this package.

    from unshard.evaluate import EvalClient

    with EvalClient("http://127.0.0.1:8000") as client:
        client.submit("/runs/a/checkpoint-1000", step=1000, profile="lm-eval", tasks=["gsm8k"])

Each name below is imported when it is first used: the server needs no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["AsyncEvalClient", "EvalClient", "EvalConfig", "Submitter"]

if TYPE_CHECKING:
    from unshard.evaluate.client.lmms import AsyncEvalClient
    from unshard.evaluate.client.v1 import EvalClient
    from unshard.evaluate.trainer.config import EvalConfig
    from unshard.evaluate.trainer.submitter import Submitter
else:  # hidden from type checkers, which would accept any name
    _MODULES = {
        "AsyncEvalClient": "client.lmms",
        "EvalClient": "client.v1",
        "EvalConfig": "trainer.config",
        "Submitter": "trainer.submitter",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
