"""What torch pickles a ShardedTensor as: FSDP1's sharded state dict without a device mesh.

Every local shard states its own box in the global tensor; that is the truth about it. The ranks in
`shards_metadata` are not: under HYBRID_SHARD they are global in one place and local to the group in
another. torch itself can load such a file only on as many ranks as wrote it.

Source: `torch.distributed._shard.sharded_tensor`, the pickles of torch 2.2 to 2.15.
"""

from dataclasses import dataclass

from unshard.containers.pickles.records import Value
from unshard.read.torch_save.values import TensorFormError, ints, member, state_of
from unshard.read.torch_save.values import shape as sizes_of
from unshard.read.torch_save.views import StorageView, dtype_named, read_view
from unshard.tensors.dtypes import DType

__all__ = ["SHARDED_TENSOR", "ShardedTensor", "read_sharded_tensor"]

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A ShardedTensor as one rank saved it: any number of parts, each with its own offsets."""

    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[StorageView, ...]
    offsets: tuple[tuple[int, ...], ...]
    rank: int
    world_size: int


def read_sharded_tensor(
    args: tuple[Value, ...], state: Value, allowed: frozenset[str]
) -> ShardedTensor:
    """Return what a pickled ShardedTensor says.

    Args:
        args: of `_rebuild_wrapper_subclass`: class, dtype, global size, …
        state: what `ShardedTensor.__getstate__` gave: local shards, metadata, process group,
            sharding spec, remote references.
        allowed: see `unwrap`.

    Raises:
        TensorFormError: it is of unknown form, or contradicts itself.
    """
    match state:
        case (list(shards), metadata, group, *_) if len(args) >= 3:
            pass
        case _:
            raise TensorFormError("a ShardedTensor of unknown form")
    dtype, shape = dtype_named(args[1]), sizes_of(args[2])
    described = ints(member(state_of(metadata), "size"))
    if described != shape:
        raise TensorFormError(f"the ShardedTensor says shape {shape}, its metadata {described}")
    stored = [_local_shard(shard, shape, allowed) for shard in shards]
    for view, _ in stored:
        if view.dtype is not dtype:
            raise TensorFormError(f"the ShardedTensor says {dtype}, a local shard {view.dtype}")
    ranks = state_of(group)
    match member(ranks, "global_rank"), member(ranks, "global_world_size"):
        case int(rank), int(world_size):
            pass
        case _:
            raise TensorFormError("a process group of unknown form")
    parts, offsets = tuple(view for view, _ in stored), tuple(at for _, at in stored)
    return ShardedTensor(dtype, shape, parts, offsets, rank, world_size)


def _local_shard(
    shard: Value, shape: tuple[int, ...], allowed: frozenset[str]
) -> tuple[StorageView, tuple[int, ...]]:
    """Return what is stored of a local shard, and where it lies in the global tensor."""
    fields = state_of(shard)
    view = read_view(member(fields, "tensor"), allowed)
    box = state_of(member(fields, "metadata"))
    offsets, sizes = ints(member(box, "shard_offsets")), ints(member(box, "shard_sizes"))
    if sizes != view.sizes:
        raise TensorFormError(f"a local shard says sizes {sizes}, its tensor has {view.sizes}")
    inside = len(offsets) == len(shape) == len(sizes) and all(
        at >= 0 and at + n <= size for at, n, size in zip(offsets, sizes, shape, strict=True)
    )
    if not inside:
        raise TensorFormError(f"a shard of {sizes} at {offsets} lies outside its shape {shape}")
    return view, offsets
