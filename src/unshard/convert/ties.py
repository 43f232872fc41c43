"""Tied weights: tensors that repeat another one in the model, and are stored once or twice.

If the config ties them and both are there with equal bytes, the second is left out, as
`save_pretrained` does. If the bytes of an output head differ, training has untied it: both stay.
transformers leaves the key out of a config where it has the family's default.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from unshard.read.beside.model_config import ModelConfig
from unshard.tensors.catalog import TensorEntry

__all__ = ["Ties", "find_ties", "is_head"]

_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "shared.weight",
)
# Ends of names, and the ends of the names of tensors that they may repeat.
_HEADS: Mapping[str, tuple[str, ...]] = {
    "lm_head.weight": _EMBEDDINGS,
    "embed_out.weight": _EMBEDDINGS,
    "output.weight": _EMBEDDINGS,
    "proj_out.weight": ("decoder.embed_tokens.weight",),
    "cls.predictions.decoder.weight": ("word_embeddings.weight",),
    "lm_head.decoder.weight": ("word_embeddings.weight",),
}
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
    "lm_head.decoder.bias": ("lm_head.bias",),
}


@dataclass(frozen=True, slots=True)
class Ties:
    """Names that repeat another tensor, and heads that should but differ, each with the other."""

    equal: Mapping[str, str]
    different: Mapping[str, str]


def find_ties(
    tensors: Mapping[str, TensorEntry],
    computed: Mapping[str, tuple[int, ...]],
    config: ModelConfig | None,
    are_equal: Callable[[TensorEntry, TensorEntry], bool],
) -> Ties:
    """Compare tensors that may be tied, if the config ties them.

    Args:
        tensors: tensors that are written as they are stored, by output name.
        computed: shapes of the others, which never equal a stored tensor.
        config: config.json.
        are_equal: compares the bytes of two tensors.
    """
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    if config is None or not config.is_tied:
        return Ties({}, {})
    shapes = {name: entry.shape for name, entry in tensors.items()} | dict(computed)
    for name in shapes:
        like = [other for other in _likely(name, shapes) if shapes[other] == shapes[name]]
        same = (  # a generator: comparing reads the files, and the first that is equal is enough
            other
            for other in like
            if name in tensors and other in tensors and are_equal(tensors[name], tensors[other])
        )
        found = next(same, None)
        if found is not None:
            equal[name] = found
        elif like and is_head(name):
            different[name] = like[0]
    return Ties(equal, different)


def is_head(name: str) -> bool:
    """Return whether a tensor is an output head, by its name."""
    return any(_ends_with(name, ending) for ending in _HEADS)


def _likely(name: str, names: Collection[str]) -> list[str]:
    """Return the names of the tensors that a tensor may repeat."""
    originals = [
        ending
        for repeated, endings in (*_HEADS.items(), *_OTHERS.items())
        if _ends_with(name, repeated)
        for ending in endings
    ]
    return [
        other
        for other in names
        if other != name and any(_ends_with(other, ending) for ending in originals)
    ]


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)
