"""Convert the state of an optimizer to the names and layout of an output.

An output tensor is made of parts of the model's tensors. If these parts are only moved, its moments
are the same parts of the model's moments. Tensors with computed values (a fused adapter, block FP8
and casts from it) have no moments.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from unshard.console import counted, listed
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import Concat, Recipe, Stack, Take, take, takes
from unshard.errors import ConversionError, raise_all
from unshard.read.optimizer_state import OptimizerState, flat_name
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.with_notes import WithNotes

_SHOWN = 5
_KEEP_NAMES = "keep the tensors as they were trained: ⟦+--names training⟧"
_Moments = Mapping[str, TensorEntry]
"""The tensors of a parameter's state, by key."""


def convert_optimizer(
    outputs: Sequence[ConvertedTensor], model: Catalog, state: OptimizerState
) -> tuple[WithNotes[list[ConvertedTensor]], OptimizerState]:
    """Return the tensors of an optimizer's state for an output, and the state under its names.

    Args:
        outputs: the tensors of the output.
        model: the tensors that they are made from.
        state: the state of the optimizer that trained `model`.

    Raises:
        ConversionError: a tensor is computed, or made of parameters with and without state.
    """
    by_parameter = state.tensors
    owners = _owners(outputs, model, by_parameter.keys() | state.values.keys())
    by_tensor = {fqn: by_parameter.get(owner, {}) for fqn, owner in owners.items()}
    moments: list[ConvertedTensor] = []
    problems: list[ConversionError] = []
    for output in outputs:
        try:
            moments += _moments_of(output, by_tensor)
        except ConversionError as error:
            problems.append(error)
    raise_all(ConversionError, "the state of the optimizer cannot be written", problems)
    renamed = _renamed(outputs, state, owners)
    unused = [name for name in by_parameter if name not in {*owners.values()}]
    count = counted(len(unused), "parameter")
    note = f"left out, like their parameters: the state of {count}: {listed(unused, _SHOWN)}"
    return WithNotes(moments, (*([note] if unused else []), *_lost(renamed))), renamed


def _lost(state: OptimizerState) -> Iterator[str]:
    """Yield a note about tensors inside plain values, which an output cannot store."""
    owners = [(f"of {name}", own) for name, own in state.values.items()]
    owners += [(f"of group {at}", group.values) for at, group in enumerate(state.groups)]
    keys = [f"{key} {owner}" for owner, own in owners for key in own if _has_tensor(own[key])]
    if keys:
        yield (
            "only dtype and shape are written for tensors inside other values of the optimizer's "
            f"state: {listed(keys, _SHOWN)}"
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
    outputs: Iterable[ConvertedTensor], model: Catalog, with_state: Iterable[str]
) -> dict[str, str]:
    """Return the parameter that has the state of each tensor that the output is made from.

    Tied weights are stored once, and have state under one of their names.
    """
    used = dict.fromkeys(part.entry.fqn for one in outputs for part in takes(one.recipe))
    by_place: dict[tuple[int, int, int], str] = {}
    parameters = set(with_state)
    for name in model.tensors:
        place = model.tensors[name].place
        if name in parameters and name not in used and place is not None:
            by_place.setdefault(place, name)
    owners = {}
    for name in used:
        place = model.tensors[name].place if name in model.tensors else None
        owners[name] = name if name in parameters or place is None else by_place.pop(place, name)
    return owners


def _moments_of(
    output: ConvertedTensor, moments: Mapping[str, _Moments]
) -> Iterator[ConvertedTensor]:
    """Yield the moments of an output's tensor, if it has state."""
    recipe = output.recipe
    parts = list(takes(recipe))
    own = {part.entry.fqn: moments.get(part.entry.fqn, {}) for part in parts}
    if not any(own.values()):
        return
    if not _is_moved(recipe):
        raise ConversionError(
            f"tensor {output.name}: its values are computed, so it has no moments",
            found=f"state of {next(filter(own.get, own))}",
            hint="write the model without ⟦--optimizer⟧; in Python, "
            "open_checkpoint(…, part='optimizer') reads the state as it is stored",
        )
    owner, first = next(iter(own.items()))
    if any(other.keys() != first.keys() for other in own.values()):
        raise ConversionError(
            f"tensor {output.name}: is made of parameters with different state",
            found=", ".join(f"{name}: {', '.join(keys) or 'none'}" for name, keys in own.items()),
            hint=_KEEP_NAMES,
        )
    for key, entry in first.items():
        name = flat_name(output.name, key)
        if all(part.entry.shape == moments[part.entry.fqn][key].shape for part in parts):
            yield ConvertedTensor(name, entry.dtype, _with_moments(recipe, moments, key))
        elif not entry.shape or (isinstance(recipe, Take) and recipe == take(recipe.entry)):
            yield ConvertedTensor(name, entry.dtype, take(entry))
        else:
            raise ConversionError(
                f"tensor {output.name}: is a part of {owner}, whose {key} cannot be divided",
                found=f"{key} of shape {list(entry.shape)}",
                hint=_KEEP_NAMES,
            )


def _is_moved(recipe: Recipe) -> bool:
    match recipe:
        case Take():
            return True
        case Stack(_, parts) | Concat(_, parts):
            return all(map(_is_moved, parts))
    return False


def _with_moments(recipe: Recipe, moments: Mapping[str, _Moments], key: str) -> Recipe:
    """Return a recipe of moved values with the tensors replaced by their moments."""
    match recipe:
        case Take(entry):
            return recipe._replace(entry=moments[entry.fqn][key])
        case Stack(_, parts) | Concat(_, parts):
            replaced = tuple(_with_moments(part, moments, key) for part in parts)
            return recipe._replace(parts=replaced)
    raise AssertionError("a computed recipe has no moments")


def _renamed(
    outputs: Iterable[ConvertedTensor], state: OptimizerState, owners: Mapping[str, str]
) -> OptimizerState:
    """Return the plain values of a state under the names of the output."""
    names: dict[str, list[str]] = {}
    for output in outputs:
        for fqn in dict.fromkeys(part.entry.fqn for part in takes(output.recipe)):
            names.setdefault(owners[fqn], []).append(output.name)

    def renamings(parameters: Iterable[str]) -> list[tuple[str, str]]:
        return [(old, new) for old in parameters for new in names.get(old, ())]

    groups = tuple(
        replace(group, params=tuple(dict.fromkeys(new for _, new in renamings(group.params))))
        for group in state.groups
    )
    steps = {new: state.steps[old] for old, new in renamings(state.steps)}
    values = {new: state.values[old] for old, new in renamings(state.values)}
    return replace(state, groups=groups, steps=steps, values=values)
