"""Heads and other weights that repeat one another, and the heads of critics.

If the config ties two weights and both are there with equal bytes, the second is left out, as
`save_pretrained` does; a head alone becomes the embedding. If the bytes of an output head differ,
training has untied it: both stay.
transformers leaves the key out of a config where it has the family's default.

A critic or reward model is a language model whose head gives one number per token. verl trains them
as `…ForTokenClassification` (a `score` or `classifier` head) and saves the config of the language
model they started from; TRL's wrapper puts `pretrained_model.` before the model's names and adds
tensors of `v_head.`, which it also looks for when it loads.
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
    """Names that repeat another tensor, and heads that should but differ, each with the other."""

    equal: Mapping[str, str]
    different: Mapping[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of heads that differ."""
        return tuple(
            f"{head} differs from {embedding}, though the model's config says that they are tied: "
            "both are written, and config.json records that"
            for head, embedding in self.different.items()
        )


def find_ties(
    tensors: Mapping[str, TensorEntry],
    computed: Mapping[str, tuple[int, ...]],
    config: ModelConfig | None,
    are_equal: Callable[[TensorEntry, TensorEntry], bool],
) -> Ties:
    """Compare the tensors that may be tied, if the config ties them.

    `tensors` are written as they are stored; `computed` has the shapes of the others, which never
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
        like = [
            other
            for other in shapes
            if other != name and shapes[other] == shape and f".{other}".endswith(originals)
        ]
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
    for head in different:  # its bias is no longer tied either
        equal.pop(f"{head.removesuffix('weight')}bias", None)
    return Ties(equal, different)


def is_head(name: str) -> bool:
    """Return whether a tensor is an output head, by its name."""
    return any(f".{name}".endswith(f".{ending}") for ending in _HEADS)


def with_embedding(
    tensors: Mapping[str, Recipe], listed: Collection[str], config: ModelConfig | None
) -> dict[str, Recipe]:
    """Return the tensors, of a tied pair of which only the head is stored the embedding.

    `listed` are the names of the model: it is the only embedding among them that is missing.
    """
    heads = [name for name in tensors if is_head(name)]
    missing = [name for name in listed if name.endswith(EMBEDDINGS) and name not in tensors]
    if config is None or not config.is_tied or len(heads) != 1 or len(missing) != 1:
        return dict(tensors)
    return {missing[0] if name in heads else name: recipe for name, recipe in tensors.items()}


def left_out_heads(names: Collection[str], config: ModelConfig | None) -> dict[str, str]:
    """Return the head that `save_pretrained` leaves out of a language model, and what it repeats.

    A model in training has it in its state dict under a name of its own.
    """
    if config is None or not config.is_tied or any(map(is_head, names)):
        return {}
    classes = config.fields.get("architectures")
    named = [str(one) for one in classes] if isinstance(classes, list) else []
    with_heads = (_LANGUAGE_MODEL, "ForConditionalGeneration", "LMHeadModel")
    if not any(one.endswith(with_heads) for one in named):
        return {}
    endings = ("embed_tokens.weight", "wte.weight")
    found = [name for name in names if f".{name}".endswith(tuple(f".{one}" for one in endings))]
    return {"lm_head.weight": found[0]} if len(found) == 1 else {}


def without_trl_wrapper(tensors: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Remove TRL's prefix if all names except the value head's have it."""
    others = [name for name in tensors if not name.startswith(_VALUE_HEAD)]
    if not others or not all(name.startswith(_TRL) for name in others):
        return dict(tensors)
    return {name.removeprefix(_TRL): recipe for name, recipe in tensors.items()}


def critic_config(config: ModelConfig, tensors: Mapping[str, Recipe]) -> ModelConfig:
    """Return a config with which transformers loads the head that the tensors have.

    If the config names a language model and the tensors have a classifier's head instead of its
    own, `architectures` and the number of labels follow the head. Other configs stay.
    """
    head = next((tensors[name] for name in _CRITIC_HEADS if name in tensors), None)
    architectures = config.fields.get("architectures")
    if head is None or "lm_head.weight" in tensors or not isinstance(architectures, list):
        return config
    names = [str(name) for name in architectures]
    if any(name.endswith(_CLASSIFIERS) for name in names):
        return config
    if not any(name.endswith(_LANGUAGE_MODEL) for name in names):
        return config
    labels = shape_of(head)[0]
    return config.changed(
        {
            "architectures": [name.replace(_LANGUAGE_MODEL, _CLASSIFIERS[0]) for name in names],
            "id2label": {str(n): f"LABEL_{n}" for n in range(labels)},
            "label2id": {f"LABEL_{n}": n for n in range(labels)},
        }
    )
