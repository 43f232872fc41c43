"""Evaluate every checkpoint while training goes on. Core commands never import this room.

    from unshard.evaluate import EvalClient

    with EvalClient("http://127.0.0.1:8000") as client:
        client.submit("/runs/a/checkpoint-1000", step=1000, profile="lm-eval", tasks=["gsm8k"])

What stands here is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unshard.evaluate.client import AsyncEvalClient, EvalClient
    from unshard.evaluate.config import EvalConfig

__all__ = ["AsyncEvalClient", "EvalClient", "EvalConfig"]

_PLACES = {
    "AsyncEvalClient": "unshard.evaluate.client",
    "EvalClient": "unshard.evaluate.client",
    "EvalConfig": "unshard.evaluate.config",
}


def __getattr__(name: str) -> object:
    """Import what is asked for, and nothing else: the server needs no client."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
