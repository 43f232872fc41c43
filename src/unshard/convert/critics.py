"""Critics and reward models: a language model whose head gives one number per token.

verl trains them as `…ForTokenClassification` (a `score` or `classifier` head) and saves the config
of the language model they started from; TRL's wrapper puts `pretrained_model.` before the model's
names and adds tensors of `v_head.`, which it also looks for when it loads.
"""

from collections.abc import Mapping

from unshard.convert.recipes import Recipe, shape_of
from unshard.read.beside.model_config import ModelConfig

__all__ = ["critic_config", "without_trl_wrapper"]

_TRL = "pretrained_model."
_VALUE_HEAD = "v_head."
_HEADS = ("score.weight", "classifier.weight")
_CLASSIFIERS = ("ForTokenClassification", "ForSequenceClassification")
_LANGUAGE_MODEL = "ForCausalLM"


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

    Args:
        config: config.json.
        tensors: the output's tensors.
    """
    head = next((tensors[name] for name in _HEADS if name in tensors), None)
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
