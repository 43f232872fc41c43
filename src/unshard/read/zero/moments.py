"""Reads the moments of DeepSpeed's ZeRO, which are flattened and cut like its float32 weights.

torch's optimizer has a flat tensor per group (of stage 3 per part of a group) instead of each
parameter, so a moment is cut into parameters by the names and shapes that the model's file has.

Universal checkpoints have a file for each kind of moments and parameter:

| in `zero/` | what it has |
|---|---|
| `NAME/exp_avg.pt`, `NAME/exp_avg_sq.pt` | a moment, as `NAME/fp32.pt` has the values |
| `NAME/step.pt` | how many steps the parameter was trained; not of stage 3 |
| `optimizer_state.pt` | the parameter groups, whose names the model's file has |

Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/bf16_optimizer.py`,
`checkpoint/ds_to_universal.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, IncompleteError, NotMergeableError
from unshard.noted import Noted
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
from unshard.read.zero.states import OptimState, Shapes
from unshard.read.zero.steps import number_in
from unshard.read.zero.universal import FILE, universal_tensors
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry

_STEP, _SHOWN = "step", 200
_GROUPS = "optimizer_state.pt"


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """The state of torch's optimizer on one rank: of each flat tensor, by key; and the groups."""

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
    bases = [_base_of(state, len(shapes)) for state in states]
    first = bases[0]
    for base in bases:
        _compare_groups(first, base)
        refuse_quantised(str(base.state.path), chain(*base.flat))
    kinds = _kinds(bases)
    paths = tuple(state.path for state in states)
    tensors: dict[str, TensorEntry] = {}
    for key in dict.fromkeys(chain(*kinds)):
        numbers = [number for number, own in enumerate(kinds) if key in own]
        cut = [_part_of(base, key, numbers) for base in bases]
        for name, entry in unflattened(cut, [shapes[one] for one in numbers], paths, 0).items():
            tensors[flat_name(name, key)] = replace(entry, fqn=flat_name(name, key))
    return SavedState(
        str(first.state.path),
        Catalog("DeepSpeed", len(states), tensors),
        {name: own for group, own in zip(shapes, kinds, strict=True) for name in group},
        _groups_of(first, shapes),
        _numbers(first, shapes),
        first.notes,
    )


def _base_of(state: OptimState, count: int) -> _Base:
    """Return the state of torch's optimizer of a rank, which has `count` flat tensors."""
    items = items_of(state.base)
    if items is None and isinstance(state.base, list):
        raise NotMergeableError(
            f"{state.path}: the state of an elastic checkpoint, without parameter groups",
            expected="base_optimizer_state with state and param_groups",
            hint=WITHOUT_IT,
        )
    saved = (items or {}).get("state")
    found = saved.items() if isinstance(saved, dict) else ()
    # The keys of pickles are salted, so that none can be made to collide.
    numbered = {int(key): value for key, value in found if isinstance(key, int)}
    read = _saved_groups(state.file, state.base)
    groups, notes = read.value, left_out_note(state.path.name, read.notes)
    numbers = [number for params, _ in groups for number in params]
    # Without momentum a group has no state.
    flat = [items_of(numbered.get(one, {})) if isinstance(one, int) else None for one in numbers]
    kept = [one for one in flat if one is not None]
    if len(kept) != count or len(flat) != count or not any(kept):
        raise CorruptError(
            f"{state.path}: the optimizer does not have the state of every flat tensor",
            expected=f"of {count}",
            found=f"of {len(kept)}",
        )
    return _Base(state, kept, groups, notes)


def _saved_groups(file: TorchFile, saved: Value) -> Noted[list[Group]]:
    """Return the parameter groups in the state dict of torch's optimizer, which is in a file."""
    listed = {"groups": (items_of(saved) or {}).get("param_groups")}
    noted = plain_values(file._replace(value=listed))
    found = noted.value["groups"] if isinstance(noted.value, dict) else None
    return Noted(saved_groups(found, str(file.path)), noted.notes)


def _compare_groups(first: _Base, base: _Base) -> None:
    """Raise if a rank has other groups or hyper-parameters than the first; steps are compared."""
    for number, ((_, ours), (_, theirs)) in enumerate(zip(first.groups, base.groups, strict=False)):
        for key in dict.fromkeys([*ours, *theirs]):
            expected, found = ours.get(key), theirs.get(key)
            if expected != found and repr(expected) != repr(found):  # nan is not nan
                raise CorruptError(
                    f"{base.state.path}: disagrees with {first.state.path.name} about {key} of "
                    f"group {number}",
                    expected=str(expected)[:_SHOWN],
                    found=str(found)[:_SHOWN],
                    hint="files of two saves are in one directory: take another checkpoint",
                )


def _kinds(bases: Sequence[_Base]) -> list[list[str]]:
    """Return the kinds of moments of each flat tensor."""
    settings = [values for params, values in bases[0].groups for _ in params]
    of_ranks = zip(*(base.flat for base in bases), strict=True)
    each = [chain.from_iterable(flat.items() for flat in ranks) for ranks in of_ranks]
    kinds = [[key for key, one in own if _is_moment(key, one)] for own in each]
    return united_kinds(settings, kinds)


def _is_moment(key: str, value: Value) -> bool:
    try:
        return is_tensor(value) and key != _STEP and len(read_view(value).sizes) > 0
    except TensorFormError:
        return True  # `unflattened` refuses it


def _part_of(base: _Base, key: str, numbers: Sequence[int]) -> OptimState:
    """Return what a rank has of a kind of moments: flat tensors, in place of the weights."""
    lost = [number for number in numbers if key not in base.flat[number]]
    if lost:
        raise CorruptError(
            f"{base.state.path}: {key} of a flat tensor is missing",
            expected=f"that of flat tensor {lost[0]}: other ranks, or groups like its own, have it",
            hint="take another checkpoint",
        )
    paddings = [one for at, one in enumerate(base.state.paddings or ()) if at in numbers]
    flat = tuple(base.flat[number][key] for number in numbers)
    return replace(base.state, flat=flat, paddings=tuple(paddings) or None)


def _groups_of(base: _Base, shapes: Sequence[Shapes]) -> list[Group]:
    """Return the groups with the names of parameters, in place of numbers of flat tensors."""
    found: list[Group] = []
    names = iter(shapes)
    for params, values in base.groups:
        found.append(([name for _ in params for name in next(names)], values))
    return found


def _numbers(base: _Base, shapes: Sequence[Shapes]) -> dict[int | str, Mapping[str, Plain]]:
    """Return what each parameter has besides moments: its step, NAdam's `mu_product`."""
    found: dict[int | str, Mapping[str, Plain]] = {}
    for group, flat in zip(shapes, base.flat, strict=True):
        others = {key: value for key, value in flat.items() if not _is_moment(key, value)}
        read = {key: number_in(base.state.file, value) for key, value in others.items()}
        numbers: dict[str, Plain] = {key: one for key, one in read.items() if one is not None}
        found |= dict.fromkeys(group, numbers) if numbers else {}
    return found


def _read_universal(reading: Reading) -> SavedState | None:
    """Return the moments of a universal checkpoint."""
    files, shapes, folders = reading.files, reading.state.groups, reading.folders()
    if not _kinds_in(folders.values()):
        return None
    if files.is_sliced or shapes is None:
        raise NotMergeableError(
            f"{files.directory}: a universal checkpoint of slices, in which no file says "
            "which parameters each group of the optimizer has",
            expected="param_shapes of data parallelism alone",
            hint=WITHOUT_IT,
        )
    zero = files.directory / "zero"
    refuse_quantised(str(zero), _kinds_in(folders.values()))
    if not (zero / _GROUPS).is_file():
        raise IncompleteError(f"{zero / _GROUPS} is missing, which has the parameter groups")
    file = read_torch_file(zero / _GROUPS)
    groups = _groups_in(file, shapes)
    of_groups = [_kinds_in(folders[name] for name in group) for group in shapes]
    kinds = united_kinds((values for _, values in groups.value), of_groups)
    both = zip(shapes, kinds, strict=True)
    of_names: dict[Key, list[str]] = {name: own for group, own in both for name in group}
    return SavedState(
        str(zero),
        _moments(shapes, folders, of_names),
        of_names,
        groups.value,
        _steps({str(name): folders[str(name)] for name in of_names}, file),
        left_out_note(_GROUPS, groups.notes),
    )


def _moments(
    shapes: Sequence[Shapes], folders: Mapping[str, Path], kinds: Mapping[Key, Sequence[str]]
) -> Catalog:
    """Return the moments of all parameters, which have these kinds."""
    trained = {name: shape for group in shapes for name, shape in group.items()}
    tensors: dict[str, TensorEntry] = {}
    archives: list[ByteRange] = []
    for kind in sorted(set(chain(*kinds.values()))):
        own = {name: shape for name, shape in trained.items() if kind in kinds[name]}
        paths = tuple(folders[name] / f"{kind}.pt" for name in own)
        having = {name: folders[name] for name in own}
        for name, one in universal_tensors(having, own, paths, 0, file=f"{kind}.pt").items():
            tensors[flat_name(name, kind)] = replace(one, fqn=flat_name(name, kind))
        archives += [ByteRange(path, 0, path.stat().st_size) for path in paths]
    return Catalog("DeepSpeed", 1, tensors, archives=tuple(archives))


def _kinds_in(folders: Iterable[Path]) -> list[str]:
    """Return the kinds of moments that any of these parameters has."""
    files = (path for folder in folders for path in folder.glob("*.pt"))
    return sorted({path.stem for path in files} - {Path(FILE).stem, _STEP})


def _groups_in(file: TorchFile, shapes: tuple[Shapes, ...]) -> Noted[list[Group]]:
    """Return the parameter groups, each with the names of the group of shapes at its place."""
    saved = _saved_groups(file, file.value)
    groups = saved.value
    if len(groups) != len(shapes):
        raise CorruptError(
            f"{file.path}: {len(groups)} parameter groups",
            expected=f"{len(shapes)}, as the model's file has",
        )
    named = zip(groups, shapes, strict=True)
    return Noted([([*names], values) for (_, values), names in named], saved.notes)


def _steps(folders: Mapping[str, Path], file: TorchFile) -> dict[Key, Mapping[str, Plain]]:
    """Return how many steps each parameter was trained.

    Stage 3 has a step for each of its flat tensors instead, which count if they are equal.
    """
    found: dict[Key, Mapping[str, Plain]] = {}
    for name, folder in folders.items():
        if (folder / f"{_STEP}.pt").is_file():
            own = read_torch_file(folder / f"{_STEP}.pt")
            step = number_in(own, own.value)
            found |= {} if step is None else {name: {_STEP: step}}
    saved = items_of((items_of(file.value) or {}).get("optimizer_state_dict")) or {}
    states = saved.get("state")
    flat = [items_of(one) or {} for one in states.values()] if isinstance(states, dict) else []
    steps = {number_in(file, one.get(_STEP)) for one in flat} - {None}
    if found or len(steps) != 1:
        return found
    (step,) = steps
    return {name: {_STEP: step} for name in folders}
