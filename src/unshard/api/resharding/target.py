"""What is written for: a mesh of ranks, and a version of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unshard.containers.torch_files.dtensors import VERSIONS, Version
from unshard.errors import UsageError
from unshard.plan.resharding import TENSOR_PARALLEL, meshes_of
from unshard.read.open import Checkpoint
from unshard.showing import counted
from unshard.tensors.placements import DeviceMesh

PLAIN_MESH = DeviceMesh((1,), ("fsdp",), (0,), "cuda")
"""The mesh of tensors that state none."""

_MOST_RANKS = 99_999


@dataclass(frozen=True, slots=True)
class Target:
    """What to write for: the mesh as each rank sees it, and the version of torch."""

    meshes: Sequence[DeviceMesh]
    torch: str

    @property
    def version(self) -> Version:
        """The version of torch, as the writers have it."""
        return VERSIONS[self.torch]

    @classmethod
    def of(  # noqa: PLR0917 (what the options say)
        cls,
        source: Checkpoint,
        world_size: int,
        mesh: Sequence[int] | None,
        mesh_names: Sequence[str] | None,
        device: str | None,
        torch: str,
    ) -> "Target":
        """Return the target that the options mean.

        Raises:
            UsageError: they do not fit.
        """
        if torch not in VERSIONS:
            raise UsageError(f"--torch {torch}: unknown", expected=", ".join(VERSIONS))
        shape = (world_size,) if mesh is None else tuple(mesh)
        if not 1 <= world_size <= _MOST_RANKS:
            limits = f"from 1 to {_MOST_RANKS}"
            raise UsageError(f"--world-size {world_size}: is not possible", expected=limits)
        if min(shape, default=0) < 1 or prod(shape) != world_size:
            sizes = "x".join(map(str, shape))
            what = f"--mesh {sizes} has {prod(shape)} ranks, not {world_size} as --world-size says"
            raise UsageError(what)
        known = _mesh_of(source)
        of_fsdp = [name for name in known.dim_names or () if name not in TENSOR_PARALLEL]
        names = tuple(mesh_names or of_fsdp[-len(shape) :] or ("fsdp",))
        if mesh_names is None and len(names) != len(shape):
            raise UsageError(
                f"--mesh {'x'.join(map(str, shape))}: has {len(shape)} dimensions, and the mesh of "
                f"the checkpoint names {len(names)} ({', '.join(names)})",
                hint="name them: --mesh-names ddp,fsdp",
            )
        _check_names(names, shape)
        if device is not None and not device.isidentifier():
            raise UsageError(f"--device {device!r}: is not a type of device", expected="cuda, cpu")
        # torch compares them, and the mesh that `fully_shard` makes by itself has none.
        own = None if mesh_names is None and known.dim_names is None else names
        return cls(meshes_of(shape, own, device or known.device_type or "cuda"), torch)


def _check_names(names: Sequence[str], shape: Sequence[int]) -> None:
    """Raise if the names of a mesh's dimensions do not fit it, or are not of FSDP."""
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
        given, wanted = counted(len(names), "name"), counted(len(shape), "dimension")
        what = f"--mesh-names {','.join(names)}: {given} for {wanted}"
        raise UsageError(what, hint="give one name per dimension of --mesh: --mesh-names A,B")


def _mesh_of(source: Checkpoint) -> DeviceMesh:
    """Return the mesh of a checkpoint's tensors; one of most dimensions, if there are several."""
    found = [one.sharding.mesh for one in source.catalog.tensors.values() if one.sharding]
    if not found:  # each rank has all of the model, as without FSDP
        return PLAIN_MESH
    return max(found, key=lambda mesh: len(mesh.shape))
