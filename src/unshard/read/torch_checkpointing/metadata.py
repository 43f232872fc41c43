"""The `metadata.pkl` of torch_checkpointing: the file of each rank, and the cuts of tensors.

A pickle of builtins. It lists the items that can be resharded; an item's tensors are listed by
their path in its state dict (as JSON), each with the meshes that it is on.

A plain tensor is listed as a replica on an unnamed mesh of all ranks, even if only some have it.
Its copies may differ.

Source: torch_checkpointing 0.1.1, `distributed_metadata`, `dtensor_metadata`, `checkpoint_layout`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import read_metadata_file, unpickled
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.torch_save.meshes import piece_numbers
from unshard.read.torch_save.table import TensorForm
from unshard.read.torch_save.values import (
    TensorFormError,
    ints,
    items_of,
    member,
    named,
    sizes_of,
)
from unshard.tensors.dtypes import BY_NAME, DType
from unshard.tensors.placements import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
)

_VERSION = "2.0"


@dataclass(frozen=True, slots=True, eq=False)
class _Mesh:
    """A device mesh: its ranks in row-major order, each with its coordinates."""

    shape: tuple[int, ...]
    names: tuple[str, ...] | None
    coordinates: Mapping[int, tuple[int, ...]]


@lru_cache(maxsize=4096)
def _seen_by(mesh: _Mesh, rank: int) -> DeviceMesh:
    at = piece_numbers(mesh.shape, tuple(mesh.coordinates), mesh.coordinates[rank])
    return DeviceMesh(mesh.shape, mesh.names, at)


@dataclass(frozen=True, slots=True)
class _PlacedTensor:
    """A tensor on one mesh."""

    dtype: DType
    shape: tuple[int, ...]
    mesh: _Mesh
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class MetadataItem:
    """The metadata of an item.

    Attributes:
        world_size: the number of ranks that wrote it.
        suffix: of its files.
        tensors: by name, on each of their meshes.
    """

    world_size: int
    suffix: str
    tensors: Mapping[str, tuple[_PlacedTensor, ...]]

    def form(self, name: str, rank: int) -> TensorForm | None:
        """Return the form of a tensor as a rank sees it; None if the rank does not have it."""
        for tensor in self.tensors.get(name, ()):
            mesh, placements = tensor.mesh, tensor.placements
            if rank in mesh.coordinates:
                is_plain = mesh.names is None and placements == (Replicate(),)
                sharding = None if is_plain else Sharding(_seen_by(mesh, rank), placements)
                return TensorForm(tensor.dtype, tensor.shape, sharding)
        return None


def read_metadata(path: Path, item: str) -> MetadataItem | None:
    """Return the metadata of an item in a `metadata.pkl`; None if the item has none.

    Raises:
        IncompleteError: the file is empty.
        CorruptError: it is not valid metadata.
        UnsafeError: its pickle would run commands.
        NotMergeableError: it is of another version, or has unsupported parts.
    """
    data = read_metadata_file(path)
    value = unpickled(path, data)
    try:
        return _MetadataReader(path, len(data)).item(value, item)
    except TensorFormError as error:
        raise CorruptError(f"{path}: not valid metadata of torch_checkpointing: {error}") from error


class _MetadataReader:
    """Reads the values of one file.

    A pickle may refer to one value many times. A mesh, which many tensors share, is read once; all
    other values are charged to a budget of one per byte, so that the time is linear in the file.
    """

    def __init__(self, path: Path, budget: int) -> None:
        self._path = path
        self._budget = budget
        self._meshes: dict[int, _Mesh] = {}  # by identity

    def item(self, value: Value, name: str) -> MetadataItem | None:
        """Return an item of the unpickled metadata; None if it was saved without a resharder."""
        fields = self._dict(value)
        version = fields.get("version")
        if version != _VERSION:
            raise self._unread(f"metadata of version {named(version)}", f"version {_VERSION!r}")
        items = self._dict(member(fields, "metadata"))
        if name not in items:
            return None
        item = self._dict(items[name])
        layouts, world = member(item, "rank_to_layout_info"), member(fields, "world_size")
        if not isinstance(layouts, dict) or not layouts or world != len(layouts):
            raise TensorFormError(f"no list of the files of {named(world)} ranks")
        if {int(rank) for rank in layouts if isinstance(rank, int)} != set(range(len(layouts))):
            raise TensorFormError("files that are not listed by rank")
        suffixes = {self._suffix(layout, f"{name}_{rank}") for rank, layout in layouts.items()}
        if len(suffixes) != 1:
            raise TensorFormError(f"files of {len(suffixes)} formats")
        listed = self._dict(member(item, "nested_path_to_metadata"))
        tensors = {_name_of(path): self._tensor(groups) for path, groups in listed.items()}
        if len(tensors) != len(listed):
            raise TensorFormError("two paths that make one name")
        return MetadataItem(len(layouts), suffixes.pop(), tensors)

    def _unread(self, problem: str, expected: str) -> NotMergeableError:
        return NotMergeableError(
            f"{self._path}: {problem}",
            expected=expected,
            hint="load the checkpoint with torch_checkpointing, and save it in that form",
        )

    def _charge(self, amount: int) -> None:
        self._budget -= amount
        if self._budget < 0:
            raise TensorFormError("values that refer to one another too often")

    def _dict(self, value: Value) -> dict[str, Value]:
        items = items_of(value)
        if items is None:
            raise TensorFormError(f"{named(value)} instead of a dict of names")
        self._charge(len(items))
        return items

    def _suffix(self, layout: Value, stem: str) -> str:
        """Return the suffix of a rank's file, which must have the usual name."""
        file = stem + ".pt" if layout is None else member(self._dict(layout), "file_path")
        for suffix in (".pt", ".safetensors"):
            if file == stem + suffix:
                return suffix
        raise self._unread(f"a file called {named(file)}", f"{stem}.pt or {stem}.safetensors")

    def _tensor(self, groups: Value) -> tuple[_PlacedTensor, ...]:
        if not isinstance(groups, list):
            raise TensorFormError(f"{named(groups)} instead of the meshes of a tensor")
        return tuple(self._placed(self._dict(group)) for group in groups)

    def _placed(self, group: dict[str, Value]) -> _PlacedTensor:
        sharding = self._dict(member(group, "sharding_metadata"))
        kind = sharding.get("type")
        if kind != "DTensorShardingMetadata":
            raise self._unread(f"tensors that are cut by {named(kind)}", "DTensors")
        fields = self._dict(member(sharding, "data"))
        name, placements = member(fields, "dtype"), member(fields, "placements")
        dtype = BY_NAME.get(name.removeprefix("torch.")) if isinstance(name, str) else None
        if dtype is None:
            raise TensorFormError(f"an unknown dtype, {named(name)}")
        spec = member(fields, "mesh_spec")
        if id(spec) not in self._meshes:
            self._meshes[id(spec)] = self._mesh(self._dict(spec))
        mesh = self._meshes[id(spec)]
        if not isinstance(placements, list | tuple) or len(placements) != len(mesh.shape):
            raise TensorFormError(f"placements that do not fit a mesh of shape {mesh.shape}")
        shape = sizes_of(member(fields, "global_shape"))
        return _PlacedTensor(dtype, shape, mesh, tuple(map(self._placement, placements)))

    def _mesh(self, fields: dict[str, Value]) -> _Mesh:
        shape, ranks = sizes_of(member(fields, "mesh_shape")), ints(member(fields, "mesh_data"))
        names = fields.get("mesh_dim_names")
        self._charge(len(ranks))
        if len(ranks) != prod(shape) or len(set(ranks)) != len(ranks) or not ranks:
            raise TensorFormError(f"a mesh of shape {shape} with {len(ranks)} ranks")
        if isinstance(names, list | tuple) and len(names) == len(shape):
            names = tuple(name if isinstance(name, str) else named(name) for name in names)
        elif names is not None:
            raise TensorFormError(f"a mesh of shape {shape} with names {named(names)}")
        return _Mesh(shape, names, dict(zip(ranks, product(*map(range, shape)), strict=True)))

    def _placement(self, value: Value) -> Placement:
        match self._dict(value):
            case {"type": "Shard", "dim": int(dim)}:
                return Shard(dim)
            case {"type": "StridedShard", "dim": int(dim), "split_factor": int(factor)}:
                return StridedShard(dim, factor)
            case {"type": "Replicate"}:
                return Replicate()
            case fields:
                raise TensorFormError(f"an unknown placement: {named(fields.get('type'))}")


def _name_of(path: str) -> str:
    """Return the name of a path in the state dict, which is JSON."""
    try:
        keys = json.loads(path)
    except (ValueError, RecursionError) as error:
        raise TensorFormError(f"a path that is not JSON: {path[:80]!r}") from error
    if not isinstance(keys, list) or not keys or not all(type(key) in (str, int) for key in keys):
        raise TensorFormError(f"a path of unknown form: {path[:80]!r}")
    return ".".join(map(str, keys))
