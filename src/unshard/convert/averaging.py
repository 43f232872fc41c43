"""The mean of several models: tensor by tensor, once all have the same names, shapes and dtypes.

Floating point tensors of 16 bits and more are averaged. Integers, booleans, 8-bit floats (which
belong to separate scales) and complex numbers do not have a mean of their own type; they are
returned separately, for the caller to compare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unshard.convert.outputs import Converted
from unshard.convert.recipes import LowRank, WeightedSum, shape_of, stored_dtype
from unshard.errors import ConversionError, UsageError, raise_all

__all__ = ["average_tensors", "ema_weights"]


def ema_weights(decay: float, count: int) -> tuple[float, ...]:
    """Return the weights of `count` models in their exponential moving average.

    The average starts as the first model; every later one moves it: average = decay * average +
    (1 - decay) * model. The weights sum to 1.

    Raises:
        UsageError: the decay is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise UsageError(f"--ema-decay {decay}: must be between 0 and 1, both excluded")
    later = ((1 - decay) * decay ** (count - 1 - index) for index in range(1, count))
    return (decay ** (count - 1), *later)


def average_tensors(
    models: Sequence[Sequence[Converted]], names: Sequence[str], weights: Sequence[float]
) -> tuple[list[Converted], Mapping[str, tuple[Converted, ...]]]:
    """Return (sum of weight * model) / (sum of weights), with one rounding at the end.

    With it, by name, the tensors that are not averaged, in the order of the models: the last of
    each is among the output's tensors.

    `models` has the tensors of each model; `names` are those of the models, for errors.

    Raises:
        ConversionError: names, shapes or stored dtypes differ, or an adapter would have to be fused
            on the way.
    """
    by_name = [{tensor.name: tensor for tensor in model} for model in models]
    problems = _missing(by_name, names)
    common = [name for name in by_name[0] if all(name in model for model in by_name)]
    pairs = {name: tuple(model[name] for model in by_name) for name in common}
    problems += [p for same in pairs.values() if (p := _mismatch(same, names)) is not None]
    raise_all(ConversionError, "the checkpoints are not of one model", problems)
    tensors, fixed = [], {}
    for name, same in pairs.items():
        if stored_dtype(same[0].recipe).castable:
            terms = zip(weights, (one.recipe for one in same), strict=True)
            tensors.append(replace(same[0], recipe=WeightedSum(tuple(terms))))
        else:
            tensors.append(same[-1])
            fixed[name] = same
    return tensors, fixed


def _missing(
    models: Sequence[Mapping[str, Converted]], names: Sequence[str]
) -> list[ConversionError]:
    """Return which tensors are in some of the models only."""
    union = dict.fromkeys(name for model in models for name in model)
    return [
        ConversionError(f"tensor {name} is missing in {names[number]}")
        for name in union
        for number, model in enumerate(models)
        if name not in model
    ]


def _mismatch(same: Sequence[Converted], names: Sequence[str]) -> ConversionError | None:
    """Return why the tensors of one name cannot be averaged, or None."""
    name = same[0].name
    forms = [f"{stored_dtype(one.recipe)} {list(shape_of(one.recipe))}" for one in same]
    other = next((number for number, form in enumerate(forms) if form != forms[0]), None)
    if other is not None:
        only_dtypes = len({shape_of(one.recipe) for one in same}) == 1
        return ConversionError(
            f"tensor {name} differs between {names[0]} and {names[other]}",
            expected=f"{forms[0]} as in {names[0]}",
            found=f"{forms[other]} in {names[other]}",
            hint="merge them to one dtype first, each by itself" if only_dtypes else "",
        )
    if any(isinstance(one.recipe, WeightedSum | LowRank) for one in same):
        return ConversionError(
            f"tensor {name} has a LoRA adapter, which is not fused while averaging",
            hint="merge each checkpoint first, then average the merged models",
        )
    return None
