"""Matches the numbers in an optimizer's state dict to parameters, proved by order and shape.

`Optimizer.state_dict` numbers parameters in the order in which they were given, group by group, and
keeps no names. Trainers give `model.parameters()`, or groups that were filtered from it, so inside
every group the numbers ascend in the order of the model's state dict (verl, lmms-engine and
SkyRL give all parameters, in one group). Every tensor of the state also has the shape and the
placements of its parameter. Numbers are matched only if exactly one assignment of all of them has
both properties.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from unshard.console import counted
from unshard.errors import NotMergeableError
from unshard.tensors.placements import Placement

_MAX_COUNTS = 2_000_000  # counts of all states: with many groups, each state is large
_LEAST_COUNTS = 10  # the cost of a state, at least
_HINT = (
    "save it with names, by get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, "
    "or give the optimizer named_parameters()"
)

Form = tuple[tuple[int, ...], tuple[Placement, ...] | None]
"""Global shape, and placements if there are any."""
_State = tuple[int, ...]
"""The number of matched parameters of each group."""


class Parameter(NamedTuple):
    """A parameter of the model, in the order of its state dict."""

    name: str
    form: Form


def match_by_order(
    where: str,
    groups: Sequence[Sequence[int]],
    forms: Mapping[int, Form],
    model: Sequence[Parameter],
) -> dict[int, str]:
    """Return the name of every number.

    Args:
        where: the file or directory, for messages.
        groups: the numbers of each parameter group, in order.
        forms: of the numbers that have state like their parameter; other numbers fit any parameter.
        model: the parameters that may be in the optimizer, in order.

    Raises:
        NotMergeableError: no assignment fits the model, or more than one.
    """
    places = _places(where, groups, forms, model)
    sizes = f"{counted(sum(map(len, groups)), 'parameter')} in {counted(len(groups), 'group')}"
    if places is None:
        raise NotMergeableError(
            f"{where}: the optimizer's state does not fit the model",
            expected=f"the model's {counted(len(model), 'parameter')}, of their shapes, in order",
            found=f"{sizes}, of other shapes or order",
            hint=_HINT,
        )
    for number, possible in places.items():
        if len(possible) > 1:
            one, other, *_ = (model[at].name for at in sorted(possible))
            raise NotMergeableError(
                f"{where}: parameter {number} of the optimizer may be {one} or {other}",
                expected="one assignment that has the order and the shapes of the model",
                found=f"{sizes}, without names",
                hint=_HINT,
            )
    return {number: model[at].name for number, (at,) in places.items()}


def _fits(number: int, forms: Mapping[int, Form], parameter: Parameter) -> bool:
    return forms.get(number, parameter.form) == parameter.form


def _leftmost(
    numbers: Sequence[int], forms: Mapping[int, Form], model: Sequence[Parameter]
) -> list[int] | None:
    """Return the first place that each number can have in the model; None if there is none."""
    places, at = [], 0
    for number in numbers:
        while at < len(model) and not _fits(number, forms, model[at]):
            at += 1
        if at == len(model):
            return None
        places.append(at)
        at += 1
    return places


def _places_of_one(
    numbers: Sequence[int], forms: Mapping[int, Form], model: Sequence[Parameter]
) -> dict[int, set[int]] | None:
    """Return the first and the last place of every number; any other place is between them."""
    first = _leftmost(numbers, forms, model)
    last = _leftmost(numbers[::-1], forms, model[::-1])
    if first is None or last is None:
        return None
    ends = zip(numbers, first, reversed(last), strict=True)
    return {number: {at, len(model) - 1 - other} for number, at, other in ends}


def _places(
    where: str,
    groups: Sequence[Sequence[int]],
    forms: Mapping[int, Form],
    model: Sequence[Parameter],
) -> dict[int, set[int]] | None:
    """Return the possible places of every number; None if they do not fit the model.

    Groups that have no form in common are matched independently: no parameter fits both.
    """
    is_any = not all(number in forms for numbers in groups for number in numbers)
    by_form: dict[Form | None, list[int]] = {}
    for at, parameter in enumerate(model):
        by_form.setdefault(None if is_any else parameter.form, []).append(at)
    own = [{None if is_any else forms[number] for number in numbers} for numbers in groups]
    owners: dict[Form | None, list[int]] = {}
    for group, form in ((group, form) for group, kinds in enumerate(own) for form in kinds):
        owners.setdefault(form, []).append(group)
    places: dict[int, set[int]] = {}
    several = partial(_places_of_several, where, [_MAX_COUNTS])
    while owners:
        members: set[int] = set()
        linked = [next(iter(owners))]
        for form in linked:  # the list grows meanwhile
            added = set(owners.pop(form, ())) - members
            members |= added
            linked += [kind for group in added for kind in own[group]]
        fitting = sorted(at for form in set(linked) for at in by_form.get(form, ()))
        numbers, part = [groups[group] for group in members], [model[at] for at in fitting]
        is_one = len(numbers) == 1
        local = _places_of_one(numbers[0], forms, part) if is_one else several(numbers, forms, part)
        if local is None:
            return None
        places |= {number: {fitting[at] for at in ats} for number, ats in local.items()}
    return places


def _places_of_several(
    where: str,
    remaining: list[int],
    groups: Sequence[Sequence[int]],
    forms: Mapping[int, Form],
    model: Sequence[Parameter],
) -> dict[int, set[int]] | None:
    """Return the possible places of numbers of several groups; None if they do not fit the model.

    First, forward, every state that an assignment of the first parameters can lead to; then,
    backward, those from which the rest can be assigned. `remaining` is the budget of counts of all
    groups, and is reduced by the cost.
    """
    steps = partial(_steps, groups, forms, model)
    layers: list[set[_State]] = [{(0,) * len(groups)}]
    cost = max(_LEAST_COUNTS, len(groups))
    for at in range(len(model)):
        layers.append(set())
        for after in (after for state in layers[-2] for after, _ in steps(state, at)):
            layers[-1].add(after)
            if len(layers[-1]) * cost > remaining[0]:  # a whole layer may be huge
                raise NotMergeableError(
                    f"{where}: the parameters of the optimizer have no names, and {len(groups)} "
                    "of its groups fit the model in too many ways",
                    hint=_HINT,
                )
        remaining[0] -= len(layers[-1]) * cost
    alive = {tuple(map(len, groups))} & layers[-1]
    places: dict[int, set[int]] = {number: set() for numbers in groups for number in numbers}
    for at in reversed(range(len(model))):
        before = set()
        for state in layers[at]:
            for after, number in steps(state, at):
                if after in alive:
                    before.add(state)
                    if number is not None:
                        places[number].add(at)
        alive = before
    return places if alive else None


def _steps(
    groups: Sequence[Sequence[int]],
    forms: Mapping[int, Form],
    model: Sequence[Parameter],
    state: _State,
    at: int,
) -> Iterator[tuple[_State, int | None]]:
    """Yield the assignments of a parameter of the model: the next number of a group, or none."""
    if at - sum(state) < len(model) - sum(map(len, groups)):
        yield state, None
    for group, (numbers, matched) in enumerate(zip(groups, state, strict=True)):
        if matched < len(numbers) and _fits(numbers[matched], forms, model[at]):
            yield (*state[:group], matched + 1, *state[group + 1 :]), numbers[matched]
