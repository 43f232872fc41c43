"""The optimizer's state in torch.distributed.checkpoint (DCP), next to the model or in its own.

| where | who |
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
from unshard.noted import Noted
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

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
_FOLDERS = ("optimizer", "optim")
_MODEL_FOLDER, _OPTIMIZER_FOLDER = "pytorch_model_fsdp_", "optimizer_"
_LARGEST = 1 << 24
"""Bytes of an object: the names of all parameters are one."""

_Path = tuple[str, ...]


@dataclass(slots=True)
class _Found:
    """Which flat names of a checkpoint are the state of an optimizer, and of what.

    Attributes:
        tensors: parameter and key; `objects`: the same of what is not a tensor.
        groups: number of the group and key; of flattened ones, parameter and key.
        inner: what torch made of lists and dicts in the state, which is not read.
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
        found = _find(metadata, str(place.weights_dir))
        if found is not None:
            return _read(metadata, found, place)
    return None


def places_beside(location: Location) -> list[Location]:
    """Return the directories next to a model's in which its optimizer is."""
    name, places = location.weights_dir.name, list[Location]()
    own = _OPTIMIZER_FOLDER + name.removeprefix(_MODEL_FOLDER)
    names = (own,) if name.startswith(_MODEL_FOLDER) else _FOLDERS
    beside = [[root.with_name(other) for root in location.roots] for other in names]
    nemo_rl = [root.parent for root in location.roots if root.parent.name == "weights"]
    beside.append([weights.with_name("optimizer") / "optim" for weights in nemo_rl])
    for paths in beside:
        roots = [path for path in paths if path.is_dir()]
        if any((root / ".metadata").exists() for root in roots):
            places.append(replace(location, weights_dir=roots[0], also=tuple(roots[1:]), file=None))
    return places


def dcp_root(location: Location) -> Path:
    """Return the directory that has all directories of a DCP checkpoint."""
    root = location.weights_dir
    is_inner = root.name.startswith(_MODEL_FOLDER) or places_beside(location)
    return root.parent if is_inner else root


def _find(metadata: DcpMetadata, where: str) -> _Found | None:
    by_prefix: dict[_Path, _Found] = {}
    for name in (*metadata.tensors, *metadata.objects):
        path = metadata.paths.get(name, (name,))
        sorted_in = _sort(path)
        if sorted_in is None:
            continue
        prefix, is_group, owner, key, is_flat = sorted_in
        found = by_prefix.setdefault(prefix, _Found())
        found.is_flat |= is_flat
        if is_group:
            found.groups[name] = owner, key
        elif len(key) > 1:
            found.inner.append(name)
        else:
            kind = found.tensors if name in metadata.tensors else found.objects
            kind[name] = owner, key[0]
    # Of an optimizer that has no state yet, or needs none, there are the groups alone.
    by_prefix = {at: found for at, found in by_prefix.items() if found.groups}
    if len(by_prefix) > 1:
        raise NotMergeableError(
            f"{where}: has the state of {len(by_prefix)} optimizers",
            expected="one",
            found=", ".join(".".join(at) for at in by_prefix),
            hint="save one of them",
        )
    return next(iter(by_prefix.values()), None)


def _sort(path: _Path) -> tuple[_Path, bool, str, _Path, bool] | None:
    """Return prefix, whether it is of a group, owner, key, whether it is flattened; or None."""
    if _GROUPS in path[:-2]:
        at = path.index(_GROUPS)
        return path[:at], True, path[at + 1], path[at + 2 :], False
    if len(path) > 2 and path[-3] == _STATE:
        return path[:-3], False, path[-2], path[-1:], False
    if _STATE in path[:-3]:
        at = path.index(_STATE)
        return path[:at], False, path[at + 1], path[at + 2 :], False
    for at, part in enumerate(path):
        kind, _, rest = part.partition(".")
        owner, _, key = rest.rpartition(".")
        if owner and (kind == _STATE or (kind == _GROUPS and at == len(path) - 1)):
            return path[:at], kind == _GROUPS, owner, (key, *path[at + 1 :]), True
    return None


def _read(metadata: DcpMetadata, found: _Found, place: Location) -> SavedState:
    owners = [owner for owner, _ in (*found.tensors.values(), *found.objects.values())]
    numbers = all(map(str.isdecimal, owners))

    def key_of(owner: str) -> Key:
        return int(owner) if numbers else owner

    names = {flat: flat_name(*of) for flat, of in found.tensors.items()}
    tensors, archives = read_tensors(metadata, names, place.roots)
    keys: dict[Key, list[str]] = {}
    for owner, key in found.tensors.values():
        keys.setdefault(key_of(owner), []).append(key)
    for parameter, kinds in keys.items():
        refuse_quantised(f"{place.weights_dir}: parameter {parameter}", kinds)
    values: dict[Key, dict[str, Plain]] = {}
    left_out = [f"{name}: inside a list or dict" for name in found.inner]
    for name, (owner, key) in found.objects.items():
        read = read_value(metadata, place, name)
        values.setdefault(key_of(owner), {})[key] = read.value
        left_out += read.notes
    groups = _groups(metadata, found, place)
    notes = left_out_note(place.weights_dir.name, (*left_out, *groups.notes))
    catalog = Catalog("", 1, tensors, archives=archives)
    where, is_flat = str(place.weights_dir), found.is_flat
    return SavedState(where, catalog, keys, groups.value, values, notes, flattened=is_flat)


def _groups(metadata: DcpMetadata, found: _Found, place: Location) -> Noted[list[Group]]:
    """Return the parameter groups, of which every value is an object or a tensor of its own."""
    values: dict[str, dict[str, Plain]] = {}
    listed: dict[str, list[Key]] = {}
    left_out: list[str] = []
    tensors, _ = read_tensors(
        metadata, {name: name for name in found.groups if name in metadata.tensors}, place.roots
    )
    numbers = numbers_of(tensors)
    for name, (owner, key) in found.groups.items():
        if name in numbers:
            value: Plain = numbers[name]
        elif name in tensors:
            value = None
            left_out.append(f"{name}: a tensor that has dimensions or is compressed")
        else:
            read = read_value(metadata, place, name)
            value = read.value
            left_out += read.notes
        fields, params = values.setdefault(owner, {}), listed.setdefault(owner, [])
        if key[0] == _PARAMS and not found.is_flat:
            inner = value if isinstance(value, list) else [value]
            params += [one for one in inner if isinstance(one, int | str)]
        elif len(key) == 1:
            fields[key[0]] = value
        else:  # a list or tuple that was flattened
            whole = fields.setdefault(key[0], [])
            if isinstance(whole, list):
                whole.append(value)
    if found.is_flat:
        groups: list[Group] = [([owner], fields) for owner, fields in values.items()]
        return Noted(groups, tuple(left_out))
    order = sorted(values, key=lambda owner: (len(owner), owner))
    return Noted([(listed[owner], values[owner]) for owner in order], tuple(left_out))


def read_value(metadata: DcpMetadata, place: Location, name: str) -> Noted[Plain]:
    """Return a pickled object as a plain value; None if it has none, and what was left out of it.

    Raises:
        IncompleteError: its file is missing or too short.
    """
    path, item = place_of(metadata, place, name)
    if item.compressed:
        archive = _decompressed(path, inflated_object(path, item, name))
    else:
        archive = read_torch_file(path, offset=item.offset, length=item.length)
    read = plain_values(archive._replace(value={name: archive.value}))
    return Noted(read.value.get(name) if isinstance(read.value, dict) else None, read.notes)


def place_of(metadata: DcpMetadata, place: Location, name: str) -> tuple[Path, Item]:
    """Return where a pickled object is.

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
    """Return what a compressed object is, of so many bytes at most."""
    out = BytesIO()
    with opened(path) as file:
        decompress(f"{path}: {name}", file, (item.offset, item.length), out, most)
    return out.getvalue()


def _decompressed(path: Path, data: bytes) -> TorchFile:
    """Return what a compressed object has; of tensors inside it nothing can be read."""

    def pread(count: int, at: int) -> bytes:
        return data[at : at + count]

    zipped = read_torch_zip(path, offset=0, length=len(data), pread=pread)
    return TorchFile(path, unpickled(path, zipped.pickle), {})
