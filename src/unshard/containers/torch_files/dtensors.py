"""Make the values that torch pickles for the DTensors of a rank.

The attributes of meshes and specs, their order and the modules of their classes differ between
versions of torch. Hashes are left out: torch computes missing hashes.

Sources: the pickles of torch 2.4 to 2.15 (`docs/formats.md`).
"""

from math import prod

import numpy as np

from unshard.containers.pickles.pickler import PickledCall, UniqueText
from unshard.containers.pickles.records import Global, Value
from unshard.containers.torch_files.writer import SavedTensor
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.dtypes import BY_NAME
from unshard.tensors.placements import DeviceMesh, Placement, Replicate, Shard, StridedShard

Version = tuple[int, int]
"""Major and minor version of torch."""

VERSIONS: dict[str, Version] = {
    "2.4": (2, 4),
    "2.6": (2, 6),
    "2.8": (2, 8),
    "2.10": (2, 10),
    "2.13": (2, 13),
}
"""The versions whose pickles can be written, oldest first."""

_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPECS = "torch.distributed.tensor._dtensor_spec"
_OLD = "torch.distributed._tensor.placement_types"  # has both, up to 2.4
_LAYOUTS = "torch.distributed._mesh_layout"


class DTensors:
    """Makes the DTensors of one rank on one mesh, whose ranks ascend from 0.

    Args:
        version: the version of torch that will read them.
        mesh: the mesh with the rank's coordinates. The tensors themselves are on the CPU.
    """

    def __init__(self, version: Version, mesh: DeviceMesh) -> None:
        is_public = version >= (2, 5)
        module = "torch.distributed.tensor" if is_public else "torch.distributed._tensor.api"
        self._dtensor = Global(module, "DTensor")
        self._specs = _SPECS if is_public else _OLD
        self._placements = _PLACEMENTS if is_public else _OLD
        self._version = version
        self._mesh = mesh
        self._rank = _rank_of(mesh)
        self._mesh_value = self._device_mesh()
        self._layout = PickledCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))

    def make(
        self, local: SavedTensor, shape: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> PickledCall:
        """Return the DTensor with this global shape and the local part `local`."""
        strides, dtensor = row_major_strides(shape), self._dtensor
        dtype = Global("torch", local.dtype.name)
        device = PickledCall(Global("torch", "device"), (UniqueText("cpu"),))
        args = (dtensor, dtype, tuple(shape), strides, 0, self._layout, device, False)
        state = {"_local_tensor": local, "_spec": self._spec(dtype, shape, placements)}
        rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
        return PickledCall(
            Global("torch._tensor", "_rebuild_from_type_v2"),
            (rebuild, dtensor, args, (None, state)),
        )

    def _has(self, major: int, minor: int) -> bool:
        """Return whether the version is at least this version."""
        return self._version >= (major, minor)

    def _spec(
        self, dtype: Global, shape: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> PickledCall:
        size = PickledCall(Global("torch", "Size"), ((*shape,),))  # a separate tuple, as in torch
        meta = (size, row_major_strides(shape), dtype)
        fields: dict[str, Value] = {
            "mesh": self._mesh_value,
            "placements": tuple(map(self._placement, placements)),
            "tensor_meta": PickledCall(Global(self._specs, "TensorMeta"), meta, is_new=True),
        }
        is_strided = any(isinstance(placement, StridedShard) for placement in placements)
        if self._has(2, 10):
            order = self._shard_order(placements)
            fields["shard_order"] = None if is_strided and self._has(2, 12) else order
        if self._has(2, 12):
            fields["use_strided_shard_as_shard_order"] = is_strided
        fields["_hash"] = None
        return PickledCall(Global(self._specs, "DTensorSpec"), state=fields, is_new=True)

    def _shard_order(self, placements: tuple[Placement, ...]) -> tuple[PickledCall, ...]:
        """Return the mesh dimensions that shard each tensor dimension, in order.

        A `_StridedShard` shards after the later mesh dimensions that its factor counts.
        """
        orders: dict[int, list[int]] = {}
        for mesh_dim in reversed(range(len(placements))):
            match placements[mesh_dim]:
                case Shard(dim):
                    orders.setdefault(dim, []).insert(0, mesh_dim)
                case StridedShard(dim, factor):
                    order, before = orders.setdefault(dim, []), 1
                    index = 0
                    while index < len(order) and before < factor:
                        before *= self._mesh.shape[order[index]]
                        index += 1
                    order.insert(index, mesh_dim)
        entry = Global(self._specs, "ShardOrderEntry")
        return tuple(
            PickledCall(entry, (dim, tuple(orders[dim])), is_new=True) for dim in sorted(orders)
        )

    def _placement(self, placement: Placement) -> PickledCall:
        match placement:
            case Shard(dim):
                # Since 2.10 the attribute's name comes from C++, as a new string object.
                name: Value = UniqueText("dim") if self._has(2, 10) else "dim"
                return self._made("Shard", {name: dim})
            case StridedShard(dim, factor):
                return self._made("_StridedShard", {"dim": dim, "split_factor": factor})
            case Replicate():
                state: Value = {} if self._has(2, 10) else None
                return self._made("Replicate", state)
            case _:
                raise TypeError(f"a tensor that is {placement} cannot be written")

    def _made(self, kind: str, state: Value) -> PickledCall:
        return PickledCall(Global(self._placements, kind), state=state, is_new=True)

    def _device_mesh(self) -> PickledCall:
        fields = self._mesh_of_layout if self._has(2, 10) else self._mesh_of_tensor
        mesh = Global("torch.distributed.device_mesh", "DeviceMesh")
        return PickledCall(mesh, state=fields(tuple(range(prod(self._mesh.shape)))), is_new=True)

    def _mesh_of_tensor(self, ranks: tuple[int, ...]) -> dict[str, Value]:
        mesh = self._mesh
        fields: dict[str, Value] = {
            "device_type": mesh.device_type,
            "mesh": _numbers(ranks, mesh.shape),
            "mesh_dim_names": mesh.dim_names,
            "_flatten_mesh_list": ranks,
        }
        fields |= {} if self._has(2, 5) else {"_parent_mesh": None}
        fields["_thread_id"] = None
        groups = self._groups()
        if self._has(2, 8):
            fields["_dim_group_names"] = groups
        else:
            fields["_dim_group_infos"] = [
                ("", _group(mesh, dim), name) for dim, name in enumerate(groups)
            ]
        fields["_coordinate_on_dim"] = list(mesh.coordinates)
        return fields

    def _mesh_of_layout(self, ranks: tuple[int, ...]) -> dict[str, Value]:
        mesh = self._mesh
        fields: dict[str, Value] = {
            "_device_type": mesh.device_type,
            "_layout": self._mesh_layout(),
            "_rank_map": _numbers(ranks, (len(ranks),)),
            "_mesh_dim_names": mesh.dim_names,
            "_root_mesh": None,
            "_flatten_rank_map": ranks,
            "_thread_id": None,
            "_flatten_mapping": {},
            "_dim_group_names": self._groups(),
        }
        if not self._has(2, 12):
            return fields | {"_coordinate_on_dim": list(mesh.coordinates)}
        return fields | {
            "_rank": self._rank,
            "_coordinate_on_dim": mesh.coordinates,
            "_hash": None,
        }

    def _groups(self) -> list[UniqueText]:
        """Return the names of this rank's groups: their numbers if no others were made before.

        A mesh of one dimension uses the group of all ranks, which is number 0.
        """
        shape = self._mesh.shape
        if len(shape) == 1:
            return [UniqueText("0")]
        ranks, names, number = np.arange(prod(shape)).reshape(shape), [], 1
        for dim, size in enumerate(shape):
            groups = ranks.swapaxes(-1, dim).reshape(-1, size)
            own = int(np.flatnonzero((groups == self._rank).any(axis=1))[0])
            names.append(UniqueText(str(number + own)))
            number += len(groups)
        return names

    def _mesh_layout(self) -> PickledCall:
        shape = self._mesh.shape
        strides = row_major_strides(shape)
        layout = Global(_LAYOUTS, "_MeshLayout")
        if not self._has(2, 13):
            return PickledCall(layout, state={"shape": shape, "stride": strides}, is_new=True)
        flat = Global(_LAYOUTS, "_FlatLayout")
        axes = tuple(
            PickledCall(flat, state={"shape": sizes, "stride": steps}, is_new=True)
            for sizes, steps in (
                ((size,), (stride,)) if size > 1 else ((), ())
                for size, stride in zip(shape, strides, strict=True)
            )
        )
        return PickledCall(layout, state={"axes": axes}, is_new=True)


def _numbers(ranks: tuple[int, ...], shape: tuple[int, ...]) -> SavedTensor:
    return SavedTensor(BY_NAME["int32"], shape, np.asarray(ranks, "<i4").tobytes())


def _rank_of(mesh: DeviceMesh) -> int:
    strides = row_major_strides(mesh.shape)
    return sum(at * step for at, step in zip(mesh.coordinates, strides, strict=True))


def _group(mesh: DeviceMesh, dim: int) -> list[int]:
    """Return the ranks along a mesh dimension, through this rank."""
    at = mesh.coordinates
    lines = ((*at[:dim], index, *at[dim + 1 :]) for index in range(mesh.shape[dim]))
    return [_rank_of(mesh._replace(coordinates=line)) for line in lines]
