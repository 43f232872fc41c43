"""Reader for torch_checkpointing, torch's successor of DCP: a file per item and rank.

`model_3.pt` is rank 3's part of the item `model`, saved by `torch.save` like an FSDP rank file. An
item may be in `model_3.safetensors` instead; then only `metadata.pkl` has the cuts of its tensors.
For `.pt` files it is compared with them.

The names are common (`model_3.pt` may be the third epoch), so one file alone is not taken for a
checkpoint: `metadata.pkl` must be there, another rank, or another item of the same rank. Next to
`metadata.pkl` the item of the model may have any name that is not a name of training state.

Source: torch_checkpointing 0.1.1, `checkpoint_layout`, `default_resharder`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.console import counted
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
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import Catalog
from unshard.tensors.placements import PlacementError, Replicate, place

if TYPE_CHECKING:
    from unshard.read.torch_checkpointing.metadata import MetadataItem

# Five digits at most: a rank number in a hostile name must not make lists of any length.
_FILE = re.compile(r"(?P<item>\w+?)_(?P<rank>0|[1-9]\d{0,4})\.(?:pt|safetensors)")
_METADATA = "metadata.pkl"
_SAME_SAVE = "do the files belong to one save?"


def _items_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the items in names of files, each with its ranks."""
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
    if _METADATA in names and any(map(_may_be_model, items)):
        return True
    others = (items[item] & ranks for item in items if item not in MODEL_KEYS)
    is_sure = len(ranks) > 1 or any(others)
    return bool(ranks) and is_sure and not any(map(is_whole_file, names))


def _claims(tree: Tree, path: Path) -> bool:
    match = _FILE.fullmatch(path.name)
    if match is None:
        return path.name == _METADATA and _holds(tree, path.parent)
    # The rank's model or the metadata must be there, too: this saves listing most directories.
    models = (
        f"{key}_{match['rank']}{end}" for key in MODEL_KEYS for end in (".pt", ".safetensors")
    )
    is_near = any(tree.exists(path.parent / name) for name in (_METADATA, *models))
    return is_near and _holds(tree, path.parent)


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.torch_checkpointing.metadata import read_metadata
    from unshard.read.whole_files.reader import WHOLE_FILES

    paths = files_in(location.roots, lambda name: _FILE.fullmatch(name) is not None)
    items = _items_of(path.name for path in paths)
    path = find_file(location.roots, _METADATA)
    item = _model_item(path, items, location)
    metadata = None if path is None else read_metadata(path, item)
    suffix = ".pt" if metadata is None else metadata.suffix
    by_name = {path.name: path for path in paths}
    names = ((rank, f"{item}_{rank}{suffix}") for rank in sorted(items[item]))
    files = {rank: by_name[name] for rank, name in names if name in by_name}
    _check_files(location.weights_dir, item, files, metadata)
    from unshard.read.rank_files.optimizer import trained_parameters

    gathered, world = Gathering(), max(map(max, items.values())) + 1
    for table in _tables(files, metadata, options):
        gathered.add(table)
        world = max(world, table.world_size)
    is_plain = len(gathered.plain) == len(gathered.names)
    if metadata is None and is_plain and location.file in files.values():
        return WHOLE_FILES.read(location, options)  # the other files may be unrelated
    if metadata is not None:
        world = metadata.world_size
        shapes = {name: on[0].shape for name, on in metadata.tensors.items() if on}
        options = replace(options, shapes=shapes)  # the shape of a plain tensor is that of a copy
        _check_names(location, gathered, metadata, files)
    return replace(
        catalog_of(gathered, files, world, location, options, trained_parameters),
        writer="torch_checkpointing",
        training_state=tuple(path for path in paths if path not in files.values()),
    )


TORCH_CHECKPOINTING = Format("torch_checkpointing", _holds, _read, _claims)


def _model_item(metadata: Path | None, items: Iterable[str], location: Location) -> str:
    """Return the item of the model; if none has a known name, the only item with tensors."""
    from unshard.read.torch_checkpointing.metadata import read_metadata

    known = next((name for name in MODEL_KEYS if name in items), None)
    if known is not None:
        return known
    if metadata is None:
        raise IncompleteError(f"{location.weights_dir}: its {_METADATA} is missing")
    candidates = [item for item in items if _may_be_model(item)]
    chosen = _FILE.fullmatch(location.file.name) if location.file is not None else None
    if chosen is not None and chosen["item"] in candidates:
        return chosen["item"]
    if len(candidates) > 1:
        read = {item: read_metadata(metadata, item) for item in candidates}
        with_tensors = [item for item, own in read.items() if own is not None and own.tensors]
        candidates = with_tensors or candidates
    if len(candidates) > 1:
        raise NotMergeableError(
            f"{location.weights_dir}: has the weights of {len(candidates)} models",
            found=f"items {shortened(candidates, 8)}",
            hint="pass a weight file of the model that you want",
        )
    return candidates[0]


def _check_files(
    directory: Path, item: str, files: Mapping[int, Path], metadata: "MetadataItem | None"
) -> None:
    if metadata is None and not files:
        raise NotMergeableError(
            f"{directory}: safetensors files of single ranks, without the cuts of their tensors",
            expected=f"{_METADATA}, which has them",
            hint=f"copy it here, if it was lost; else save {item} with a resharder "
            "(DefaultResharder)",
        )
    if metadata is not None and not files:
        raise IncompleteError(
            f"{directory}: the files of all {metadata.world_size} ranks are missing",
            expected=f"{item}_0{metadata.suffix} and the others in {_METADATA}",
        )
    if metadata is not None and max(files) >= metadata.world_size:
        raise CorruptError(
            f"{files[max(files)]}: a rank that is not in {_METADATA}",
            expected=f"the files of {metadata.world_size} ranks",
            hint=_SAME_SAVE,
        )


def _tables(
    files: Mapping[int, Path], metadata: "MetadataItem | None", options: ReadOptions
) -> Iterator[RankTable]:
    """Yield the table of every file; contradictions to the metadata are among its problems."""
    if metadata is not None and metadata.suffix == ".safetensors":
        for number, (rank, path) in enumerate(files.items()):
            yield _read_safetensors(path, rank, number, metadata)
        return
    for table in read_rank_files(list(files.items()), options.allowed_globals):
        if metadata is not None:
            table.problems += _contradictions(table, files[table.rank], metadata)
        yield table


def _contradictions(
    table: RankTable, path: Path, metadata: "MetadataItem"
) -> Iterator[CorruptError]:
    for name, form in table.forms():
        expected = metadata.form(name, table.rank)
        if expected is None and form.is_plain:
            continue  # torch lists a plain tensor only if the first rank has it
        if expected is None or _shown(form) != _shown(expected):
            yield _contradiction(name, path, expected, _shown(form))


def _contradiction(name: str, path: Path, expected: TensorForm | None, found: str) -> CorruptError:
    return CorruptError(
        f"tensor {name}: {path.name} contradicts {_METADATA}",
        expected="nothing about this tensor" if expected is None else _shown(expected),
        found=found,
        hint=_SAME_SAVE,
    )


@lru_cache(maxsize=4096)
def _shown(form: TensorForm) -> str:
    """Describe a tensor; a plain tensor and a replica, as which it is listed, are the same."""
    sharding = form.sharding
    if sharding is None or set(sharding.placements) == {Replicate()}:
        return f"{'boxes of' if form.boxed else 'whole'} {form.dtype} {list(form.shape)}"
    placements = ", ".join(map(str, sharding.placements))
    cut = f"({placements}) at {sharding.mesh.coordinates} of mesh {sharding.mesh.shape}"
    return f"{form.dtype} {list(form.shape)}, {cut}"


def _read_safetensors(path: Path, rank: int, number: int, metadata: "MetadataItem") -> RankTable:
    """Return the table of a safetensors file, whose tensors are placed by the metadata."""
    file = read_header(path)
    entries = sorted(file.entries, key=lambda entry: natural_order(entry.name))
    storages = {
        entry.name: StorageRecord(file.data_start + entry.begin, entry.end - entry.begin, 0)
        for entry in entries
    }
    tensors = {
        entry.name: partial(_local_tensor, path, entry, metadata.form(entry.name, rank))
        for entry in entries
    }
    return table_of(TorchFile(path, None, storages), tensors, rank=rank, file_number=number)


def _local_tensor(path: Path, entry: HeaderEntry, form: TensorForm | None) -> LocalTensor:
    """Return the stored part of a tensor; a CorruptError if it does not fit the metadata."""
    if problem := size_problem(path, entry):
        raise problem
    found = f"{entry.dtype} {list(entry.shape)}"
    if form is None or form.dtype is not entry.dtype:
        raise _contradiction(entry.name, path, form, found)
    try:
        local = form.shape if form.sharding is None else place(form.shape, form.sharding)[0]
    except PlacementError as error:
        raise CorruptError(f"tensor {entry.name}: {_METADATA}: {error}") from error
    # torch stores an empty part with shape [0].
    if local != entry.shape and not (0 in local and 0 in entry.shape):
        raise _contradiction(entry.name, path, form, found)
    strides = row_major_strides(entry.shape)
    view = StorageView(entry.name, entry.dtype, prod(entry.shape), 0, entry.shape, strides)
    return LocalTensor(form, (view,))


def _check_names(
    location: Location, gathered: Gathering, metadata: "MetadataItem", files: Mapping[int, Path]
) -> None:
    """Raise contradictions to the metadata, or the names that no file has."""
    corrupt = [problem for problem in gathered.problems if isinstance(problem, CorruptError)]
    raise_all(CorruptError, f"{location.weights_dir}: the files are not of one save", corrupt)
    lost = [name for name in metadata.tensors if name not in gathered.names]
    if gathered.problems:
        return  # unreadable tensors are reported later, with all others
    missing = [str(rank) for rank in range(metadata.world_size) if rank not in files]
    if lost and missing:
        raise IncompleteError(
            f"{location.weights_dir}: Missing checkpoint for rank {shortened(missing, 16)} of "
            f"world size {metadata.world_size}",
            expected=f"{counted(len(lost), 'tensor')} that {_METADATA} lists and no file has: "
            f"{shortened(lost)}",
            hint="copy the files here from the nodes that wrote them, or take another checkpoint",
        )
    if lost:
        raise CorruptError(
            f"{location.weights_dir}: in no file: {counted(len(lost), 'tensor')} of {_METADATA}",
            found=f"no {shortened(lost)}",
            hint=_SAME_SAVE,
        )
