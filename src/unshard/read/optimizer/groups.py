"""Parameter groups as state dicts have them: whole, or flattened per parameter."""

from collections.abc import Iterable, Mapping, Sequence

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError
from unshard.read.optimizer_state import Key

Group = tuple[list[Key], dict[str, Plain]]
"""The parameters of a group, by number or name, and its hyper-parameters."""

_STATE, _GROUPS = "state.", "param_groups."
_OF_GROUP = {"lr", "initial_lr", "weight_decay", "param_names"}  # groups of one kind differ in them


def saved_groups(value: Plain, where: str) -> list[Group]:
    """Return the groups of a saved `param_groups`.

    Raises:
        CorruptError: it is not a list of groups, or a parameter is in two of them.
    """
    groups: list[Group] = []
    for one in value if isinstance(value, list) else [None]:
        match one:
            case {"params": list(params), **rest} if all(
                isinstance(key, int | str) for key in params
            ):
                groups.append((params, {str(key): part for key, part in rest.items()}))
            case _:
                raise CorruptError(f"{where}: parameter groups of unknown form")
    every = [key for params, _ in groups for key in params]
    if len(every) != len(set(every)):
        raise CorruptError(f"{where}: a parameter is in several groups of the optimizer")
    return groups


def united_kinds(
    settings: Iterable[Mapping[str, Plain]], kinds: Sequence[Iterable[str]]
) -> list[list[str]]:
    """Return each group's kinds of moments: those of all groups with equal settings."""
    alike = [{key: own[key] for key in own.keys() - _OF_GROUP} for own in settings]
    first = [alike.index(own) for own in alike]
    united: dict[int, dict[str, None]] = {}
    for at, own in zip(first, kinds, strict=True):
        united.setdefault(at, {}).update(dict.fromkeys(own))
    return [list(united[at]) for at in first]


def flat_groups(
    items: Mapping[str, Value],
) -> tuple[dict[Key, dict[str, Value]], list[dict[str, Value]]]:
    """Return state and groups of a flattened state dict: `state.NAME.KEY`, `param_groups.NAME.KEY`.

    Groups were lost when it was flattened, and each parameter is one: see `joined_groups`.
    """
    state: dict[Key, dict[str, Value]] = {}
    values: dict[str, dict[str, Value]] = {}
    for name, value in items.items():
        owner, _, key = name.rpartition(".")
        if owner.startswith(_STATE):
            state.setdefault(owner.removeprefix(_STATE), {})[key] = value
        elif owner.startswith(_GROUPS):
            values.setdefault(owner.removeprefix(_GROUPS), {})[key] = value
    return state, [{**fields, "params": [name]} for name, fields in values.items()]


def joined_groups(groups: Iterable[Group], order: Mapping[Key, int]) -> list[Group]:
    """Return groups of one parameter each, in the optimizer's order, as the groups they were.

    A group ends where the values change, or where the parameters stop to be in the order of the
    model, in which every group has them (see `matching`). `order` is a parameter's place in it.
    Two groups that nothing else divides become one.
    """
    joined: list[Group] = []
    last = -1
    for (parameter,), values in groups:
        if joined and joined[-1][1] == values and order[parameter] > last:
            joined[-1][0].append(parameter)
        else:
            joined.append(([parameter], values))
        last = order[parameter]
    return joined
