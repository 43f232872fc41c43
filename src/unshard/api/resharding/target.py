"""The target of a reshard: the format, a mesh of ranks, and a version of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unshard.console import counted
from unshard.containers.torch_files.dtensors import VERSIONS, Version
from unshard.errors import NotMergeableError, UsageError
from unshard.plan.resharding import TENSOR_PARALLEL, meshes_of
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint
from unshard.tensors.placements import DeviceMesh

PLAIN_MESH = DeviceMesh((1,), ("fsdp",), (0,), "cuda")
"""The mesh of tensors without a recorded mesh."""

_MOST_RANKS = 99_999


@dataclass(frozen=True, slots=True)
class ReshardTarget:
    """The format to write, the mesh as each rank sees it, and the version of torch."""

    format: ReshardFormat
    meshes: Sequence[DeviceMesh]
    torch: str

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.meshes)

    @property
    def version(self) -> Version:
        """The version of torch for the writers."""
        return VERSIONS[self.torch]

    @classmethod
    def of(  # noqa: PLR0917 (one argument per option)
        cls,
        source: Checkpoint,
        kind: ReshardFormat,
        world_size: int,
        mesh: Sequence[int] | None,
        mesh_names: Sequence[str] | None,
        device: str | None,
        torch: str,
    ) -> "ReshardTarget":
        """Return the target of these options.

        Raises:
            UsageError: they do not fit.
        """
        if torch not in VERSIONS:
            raise UsageError(f"--torch {torch}: unknown", expected=", ".join(VERSIONS))
        shape = (world_size,) if mesh is None else tuple(mesh)
        number: object = world_size  # callers may not check types
        if not isinstance(number, int) or not 1 <= number <= _MOST_RANKS:
            limits = f"from 1 to {_MOST_RANKS}"
            raise UsageError(f"--world-size {world_size}: is not possible", expected=limits)
        sizes = "x".join(map(str, shape))
        if min(shape, default=0) < 1 or prod(shape) != world_size:
            raise UsageError(
                f"--mesh {sizes} has {prod(shape)} ranks, not --world-size {world_size}"
            )
        own = _mesh_of(source)
        of_fsdp = [name for name in own.dim_names or () if name not in TENSOR_PARALLEL]
        names = tuple(mesh_names or of_fsdp[-len(shape) :] or ("fsdp",))
        if mesh_names is None and len(names) != len(shape):
            raise UsageError(
                f"--mesh {sizes}: has {len(shape)} dimensions, and the mesh of the checkpoint has "
                f"{len(names)} ({', '.join(names)})",
                hint="name them: --mesh-names ddp,fsdp",
            )
        _check_names(names, shape)
        if device is not None and not device.isidentifier():
            raise UsageError(f"--device {device!r}: is not a type of device", expected="cuda, cpu")
        # torch compares names, and the default mesh of `fully_shard` has none.
        written = None if mesh_names is None and own.dim_names is None else names
        return cls(kind, meshes_of(shape, written, device or own.device_type or "cuda"), torch)


def _check_names(names: Sequence[str], shape: Sequence[int]) -> None:
    if not TENSOR_PARALLEL.isdisjoint(names):
        raise UsageError(
            f"--mesh-names {','.join(names)}: tensor parallelism is not written",
            expected="dimensions of FSDP, of which the last shards",
            hint="write for FSDP alone: leave the dimension out of --mesh and --mesh-names",
        )
    if not all(names) or len(set(names)) < len(names):
        what = f"--mesh-names {','.join(names)}: every dimension needs a name of its own"
        raise UsageError(what, expected="names such as ddp,fsdp")
    if len(names) != len(shape):
        count, dimensions = counted(len(names), "name"), counted(len(shape), "dimension")
        what = f"--mesh-names {','.join(names)}: {count} for {dimensions}"
        raise UsageError(what, hint="give one name per dimension of --mesh: --mesh-names A,B")


def _mesh_of(source: Checkpoint) -> DeviceMesh:
    """Return the mesh of a checkpoint's tensors, and of several a mesh with the most dimensions."""
    entries = source.catalog.tensors.values()
    meshes = [entry.sharding.mesh for entry in entries if entry.sharding]
    return max(meshes, key=lambda mesh: len(mesh.shape), default=PLAIN_MESH)


def wanted_format(source: Checkpoint, to: str | None) -> ReshardFormat:
    """Return the format `--to`, by default that of the source.

    Raises:
        UsageError: `to` is unknown.
        NotMergeableError: the source's own format cannot be written; or trainers that load the
            format do not load the source's names.
    """
    location, by_name = source.location, {known.value: known for known in ReshardFormat}
    kind = format_of(source) if to is None else by_name.get(to)
    if to is not None and kind is None:
        raise UsageError(f"--to {to}: unknown", expected=", ".join(by_name))
    if kind is None:
        raise NotMergeableError(
            f"{location.file or location.weights_dir}: unshard reads its format "
            f"({source.catalog.format}) but does not write it",
            expected="rank files, such as model_world_size_4_rank_0.pt, or a DCP checkpoint",
            hint=f"name the format to write: --to {'|'.join(by_name)}",
        )
    if kind not in location.format.reshards_to:
        raise NotMergeableError(
            f"{location.weights_dir}: has the names of {location.format}, which trainers of "
            f"--to {kind.value} do not load",
            hint="merge it first, and reshard the merged model",
        )
    return kind


def format_of(source: Checkpoint) -> ReshardFormat | None:
    """Return the format of a checkpoint; None if a reshard does not write it."""
    return source.location.format.reshard_format(source.location, source.catalog)


def keeps_keys(source: Checkpoint, to: ReshardFormat) -> bool:
    """Return whether rank files stay in their format, so that parameters keep their keys."""
    return to is format_of(source) and not to.is_dcp
