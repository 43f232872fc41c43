"""Parameter groups as state dicts have them: whole, or flattened per parameter."""

from collections.abc import Mapping, Sequence

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError
from unshard.read.optimizer.state import Key

__all__ = ["Group", "alike_groups", "flat_groups", "saved_groups"]

Group = tuple[list[Key], dict[str, Plain]]
"""The parameters of a group, by number or name, and its hyper-parameters."""

_STATE, _GROUPS = "state.", "param_groups."


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


def flat_groups(
    items: Mapping[str, Value],
) -> tuple[dict[Key, dict[str, Value]], list[dict[str, Value]]]:
    """Return state and groups of a flattened state dict: `state.NAME.KEY`, `param_groups.NAME.KEY`.

    Groups were lost when it was flattened: parameters with equal values are one group.
    """
    state: dict[Key, dict[str, Value]] = {}
    values: dict[str, dict[str, Value]] = {}
    for name, value in items.items():
        owner, _, key = name.rpartition(".")
        if owner.startswith(_STATE):
            state.setdefault(owner.removeprefix(_STATE), {})[key] = value
        elif owner.startswith(_GROUPS):
            values.setdefault(owner.removeprefix(_GROUPS), {})[key] = value
    # Compared once they are plain: see `alike_groups`.
    return state, [{**fields, "params": [name]} for name, fields in values.items()]


def alike_groups(groups: Sequence[Group]) -> list[Group]:
    """Return groups of one parameter each as groups of all parameters with equal values."""
    united: list[Group] = []
    for params, values in groups:
        for others, known in united:
            if known == values:
                others.extend(params)
                break
        else:
            united.append(([*params], values))
    return united
