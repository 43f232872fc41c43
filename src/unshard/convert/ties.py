"""Tied weights: tensors that a model makes of another one, stored once or twice.

If the config says that they are tied and both are there with equal bytes, the second is left out,
as `save_pretrained` does. Where the bytes of an output head differ, training has untied it: both
stay. transformers leaves the word out of a config where it is the family's default.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from unshard.containers.chunks import equal_tensors
from unshard.containers.open_files import OpenFiles
from unshard.tensors.catalog import TensorEntry

__all__ = ["Ties", "are_tied", "find_ties", "is_head", "may_be_tied"]

_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "shared.weight",
)
# Endings of names, and of those of the tensors that they may repeat.
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
TIED_BY_DEFAULT = frozenset(
    """
    aya_vision bart bert bloom cohere cohere2 ctrl ernie4_5 ernie4_5_moe falcon falcon_mamba gemma
    gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text got_ocr2 gpt2 gpt_bigcode
    gpt_neo instructblip internvl lfm2 lfm2_moe lfm2_vl longt5 mamba marian mbart mistral3 mpt mt5
    opt ovis2 paligemma pegasus recurrent_gemma roberta smollm3 starcoder2 t5 t5gemma umt5
    vaultgemma whisper xglm xlm-roberta zamba zamba2
    """.split()
)
"""Model types whose config means tied weights without saying so; a test asks transformers."""


@dataclass(frozen=True, slots=True)
class Ties:
    """Names that repeat another tensor, and heads that should and do not; by the other's name."""

    equal: Mapping[str, str]
    different: Mapping[str, str]


def find_ties(
    tensors: Mapping[str, TensorEntry],
    computed: Mapping[str, tuple[int, ...]],
    config: Mapping[str, object] | None,
) -> Ties:
    """Compare what may be tied, if the config says that it is.

    Args:
        tensors: tensors that are written as they are stored, by output name.
        computed: shapes of the others, which equal nothing that is stored.
        config: config.json.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    if config is None or not are_tied(config):
        return Ties({}, {})
    shapes = {name: entry.shape for name, entry in tensors.items()} | dict(computed)
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for name in shapes:
            like = [other for other in _likely(name, shapes) if shapes[other] == shapes[name]]
            same = (
                other
                for other in like
                if name in tensors
                and other in tensors
                and equal_tensors(tensors[name], tensors[other], files)
            )
            found = next(same, None)
            if found is not None:
                equal[name] = found
            elif like and is_head(name):
                different[name] = like[0]
    return Ties(equal, different)


def is_head(name: str) -> bool:
    """Tell whether a tensor is an output head by its name."""
    return any(_ends_with(name, ending) for ending in _HEADS)


def are_tied(config: Mapping[str, object]) -> bool:
    """Tell whether a config, or its text model's, says that head and embedding are one."""
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    stated = config.get("tie_word_embeddings", nested.get("tie_word_embeddings"))
    if stated is None:
        return bool({config.get("model_type"), nested.get("model_type")} & TIED_BY_DEFAULT)
    return stated is True


def may_be_tied(config: Mapping[str, object]) -> bool:
    """Return whether a config or its text model's, each by itself, says that they are one.

    Versions of transformers differ in which of the two counts.
    """
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, dict) else {}):
        stated = fields.get("tie_word_embeddings")
        if stated is True or (stated is None and fields.get("model_type") in TIED_BY_DEFAULT):
            return True
    return False


def _likely(name: str, names: Collection[str]) -> list[str]:
    """Return the names of the tensors that one may repeat."""
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
