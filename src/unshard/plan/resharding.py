"""Lay out rank files, or DCP directories, for another number of ranks.

A rank's file has its part of every sharded tensor, as DTensors on one mesh, and all other tensors
whole. In DCP every rank has its part of every tensor that is cut, and its share of the others, as
`dcp.save` distributes them; torch reads the result on any number of ranks. Like every layout, these
are made before any weights are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import PurePosixPath
from uuid import NAMESPACE_OID, uuid5

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.dcp_files import DcpFile, lay_out_dcp
from unshard.containers.torch_files.dcp_metadata import (
    ItemPath,
    SavedItem,
    SavedObject,
    SavedPart,
    SavePlan,
    flat_name,
)
from unshard.containers.torch_files.dtensors import DTensors, Version
from unshard.containers.torch_files.writer import SavedTensor, write_pickle
from unshard.containers.torch_files.zip_layout import ZipLayout, lay_out_zip
from unshard.convert.recipes import Take, take
from unshard.errors import NotMergeableError
from unshard.plan.layout import Layout, OutputFile, OutputTensor
from unshard.read.optimizer_state import OptimizerState
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import ByteRange, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    place,
)

TENSOR_PARALLEL = frozenset({"tp", "tensor_parallel"})
"""Names of the mesh dimension of tensor parallelism in torchtitan and NeMo, and in Lightning."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file to write: its path inside the output, the pickled value, the sources of tensors."""

    filename: str
    value: Value
    tensors: "RankTensors"


@dataclass(frozen=True, slots=True, eq=False)
class Resharded:
    """The layout of all files, and their zips in the same order, whose checksums come last."""

    layout: Layout
    zips: tuple[ZipLayout | DcpFile, ...]

    @classmethod
    def of(cls, files: Sequence[tuple[OutputFile, ZipLayout | DcpFile]]) -> "Resharded":
        """Return the layout of these files, each with its zip."""
        outputs = tuple(output for output, _ in files)
        weight_map = {tensor.name: file.filename for file in outputs for tensor in file.tensors}
        layout = Layout(outputs, weight_map, sum(file.data_bytes for file in outputs))
        return cls(layout, tuple(zipped for _, zipped in files))


class RankTensors:
    """Makes the tensors of one rank file, and keeps their sources."""

    def __init__(self, version: Version, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._dtensors = DTensors(version, mesh)
        self._sources: dict[int, tuple[SavedTensor, Take]] = {}

    def make(self, entry: TensorEntry) -> Value:
        """Return the rank's part of a tensor, as it is pickled.

        Raises:
            NotMergeableError: a mesh for FSDP alone cannot express the cut.
        """
        placements = _placements(entry, len(self._mesh.shape))
        box = Box.whole(entry.shape)
        if placements is not None:
            _, pieces = place(entry.shape, Sharding(self._mesh, placements))
            box = pieces[0].box
        local = SavedTensor(entry.dtype, box.sizes, None)
        self._sources[id(local)] = local, Take(entry, box)
        if placements is None:
            return local
        return self._dtensors.make(local, entry.shape, placements)

    def source_of(self, tensor: SavedTensor) -> Take | None:
        """Return the source of a tensor of the file; None if this did not make the tensor."""
        _, source = self._sources.get(id(tensor), (None, None))
        return source


def meshes_of(
    shape: tuple[int, ...], names: tuple[str, ...] | None, device_type: str
) -> Sequence[DeviceMesh]:
    """Return a mesh as each of its ranks sees it, in the order of the ranks."""
    coordinates = product(*map(range, shape))  # the last dimension runs fastest
    return [DeviceMesh(shape, names, at, device_type) for at in coordinates]


def _placements(entry: TensorEntry, dimensions: int) -> tuple[Placement, ...] | None:
    """Return the placements on a mesh whose last dimension shards; None for a plain tensor.

    The tensor is cut along the dimension that FSDP cut, or along its first dimension, as by
    `fully_shard`, if only tensor parallelism cut it.
    """
    if entry.sharding is None:
        return None
    names = entry.sharding.mesh.dim_names or ("",) * len(entry.sharding.placements)
    of_fsdp = [
        placement
        for name, placement in zip(names, entry.sharding.placements, strict=True)
        if name not in TENSOR_PARALLEL
    ]
    cut = {placement.dim for placement in of_fsdp if isinstance(placement, Shard | StridedShard)}
    if not of_fsdp and entry.shape:
        cut = {0}
    if len(cut) > 1:
        dims = ", ".join(map(str, sorted(cut)))
        raise NotMergeableError(
            f"tensor {entry.fqn}: is cut along several dimensions ({dims}) by the mesh "
            f"({', '.join(names)})",
            expected="one dimension cut by FSDP; other dimensions may be cut only by a mesh "
            f"dimension named {' or '.join(sorted(TENSOR_PARALLEL))}",
            hint="merge the checkpoint instead; other parallelism is not resharded",
        )
    last: Placement = Shard(cut.pop()) if cut else Replicate()
    return (*[Replicate()] * (dimensions - 1), last)


def lay_out_ranks(files: Sequence[RankFile], version: Version) -> Resharded:
    """Lay out rank files."""
    return Resharded.of([_lay_out(file, version) for file in files])


def _lay_out(file: RankFile, version: Version) -> tuple[OutputFile, ZipLayout]:
    pickle, tensors = write_pickle(file.value)
    root = file.filename.rsplit("/", 1)[-1].removesuffix(".pt")
    zipped = lay_out_zip(root, pickle, [tensor.nbytes for tensor in tensors], version)
    pieces = dict(zipped.fixed())
    placed: list[tuple[int, int, SavedTensor, Take]] = []
    for (start, size), tensor in zip(zipped.storages, tensors, strict=True):
        take = file.tensors.source_of(tensor)
        if take is not None:
            placed.append((start, start + size, tensor, take))
        elif isinstance(tensor.source, ByteRange):
            placed.append((start, start + size, tensor, _take_of(tensor, tensor.source)))
        elif isinstance(tensor.source, bytes):
            pieces[start] = tensor.source
    placed.sort(key=lambda item: item[:2])
    first = min((start for start, end, *_ in placed if end > start), default=zipped.size)
    ordered = sorted(pieces.items())
    header = b"".join(piece for at, piece in ordered if at < first)
    outputs = [
        OutputTensor(
            take.entry.fqn,
            tensor.dtype,
            tensor.shape,
            take,
            (max(start, first) - first, max(end, first) - first),
        )
        for start, end, tensor, take in placed
    ]
    rest = tuple((at, piece) for at, piece in ordered if at >= first)
    return OutputFile(file.filename, header, tuple(outputs), rest), zipped


def _take_of(tensor: SavedTensor, source: ByteRange) -> Take:
    """Return the source of a tensor among plain values, whose elements are in a file, row-major."""
    draft = TensorDraft(f"{source.path.name}: byte {source.offset}", tensor.dtype, tensor.shape)
    draft.add(rank=0, file=0, start=source.offset)
    return take(draft.entry((source.path,)))


def optimizer_value(
    tensors: RankTensors, state: OptimizerState, keys: Mapping[str, int | str], *, is_flat: bool
) -> Value:
    """Return the state dict of an optimizer, as `torch.optim` has it.

    Args:
        tensors: makes the tensors of the rank.
        state: the state of the optimizer.
        keys: the key of each parameter in the state dict, a number or its name, in order.
        is_flat: whether the dict is flattened: `state.NAME.KEY` and `param_groups.NAME.KEY`.
    """
    entries = state.tensors
    by_key: dict[int | str, dict[str, Value]] = {}
    for name, own in keys.items():
        by_key[own] = {key: tensors.make(entry) for key, entry in entries.get(name, {}).items()}
        by_key[own] |= state.values.get(name, {})
    if not is_flat:
        groups = [
            {**group.values, "params": [keys[name] for name in group.params]}
            for group in state.groups
        ]
        return {"state": {key: own for key, own in by_key.items() if own}, "param_groups": groups}
    flat: dict[Value, Value] = {}
    for own, fields in by_key.items():
        flat |= {f"state.{own}.{key}": value for key, value in fields.items()}
    for group in state.groups:
        for name in group.params:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.values.items()}
    return flat


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntry:
    """A tensor to save.

    Attributes:
        path: its keys in the saved dict.
        entry: the source of its elements.
        dtype: the dtype to write.
        dim: the dimension that is cut; None if one rank saves the whole tensor.
    """

    path: ItemPath
    entry: TensorEntry
    dtype: DType
    dim: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DcpDirectory:
    """The output of one call of `dcp.save`.

    Attributes:
        name: the directory inside the output; "" for the output itself.
        items: tensors and objects, in the order of the saved dict.
    """

    name: str
    items: Sequence[SavedEntry | SavedObject]

    def path_of(self, filename: str) -> str:
        """Return the path of a file of this directory inside the output."""
        return f"{self.name}/{filename}" if self.name else filename


def lay_out_directories(
    directories: Sequence[DcpDirectory], world: int, version: Version, target: PurePosixPath
) -> tuple[Resharded, dict[str, bytes]]:
    """Lay out DCP directories; return their files and the contents of each `.metadata`, by path.

    Args:
        directories: the directories to write.
        world: the number of ranks; a rank that saves nothing gets no file.
        version: the version of torch that is to read it.
        target: the directory of the output, which torch records in the metadata.
    """
    files: list[tuple[OutputFile, DcpFile]] = []
    metadata: dict[str, bytes] = {}
    for directory in directories:
        ranks, sources = _distribute(directory.items, world)
        names = "\n".join(flat_name(item.path) for item in directory.items)
        layout = lay_out_dcp(
            SavePlan([item.path for item in directory.items], ranks),
            version,
            checkpoint_id=target / directory.name,
            save_id=str(uuid5(NAMESPACE_OID, names)),
        )
        for file, takes in zip(layout.files, sources, strict=True):
            if file.places:
                files.append((_output_file(directory.path_of(file.name), file, takes), file))
        metadata[directory.path_of(".metadata")] = layout.metadata
    return Resharded.of(files), metadata


_TypedTake = tuple[Take, DType]


def _distribute(
    items: Sequence[SavedEntry | SavedObject], world: int
) -> tuple[list[list[SavedItem]], list[list[_TypedTake]]]:
    """Return the items of each rank, and the sources of its tensors."""
    ranks: list[list[SavedItem]] = [[] for _ in range(world)]
    takes: list[list[_TypedTake]] = [[] for _ in range(world)]
    loads = [0] * world  # bytes
    for item in items:
        if isinstance(item, SavedObject):
            ranks[0].append(item)
            continue
        for rank, box in _boxes(item, world):
            least = loads.index(min(loads)) if rank is None else rank
            entry = item.entry
            ranks[least].append(
                SavedPart(item.path, item.dtype, entry.shape, box.offsets, box.sizes)
            )
            takes[least].append((Take(entry, box), item.dtype))
            loads[least] += box.volume * item.dtype.itemsize
    return ranks, takes


def _boxes(item: SavedEntry, world: int) -> Iterator[tuple[int | None, Box]]:
    """Yield the rank and box of each part; the rank is None if any rank may save it."""
    shape = item.entry.shape
    if item.dim is None or 0 in shape:
        yield None, Box.whole(shape)
        return
    for rank, mesh in enumerate(meshes_of((world,), ("fsdp",), "")):
        _, (piece,) = place(shape, Sharding(mesh, (Shard(item.dim),)))
        if piece.box.volume:
            yield rank, piece.box


def _output_file(filename: str, file: DcpFile, takes: Sequence[_TypedTake]) -> OutputFile:
    """Return a file with only its tensors; `write.sealing` adds the bytes around them.

    Those bytes would take 1.5 KB of memory per item here. The last byte alone fixes the size.
    """
    placed = sorted(
        (
            (start, start + size, take, dtype)
            for (start, size), (take, dtype) in zip(file.storages, takes, strict=True)
        ),
        key=lambda item: item[:2],
    )
    tensors = tuple(
        OutputTensor(take.entry.fqn, dtype, take.box.sizes, take, (start, end))
        for start, end, take, dtype in placed
    )
    return OutputFile(filename, b"", tensors, ((file.size - 1, b"\0"),))
