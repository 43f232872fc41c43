"""The optimizer's state in torch.distributed.checkpoint (DCP), next to the model or in its own.

| where | trainers |
|---|---|
| in the model's directory | torchtitan, VeOmni, OLMo-core, Lightning, Composer, prime-rl |
| `optimizer_I/` next to `pytorch_model_fsdp_I/` | accelerate and the HF Trainer |
| `optimizer/` or `optim/` next to the model's directory | LLaMA-Factory, NeMo AutoModel |
| `optimizer/optim/` next to `weights/model/` | NeMo-RL |

Tensors are at `(…, "state", NAME, "exp_avg")`, or flattened at `(…, "state.NAME.exp_avg")`. Groups
are pickled objects at `(…, "param_groups", I, "lr")`, or `(…, "param_groups.NAME.lr")`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path

from unshard.containers.open_files import opened
from unshard.containers.torch_files.reader import TorchFile, read_torch_file, unpickled
from unshard.containers.torch_files.writer import Plain
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.containers.zstd import decompress
from unshard.errors import IncompleteError, NotMergeableError
from unshard.read.dcp.item_table import Item
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.read.dcp.tensors import metadata_files, read_tensors
from unshard.read.format import Location, find_file
from unshard.read.optimizer_state import (
    Group,
    Key,
    SavedState,
    flat_name,
    left_out_note,
    numbers_of,
    refuse_quantised,
)
from unshard.read.training_state.plain_values import plain_values
from unshard.tensors.catalog import Catalog
from unshard.with_notes import WithNotes

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_FOLDERS = ("optimizer", "optim")
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_", "optimizer_"
_LARGEST = 1 << 24
"""Bytes of an object: the names of all parameters are one object."""

_Path = tuple[str, ...]


@dataclass(slots=True)
class _StateNames:
    """The flat names of an optimizer's state in a checkpoint.

    Attributes:
        tensors: name -> parameter and key; `objects`: the same of values that are not tensors.
        groups: name -> number of the group and key; of flattened groups, parameter and key.
        inner: names inside lists and dicts of the state, which are left out.
    """

    tensors: dict[str, tuple[str, str]] = field(default_factory=dict)
    objects: dict[str, tuple[str, str]] = field(default_factory=dict)
    groups: dict[str, tuple[str, _Path]] = field(default_factory=dict)
    inner: list[str] = field(default_factory=list)
    is_flat: bool = False


def read_optimizer(places: Iterable[Location]) -> SavedState | None:
    """Return the optimizer's state in the first directory that has one; None without any.

    Raises:
        CheckpointError: it cannot be read, or there are several.
    """
    for place in places:
        metadata = read_metadata(metadata_files(place))
        names = _find(metadata, str(place.weights_dir))
        if names is not None:
            return _read(metadata, names, place)
    return None


def places_beside(location: Location) -> list[Location]:
    """Return the directories of the optimizer next to the directory of a model."""
    name, places = location.weights_dir.name, list[Location]()
    own = _OPTIMIZER_FOLDER + name.removeprefix(_MODEL_FOLDER)
    names = (own,) if name.startswith(_MODEL_FOLDER) else _FOLDERS
    folders = [[root.with_name(other) for root in location.roots] for other in names]
    nemo_rl = [root.parent for root in location.roots if root.parent.name == "weights"]
    folders.append([weights.with_name("optimizer") / "optim" for weights in nemo_rl])
    for paths in folders:
        roots = [path for path in paths if path.is_dir()]
        if any((root / ".metadata").exists() for root in roots):
            places.append(replace(location, weights_dir=roots[0], also=tuple(roots[1:]), file=None))
    return places


def dcp_root(location: Location) -> Path:
    """Return the directory that contains all directories of a DCP checkpoint."""
    root = location.weights_dir
    is_inner = root.name.startswith(_MODEL_FOLDER) or places_beside(location)
    return root.parent if is_inner else root


def _find(metadata: DcpMetadata, where: str) -> _StateNames | None:
    by_prefix: dict[_Path, _StateNames] = {}
    for name in (*metadata.tensors, *metadata.objects):
        parts = _parts_of(metadata.paths.get(name, (name,)))
        if parts is None:
            continue
        prefix, kind, owner, key, is_flat = parts
        names = by_prefix.setdefault(prefix, _StateNames())
        names.is_flat |= is_flat
        if kind == _GROUPS:
            names.groups[name] = owner, key
        elif len(key) > 1:
            names.inner.append(name)
        else:
            stored = names.tensors if name in metadata.tensors else names.objects
            stored[name] = owner, key[0]
    # An optimizer that has no state yet, or needs none, has groups alone.
    by_prefix = {prefix: names for prefix, names in by_prefix.items() if names.groups}
    if len(by_prefix) > 1:
        raise NotMergeableError(
            f"{where}: has the state of {len(by_prefix)} optimizers",
            expected="one",
            found=", ".join(".".join(prefix) for prefix in by_prefix),
            hint="save one of them",
        )
    return next(iter(by_prefix.values()), None)


def _parts_of(path: _Path) -> tuple[_Path, str, str, _Path, bool] | None:
    """Return prefix, "state" or "param_groups", owner, key, and whether it is flattened; or None.

    The owner is a parameter, or the number of a group.
    """
    if _GROUPS in path[:-2]:
        at = path.index(_GROUPS)
        return path[:at], _GROUPS, path[at + 1], path[at + 2 :], False
    if len(path) > 2 and path[-3] == _STATE:
        return path[:-3], _STATE, path[-2], path[-1:], False
    if _STATE in path[:-3]:
        at = path.index(_STATE)
        return path[:at], _STATE, path[at + 1], path[at + 2 :], False
    for at, part in enumerate(path):
        kind, _, rest = part.partition(".")
        owner, _, key = rest.rpartition(".")
        if owner and (kind == _STATE or (kind == _GROUPS and at == len(path) - 1)):
            return path[:at], kind, owner, (key, *path[at + 1 :]), True
    return None


def _read(metadata: DcpMetadata, names: _StateNames, place: Location) -> SavedState:
    owners = [owner for owner, _ in (*names.tensors.values(), *names.objects.values())]
    are_numbers = all(map(str.isdecimal, owners))

    def key_of(owner: str) -> Key:
        return int(owner) if are_numbers else owner

    flat_names = {name: flat_name(*parts) for name, parts in names.tensors.items()}
    tensors, archives = read_tensors(metadata, flat_names, place.roots)
    kinds: dict[Key, list[str]] = {}
    for owner, kind in names.tensors.values():
        kinds.setdefault(key_of(owner), []).append(kind)
    for parameter, own in kinds.items():
        refuse_quantised(f"{place.weights_dir}: parameter {parameter}", own)
    values: dict[Key, dict[str, Plain]] = {}
    left_out = [f"{name}: inside a list or dict" for name in names.inner]
    for name, (owner, key) in names.objects.items():
        value, notes = read_value(metadata, place, name)
        values.setdefault(key_of(owner), {})[key] = value
        left_out += notes
    groups, notes = _groups(metadata, names, place)
    return SavedState(
        str(place.weights_dir),
        Catalog("", 1, tensors, archives=archives),
        kinds,
        groups,
        values,
        left_out_note(place.weights_dir.name, (*left_out, *notes)),
        flattened=names.is_flat,
    )


def _groups(metadata: DcpMetadata, names: _StateNames, place: Location) -> WithNotes[list[Group]]:
    """Return the parameter groups, whose values are each an object or a tensor."""
    values: dict[str, dict[str, Plain]] = {}
    params: dict[str, list[Key]] = {}
    left_out: list[str] = []
    in_tensors = {name: name for name in names.groups if name in metadata.tensors}
    tensors, _ = read_tensors(metadata, in_tensors, place.roots)
    numbers = numbers_of(tensors)
    for name, (owner, key) in names.groups.items():
        value: Plain = numbers.get(name)
        if name in tensors and name not in numbers:
            left_out.append(f"{name}: a tensor that has dimensions or is compressed")
        elif name not in tensors:
            value, notes = read_value(metadata, place, name)
            left_out += notes
        fields, listed = values.setdefault(owner, {}), params.setdefault(owner, [])
        if key[0] == _PARAMS and not names.is_flat:
            inner = value if isinstance(value, list) else [value]
            listed += [param for param in inner if isinstance(param, int | str)]
        elif len(key) == 1:
            fields[key[0]] = value
        else:  # a list or tuple that was flattened
            whole = fields.setdefault(key[0], [])
            if isinstance(whole, list):
                whole.append(value)
    if names.is_flat:
        groups: list[Group] = [([owner], fields) for owner, fields in values.items()]
        return WithNotes(groups, tuple(left_out))
    order = sorted(values, key=lambda owner: (len(owner), owner))
    return WithNotes([(params[owner], values[owner]) for owner in order], tuple(left_out))


def read_value(metadata: DcpMetadata, place: Location, name: str) -> WithNotes[Plain]:
    """Return a pickled object as a plain value, with notes of the parts that have no plain form.

    Raises:
        IncompleteError: its file is missing or too short.
    """
    path, item = place_of(metadata, place, name)
    if item.compressed:
        data = inflated_object(path, item, name)
        zipped = read_torch_zip(
            path, offset=0, length=len(data), pread=lambda count, at: data[at : at + count]
        )
        # Tensors inside a compressed object cannot be read: it has no storages in the file.
        archive = TorchFile(path, unpickled(path, zipped.pickle), {})
    else:
        archive = read_torch_file(path, offset=item.offset, length=item.length)
    value, notes = plain_values(archive._replace(value={name: archive.value}))
    return WithNotes(value.get(name) if isinstance(value, dict) else None, notes)


def place_of(metadata: DcpMetadata, place: Location, name: str) -> tuple[Path, Item]:
    """Return the file of a pickled object, and its place there.

    Raises:
        IncompleteError: its file is missing or too short.
    """
    item = metadata.items.get(name)
    path = None if item is None else find_file(place.roots, item.path)
    if item is None or path is None or item.offset + item.length > path.stat().st_size:
        raise IncompleteError(
            f"{place.weights_dir}: the file that contains {name} is missing or truncated",
            hint="copy it here from the node that wrote it, or name that node's directory: "
            "⟦+--also DIR⟧",
        )
    return path, item


def inflated_object(path: Path, item: Item, name: str, most: int = _LARGEST) -> bytes:
    """Return the decompressed bytes of an object, `most` at most."""
    out = BytesIO()
    with opened(path) as file:
        decompress(f"{path}: {name}", file, (item.offset, item.length), out, most)
    return out.getvalue()
