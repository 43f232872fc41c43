"""Conditions on a config and the number of a layer, by which a model has tensors or not. Pure."""

from collections.abc import Callable

from unshard.read.beside.model_config import Fields

__all__ = [
    "Condition",
    "NotKnownError",
    "always",
    "both",
    "flag",
    "given",
    "integer",
    "interleaved",
    "is_not",
    "later",
    "linear",
    "stepped",
]

Condition = Callable[[Fields, int], bool]
"""Whether names are there: by a part's config and the number of a layer."""


class NotKnownError(Exception):
    """A config does not say which tensors its model has; caught where names are made."""


def always(_config: Fields, _layer: int) -> bool:
    """Return True."""
    return True


def flag(key: str, *, default: bool, wanted: bool = True) -> Condition:
    """Return whether a key that is true or false has the wanted value."""

    def holds(config: Fields, _layer: int) -> bool:
        value = config.get(key, default)
        if not isinstance(value, bool):
            raise NotKnownError
        return value is wanted

    return holds


def given(key: str, *, wanted: bool = True) -> Condition:
    """Return whether a size is there and above 0; where the key itself is missing, nothing is."""

    def holds(config: Fields, _layer: int) -> bool:
        if key not in config:
            raise NotKnownError
        value = config[key]
        if value is not None and type(value) is not int:
            raise NotKnownError
        return bool(value) is wanted

    return holds


def is_not(condition: Condition) -> Condition:
    """Return whether a condition does not hold."""
    return lambda config, layer: not condition(config, layer)


def both(first: Condition, second: Condition) -> Condition:
    """Return whether two conditions hold."""
    return lambda config, layer: first(config, layer) and second(config, layer)


def integer(config: Fields, key: str, default: int | None = None) -> int:
    """Return a count that a config holds.

    Raises:
        NotKnownError: it is missing without a default, negative, or of another type.
    """
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise NotKnownError
    return value


def stepped(config: Fields, layer: int) -> bool:
    """Return whether a layer of Qwen is sparse: every so manieth, but for some."""
    dense = config.get("mlp_only_layers", [])
    step = integer(config, "decoder_sparse_step", 1)
    if dense is None:
        dense = []
    if not isinstance(dense, list) or not step:
        raise NotKnownError
    return layer not in dense and (layer + 1) % step == 0


def later(config: Fields, layer: int) -> bool:
    """Return whether a layer is sparse where the first few are dense, and the others are not."""
    if config.get("moe_layer_freq", 1) != 1:
        raise NotKnownError
    return layer >= integer(config, "first_k_dense_replace")


def interleaved(config: Fields, layer: int) -> bool:
    """Return whether a layer of Llama 4 is sparse."""
    layers = config.get("moe_layers")
    if layers is None:
        step = integer(config, "interleave_moe_layer_step")
        return step > 0 and (layer + 1) % step == 0
    if not isinstance(layers, list):
        raise NotKnownError
    return layer in layers


def linear(config: Fields, layer: int) -> bool:
    """Return whether the attention of a layer is linear."""
    types = config.get("layer_types")
    if types is None:
        return (layer + 1) % _full_every(config) != 0
    if not isinstance(types, list) or layer >= len(types):
        raise NotKnownError
    if types[layer] not in ("linear_attention", "full_attention"):
        raise NotKnownError
    return bool(types[layer] == "linear_attention")


def _full_every(config: Fields) -> int:
    found = integer(config, "full_attention_interval", 4)
    if not found:
        raise NotKnownError
    return found
