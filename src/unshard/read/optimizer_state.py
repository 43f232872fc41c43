"""An optimizer's state as data: a catalog of its tensors, parameter groups, and plain values.

The tensors have the names of torch's flattened optimizer state dict: `state.PARAMETER.exp_avg`.
A parameter's name may contain dots, the key after it may not, so the last dot divides the two.

Source: `torch.distributed.checkpoint.state_dict`, `StateDictOptions.flatten_optimizer_state_dict`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unshard.console import listed
from unshard.containers.open_files import Opened, name_of, opened, pread_many
from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, NotMergeableError
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.dtypes import DType, numpy_dtype

Key = int | str
"""The key of a parameter in a state dict: its number, or its name."""

Group = tuple[list[Key], dict[str, Plain]]
"""The parameters of a group, by number or name, and its hyper-parameters."""

LIKE_PARAMETER = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg grad_avg acc_delta sum "
    "ax mu eta prev step_size".split()
)
"""Keys of torch's optimizers and of Muon whose tensors, with dimensions, are like the parameter."""

WITHOUT_IT = (
    "merge the model alone, without the optimizer; `unshard reshard` takes what was merged, too"
)
"""Advice if the state of an optimizer cannot be read."""

_PREFIX, _GROUPS = "state.", "param_groups."
_OF_GROUP = {"lr", "initial_lr", "weight_decay", "param_names"}  # groups of one kind differ in them
_LONGEST_LIST = 5
_QUANTISED = frozenset("state1 state2 absmax1 qmap1 __bnb_optimizer_quant_state__".split())


@dataclass(frozen=True, slots=True, eq=False)
class ParamGroup:
    """Parameters that share hyper-parameters.

    Attributes:
        params: their names, in the order of the optimizer.
        values: the hyper-parameters by name.
    """

    params: tuple[str, ...]
    values: Mapping[str, Plain]


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """The contents of an optimizer's files, before its keys are mapped to parameters.

    Attributes:
        where: the file or directory, for messages.
        catalog: the tensors, by `flat_name` of number or name.
        keys: the keys of the tensors of every parameter with state.
        groups: the parameters of each group, and its hyper-parameters.
        values: by parameter, the values that are not tensors.
        notes: for the user, about values that were left out.
        flattened: whether every parameter is a group, because the groups were lost.
    """

    where: str
    catalog: Catalog
    keys: Mapping[Key, Sequence[str]]
    groups: Sequence[Group]
    values: Mapping[Key, Mapping[str, Plain]]
    notes: tuple[str, ...] = ()
    flattened: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """The state of an optimizer.

    Attributes:
        catalog: its tensors, also those of one element; `split_name` divides their names.
        groups: in the order of the optimizer.
        values: by the parameter's name, its values that are not tensors.
        steps: the steps of each parameter, if they are stored.
        names: the source of the parameters' names: "recorded" in the files, or their "order".
        numbers: of the parameters in the files, if these number them.
        notes: for the user, about values that were left out or inferred.
        flattened: whether it was saved flattened, so the groups were inferred.
    """

    catalog: Catalog
    groups: tuple[ParamGroup, ...]
    values: Mapping[str, Mapping[str, Plain]]
    steps: Mapping[str, float]
    names: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    flattened: bool = False

    @property
    def tensors(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each parameter that has any, by key."""
        by_parameter: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in self.catalog.tensors.items():
            parameter, key = split_name(name)
            by_parameter.setdefault(parameter, {})[key] = entry
        return by_parameter

    @property
    def parameters(self) -> list[str]:
        """The parameters that have state, in order."""
        return list(dict.fromkeys([*self.tensors, *self.values]))


def flat_name(parameter: Key, key: str) -> str:
    """Return the name of a tensor of the state."""
    return f"{_PREFIX}{parameter}.{key}"


def split_name(name: str) -> tuple[str, str]:
    """Return the parameter and the key of its state in a tensor's name."""
    parameter, _, key = name.removeprefix(_PREFIX).rpartition(".")
    return parameter, key


def left_out_note(where: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return a note of values of the optimizer that have no plain form; none without any."""
    shown = listed(values, _LONGEST_LIST)
    return (f"{where}: left out of the optimizer's state: {shown}",) if values else ()


def refuse_quantised(where: str, keys: Iterable[str]) -> None:
    """Refuse the state of an optimizer of 8 bits, whose blocks do not have a parameter's shape."""
    if quantised := sorted(_QUANTISED.intersection(keys)):
        raise NotMergeableError(
            f"{where}: the state of an 8-bit optimizer (bitsandbytes)",
            expected="moments in the shape of their parameters",
            found=", ".join(quantised),
            hint=f"each rank cuts its blocks by itself, so they cannot be joined; {WITHOUT_IT}",
        )


def flat_parameters(where: str, found: str) -> NotMergeableError:
    """Return the error of flat parameters of FSDP1, which belong to several parameters each."""
    return NotMergeableError(
        f"{where}: parts of the flat parameters of FSDP1",
        expected="the state of each parameter",
        found=f"{found}; only the model has their boundaries",
        hint="save FSDP.optim_state_dict(model, optimizer) instead of optimizer.state_dict(), or "
        f"train with FSDP2; or {WITHOUT_IT}",
    )


def saved_groups(value: Plain, where: str) -> list[Group]:
    """Return the groups of a saved `param_groups`.

    Raises:
        CorruptError: it is not a list of groups, or a parameter is in two of them.
    """
    groups: list[Group] = []
    for group in value if isinstance(value, list) else [None]:
        match group:
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

    Flattening loses the groups, so each parameter is a group here: see `joined_groups`.
    """
    state: dict[Key, dict[str, Value]] = {}
    values: dict[str, dict[str, Value]] = {}
    for name, value in items.items():
        owner, _, key = name.rpartition(".")
        if owner.startswith(_PREFIX):
            state.setdefault(owner.removeprefix(_PREFIX), {})[key] = value
        elif owner.startswith(_GROUPS):
            values.setdefault(owner.removeprefix(_GROUPS), {})[key] = value
    return state, [{**fields, "params": [name]} for name, fields in values.items()]


def joined_groups(groups: Iterable[Group], order: Mapping[Key, int]) -> list[Group]:
    """Return groups of one parameter each, in the optimizer's order, as the groups they were.

    A group ends where the values change, or where the parameters leave the order of the model,
    which they have in every group (see `matching`). `order` is a parameter's index in the model.
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


def read_numbers(file: Opened, places: Sequence[tuple[DType, int]]) -> list[float]:
    """Return the numbers at some places of a file, each of a dtype and a first byte.

    Raises:
        CorruptError: the file ends before the end of a number.
    """
    data = pread_many(file, [(dtype.itemsize, start) for dtype, start in places])
    read = list(zip(data, places, strict=True))
    if any(len(number) < dtype.itemsize for number, (dtype, _) in read):
        raise CorruptError(f"{name_of(file)}: ends before a value that its directory lists")
    return [np.frombuffer(number, numpy_dtype(dtype))[0].item() for number, (dtype, _) in read]


def numbers_of(entries: Mapping[str, TensorEntry]) -> dict[str, float]:
    """Return the numbers in the tensors that have no dimensions and are not compressed."""
    by_file: dict[Path, dict[str, tuple[DType, int]]] = {}
    for name, entry in entries.items():
        chunks = entry.chunks
        if entry.shape == () and len(chunks) and not chunks.compressed[0]:
            places = by_file.setdefault(chunks.paths[int(chunks.file[0])], {})
            places[name] = entry.dtype, int(chunks.start[0])
    numbers: dict[str, float] = {}
    for path, places in by_file.items():
        with opened(path) as file:
            numbers |= zip(places, read_numbers(file, list(places.values())), strict=True)
    return numbers
