"""Reads the moments of DeepSpeed's ZeRO, which are flattened and cut like its float32 weights.

torch's optimizer has a flat tensor per group (of stage 3 per part of a group) instead of each
parameter, so a moment is cut into parameters by the names and shapes in the model's file.

Universal checkpoints have a file for each kind of moment and parameter:

| in `zero/` | contents |
|---|---|
| `NAME/exp_avg.pt`, `NAME/exp_avg_sq.pt` | a moment, stored like the values in `NAME/fp32.pt` |
| `NAME/step.pt` | the steps of the parameter; not of stage 3 |
| `optimizer_state.pt` | the parameter groups, whose names are in the model's file |

Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/bf16_optimizer.py`,
`checkpoint/ds_to_universal.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.read.format import Location, ReadOptions
from unshard.read.optimizer_state import (
    WITHOUT_IT,
    Group,
    Key,
    SavedState,
    flat_name,
    left_out_note,
    refuse_quantised,
    saved_groups,
    united_kinds,
)
from unshard.read.torch_save.values import TensorFormError, is_tensor, items_of, read_view
from unshard.read.training_state.plain_values import plain_values
from unshard.read.zero.masters import unflattened
from unshard.read.zero.partitions import Reading, open_zero
from unshard.read.zero.states import OptimState, Shapes, base_states, number_in
from unshard.read.zero.universal import FILE, universal_tensors
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry
from unshard.with_notes import WithNotes

_STEP, _LONGEST_SHOWN = "step", 200
_GROUPS = "optimizer_state.pt"


class _RankOptimizer(NamedTuple):
    """The state of torch's optimizer on one rank; `flat` has that of each flat tensor, by key."""

    state: OptimState
    flat: Sequence[Mapping[str, Value]]
    groups: Sequence[Group]
    notes: tuple[str, ...]


def read_optimizer(location: Location, options: ReadOptions) -> SavedState | None:
    """Return the moments of a ZeRO checkpoint, by the names of parameters; None without any.

    Raises:
        CheckpointError: a file is missing, cannot be read, or contradicts another.
    """
    reading = open_zero(location, options)
    if not reading.files.optim:
        return _read_universal(reading) if reading.files.universal else None
    states, shapes = reading.partitions()
    ranks = [_rank_optimizer(state, len(shapes)) for state in states]
    first = ranks[0]
    for rank in ranks:
        _compare_groups(first, rank)
        refuse_quantised(str(rank.state.path), chain(*rank.flat))
    kinds = _kinds(ranks)
    paths = tuple(state.path for state in states)
    tensors: dict[str, TensorEntry] = {}
    for kind in dict.fromkeys(chain(*kinds)):
        numbers = [number for number, of_tensor in enumerate(kinds) if kind in of_tensor]
        moments = [_with_moment(rank, kind, numbers) for rank in ranks]
        own_shapes = [shapes[number] for number in numbers]
        for name, entry in unflattened(moments, own_shapes, paths, 0).items():
            tensors[flat_name(name, kind)] = replace(entry, fqn=flat_name(name, kind))
    # The groups get the names of parameters, in place of numbers of flat tensors.
    names = iter(shapes)
    groups: list[Group] = [
        ([name for _ in params for name in next(names)], own) for params, own in first.groups
    ]
    return SavedState(
        str(first.state.path),
        Catalog("DeepSpeed", len(states), tensors),
        {name: own for group, own in zip(shapes, kinds, strict=True) for name in group},
        groups,
        _numbers(first, shapes),
        first.notes,
    )


def _rank_optimizer(state: OptimState, count: int) -> _RankOptimizer:
    """Return the state of torch's optimizer of a rank, which has `count` flat tensors."""
    if items_of(state.base) is None and isinstance(state.base, list):
        raise NotMergeableError(
            f"{state.path}: the state of an elastic checkpoint, without parameter groups",
            expected="base_optimizer_state with state and param_groups",
            hint=WITHOUT_IT,
        )
    by_number = base_states(state.base)
    groups, left_out = _saved_groups(state.file, state.base)
    numbers = [number for params, _ in groups for number in params]
    # Without momentum a group has no state.
    flat = [items_of(by_number.get(key, {})) if isinstance(key, int) else None for key in numbers]
    readable = [items for items in flat if items is not None]
    if len(readable) != count or len(flat) != count or not any(readable):
        raise CorruptError(
            f"{state.path}: the optimizer does not have the state of every flat tensor",
            expected=f"the state of {count}",
            found=f"the state of {len(readable)}",
        )
    return _RankOptimizer(state, readable, groups, left_out_note(state.path.name, left_out))


def _saved_groups(file: TorchFile, saved: Value) -> WithNotes[list[Group]]:
    """Return the parameter groups in a file's state dict of torch's optimizer."""
    listed = {"groups": (items_of(saved) or {}).get("param_groups")}
    noted = plain_values(file._replace(value=listed))
    groups = noted.value["groups"] if isinstance(noted.value, dict) else None
    return WithNotes(saved_groups(groups, str(file.path)), noted.notes)


def _compare_groups(first: _RankOptimizer, other: _RankOptimizer) -> None:
    """Raise if a rank has other groups or hyper-parameters than the first; steps are compared."""
    pairs = zip(first.groups, other.groups, strict=False)
    for number, ((_, ours), (_, theirs)) in enumerate(pairs):
        for key in dict.fromkeys([*ours, *theirs]):
            expected, found = ours.get(key), theirs.get(key)
            if expected != found and repr(expected) != repr(found):  # nan is not nan
                raise CorruptError(
                    f"{other.state.path}: disagrees with {first.state.path.name} about {key} of "
                    f"group {number}",
                    expected=str(expected)[:_LONGEST_SHOWN],
                    found=str(found)[:_LONGEST_SHOWN],
                    hint="files of two saves are in one directory: take another checkpoint",
                )


def _kinds(ranks: Sequence[_RankOptimizer]) -> list[list[str]]:
    """Return the kinds of moments of each flat tensor."""
    settings = [values for params, values in ranks[0].groups for _ in params]
    kinds = [
        [key for items in of_ranks for key, value in items.items() if _is_moment(key, value)]
        for of_ranks in zip(*(rank.flat for rank in ranks), strict=True)
    ]
    return united_kinds(settings, kinds)


def _is_moment(key: str, value: Value) -> bool:
    try:
        return is_tensor(value) and key != _STEP and len(read_view(value).sizes) > 0
    except TensorFormError:
        return True  # `unflattened` refuses it


def _with_moment(rank: _RankOptimizer, kind: str, numbers: Sequence[int]) -> OptimState:
    """Return a rank's partitions with a kind of moment in place of the weights.

    `numbers` are the flat tensors that have this kind.
    """
    missing = [number for number in numbers if kind not in rank.flat[number]]
    if missing:
        raise CorruptError(
            f"{rank.state.path}: {kind} of flat tensor {missing[0]} is missing",
            expected="a tensor, as on other ranks or in groups with the same settings",
            hint="take another checkpoint",
        )
    paddings = [group for at, group in enumerate(rank.state.paddings or ()) if at in numbers]
    flat = tuple(rank.flat[number][kind] for number in numbers)
    return rank.state._replace(flat=flat, paddings=tuple(paddings) or None)


def _numbers(rank: _RankOptimizer, shapes: Sequence[Shapes]) -> dict[Key, Mapping[str, Plain]]:
    """Return the numbers of each parameter: its step, NAdam's `mu_product`."""
    by_name: dict[Key, Mapping[str, Plain]] = {}
    for group, items in zip(shapes, rank.flat, strict=True):
        others = {key: value for key, value in items.items() if not _is_moment(key, value)}
        read = {key: number_in(rank.state.file, value) for key, value in others.items()}
        numbers: dict[str, Plain] = {key: value for key, value in read.items() if value is not None}
        by_name |= dict.fromkeys(group, numbers) if numbers else {}
    return by_name


def _read_universal(reading: Reading) -> SavedState | None:
    """Return the moments of a universal checkpoint."""
    files, shapes, folders = reading.files, reading.state.groups, reading.folders()
    if not (all_kinds := _kinds_in(folders.values())):
        return None
    if files.is_sliced or shapes is None:
        raise NotMergeableError(
            f"{files.directory}: a universal checkpoint of slices, without the names of the "
            "parameters in each group of the optimizer",
            expected="param_shapes of data parallelism alone",
            hint=WITHOUT_IT,
        )
    zero = files.directory / "zero"
    refuse_quantised(str(zero), all_kinds)
    if not (zero / _GROUPS).is_file():
        raise IncompleteError(f"{zero / _GROUPS} is missing, which has the parameter groups")
    file = read_torch_file(zero / _GROUPS)
    saved, left_out = _saved_groups(file, file.value)
    if len(saved) != len(shapes):
        raise CorruptError(
            f"{file.path}: {len(saved)} parameter groups",
            expected=f"{len(shapes)}, as the model's file has",
        )
    groups: list[Group] = [([*group], own) for (_, own), group in zip(saved, shapes, strict=True)]
    of_groups = [_kinds_in(folders[name] for name in group) for group in shapes]
    kinds = united_kinds((own for _, own in groups), of_groups)
    pairs = zip(shapes, kinds, strict=True)
    by_name: dict[Key, list[str]] = {name: own for group, own in pairs for name in group}
    return SavedState(
        str(zero),
        _moments(shapes, folders, by_name),
        by_name,
        groups,
        _steps({name: folders[name] for group in shapes for name in group}, file),
        left_out_note(_GROUPS, left_out),
    )


def _moments(
    shapes: Sequence[Shapes], folders: Mapping[str, Path], kinds: Mapping[Key, Sequence[str]]
) -> Catalog:
    """Return the moments of all parameters; `kinds` has the kinds of each."""
    trained = {name: shape for group in shapes for name, shape in group.items()}
    tensors: dict[str, TensorEntry] = {}
    archives: list[ByteRange] = []
    for kind in sorted(set(chain(*kinds.values()))):
        own = {name: shape for name, shape in trained.items() if kind in kinds[name]}
        paths = tuple(folders[name] / f"{kind}.pt" for name in own)
        having = {name: folders[name] for name in own}
        for name, entry in universal_tensors(having, own, paths, 0, file=f"{kind}.pt").items():
            tensors[flat_name(name, kind)] = replace(entry, fqn=flat_name(name, kind))
        archives += [ByteRange(path, 0, path.stat().st_size) for path in paths]
    return Catalog("DeepSpeed", 1, tensors, archives=tuple(archives))


def _kinds_in(folders: Iterable[Path]) -> list[str]:
    """Return the kinds of moments that any of these parameters has."""
    files = (path for folder in folders for path in folder.glob("*.pt"))
    return sorted({path.stem for path in files} - {Path(FILE).stem, _STEP})


def _steps(folders: Mapping[str, Path], file: TorchFile) -> dict[Key, Mapping[str, Plain]]:
    """Return the steps of each parameter.

    Stage 3 has a step for each of its flat tensors instead; it is used if all are equal.
    """
    by_name: dict[Key, Mapping[str, Plain]] = {}
    for name, folder in folders.items():
        if (folder / f"{_STEP}.pt").is_file():
            saved = read_torch_file(folder / f"{_STEP}.pt")
            step = number_in(saved, saved.value)
            by_name |= {} if step is None else {name: {_STEP: step}}
    base = items_of((items_of(file.value) or {}).get("optimizer_state_dict")) or {}
    states = base.get("state")
    flat = [items_of(state) or {} for state in states.values()] if isinstance(states, dict) else []
    steps = {number_in(file, items.get(_STEP)) for items in flat} - {None}
    if by_name or len(steps) != 1:
        return by_name
    (step,) = steps
    return {name: {_STEP: step} for name in folders}
