"""The float32 weights of ZeRO's optimizer: names and shapes laid over the flat partitions.

Stages 1 and 2 lay a group's parameters end to end and cut the result into one part per rank. Stage
3 cuts every parameter into one part per rank, each of as many elements, and a rank lays its parts
end to end, in one or several tensors. Padding is never part of a tensor.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from unshard.console import counted
from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import TorchFile
from unshard.errors import CorruptError
from unshard.read.zero.flat import FlatCuts, FlatRun, FlatTensor
from unshard.read.zero.states import ModelState, OptimState, Shapes, flat_run
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DType

_SAME_SAVE = "do the files belong to one save?"


def unflattened(
    states: Sequence[OptimState], groups: Sequence[Shapes], paths: tuple[Path, ...], first: int
) -> dict[str, TensorEntry]:
    """Return the tensors that the partitions of all ranks make.

    Args:
        states: of all ranks, in their order.
        groups: the shapes, in flat order.
        paths: all files that are read; the ranks' files start at number `first`.
        first: see `paths`.

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
    tensors: dict[str, TensorEntry] = {}
    paddings = states[0].paddings or tuple((0,) * len(group) for group in groups)
    if list(map(len, paddings)) != list(map(len, groups)):
        raise CorruptError(
            f"{states[0].path}: param_alignment_paddings does not fit param_shapes",
            hint=_SAME_SAVE,
        )
    for number, (shapes, between) in enumerate(zip(groups, paddings, strict=True)):
        flat = _joined([(state.file, [state.flat[number]]) for state in states], first)
        at = 0
        for (name, shape), padding in zip(shapes.items(), between, strict=True):
            elements = prod(shape)
            if at + elements > flat.elements:
                raise _misfit(states[0].path, number, at + elements, flat.elements)
            tensors[name] = cuts.entry(name, flat.dtype, shape, flat.cut(at, elements))
            at += elements + padding
        # Padding at the end makes the parts of all ranks equal: a multiple of two elements each.
        if flat.elements - at >= 2 * len(states):
            raise _misfit(states[0].path, number, at, flat.elements)
    return tensors


def _misfit(path: Path, group: int, needed: int, stored: int) -> CorruptError:
    return CorruptError(
        f"{path}: the partitions of group {group} do not fit param_shapes",
        expected=f"{needed} elements of all ranks",
        found=f"{stored}",
        hint=_SAME_SAVE,
    )


def _of_stage3(
    states: Sequence[OptimState], groups: Sequence[Shapes], cuts: FlatCuts, first: int
) -> dict[str, TensorEntry]:
    """Return the tensors of stage 3."""
    parts = [
        _joined([(state.file, state.flat)], first + rank, rank=rank)
        for rank, state in enumerate(states)
    ]
    _check_dtypes(states, parts)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    needed = sum(_part_size(shape, len(states)) for shape in shapes.values())
    for state, flat in zip(states, parts, strict=True):
        if flat.elements != needed:
            raise CorruptError(
                f"{state.path}: its partition does not fit param_shapes",
                expected=f"{needed} elements",
                found=f"{flat.elements}",
                hint="is the optimizer on NVMe (offloaded_tensors)? its state is not in the files"
                if (state.path.parent / "offloaded_tensors").is_dir()
                else _SAME_SAVE,
            )
    tensors: dict[str, TensorEntry] = {}
    at = 0
    for name, shape in shapes.items():
        tensors[name] = _cut_by_ranks(name, shape, parts, at, cuts)
        at += _part_size(shape, len(states))
    return tensors


def _part_size(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of a rank's part of a parameter of stage 3; the last has padding."""
    return -(-prod(shape) // ranks)


def _cut_by_ranks(
    name: str, shape: tuple[int, ...], parts: Sequence[FlatTensor], at: int, cuts: FlatCuts
) -> TensorEntry:
    """Return a tensor that has an equal part, from element `at` on, in the part of every rank."""
    remaining = prod(shape)
    size = _part_size(shape, len(parts))
    runs: list[FlatRun] = []
    for flat in parts:
        runs += flat.cut(at, min(size, remaining))
        remaining -= min(size, remaining)
    return cuts.entry(name, parts[0].dtype, shape, runs)


def _joined(
    parts: Sequence[tuple[TorchFile, Sequence[Value]]], first: int, *, rank: int | None = None
) -> FlatTensor:
    """Return the flat tensors of one file, or of all ranks' files, as one; all of one dtype."""
    runs: list[FlatRun] = []
    dtypes: dict[DType, Path] = {}
    for number, (file, values) in enumerate(parts):
        of_rank = number if rank is None else rank
        for value in values:
            dtype, run = flat_run(file, value, rank=of_rank, number=first + number)
            runs.append(run)
            dtypes.setdefault(dtype, file.path)
    _check_one(dtypes)
    return FlatTensor(next(iter(dtypes), BY_NAME["float32"]), runs)


def _check_dtypes(states: Sequence[OptimState | ModelState], parts: Sequence[FlatTensor]) -> None:
    _check_one({flat.dtype: state.path for flat, state in zip(parts, states, strict=True)})


def _check_one(dtypes: Mapping[DType, Path]) -> None:
    if len(dtypes) > 1:
        raise CorruptError(
            "partitions of one group differ in their dtype",
            found=", ".join(f"{dtype} in {path.name}" for dtype, path in dtypes.items()),
            hint=_SAME_SAVE,
        )


def frozen_of_ranks(
    states: Sequence[ModelState], shapes: Shapes, cuts: FlatCuts
) -> dict[str, TensorEntry]:
    """Return the parameters of stage 3 that are not trained; see `unflattened`."""
    tensors: dict[str, TensorEntry] = {}
    for name, shape in shapes.items():
        parts = []
        for rank, state in enumerate(states):
            fragments = [state.fragments[name]] if name in state.fragments else []
            flat = _joined([(state.file, fragments)], rank, rank=rank)
            needed = _part_size(shape, len(states))
            if flat.elements != needed:
                raise CorruptError(
                    f"tensor {name}: {state.path.name} does not have rank {rank}'s part of it",
                    expected=f"{needed} elements of {list(shape)}",
                    found=f"{flat.elements}",
                    hint=_SAME_SAVE,
                )
            parts.append(flat)
        _check_dtypes(states, parts)
        tensors[name] = _cut_by_ranks(name, shape, parts, 0, cuts)
    return tensors
