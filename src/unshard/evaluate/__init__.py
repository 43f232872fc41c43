"""Evaluate every checkpoint while training continues. Core commands never import this room.

    from unshard.evaluate import EvalClient

    with EvalClient("http://127.0.0.1:8000") as client:
        client.submit("/runs/a/checkpoint-1000", step=1000, profile="lm-eval", tasks=["gsm8k"])

Each name below is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unshard.evaluate.client.lmms import AsyncEvalClient
    from unshard.evaluate.client.v1 import EvalClient
    from unshard.evaluate.trainer.config import EvalConfig
    from unshard.evaluate.trainer.submitter import Submitter

__all__ = ["AsyncEvalClient", "EvalClient", "EvalConfig", "Submitter"]

_PLACES = {
    "AsyncEvalClient": "unshard.evaluate.client.lmms",
    "EvalClient": "unshard.evaluate.client.v1",
    "EvalConfig": "unshard.evaluate.trainer.config",
    "Submitter": "unshard.evaluate.trainer.submitter",
}


def __getattr__(name: str) -> object:
    """Import the module of one name: the server needs no client."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
