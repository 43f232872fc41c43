"""Reads the moments of universal checkpoints, which have a file for each kind and parameter.

| in `zero/` | what it has |
|---|---|
| `NAME/exp_avg.pt`, `NAME/exp_avg_sq.pt` | a moment, as `NAME/fp32.pt` has the values |
| `NAME/step.pt` | how many steps the parameter was trained; not of stage 3 |
| `optimizer_state.pt` | the parameter groups, whose names the model's file has |

Source: DeepSpeed 0.19.8, `checkpoint/ds_to_universal.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

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
from unshard.read.torch_save.values import items_of
from unshard.read.training_state.plain_values import plain_values
from unshard.read.zero.partitions import read_universal
from unshard.read.zero.states import Shapes
from unshard.read.zero.steps import number_in
from unshard.read.zero.universal import FILE, universal_tensors
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry

_STEP = "step"
_GROUPS = "optimizer_state.pt"


def read_universal_moments(location: Location, options: ReadOptions) -> SavedState | None:
    """Return the moments of a universal checkpoint, by the names of parameters; None without any.

    Raises:
        IncompleteError: a file is missing.
        NotMergeableError: it was made of slices, so the names of the groups are not known.
        CheckpointError: a file cannot be read.
    """
    found = read_universal(location, options)
    if found is None or not _kinds(found[1].values()):
        return None
    shapes, folders = found
    if shapes is None:
        raise NotMergeableError(
            f"{location.weights_dir}: a universal checkpoint of slices, in which no file says "
            "which parameters each group of the optimizer has",
            expected="param_shapes of data parallelism alone",
            hint=WITHOUT_IT,
        )
    zero = location.weights_dir / "zero"
    refuse_quantised(str(zero), _kinds(folders.values()))
    if not (zero / _GROUPS).is_file():
        raise IncompleteError(f"{zero / _GROUPS} is missing, which has the parameter groups")
    file = read_torch_file(zero / _GROUPS)
    groups = _groups(file, shapes)
    of_groups = [_kinds(folders[name] for name in group) for group in shapes]
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


def _kinds(folders: Iterable[Path]) -> list[str]:
    """Return the kinds of moments that any of these parameters has."""
    files = (path for folder in folders for path in folder.glob("*.pt"))
    return sorted({path.stem for path in files} - {Path(FILE).stem, _STEP})


def _groups(file: TorchFile, shapes: tuple[Shapes, ...]) -> Noted[list[Group]]:
    """Return the parameter groups, each with the names of the group of shapes at its place."""
    listed = {"groups": (items_of(file.value) or {}).get("param_groups")}
    noted = plain_values(replace(file, value=listed))
    plain = noted.value["groups"] if isinstance(noted.value, dict) else None
    groups = saved_groups(plain, str(file.path))
    if len(groups) != len(shapes):
        raise CorruptError(
            f"{file.path}: {len(groups)} parameter groups",
            expected=f"{len(shapes)}, as the model's file has",
        )
    named = zip(groups, shapes, strict=True)
    return Noted([([*names], values) for (_, values), names in named], noted.notes)


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
