"""Lay out rank files for another number of ranks: pickles, zips, and the sources of tensors.

A rank's file has its part of every sharded tensor, as DTensors on one mesh, and all other tensors
whole. Like every layout, this one is made before any weights are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.dcp_files import DcpFile
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
