"""The state of an optimizer under the names of an output: moments move as their parameters do.

An output's tensor is made of parts of the model's tensors. Where these parts are only moved, its
moments are the same parts of the model's moments. Where values are computed (a fused adapter, block
FP8, a cast from it) there are none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.convert.outputs import Converted
from unshard.convert.recipes import Concat, Recipe, Stack, Take, take, takes
from unshard.errors import ConversionError, raise_all
from unshard.noted import Noted
from unshard.read.optimizer_state import OptimizerState, flat_name
from unshard.showing import counted, listed
from unshard.tensors.catalog import Catalog, TensorEntry

_SHOWN = 5

_Moments = Mapping[str, TensorEntry]
"""The tensors of a parameter's state, by key."""


def convert_optimizer(
    outputs: Sequence[Converted], model: Catalog, state: OptimizerState
) -> tuple[Noted[list[Converted]], OptimizerState]:
    """Return the tensors of an optimizer's state for an output, and the state under its names.

    Args:
        outputs: the tensors of the output.
        model: the tensors that they are made from.
        state: of the optimizer that trained them.

    Raises:
        ConversionError: a tensor is computed, or made of parameters with and without state.
    """
    moments = state.tensors
    owners = _owners(outputs, model, moments.keys() | state.values.keys())
    made: list[Converted] = []
    problems: list[ConversionError] = []
    for one in outputs:
        try:
            made += _moments_of(one, {fqn: moments.get(own, {}) for fqn, own in owners.items()})
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "the state of the optimizer cannot be written", problems)
    renamed = _renamed(outputs, state, owners)
    left = [name for name in moments if name not in {*owners.values()}]
    what = (
        f"left out, like their parameters: the state of {counted(len(left), 'parameter')}: "
        f"{listed(left, _SHOWN)}"
    )
    return Noted(made, (*([what] if left else []), *_lost(renamed))), renamed


def _lost(state: OptimizerState) -> Iterator[str]:
    """Yield a note of tensors inside plain values, which have no place in an output."""
    owners = [(f"of {name}", own) for name, own in state.values.items()]
    owners += [(f"of group {at}", group.values) for at, group in enumerate(state.groups)]
    found = [f"{key} {of}" for of, own in owners for key, one in own.items() if _has_tensor(one)]
    if found:
        yield (
            "of tensors inside other values of the optimizer's state only dtype and shape are "
            f"written: {listed(found, _SHOWN)}"
        )


def _has_tensor(value: Plain) -> bool:
    match value:
        case SavedTensor():
            return bool(value.shape)  # others are written as numbers
        case dict():
            return any(map(_has_tensor, value.values()))
        case list() | tuple():
            return any(map(_has_tensor, value))
    return False


def _owners(
    outputs: Iterable[Converted], model: Catalog, with_state: Iterable[str]
) -> dict[str, str]:
    """Return whose state each tensor of the model has that the output is made from.

    Tied weights are stored once, and have state under one of their names.
    """
    used = dict.fromkeys(part.entry.fqn for one in outputs for part in takes(one.recipe))
    stored: dict[tuple[int, int, int], str] = {}
    known = set(with_state)
    for name in model.tensors:
        place = model.tensors[name].place
        if name in known and name not in used and place is not None:
            stored.setdefault(place, name)
    owners = {}
    for name in used:
        place = model.tensors[name].place if name in model.tensors else None
        owners[name] = name if name in known or place is None else stored.pop(place, name)
    return owners


def _moments_of(output: Converted, moments: Mapping[str, _Moments]) -> Iterator[Converted]:
    """Yield the tensors of the state of an output's tensor; none of one without state."""
    parts = list(takes(output.recipe))
    names = list(dict.fromkeys(part.entry.fqn for part in parts))
    each = [moments.get(name, {}) for name in names]
    if not any(each):
        return
    if not _is_moved(output.recipe):
        raise ConversionError(
            f"tensor {output.name}: its values are computed, so it has no moments",
            found=f"state of {next(name for name, own in zip(names, each, strict=True) if own)}",
            hint="write the model without ⟦--optimizer⟧; in Python, "
            "open_checkpoint(…, part='optimizer') reads the state as it is stored",
        )
    if any(own.keys() != each[0].keys() for own in each):
        raise ConversionError(
            f"tensor {output.name}: is made of parameters with different state",
            found=", ".join(
                f"{name}: {', '.join(own) or 'none'}" for name, own in zip(names, each, strict=True)
            ),
            hint="keep the tensors as they were trained: ⟦+--names training⟧",
        )
    for key, first in each[0].items():
        name = flat_name(output.name, key)
        like = all(part.entry.shape == moments[part.entry.fqn][key].shape for part in parts)
        if like:
            yield Converted(name, first.dtype, _exchanged(output.recipe, moments, key))
        elif not first.shape or _is_whole(output.recipe):
            yield Converted(name, first.dtype, take(first))
        else:
            raise ConversionError(
                f"tensor {output.name}: is a part of {names[0]}, whose {key} cannot be divided",
                found=f"{key} of shape {list(first.shape)}",
                hint="keep the tensors as they were trained: ⟦+--names training⟧",
            )


def _is_moved(recipe: Recipe) -> bool:
    match recipe:
        case Take():
            return True
        case Stack(_, parts) | Concat(_, parts):
            return all(map(_is_moved, parts))
    return False


def _is_whole(recipe: Recipe) -> bool:
    """Return whether a recipe is all of a tensor, as it is stored."""
    return recipe == take(recipe.entry) if isinstance(recipe, Take) else False


def _exchanged(recipe: Recipe, moments: Mapping[str, _Moments], key: str) -> Recipe:
    """Return a recipe with the moments of the tensors in place of these."""
    match recipe:
        case Take(entry):
            return recipe._replace(entry=moments[entry.fqn][key])
        case Stack(dim, parts):
            return Stack(dim, tuple(_exchanged(part, moments, key) for part in parts))
        case Concat(dim, parts):
            return Concat(dim, tuple(_exchanged(part, moments, key) for part in parts))
    raise AssertionError("a computed recipe has no moments")


def _renamed(
    outputs: Iterable[Converted], state: OptimizerState, owners: Mapping[str, str]
) -> OptimizerState:
    """Return the plain values of a state under the names of the output."""
    names: dict[str, list[str]] = {}
    for one in outputs:
        for fqn in dict.fromkeys(part.entry.fqn for part in takes(one.recipe)):
            names.setdefault(owners[fqn], []).append(one.name)

    def renamings(parameters: Iterable[str]) -> list[tuple[str, str]]:
        return [(old, new) for old in parameters for new in names.get(old, ())]

    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(new for _, new in renamings(group.params))))
        for group in state.groups
    )
    steps = {new: state.steps[old] for old, new in renamings(state.steps)}
    values = {new: state.values[old] for old, new in renamings(state.values)}
    return replace(state, groups=groups, steps=steps, values=values)
