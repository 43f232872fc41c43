"""Tied weights: an output head that is the input embedding, stored once or twice.

If config.json says that they are tied and both are there with equal bytes, the head is left out, as
`save_pretrained` does. Where the bytes differ training has untied them: both stay.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unshard.containers.open_files import OpenFiles
from unshard.read.chunks import equal_tensors
from unshard.tensors.catalog import TensorEntry

__all__ = ["Ties", "find_ties"]

_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)


@dataclass(frozen=True, slots=True)
class Ties:
    """Heads that repeat an embedding, and heads that should and do not; by the embedding's name."""

    equal: Mapping[str, str]
    different: Mapping[str, str]


def find_ties(tensors: Mapping[str, TensorEntry], config: Mapping[str, object] | None) -> Ties:
    """Compare heads with embeddings, if the config says that they are tied.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    if config is None or not _are_tied(config):
        return Ties({}, {})
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for head in (name for name in tensors if _ends_with(name, _HEADS)):
            like = [
                name
                for name, entry in tensors.items()
                if _ends_with(name, _EMBEDDINGS) and entry.shape == tensors[head].shape
            ]
            same = (name for name in like if equal_tensors(tensors[head], tensors[name], files))
            found = next(same, None)
            if found is not None:
                equal[head] = found
            elif like:
                different[head] = like[0]
    return Ties(equal, different)


def _are_tied(config: Mapping[str, object]) -> bool:
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    return config.get("tie_word_embeddings", nested.get("tie_word_embeddings")) is True


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)
