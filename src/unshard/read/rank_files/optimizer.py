"""The optimizer's state in files of ranks: verl, lmms-engine, SkyRL, and accelerate without DCP.

| file | trainers | parameters by |
|---|---|---|
| `optim_world_size_W_rank_R.pt` next to the model's | verl, SkyRL | number: `state_dict()` |
| `optimizer/optimizer_world_size_W_rank_R.pt` in the step | lmms-engine | number |
| `optimizer_I_rankR.bin` next to the model's | accelerate, `use_dcp=False` | name |

Names may also be flattened, as VeOmni saves them: `state.NAME.exp_avg`, `param_groups.NAME.lr`.

With FSDP1 a plain `optimizer.state_dict()` has parts of flat parameters, which belong to several
parameters: only the model knows where these begin. They are refused.

Sources: verl 0.9.1's FSDPCheckpointManager, lmms-engine 0.1.4's FSDP2 trainer, accelerate 1.15's
`save_fsdp_optimizer`, `torch.optim.Optimizer.state_dict`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from unshard.console import plain
from unshard.containers.open_files import opened
from unshard.containers.pickles.records import Value
from unshard.containers.strided import crc_of
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.containers.torch_files.writer import SavedTensor
from unshard.errors import (
    CheckpointError,
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UsageError,
)
from unshard.read.format import Location, ReadOptions
from unshard.read.optimizer_state import (
    LIKE_PARAMETER,
    Key,
    SavedState,
    flat_groups,
    flat_name,
    flat_parameters,
    left_out_note,
    read_numbers,
    refuse_quantised,
    saved_groups,
    split_name,
)
from unshard.read.rank_files.copies import catalog_of
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.table import RankTable
from unshard.read.torch_save.values import is_tensor, items_of
from unshard.read.training_state.plain_values import plain_values
from unshard.read.training_state.reader import step_dirs
from unshard.read.wrapper_names import names_without_wrappers
from unshard.tensors.catalog import ByteRange, Catalog, TensorEntry

_WORLD = re.compile(r"optim(?:izer)?_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_UNNAMED = re.compile(r"optimizer_(\d{1,4})_rank(\d{1,6})\.bin")
_LONGEST_SHOWN = 200
_BLOCK = 1 << 20
_MODEL = re.compile(r"pytorch_model_fsdp_(\d+)(?:_rank\d+\.bin)?")


def find_files(location: Location, world_size: int) -> dict[int, Path]:
    """Return the file of each rank of this world size; none if no optimizer was saved.

    Raises:
        IncompleteError: there are files of other world sizes only.
    """
    folders = [*location.roots, *(step / "optimizer" for step in step_dirs(location))]
    existing = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    worlds: dict[int, dict[int, Path]] = {}
    unnamed: dict[int, Path] = {}
    model = _MODEL.fullmatch(location.file.name if location.file else location.weights_dir.name)
    number = int(model[1]) if model else 0
    for path in sorted(path for folder in existing for path in folder.iterdir()):
        if match := _WORLD.fullmatch(path.name):
            worlds.setdefault(int(match[1]), {}).setdefault(int(match[2]), path)
        elif (match := _UNNAMED.fullmatch(path.name)) and int(match[1]) == number:
            unnamed.setdefault(int(match[2]), path)
    files = worlds.get(world_size) or unnamed
    if worlds and not files:
        sizes = ", ".join(map(str, sorted(worlds)))
        raise IncompleteError(
            f"{next(iter(next(iter(worlds.values())).values())).parent}: the optimizer's files are "
            f"of world size {sizes}",
            expected=f"{world_size}, as the files of the model",
            hint="they belong to another save; take another checkpoint",
        )
    return dict(sorted(files.items()))


def read_optimizer(location: Location, world: int, options: ReadOptions) -> SavedState | None:
    """Read the files of all ranks, but no values of moments; None without files.

    Raises:
        CheckpointError: a file cannot be read, ranks disagree, or the parameters of the state are
            unknown.
        UsageError: the options have a size of expert parallelism.
    """
    files = find_files(location, world)
    if files and options.ep_size is not None:
        raise UsageError(
            f"⟦--ep-size {options.ep_size}⟧: the optimizer's state of such experts cannot be read",
            hint="leave out the optimizer",
        )
    gathered, first = Gathering(), None
    for number, (rank, path) in enumerate(files.items()):
        own = _read_file(path, rank, number, options)
        if world > 1:
            _refuse_flat(own)
        gathered.add(own.table)
        if first is None:
            first = own
        else:
            _compare(first, own)
    if first is None:
        return None
    place = replace(location, weights_dir=first.path.parent)
    catalog = catalog_of(gathered, files, world, place, replace(options, selects=False))
    return replace(first.state, catalog=catalog)


def trained_parameters(
    location: Location, world: int, tensors: Mapping[str, TensorEntry]
) -> list[str]:
    """Return the optimizer's parameters among some plain tensors of a model, if it can be read.

    If it has numbers instead of names, these are all tensors of the shape of a plain moment.
    """
    try:
        rank, path = next(iter(find_files(location, world).items() if tensors else ()))
        own = _read_file(path, rank, 0, ReadOptions())
    except (CheckpointError, StopIteration):
        return []  # the model can be merged without its optimizer
    listed = chain(*([*params, values.get("param_names")] for params, values in own.state.groups))
    flat = chain(*(each if isinstance(each, list) else [each] for each in listed))
    names = {name for name in flat if isinstance(name, str)}
    forms = [form for name, form in own.table.forms() if split_name(name)[1] in LIKE_PARAMETER]
    is_flat = all(form.is_plain for form in forms)  # FSDP1's parts, of any size
    shapes = {form.shape for form in forms if form.is_plain and not (is_flat or names)}
    short = names_without_wrappers([*names, *tensors])
    names = {short[name] for name in names}
    return [
        name for name, entry in tensors.items() if short[name] in names or entry.shape in shapes
    ]


class _OptimizerFile(NamedTuple):
    """A rank's file: `state` has no tensors, and `scalars` the numbers in tensors of no shape."""

    path: Path
    rank: int
    table: RankTable
    state: SavedState
    scalars: Mapping[str, float]


def _read_file(path: Path, rank: int, number: int, options: ReadOptions) -> _OptimizerFile:
    archive = read_torch_file(path)
    saved, groups, is_flat = _parts_of(archive)
    tensors: dict[str, Value] = {}
    keys: dict[Key, list[str]] = {}
    others: dict[Value, Value] = {}
    for parameter, fields in saved.items():
        refuse_quantised(str(path), fields)
        for key, value in fields.items():
            if is_tensor(value) and "." not in key:
                tensors[flat_name(parameter, key)] = value
                keys.setdefault(parameter, []).append(key)
        rest = {key: value for key, value in fields.items() if not is_tensor(value)}
        if rest:
            others[parameter] = rest
    table = tensors_of(
        archive, tensors, rank=rank, file_number=number, allowed=options.allowed_globals
    )
    plain_parts, left_out = plain_values(
        archive._replace(value={"groups": groups, "values": others})
    )
    if not isinstance(plain_parts, dict):
        raise CorruptError(f"{path}: has no parameter groups")
    state = SavedState(
        str(path),
        Catalog("", 1, {}),
        keys,
        saved_groups(plain_parts.get("groups"), str(path)),
        plain_parts.get("values", {}),
        left_out_note(path.name, left_out),
        flattened=is_flat,
    )
    return _OptimizerFile(path, rank, table, state, _scalars(table, path))


def _parts_of(archive: TorchFile) -> tuple[dict[Key, dict[str, Value]], Value, bool]:
    """Return the state by parameter, the parameter groups, and whether they were flattened."""
    items = items_of(archive.value)
    saved = None if items is None else items.get("state")
    if items is not None and isinstance(saved, dict) and "param_groups" in items:
        state: dict[Key, dict[str, Value]] = {}
        for parameter, fields in saved.items():
            named = items_of(fields)
            if named is None or not isinstance(parameter, int | str):
                raise CorruptError(f"{archive.path}: state of unknown form")
            state[int(parameter) if isinstance(parameter, int) else parameter] = named
        return state, items["param_groups"], False
    if items is not None and any(name.startswith("state.") for name in items):
        return *flat_groups(items), True
    raise NotMergeableError(
        f"{archive.path}: not the state dict of an optimizer",
        expected="a dict with state and param_groups",
        found=", ".join(list(items or {})[:5]) or type(archive.value).__name__,
    )


def _scalars(table: RankTable, path: Path) -> dict[str, float]:
    """Return the numbers in the tensors without dimensions of a rank's file."""
    starts, scalars, at = table.starts.tolist(), [], 0
    for name, number in zip(table.names, table.cuts.tolist(), strict=True):
        cut = table.cut_table[number]
        if cut.form.shape == () and len(cut.boxes) == 1:
            scalars.append((name, cut.form.dtype, starts[at]))
        at += len(cut.boxes)
    with opened(path) as file:
        numbers = read_numbers(file, [(dtype, start) for _, dtype, start in scalars])
    return {name: number for (name, *_), number in zip(scalars, numbers, strict=True)}


def _facts(own: _OptimizerFile) -> dict[str, object]:
    """Return the values that must be equal on every rank, by description."""
    facts: dict[str, object] = {"the number of parameter groups": len(own.state.groups)}
    for number, (params, values) in enumerate(own.state.groups):
        facts |= {f"{key} of group {number}": value for key, value in values.items()}
        facts[f"the parameters of group {number}"] = params
    facts |= {f"the tensors of parameter {key}": kinds for key, kinds in own.state.keys.items()}
    facts |= {f"tensor {name}": value for name, value in own.scalars.items()}
    facts |= {f"the state of parameter {key}": value for key, value in own.state.values.items()}
    return {name: _comparable(value) for name, value in facts.items()}


def _comparable(value: object) -> object:
    """Return a value with checksums in place of tensors that were not read."""
    match value:
        case SavedTensor(dtype, shape, ByteRange(path, start, size)):
            with opened(path) as file:
                crc = crc_of(file, start, size, block=_BLOCK)
            return f"a tensor of {dtype}, shape {list(shape)}, CRC-32 {crc:08x}"
        case dict():
            return {key: _comparable(part) for key, part in value.items()}
        case list() | tuple():
            return [_comparable(part) for part in value]
    return value


def _compare(first: _OptimizerFile, own: _OptimizerFile) -> None:
    """Raise if a rank has other groups, steps or parameters with state than the first rank."""
    ours, theirs = _facts(first), _facts(own)
    for name in dict.fromkeys([*ours, *theirs]):
        expected, found = ours.get(name), theirs.get(name)
        if expected != found and repr(expected) != repr(found):  # nan is not nan
            raise CorruptError(
                f"{own.path}: rank {own.rank} disagrees with rank {first.rank} about {name}",
                expected=f"{plain(expected)[:_LONGEST_SHOWN]}, as in {first.path.name}",
                found=plain(found)[:_LONGEST_SHOWN],
                hint="the files are of two saves, or the ranks were trained apart",
            )


def _refuse_flat(first: _OptimizerFile) -> None:
    """Refuse the parts of FSDP1's flat parameters: plain vectors under numbers, on every rank."""
    forms = dict(first.table.forms())
    moments = [name for name, form in forms.items() if form.shape != ()]
    flat = [name for name in moments if forms[name].is_plain and len(forms[name].shape) == 1]
    by_number = not any(isinstance(key, str) for key in first.state.keys)
    if by_number and moments and len(flat) == len(moments):
        raise flat_parameters(str(first.path), f"{len(first.state.keys)} plain vectors a rank")
