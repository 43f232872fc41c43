"""DTensors are pickled as torch pickles them."""

import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from other_versions import unpack_rank_files
from ranks import as_rank, save_ranks
from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.pickles.unpickle import unpickle
from unshard.containers.torch_files.dtensors import VERSIONS, DTensors, Version
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import SavedTensor, write_pickle
from unshard.containers.torch_files.zip_layout import lay_out_zip
from unshard.read.torch_save.state_dict import rank_table
from unshard.read.torch_save.tensors import TensorDecoder
from unshard.tensors.dtypes import BY_NAME
from unshard.tensors.placements import (
    DeviceMesh,
    Placement,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    place,
)

TRUTH = {
    "a.weight": torch.arange(12.0).reshape(4, 3),
    "b": torch.arange(5.0),
    "c": torch.arange(3).bfloat16(),
    "d": torch.rand(1, 2, 3),
}


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_rank_files(tmp_path_factory.mktemp("rank_files"))


def pickle_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(archive.namelist()[0])


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> DeviceMesh:
    at: list[int] = []
    for size in reversed(shape):
        rank, coordinate = divmod(rank, size)
        at.insert(0, coordinate)
    return DeviceMesh(shape, names, tuple(at), "cpu")


def local(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> SavedTensor:
    sizes, _ = place(tuple(tensor.shape), Sharding(mesh, placements))
    return SavedTensor(BY_NAME[str(tensor.dtype).removeprefix("torch.")], sizes, None)


def written(
    version: Version, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[bytes, tuple[SavedTensor, ...]]:
    tensors = DTensors(version, mesh)
    return write_pickle(
        {
            name: tensors.make(local(one, mesh, placements), tuple(one.shape), placements)
            for name, one in TRUTH.items()
        }
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_pickle_is_that_of_torch_byte_for_byte(tmp_path: Path, world: int) -> None:
    save_ranks(tmp_path, TRUTH, world)
    for rank in range(world):
        mesh = mesh_of((world,), ("fsdp",), rank)
        theirs = pickle_of(tmp_path / f"model_world_size_{world}_rank_{rank}.pt")
        assert written((2, 13), mesh, (Shard(0),))[0] == theirs


UNLIKE = {"_hash", "_dim_group_names", "_dim_group_infos", "_thread_id", "_parent_mesh"}


def plain(value: Value) -> object:
    """Return what a pickle says, without hashes and names of groups, to be compared."""
    match value:
        case Record():
            stated = sorted(map(repr, map(plain, value.items)))
            return (plain(value.callee), plain(value.args), plain(value.state), stated)
        case Persistent(pid=(_, kind, _, device, _)):  # without the key and the size of the storage
            return ("persistent", plain(kind), device)
        case Global():
            return value.dotted
        case dict():
            return [(key, plain(one)) for key, one in value.items() if key not in UNLIKE]
        case list() | tuple():
            return (type(value).__name__, *map(plain, value))
    return value


ENCODED = {"2.4": "2.4", "2.5": "2.6", "2.6": "2.6", "2.8": "2.8", "2.9": "2.8", "2.10": "2.10"}


CASES = [(version, case) for version in ENCODED for case in ("fsdp2_1d", "fsdp2_hsdp")]
CASES += [(version, "fsdp2_tp") for version in ("2.5", "2.6", "2.8", "2.9")]
CASES += [(version, "fsdp2_tp_uneven") for version in ("2.8", "2.9")]
CASES.remove(("2.4", "fsdp2_hsdp"))  # torch refused to write it


@pytest.mark.parametrize(("torch_version", "case"), CASES)
def test_what_other_versions_pickled_is_pickled_alike(
    rank_files: Path, torch_version: str, case: str
) -> None:
    compared = 0
    for path in sorted((rank_files / f"torch-{torch_version}" / case).glob("*.pt")):
        archive = read_torch_file(path)
        rank = int(path.stem.rsplit("_", 1)[1])
        table = rank_table(archive, rank=rank, file=0, allowed=frozenset())
        value = unpickle(pickle_of(path))
        items = value if isinstance(value, dict) else dict(value.items)  # type: ignore[attr-defined]
        for name, cut in zip(table.names, table.cuts, strict=True):
            form = table.cut_table[cut].form
            stated = items[name]
            if form.sharding is None or not is_whole_mesh(stated):
                continue
            ours = alone(
                form.shape, form.dtype.name, form.sharding, VERSIONS[ENCODED[torch_version]]
            )
            assert plain(ours) == plain(stated), name
            compared += 1
    assert compared


def alone(shape: tuple[int, ...], dtype: str, sharding: Sharding, version: Version) -> Value:
    sizes, _ = place(shape, sharding)
    tensors = DTensors(version, sharding.mesh)
    made = tensors.make(SavedTensor(BY_NAME[dtype], sizes, None), shape, sharding.placements)
    return unpickle(write_pickle(made)[0])


def is_whole_mesh(value: Value) -> bool:
    """Whether the mesh of a DTensor is all ranks, ascending: what is written always is."""
    spec = value.args[3][1]["_spec"].state  # type: ignore[attr-defined]
    state = spec["mesh"].state
    ranks = state.get("_flatten_rank_map", state.get("_flatten_mesh_list"))
    return list(ranks) == list(range(len(ranks))) and state.get("_root_mesh") is None


GRIDS: list[tuple[tuple[int, ...], tuple[str, ...], tuple[Placement, ...]]] = [
    ((3,), ("fsdp",), (Shard(0),)),
    ((2, 2), ("ddp", "fsdp"), (Replicate(), Shard(0))),
    ((2, 2), ("dp", "tp"), (StridedShard(0, 2), Shard(0))),
    ((2, 2), ("dp", "tp"), (Shard(0), Shard(0))),
]


@pytest.mark.parametrize(("shape", "names", "placements"), GRIDS)
def test_torch_makes_the_same_dtensors_of_it(
    tmp_path: Path,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    placements: tuple[Placement, ...],
) -> None:
    world = torch.Size(shape).numel()
    for rank in range(world):
        mesh = mesh_of(shape, names, rank)
        pickle, tensors = written((2, 13), mesh, placements)
        layout = lay_out_zip("x", pickle, [one.nbytes for one in tensors], (2, 13))
        file = bytearray(layout.size)
        for at, piece in layout.fixed():
            file[at : at + len(piece)] = piece
        path = tmp_path / f"{rank}.pt"
        path.write_bytes(file)
        with as_rank(rank, world):
            found = torch.load(path, weights_only=False)
            for name, tensor in TRUTH.items():
                one = found[name]
                assert isinstance(one, DTensor)
                assert one.shape == tensor.shape
                assert one.device_mesh.mesh.flatten().tolist() == [0] * world  # not written here
                sizes, _ = place(tuple(tensor.shape), Sharding(mesh, placements))
                assert one.to_local().shape == sizes
                kinds = [type(theirs).__name__.lstrip("_") for theirs in one.placements]
                assert kinds == [type(ours).__name__ for ours in placements]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("shape", "names", "placements"), GRIDS)
def test_our_reader_reads_every_version_alike(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    placements: tuple[Placement, ...],
    version: str,
) -> None:
    for rank in range(torch.Size(shape).numel()):
        mesh = mesh_of(shape, names, rank)
        value = unpickle(written(VERSIONS[version], mesh, placements)[0])
        assert isinstance(value, dict)
        decoder = TensorDecoder(rank, lambda _: (), frozenset())
        for name, tensor in TRUTH.items():
            found = decoder.decode(value[name]).form
            assert found.shape == tensor.shape
            assert found.sharding is not None
            ours = Sharding(mesh, placements)
            assert place(found.shape, found.sharding) == place(found.shape, ours)


def test_a_pending_reduction_is_refused() -> None:
    from unshard.tensors.placements import Partial

    with pytest.raises(TypeError, match=r"Partial\(sum\)"):
        DTensors((2, 13), mesh_of((2,), ("x",), 0)).make(
            SavedTensor(BY_NAME["float32"], (1,), None), (1,), (Partial("sum"),)
        )
