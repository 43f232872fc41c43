"""Groups of tensors, and the conditions on a config under which a layer has them. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from unshard.read.beside.model_config import Fields

__all__ = [
    "Group",
    "Groups",
    "NotKnownError",
    "deepseek_sparse",
    "flag",
    "given",
    "integer",
    "is_not",
    "linear_attention",
    "llama4_sparse",
    "qwen_sparse",
    "when",
]

Condition = Callable[[Fields, int], bool]
"""Return whether a layer has a group, by the config of its component and the layer's number."""


class NotKnownError(Exception):
    """A config does not say which tensors its model has; caught where names are made."""


@dataclass(frozen=True, slots=True)
class Group:
    """Patterns of names, separated by spaces, that a layer has if all conditions hold.

    An `optional` group may be missing in a checkpoint all the same.
    """

    names: str
    conditions: tuple[Condition, ...] = ()
    optional: bool = False


Groups = tuple[str | Group, ...]
"""All tensors of a component; plain patterns are those that it always has."""


def when(names: str, *conditions: Condition) -> Group:
    """Return a group that is there if all conditions hold."""
    return Group(names, conditions)


def is_not(condition: Condition) -> Condition:
    """Return the opposite of a condition."""
    return lambda config, layer: not condition(config, layer)


def flag(key: str, *, default: bool = False) -> Condition:
    """Return the condition that a key is true; the default is that of transformers."""

    def holds(config: Fields, _layer: int) -> bool:
        value = config.get(key, default)
        if not isinstance(value, bool):
            raise NotKnownError
        return value

    return holds


def given(key: str) -> Condition:
    """Return the condition that a size is above 0; a config without the key decides nothing."""

    def holds(config: Fields, _layer: int) -> bool:
        value = config.get(key, "")  # a missing key is as unclear as a text
        if value is not None and type(value) is not int:
            raise NotKnownError
        return bool(value)

    return holds


def integer(config: Fields, key: str, default: int | None = None) -> int:
    """Return a count that a config states.

    Raises:
        NotKnownError: it is missing without a default, negative, or of another type.
    """
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise NotKnownError
    return value


def qwen_sparse(config: Fields, layer: int) -> bool:
    """Return whether a layer of Qwen has experts: every Nth layer, except those listed as dense."""
    dense = config.get("mlp_only_layers")
    step = integer(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list | None) or not step:
        raise NotKnownError
    return layer not in (dense or ()) and (layer + 1) % step == 0


def deepseek_sparse(config: Fields, layer: int) -> bool:
    """Return whether a layer has experts where only the first few layers do not."""
    if config.get("moe_layer_freq", 1) != 1:
        raise NotKnownError
    return layer >= integer(config, "first_k_dense_replace")


def llama4_sparse(config: Fields, layer: int) -> bool:
    """Return whether a layer of Llama 4 has experts."""
    layers = config.get("moe_layers")
    if layers is None:
        step = integer(config, "interleave_moe_layer_step")
        return step > 0 and (layer + 1) % step == 0
    if not isinstance(layers, list):
        raise NotKnownError
    return layer in layers


def linear_attention(config: Fields, layer: int) -> bool:
    """Return whether a layer has linear attention instead of full attention."""
    types = config.get("layer_types")
    if types is None:
        interval = integer(config, "full_attention_interval", 4)
        if not interval:
            raise NotKnownError
        return (layer + 1) % interval != 0
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or layer >= len(types) or types[layer] not in known:
        raise NotKnownError
    return bool(types[layer] == known[0])
