"""Reader for torch_checkpointing, torch's successor of DCP: a file per item and rank.

`model_3.pt` is what rank 3 has of the item `model`, saved by `torch.save` like an FSDP rank file.
An item may be in `model_3.safetensors` instead, of which only `metadata.pkl` says how its tensors
are cut. What it says of `.pt` files is compared with them.

The names are common ones (`model_3.pt` may be the third epoch), so one file alone is not taken for
a checkpoint: `metadata.pkl` must be there, another rank, or another item of the same rank. Next to
`metadata.pkl` the item of the model may have any name that is not one of training state.

Source: torch_checkpointing 0.1.1, `checkpoint_layout`, `default_resharder`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.containers.safetensors_file import HeaderEntry
from unshard.containers.torch_files.reader import TorchFile
from unshard.containers.torch_files.zip import StorageRecord
from unshard.errors import CorruptError, IncompleteError, NotMergeableError, raise_all
from unshard.read.dcp.names import MODEL_KEYS, OTHER_KEYS
from unshard.read.format import Format, Location, ReadOptions, files_in, find_file, shortened
from unshard.read.hub_files import natural_order, read_header, size_problem
from unshard.read.rank_files.copies import catalog_of
from unshard.read.step_names import is_state
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import table_of
from unshard.read.torch_save.table import RankTable, TensorForm
from unshard.read.torch_save.template_reader import read_rank_files
from unshard.read.torch_save.tensors import LocalTensor
from unshard.read.torch_save.values import StorageView
from unshard.read.tree import Tree
from unshard.read.whole_files.names import is_whole_file
from unshard.showing import counted
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import Catalog
from unshard.tensors.placements import PlacementError, Replicate, place

if TYPE_CHECKING:
    from unshard.read.torch_checkpointing.metadata import StatedItem

# Five digits at most: a name must not make lists as long as it likes.
_FILE = re.compile(r"(?P<item>\w+?)_(?P<rank>0|[1-9]\d{0,4})\.(?:pt|safetensors)")
_METADATA = "metadata.pkl"


def _items_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the items that files are named after, each with its ranks."""
    items: dict[str, set[int]] = {}
    for match in map(_FILE.fullmatch, names):
        if match is not None:
            items.setdefault(match["item"], set()).add(int(match["rank"]))
    return items


def _may_be_model(item: str) -> bool:
    return not (item in OTHER_KEYS or "optim" in item or is_state(item))


def _holds(tree: Tree, directory: Path) -> bool:
    names = tree.inside(directory)
    items = _items_of(names)
    ranks = next((items[key] for key in MODEL_KEYS if key in items), set())
    is_stated = _METADATA in names
    if is_stated and any(map(_may_be_model, items)):
        return True
    others = (items[item] & ranks for item in items if item not in MODEL_KEYS)
    is_shown = len(ranks) > 1 or any(others)
    return bool(ranks) and is_shown and not any(map(is_whole_file, names))


def _claims(tree: Tree, path: Path) -> bool:
    match = _FILE.fullmatch(path.name)
    if match is None:
        return path.name == _METADATA and _holds(tree, path.parent)
    # Of the rank, the model must be there, too, or what states the items: this spares most
    # directories a listing.
    models = (
        f"{key}_{match['rank']}{end}" for key in MODEL_KEYS for end in (".pt", ".safetensors")
    )
    is_near = any(tree.exists(path.parent / name) for name in (_METADATA, *models))
    return is_near and _holds(tree, path.parent)


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.torch_checkpointing.metadata import read_metadata
    from unshard.read.whole_files.reader import WHOLE_FILES

    found = files_in(location.roots, lambda name: _FILE.fullmatch(name) is not None)
    items = _items_of(path.name for path in found)
    path = find_file(location.roots, _METADATA)
    item = _model_item(path, items, location)
    stated = None if path is None else read_metadata(path, item)
    suffix = ".pt" if stated is None else stated.suffix
    by_name = {path.name: path for path in found}
    names = ((rank, f"{item}_{rank}{suffix}") for rank in sorted(items[item]))
    files = {rank: by_name[name] for rank, name in names if name in by_name}
    _check_files(location.weights_dir, item, files, stated)
    from unshard.read.rank_files.optimizer import trained_parameters

    gathered, world = Gathering(), max(map(max, items.values())) + 1
    for table in _tables(files, stated, options):
        gathered.add(table)
        world = max(world, table.world_size)
    is_plain = len(gathered.plain) == len(gathered.names)
    if stated is None and is_plain and location.file in files.values():
        return WHOLE_FILES.read(location, options)  # nothing shows that the others belong to it
    if stated is not None:
        world = stated.world_size
        shapes = {name: on[0].shape for name, on in stated.tensors.items() if on}
        options = replace(options, shapes=shapes)  # of a plain tensor: that of a copy
        _check_names(location, gathered, stated, files)
    return replace(
        catalog_of(gathered, files, world, location, options, trained_parameters),
        writer="torch_checkpointing",
        training_state=tuple(path for path in found if path not in files.values()),
    )


TORCH_CHECKPOINTING = Format("torch_checkpointing", _holds, _read, _claims)


def _model_item(metadata: Path | None, items: Iterable[str], location: Location) -> str:
    """Return the item that is the model; if none has a known name, the only one with tensors."""
    from unshard.read.torch_checkpointing.metadata import read_metadata

    known = next((name for name in MODEL_KEYS if name in items), None)
    if known is not None:
        return known
    if metadata is None:
        raise IncompleteError(f"{location.weights_dir}: its {_METADATA} is missing")
    may_be = [item for item in items if _may_be_model(item)]
    named = _FILE.fullmatch(location.file.name) if location.file is not None else None
    if named is not None and named["item"] in may_be:
        return named["item"]
    if len(may_be) > 1:
        stated = {item: read_metadata(metadata, item) for item in may_be}
        may_be = [item for item, one in stated.items() if one is not None and one.tensors] or may_be
    if len(may_be) > 1:
        raise NotMergeableError(
            f"{location.weights_dir}: has the weights of {len(may_be)} models",
            found=f"items {shortened(may_be, 8)}",
            hint="give the weight file of the one that you want",
        )
    return may_be[0]


def _check_files(
    directory: Path, item: str, files: Mapping[int, Path], stated: "StatedItem | None"
) -> None:
    if stated is None and not files:
        raise NotMergeableError(
            f"{directory}: the safetensors files of single ranks, which do not state how their "
            "tensors are cut",
            expected=f"{_METADATA}, which does",
            hint=f"copy it here, if it was lost; else save {item} with a resharder "
            "(DefaultResharder)",
        )
    if stated is not None and not files:
        raise IncompleteError(
            f"{directory}: the files of all {stated.world_size} ranks are missing",
            expected=f"{item}_0{stated.suffix} and the others, as {_METADATA} says",
        )
    if stated is not None and max(files) >= stated.world_size:
        raise CorruptError(
            f"{files[max(files)]}: a rank that {_METADATA} does not know",
            expected=f"the files of {stated.world_size} ranks",
            hint="do the files belong to one save?",
        )


def _tables(
    files: Mapping[int, Path], stated: "StatedItem | None", options: ReadOptions
) -> Iterator[RankTable]:
    """Yield the table of every file; what contradicts the metadata is among its problems."""
    if stated is not None and stated.suffix == ".safetensors":
        for number, (rank, path) in enumerate(files.items()):
            yield _read_safetensors(path, rank, number, stated)
        return
    for table in read_rank_files(list(files.items()), options.allowed_globals):
        if stated is not None:
            table.problems += _contradictions(table, files[table.rank], stated)
        yield table


def _contradictions(table: RankTable, path: Path, stated: "StatedItem") -> Iterator[CorruptError]:
    for name, found in table.forms():
        expected = stated.form(name, table.rank)
        if expected is None and found.is_plain:
            continue  # torch lists a plain tensor only if the first rank has it
        if expected is None or _shown(found) != _shown(expected):
            yield _contradiction(name, path, expected, _shown(found))


def _contradiction(name: str, path: Path, expected: TensorForm | None, found: str) -> CorruptError:
    return CorruptError(
        f"tensor {name}: {path.name} contradicts {_METADATA}",
        expected="nothing about this tensor" if expected is None else _shown(expected),
        found=found,
        hint="do the files belong to one save?",
    )


@lru_cache(maxsize=4096)
def _shown(form: TensorForm) -> str:
    """Return what a tensor is; a plain tensor is listed as a replica, and is the same."""
    how = form.sharding
    if how is None or set(how.placements) == {Replicate()}:
        return f"{'boxes of' if form.boxed else 'whole'} {form.dtype} {list(form.shape)}"
    placements = ", ".join(map(str, how.placements))
    cut = f"({placements}) at {how.mesh.coordinates} of mesh {how.mesh.shape}"
    return f"{form.dtype} {list(form.shape)}, {cut}"


def _read_safetensors(path: Path, rank: int, number: int, stated: "StatedItem") -> RankTable:
    """Return what a safetensors file contains, its tensors placed as the metadata states."""
    file = read_header(path)
    entries = sorted(file.entries, key=lambda entry: natural_order(entry.name))
    storages = {
        entry.name: StorageRecord(file.data_start + entry.begin, entry.end - entry.begin, 0)
        for entry in entries
    }
    tensors = {
        entry.name: partial(_local_tensor, path, entry, stated.form(entry.name, rank))
        for entry in entries
    }
    return table_of(TorchFile(path, None, storages), tensors, rank=rank, file_number=number)


def _local_tensor(path: Path, entry: HeaderEntry, form: TensorForm | None) -> LocalTensor:
    """Return what is stored of a tensor; a CorruptError if it does not fit the metadata."""
    if problem := size_problem(path, entry):
        raise problem
    found = f"{entry.dtype} {list(entry.shape)}"
    if form is None or form.dtype is not entry.dtype:
        raise _contradiction(entry.name, path, form, found)
    try:
        local = form.shape if form.sharding is None else place(form.shape, form.sharding)[0]
    except PlacementError as error:
        raise CorruptError(f"tensor {entry.name}: {_METADATA}: {error}") from error
    # torch stores an empty part as one of shape [0].
    if local != entry.shape and not (0 in local and 0 in entry.shape):
        raise _contradiction(entry.name, path, form, found)
    strides = row_major_strides(entry.shape)
    view = StorageView(entry.name, entry.dtype, prod(entry.shape), 0, entry.shape, strides)
    return LocalTensor(form, (view,))


def _check_names(
    location: Location, gathered: Gathering, stated: "StatedItem", files: Mapping[int, Path]
) -> None:
    """Raise what contradicts the metadata, and the names that no file has."""
    corrupt = [problem for problem in gathered.problems if isinstance(problem, CorruptError)]
    raise_all(CorruptError, f"{location.weights_dir}: the files are not of one save", corrupt)
    lost = [name for name in stated.tensors if name not in gathered.names]
    if gathered.problems:
        return  # tensors that cannot be read, which is reported with all others
    missing = [str(rank) for rank in range(stated.world_size) if rank not in files]
    if lost and missing:
        raise IncompleteError(
            f"{location.weights_dir}: Missing checkpoint for rank {shortened(missing, 16)} of "
            f"world size {stated.world_size}",
            expected=f"{counted(len(lost), 'tensor')} that {_METADATA} lists and no file has: "
            f"{shortened(lost)}",
            hint="copy the files here from the nodes that wrote them, or take another checkpoint",
        )
    if lost:
        raise CorruptError(
            f"{location.weights_dir}: in no file: {counted(len(lost), 'tensor')} of {_METADATA}",
            found=f"no {shortened(lost)}",
            hint="do the files belong to one save?",
        )
