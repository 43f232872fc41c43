"""Tied heads and other tied weights, and the heads of critics.

If the config ties two weights and both are stored with equal bytes, the second is left out, as
`save_pretrained` does; a head without an embedding becomes the embedding. If the bytes of an output
head differ, training has untied it, and both stay.

A critic or reward model is a language model whose head has one output per token. verl trains them
as `…ForTokenClassification` (a `score` or `classifier` head) and saves the config of the language
model that it started from; TRL's wrapper prefixes the model's names with `pretrained_model.` and
adds tensors of `v_head.`, which it also looks for when it loads.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from unshard.convert.recipes import Recipe, shape_of
from unshard.read.model_config import ModelConfig
from unshard.tensors.catalog import TensorEntry

EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "shared.weight",
    "backbone.embeddings.weight",
    "word_embedding.weight",
)
# Ends of names, and the ends of the names of tensors that they may repeat.
_HEADS: Mapping[str, tuple[str, ...]] = {
    "lm_head.weight": EMBEDDINGS,
    "embed_out.weight": EMBEDDINGS,
    "output.weight": EMBEDDINGS,
    "proj_out.weight": ("decoder.embed_tokens.weight",),
    "decoder.weight": EMBEDDINGS,
    "vocab_projector.weight": EMBEDDINGS,
    "generator_lm_head.weight": EMBEDDINGS,
    "lm_loss.weight": EMBEDDINGS,
}
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    "predictions.decoder.bias": ("predictions.bias",),
    "lm_head.decoder.bias": ("lm_head.bias",),
}
_TRL = "pretrained_model."
_VALUE_HEAD = "v_head."
_CRITIC_HEADS = ("score.weight", "classifier.weight")
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")
_LANGUAGE_MODEL = "ForCausalLM"


class Ties(NamedTuple):
    """Tied names and their originals: tensors that are equal, and heads that differ."""

    equal: Mapping[str, str]
    different: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about heads that differ."""
        return tuple(
            f"{head} differs from {embedding}, though the model's config ties them: both are "
            "written, and config.json is changed to untied"
            for head, embedding in self.different.items()
        )


def find_ties(
    tensors: Mapping[str, TensorEntry],
    computed: Mapping[str, tuple[int, ...]],
    config: ModelConfig | None,
    are_equal: Callable[[TensorEntry, TensorEntry], bool],
) -> Ties:
    """Compare the tensors that may be tied, if the config ties weights.

    `tensors` are written as they are stored; `computed` has the shapes of all others, which never
    equal a stored tensor.
    """
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    if config is None or not config.is_tied:
        return Ties({}, {})
    shapes = {name: entry.shape for name, entry in tensors.items()} | dict(computed)
    for name, shape in shapes.items():
        originals = tuple(
            f".{ending}"
            for repeated, endings in (*_HEADS.items(), *_OTHERS.items())
            if f".{name}".endswith(f".{repeated}")
            for ending in endings
        )
        if not originals:
            continue
        candidates = [
            other
            for other in shapes
            if other != name and shapes[other] == shape and f".{other}".endswith(originals)
        ]
        same = (  # a generator: comparing reads the files, so it stops at the first equal tensor
            other
            for other in candidates
            if name in tensors and other in tensors and are_equal(tensors[name], tensors[other])
        )
        original = next(same, None)
        if original is not None:
            equal[name] = original
        elif candidates and is_head(name):
            different[name] = candidates[0]
    for head in different:  # an untied head has its own bias, too
        equal.pop(f"{head.removesuffix('weight')}bias", None)
    return Ties(equal, different)


def is_head(name: str) -> bool:
    """Return whether a tensor has the name of an output head."""
    return any(f".{name}".endswith(f".{ending}") for ending in _HEADS)


def with_embedding(
    tensors: Mapping[str, Recipe], listed: Collection[str], config: ModelConfig | None
) -> dict[str, Recipe]:
    """Rename the head of a tied pair to the embedding if only the head is stored.

    The embedding must be the only missing embedding among `listed`, the names of the model.
    """
    heads = [name for name in tensors if is_head(name)]
    missing = [name for name in listed if name.endswith(EMBEDDINGS) and name not in tensors]
    if config is None or not config.is_tied or len(heads) != 1 or len(missing) != 1:
        return dict(tensors)
    return {missing[0] if name in heads else name: recipe for name, recipe in tensors.items()}


def left_out_heads(names: Collection[str], config: ModelConfig | None) -> dict[str, str]:
    """Return the tied head that `save_pretrained` leaves out of a language model, and its original.

    The state dict of a model in training contains both names.
    """
    if config is None or not config.is_tied or any(map(is_head, names)):
        return {}
    classes = config.fields.get("architectures")
    with_heads = (_LANGUAGE_MODEL, "ForConditionalGeneration", "LMHeadModel")
    if not isinstance(classes, list) or not any(str(one).endswith(with_heads) for one in classes):
        return {}
    endings = (".embed_tokens.weight", ".wte.weight")
    embeddings = [name for name in names if f".{name}".endswith(endings)]
    return {"lm_head.weight": embeddings[0]} if len(embeddings) == 1 else {}


def without_trl_wrapper(tensors: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Remove TRL's prefix if all names but the value head's have it."""
    others = [name for name in tensors if not name.startswith(_VALUE_HEAD)]
    if not others or not all(name.startswith(_TRL) for name in others):
        return dict(tensors)
    return {name.removeprefix(_TRL): recipe for name, recipe in tensors.items()}


def critic_config(config: ModelConfig, tensors: Mapping[str, Recipe]) -> ModelConfig:
    """Return a config with which transformers loads the head among the tensors.

    If the config names a language model and the tensors have a classifier's head instead,
    `architectures` and the number of labels follow the head. Other configs stay.
    """
    head = next((tensors[name] for name in _CRITIC_HEADS if name in tensors), None)
    architectures = config.fields.get("architectures")
    if head is None or "lm_head.weight" in tensors or not isinstance(architectures, list):
        return config
    names = [str(name) for name in architectures]
    is_classifier = any(name.endswith(_CLASSIFIERS) for name in names)
    if is_classifier or not any(name.endswith(_LANGUAGE_MODEL) for name in names):
        return config
    labels = shape_of(head)[0]
    return config.changed(
        {
            "architectures": [name.replace(_LANGUAGE_MODEL, _CLASSIFIERS[0]) for name in names],
            "id2label": {str(n): f"LABEL_{n}" for n in range(labels)},
            "label2id": {f"LABEL_{n}": n for n in range(labels)},
        }
    )
