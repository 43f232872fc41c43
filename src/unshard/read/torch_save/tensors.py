"""Decodes pickled tensors: storage, shape and strides, mesh and placements.

Dispatches on the attributes that are present, never on a torch version; a fact that a pickle has
twice is compared. Knows nothing of files.

A ShardedTensor is FSDP1's sharded state dict without a device mesh. Every local shard has its own
box in the global tensor, and only that is used. The ranks in `shards_metadata` are ignored: under
HYBRID_SHARD they are global in one place and local to the group in another. torch itself can load
such a file only on as many ranks as wrote it.

Sources: the pickles of torch 2.1 to 2.15 (`docs/formats.md`), `torch._utils`, `torch._tensor`,
`torch.distributed._shard.sharded_tensor`.
"""

from collections.abc import Callable
from typing import NamedTuple

from unshard.containers.pickles.records import Global, Record, Value
from unshard.fronts import Text
from unshard.read.torch_save.meshes import read_mesh
from unshard.read.torch_save.table import TensorForm
from unshard.read.torch_save.values import (
    TYPED,
    StorageView,
    TensorFormError,
    dtype_named,
    ints,
    member,
    named,
    packed,
    read_view,
    sizes_of,
    state_of,
    unwrap,
    view_of,
)
from unshard.tensors.placements import (
    DeviceMesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
)


class LocalTensor(NamedTuple):
    """A tensor as one rank saved it.

    Attributes:
        form: its dtype and shape, and how it is cut.
        parts: the views that are stored here; of a ShardedTensor any number, else one.
        offsets: of each part of a ShardedTensor in the global tensor.
    """

    form: TensorForm
    parts: tuple[StorageView, ...]
    offsets: tuple[tuple[int, ...], ...] = ()


DTENSORS = frozenset(
    {
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._api.DTensor",
        "torch.distributed.tensor.api.DTensor",
        "torch.distributed._tensor.api.DTensor",
        "torch.distributed._tensor.DTensor",
    }
)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_PLACEMENT_MODULES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
)


class TensorDecoder:
    """Decodes the tensors of one rank file; each mesh and each spec in it once.

    Old torch keeps the ranks of a mesh in a small tensor, which `read_ints` reads. Subclasses that
    are `allowed` (`--allow-global`) are read as the plain tensors that they store.

    Attributes:
        world_size: the number of ranks in the tensors decoded so far.
    """

    def __init__(
        self,
        rank: int,
        read_ints: Callable[[StorageView], tuple[int, ...]],
        allowed: frozenset[str] = frozenset(),
    ) -> None:
        self.world_size = 1
        self._rank = rank
        self._allowed = allowed
        self._read_ints = read_ints
        self._meshes: dict[int, DeviceMesh] = {}
        self._specs: dict[int, Sharding] = {}

    def decode(self, value: Value) -> LocalTensor:
        """Return a pickled tensor's form and stored parts.

        Raises:
            TensorFormError: it is of a kind that cannot be read, or contradicts itself.
        """
        name, args = unwrap(value, self._allowed)
        if name != TYPED:
            view = view_of(name, args)
            return LocalTensor(TensorForm(view.dtype, view.sizes, None), (view,))
        kind, inner, state = named(args[1]), args[2], args[3]
        if kind in DTENSORS and isinstance(inner, tuple):
            return self._dtensor(inner, state_of(state))
        if kind == _SHARDED_TENSOR and isinstance(inner, tuple):
            return self._sharded_tensor(inner, state)
        if advice := packed(args):
            raise TensorFormError(f"an instance of {kind}{advice}")
        problem = f"an instance of {kind}, which may mean something else than its stored bytes "
        raise TensorFormError(problem + Text(f"(if it does not: ⟦+--allow-global {kind}⟧)"))

    def _sharded_tensor(self, args: tuple[Value, ...], state: Value) -> LocalTensor:
        """Decode a ShardedTensor.

        `args` are those of `_rebuild_wrapper_subclass`: class, dtype, global size, …; `state` is
        the result of `ShardedTensor.__getstate__`: local shards, metadata, process group, sharding
        spec, remote references.
        """
        match state:
            case (list(shards), metadata, group, *_) if len(args) >= 3:
                pass
            case _:
                raise TensorFormError("a ShardedTensor of unknown form")
        dtype, shape = dtype_named(args[1]), sizes_of(args[2])
        described = ints(member(state_of(metadata), "size"))
        if described != shape:
            raise TensorFormError(f"a ShardedTensor of shape {shape}, in its metadata {described}")
        stored = [_local_shard(shard, shape, self._allowed) for shard in shards]
        for view, _ in stored:
            if view.dtype is not dtype:
                raise TensorFormError(f"a ShardedTensor of {dtype} with a shard of {view.dtype}")
        self._check_group(state_of(group))
        parts, offsets = tuple(view for view, _ in stored), tuple(at for _, at in stored)
        return LocalTensor(TensorForm(dtype, shape, None, boxed=True), parts, offsets)

    def _check_group(self, group: dict[str, Value]) -> None:
        """Compare a ShardedTensor's process group with the rank in the file's name."""
        match member(group, "global_rank"), member(group, "global_world_size"):
            case int(rank), int(world_size):
                pass
            case _:
                raise TensorFormError("a process group of unknown form")
        if rank != self._rank:
            raise TensorFormError(
                f"saved by rank {rank}, but the file's name has rank {self._rank}: was it renamed?"
            )
        self.world_size = max(self.world_size, world_size)

    def _dtensor(self, args: tuple[Value, ...], state: dict[str, Value]) -> LocalTensor:
        if len(args) < 3:
            raise TensorFormError(f"a DTensor with {len(args)} arguments")
        view = read_view(member(state, "_local_tensor"), self._allowed)
        spec = member(state, "_spec")
        shape, dtype = sizes_of(args[2]), dtype_named(args[1])
        if dtype is not view.dtype:
            raise TensorFormError(f"a DTensor of {dtype} with a local tensor of {view.dtype}")
        sharding = self._specs.get(id(spec))
        if sharding is None:
            sharding = self._specs[id(spec)] = self._sharding(spec)
        match state_of(spec).get("tensor_meta"):  # in all its forms the shape is first
            case Record(args=(repeated, *_)) if ints(repeated) != shape:
                raise TensorFormError(f"a DTensor of shape {shape}, in its spec {ints(repeated)}")
        return LocalTensor(TensorForm(view.dtype, shape, sharding), (view,))

    def _sharding(self, spec: Value) -> Sharding:
        fields = state_of(spec)
        placements = member(fields, "placements")
        if not isinstance(placements, tuple | list):
            raise TensorFormError("placements that are not a sequence")
        mesh = self.mesh(member(fields, "mesh"))
        order = fields.get("shard_order")
        return Sharding(mesh, tuple(_placement(p) for p in placements), _shard_order(order))

    def mesh(self, pickled: Value) -> DeviceMesh:
        """Return a pickled device mesh as this rank sees it."""
        mesh = self._meshes.get(id(pickled))
        if mesh is None:
            mesh, ranks = read_mesh(
                state_of(pickled),
                self._rank,
                lambda value: self._read_ints(read_view(value, self._allowed)),
            )
            self._meshes[id(pickled)] = mesh
            self.world_size = max(self.world_size, ranks)
        return mesh


def _local_shard(
    shard: Value, shape: tuple[int, ...], allowed: frozenset[str]
) -> tuple[StorageView, tuple[int, ...]]:
    """Return the stored view of a local shard, and its offsets in the global tensor."""
    fields = state_of(shard)
    view = read_view(member(fields, "tensor"), allowed)
    box = state_of(member(fields, "metadata"))
    offsets, sizes = ints(member(box, "shard_offsets")), ints(member(box, "shard_sizes"))
    if sizes != view.sizes:
        raise TensorFormError(f"a local shard of sizes {sizes}, whose tensor has {view.sizes}")
    inside = len(offsets) == len(shape) == len(sizes) and all(
        at >= 0 and at + n <= size for at, n, size in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise TensorFormError(f"a shard of {sizes} at {offsets} is outside its shape {shape}")
    return view, offsets


def _placement(value: Value) -> Placement:
    if not isinstance(value, Record) or not isinstance(value.callee, Global):
        raise TensorFormError(f"an unknown placement: {named(value)}")
    fields = state_of(value)
    name = value.callee.name if value.callee.module in _PLACEMENT_MODULES else named(value.callee)
    match name, fields:
        case "Shard", {"dim": int(dim)}:
            return Shard(dim)
        case "_StridedShard", {"dim": int(dim), "split_factor": int(factor)}:
            return StridedShard(dim, factor)
        case "Replicate", _:
            return Replicate()
        case "Partial" | "_Partial" | "_NormPartial" | "_MaskPartial", _:
            operation = fields.get("reduce_op", "sum")
            return Partial(operation[:80] if isinstance(operation, str) else named(operation))
    raise TensorFormError(f"an unknown placement: {name}, with {len(fields)} attributes")


def _shard_order(value: Value) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    if value is None:
        return None
    entries = value if isinstance(value, tuple | list) else ()
    order = []
    for entry in entries:
        match entry:
            case (
                Record(args=(int(dim), mesh_dims))
                | Record(state={"tensor_dim": int(dim), "mesh_dims": mesh_dims})
            ):
                order.append((dim, ints(mesh_dims)))
            case _:
                raise TensorFormError("a shard order of unknown form")
    return tuple(order)
