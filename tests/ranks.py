"""Write rank files with real torch, in one process: DTensors on a fake process group.

torch pickles the same objects as on real ranks; only the collectives are missing, and saving needs
none. Checkpoints of real processes are in `tests/oracle`.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

Tensors = Mapping[str, torch.Tensor]


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be this rank of a process group that does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()


def rank_path(directory: Path, world: int, rank: int) -> Path:
    return directory / f"model_world_size_{world}_rank_{rank}.pt"


def save_ranks(
    directory: Path,
    tensors: Tensors,
    world: int,
    *,
    mesh_shape: Sequence[int] | None = None,
    mesh_names: Sequence[str] | None = ("fsdp",),
    placements: Sequence[Placement] | None = None,
    plain: Sequence[Tensors] | None = None,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """Save `tensors`, sharded, as rank files; `plain[rank]` and `extra` go in as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh(
                "cpu",
                tuple(mesh_shape or (world,)),
                mesh_dim_names=None if mesh_names is None else tuple(mesh_names),
            )
            state: dict[str, object] = {
                name: shard(tensor, mesh, placements) for name, tensor in tensors.items()
            }
            state.update(plain[rank] if plain else {})
            state.update(extra or {})
            torch.save(state, rank_path(directory, world, rank))
    return directory


def shard(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> torch.Tensor:
    """Return this rank's part as a DTensor; without placements along dimension 0."""
    first: Placement = Shard(0) if tensor.ndim else Replicate()
    chosen = placements or [*([Replicate()] * (mesh.ndim - 1)), first]
    return distribute_tensor(tensor, mesh, list(chosen), src_data_rank=None)


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A few tensors of uneven sizes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(13, 6, generator=generator),
        "model.norm.weight": torch.randn(6, generator=generator),
        "lm_head.weight": torch.randn(13, 6, generator=generator),
    }


def merged(output: Path) -> dict[str, torch.Tensor]:
    """Load all weight files of an output with safetensors' own reader."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(output.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return b""
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]] = flat.view(torch.uint8).numpy()
    return raw.tobytes()


def assert_same(found: Tensors, truth: Tensors) -> None:
    """Same names, dtypes, shapes and bits."""
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a directory, by name."""
    return {name: text for name, (_, _, text) in snapshot(directory).items()}


def made(output: Path) -> dict[str, bytes]:
    """Return the files of an output, without the fingerprint of sizes and times of its sources."""
    found = contents(output)
    if "unshard.json" in found:
        record = json.loads(found["unshard.json"])
        del record["output"]["fingerprint"]
        found["unshard.json"] = json.dumps(record).encode()
    return found


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file under a directory: size, mtime and content; to show that nothing was touched."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_size,
            path.stat().st_mtime_ns,
            path.read_bytes(),
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
