"""The float32 weights of ZeRO's optimizer: names and shapes laid over the flat partitions.

Stages 1 and 2: a group's parameters are laid end to end, and cut into one part per rank. Stage 3:
every parameter is cut into one part per rank, each of as many elements; what a rank has of all
parameters is laid end to end, in one or several tensors. Padding is never part of a tensor.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import TorchFile
from unshard.errors import CorruptError
from unshard.read.zero.flat import FlatCuts, Run, Runs
from unshard.read.zero.states import ModelState, OptimState, Shapes, flat_run
from unshard.showing import counted
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DType

_SAME_SAVE = "do the files belong to one save?"


def unflattened(
    states: Sequence[OptimState], groups: Sequence[Shapes], paths: tuple[Path, ...], first: int
) -> dict[str, TensorEntry]:
    """Return the tensors that the flat tensors of all ranks make.

    Args:
        states: of all ranks, in their order.
        groups: the shapes, in flat order.
        paths: all files that are read.
        first: the number of the first rank's file among them; the others follow.

    Raises:
        CorruptError: the partitions do not have the elements of these shapes.
    """
    of_stage = _of_stage3 if states[0].is_stage3 else _of_groups
    return of_stage(states, groups, FlatCuts(paths), first)


def _of_groups(
    states: Sequence[OptimState], groups: Sequence[Shapes], cuts: FlatCuts, first: int
) -> dict[str, TensorEntry]:
    """Return the tensors of stages 1 and 2."""
    for state in states:
        if len(state.flat) != len(groups):
            raise CorruptError(
                f"{state.path}: has partitions of {counted(len(state.flat), 'group')}",
                expected=f"{counted(len(groups), 'group')}, as param_shapes has",
                hint=_SAME_SAVE,
            )
    found: dict[str, TensorEntry] = {}
    paddings = states[0].paddings or tuple((0,) * len(group) for group in groups)
    if list(map(len, paddings)) != list(map(len, groups)):
        raise CorruptError(
            f"{states[0].path}: param_alignment_paddings does not fit param_shapes",
            hint=_SAME_SAVE,
        )
    for number, (shapes, between) in enumerate(zip(groups, paddings, strict=True)):
        parts = [state.flat[number] for state in states]
        runs = _joined([(s.file, [part]) for s, part in zip(states, parts, strict=True)], first)
        at = 0
        for (name, shape), padding in zip(shapes.items(), between, strict=True):
            count = prod(shape)
            if at + count > runs.count:
                raise _short(states[0].path, number, at + count, runs.count)
            found[name] = cuts.entry(name, runs.dtype, shape, runs.cut(at, count))
            at += count + padding
        # The last elements fill the parts of all ranks: a multiple of two each.
        if runs.count - at >= 2 * len(states):
            raise _short(states[0].path, number, at, runs.count)
    return found


def _short(path: Path, group: int, needed: int, there: int) -> CorruptError:
    return CorruptError(
        f"{path}: the partitions of group {group} do not fit param_shapes",
        expected=f"{needed} elements of all ranks",
        found=f"{there}",
        hint=_SAME_SAVE,
    )


def _of_stage3(
    states: Sequence[OptimState], groups: Sequence[Shapes], cuts: FlatCuts, first: int
) -> dict[str, TensorEntry]:
    """Return the tensors of stage 3."""
    ranks = [
        _joined([(state.file, state.flat)], first + rank, rank=rank)
        for rank, state in enumerate(states)
    ]
    _check_alike(states, ranks)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    needed = sum(-(-prod(shape) // len(states)) for shape in shapes.values())
    for state, runs in zip(states, ranks, strict=True):
        if runs.count != needed:
            raise CorruptError(
                f"{state.path}: its partition does not fit param_shapes",
                expected=f"{needed} elements",
                found=f"{runs.count}",
                hint="is the optimizer on NVMe (offloaded_tensors)? its state is not in the files"
                if (state.path.parent / "offloaded_tensors").is_dir()
                else _SAME_SAVE,
            )
    found: dict[str, TensorEntry] = {}
    at = 0
    for name, shape in shapes.items():
        found[name] = _cut_by_ranks(name, shape, ranks, at, cuts)
        at += -(-prod(shape) // len(states))
    return found


def _cut_by_ranks(
    name: str, shape: tuple[int, ...], ranks: Sequence[Runs], at: int, cuts: FlatCuts
) -> TensorEntry:
    """Return a tensor that is cut into equal parts of all ranks, each at the same place in its."""
    left = prod(shape)
    part = -(-left // len(ranks))
    runs: list[Run] = []
    for one in ranks:
        runs += one.cut(at, min(part, left))
        left -= min(part, left)
    return cuts.entry(name, ranks[0].dtype, shape, runs)


def _joined(
    parts: Sequence[tuple[TorchFile, Sequence[Value]]], first: int, *, rank: int | None = None
) -> Runs:
    """Return the flat tensors of one file, or of all ranks' files, as one; all of one dtype."""
    runs: list[Run] = []
    dtypes: dict[DType, Path] = {}
    for number, (file, values) in enumerate(parts):
        of_rank = number if rank is None else rank
        for value in values:
            dtype, run = flat_run(file, value, rank=of_rank, number=first + number)
            runs.append(run)
            dtypes.setdefault(dtype, file.path)
    if len(dtypes) > 1:
        raise _mixed(dtypes)
    return Runs.of(next(iter(dtypes), BY_NAME["float32"]), runs)


def _check_alike(states: Sequence[OptimState | ModelState], ranks: Sequence[Runs]) -> None:
    dtypes = {one.dtype: state.path for one, state in zip(ranks, states, strict=True)}
    if len(dtypes) > 1:
        raise _mixed(dtypes)


def _mixed(dtypes: Mapping[DType, Path]) -> CorruptError:
    return CorruptError(
        "partitions of one group differ in their dtype",
        found=", ".join(f"{dtype} in {path.name}" for dtype, path in dtypes.items()),
        hint=_SAME_SAVE,
    )


def frozen_of_ranks(
    states: Sequence[ModelState], shapes: Shapes, cuts: FlatCuts
) -> dict[str, TensorEntry]:
    """Return the parameters that are not trained, of stage 3; see `unflattened`."""
    found: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        parts = []
        for rank, state in enumerate(states):
            part = state.fragments.get(name)
            runs = _joined([(state.file, [] if part is None else [part])], rank, rank=rank)
            if runs.count != -(-prod(shape) // len(states)):
                raise CorruptError(
                    f"tensor {name}: {state.path.name} does not have rank {rank}'s part of it",
                    expected=f"{-(-prod(shape) // len(states))} elements of {list(shape)}",
                    found=f"{runs.count}",
                    hint=_SAME_SAVE,
                )
            parts.append(runs)
        _check_alike(states, parts)
        found[name] = _cut_by_ranks(name, shape, parts, 0, cuts)
    return found
