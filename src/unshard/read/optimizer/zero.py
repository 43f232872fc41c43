"""Reads the moments of DeepSpeed's ZeRO, which are flattened and cut like its float32 weights.

torch's optimizer has a flat tensor per group (of stage 3 per part of a group) instead of each
parameter, so a moment is cut into parameters by the names and shapes that the model's file has.

Source: DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/bf16_optimizer.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unshard.containers.open_files import opened
from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.writer import Plain
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.format import Location, ReadOptions
from unshard.read.optimizer.groups import Group, saved_groups
from unshard.read.optimizer.rank_files import read_numbers
from unshard.read.optimizer.universal import read_universal_moments
from unshard.read.optimizer_state import (
    WITHOUT_IT,
    SavedState,
    flat_name,
    left_out_note,
    refuse_quantised,
)
from unshard.read.torch_save.state_dict import start_of
from unshard.read.torch_save.values import is_tensor, items_of, read_view
from unshard.read.training_state.plain_values import plain_values
from unshard.read.zero.masters import unflattened
from unshard.read.zero.reader import read_partitions
from unshard.read.zero.states import OptimState, Shapes
from unshard.tensors.catalog import Catalog, TensorEntry

_STEP, _SHOWN = "step", 200


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """The state of torch's optimizer on one rank: of each flat tensor, by key; and the groups."""

    state: OptimState
    flat: Sequence[Mapping[str, Value]]
    groups: Sequence[Group]
    notes: tuple[str, ...]


def read_zero(location: Location, options: ReadOptions) -> SavedState | None:
    """Return the moments of a ZeRO checkpoint, by the names of parameters; None without any.

    Raises:
        CheckpointError: a file is missing, cannot be read, or contradicts another.
    """
    read = read_partitions(location, options)
    if read is None:
        return read_universal_moments(location, options)
    states, shapes = read
    bases = [_base_of(state, len(shapes)) for state in states]
    first = bases[0]
    for base in bases[1:]:
        _compare_groups(first, base)
    moments = [key for key, value in first.flat[0].items() if is_tensor(value) and key != _STEP]
    refuse_quantised(str(first.state.path), first.flat[0])
    paths = tuple(state.path for state in states)
    tensors: dict[str, TensorEntry] = {}
    for key in moments:
        cut = [replace(base.state, flat=_values(base, key)) for base in bases]
        for name, entry in unflattened(cut, shapes, paths, 0).items():
            tensors[flat_name(name, key)] = replace(entry, fqn=flat_name(name, key))
    names = [name for group in shapes for name in group]
    catalog = Catalog("DeepSpeed", len(states), tensors)
    return SavedState(
        str(first.state.path),
        catalog,
        dict.fromkeys(names, moments),
        _groups_of(first, shapes),
        _steps(first, shapes),
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
    listed = {"groups": (items or {}).get("param_groups")}
    noted = plain_values(replace(state.file, value=listed))
    plain, notes = noted.value, left_out_note(state.path.name, noted.notes)
    groups = saved_groups(plain["groups"] if isinstance(plain, dict) else None, str(state.path))
    numbers = [number for params, _ in groups for number in params]
    flat = [items_of(numbered.get(one)) if isinstance(one, int) else None for one in numbers]
    kept = [one for one in flat if one is not None]
    if len(kept) != count or len(flat) != count or not all(kept):
        raise CorruptError(
            f"{state.path}: the optimizer does not have the state of every flat tensor",
            expected=f"of {count}",
            found=f"of {len(kept)}",
        )
    return _Base(state, kept, groups, notes)


def _compare_groups(first: _Base, base: _Base) -> None:
    """Raise if a rank has other groups or hyper-parameters than the first; steps are compared."""
    for number, ((_, ours), (_, theirs)) in enumerate(zip(first.groups, base.groups, strict=False)):
        for key in dict.fromkeys([*ours, *theirs]):
            if ours.get(key) != theirs.get(key):
                raise CorruptError(
                    f"{base.state.path}: disagrees with {first.state.path.name} about {key} of "
                    f"group {number}",
                    expected=str(ours.get(key))[:_SHOWN],
                    found=str(theirs.get(key))[:_SHOWN],
                    hint="files of two saves are in one directory: take another checkpoint",
                )


def _values(base: _Base, key: str) -> tuple[Value, ...]:
    if not all(key in one for one in base.flat):
        raise CorruptError(f"{base.state.path}: {key} of a flat tensor is missing")
    return tuple(one[key] for one in base.flat)


def _groups_of(base: _Base, shapes: Sequence[Shapes]) -> list[Group]:
    """Return the groups with the names of parameters, in place of numbers of flat tensors."""
    found: list[Group] = []
    names = iter(shapes)
    for params, values in base.groups:
        found.append(([name for _ in params for name in next(names)], values))
    return found


def _steps(base: _Base, shapes: Sequence[Shapes]) -> dict[int | str, Mapping[str, Plain]]:
    """Return how many steps each parameter was trained."""
    found: dict[int | str, Mapping[str, Plain]] = {}
    for group, flat in zip(shapes, base.flat, strict=True):
        value = flat.get(_STEP)
        if is_tensor(value):
            view = read_view(value)
            with opened(base.state.path) as file:
                (value,) = read_numbers(file, [(view.dtype, start_of(base.state.file, view))])
        if isinstance(value, int | float):
            found |= {name: {_STEP: value} for name in group}
    return found
