"""The `.metadata` of torch's own classes, of every generation; and what is refused."""

import pickle
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_tables import Tensor, items_of, plain
from unshard.containers.pickles import machine
from unshard.errors import (
    CheckpointError,
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnsafeError,
)
from unshard.read.dcp.item_table import Item
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.tensors.dtypes import BY_NAME

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
FLOAT32 = BY_NAME["float32"]
TWO: list[Chunk] = [((0, 0), (2, 3)), ((2, 0), (1, 3))]


def tensor(
    shape: Sequence[int] = (3, 3), chunks: Sequence[Chunk] = TWO, dtype: torch.dtype = torch.float32
) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), boxes)


def whole(**changes: Any) -> Metadata:
    """Metadata of a tensor in two chunks and an object, as torch makes it."""
    storage: dict[Any, Any] = {
        MetadataIndex("model.w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 100),
        MetadataIndex("model.w", torch.Size((2, 0)), 1): _StorageInfo("__1_0.distcp", 7, 90),
        MetadataIndex("step"): _StorageInfo("__0_0.distcp", 100, 50),
    }
    fields: dict[str, Any] = {
        "state_dict_metadata": {"model.w": tensor(), "step": BytesStorageMetadata()},
        "planner_data": {"model.w": ("model", "w"), "step": ("step",)},
        "storage_data": storage,
        "storage_meta": StorageMeta(checkpoint_id=Path("/somewhere"), save_id="1"),
    }
    return Metadata(**(fields | changes))


def stored(directory: Path, value: object, protocol: int = 4, name: str = ".metadata") -> Path:
    path = directory / name
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


def read(directory: Path, value: object) -> DcpMetadata:
    return read_metadata([stored(directory, value)])


def tensors_of(found: DcpMetadata) -> dict[str, Tensor]:
    return {name: plain(one) for name, one in found.tensors.items()}


def said(found: DcpMetadata) -> tuple[object, ...]:
    items = items_of(found)
    assert found.items == {name: item for (name, at), item in items.items() if at is None}
    return tensors_of(found), found.objects, found.paths, found.steps, items


EXPECTED = (
    {"model.w": (FLOAT32, (3, 3), TWO)},
    {"step": None},
    {"model.w": ("model", "w"), "step": ("step",)},
    {"model.w": ("model", "w"), "step": ("step",)},
    {
        ("model.w", (0, 0)): Item("__0_0.distcp", 0, 100, compressed=False),
        ("model.w", (2, 0)): Item("__1_0.distcp", 7, 90, compressed=False),
        ("step", None): Item("__0_0.distcp", 100, 50, compressed=False),
    },
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_read(tmp_path: Path, protocol: int) -> None:
    assert said(read_metadata([stored(tmp_path, whole(), protocol)])) == EXPECTED


NEW = b"ctorch.distributed.checkpoint."
OLD = b"ctorch.distributed._shard.checkpoint."
PROPERTIES = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n"
GENERATIONS: dict[str, list[tuple[bytes, bytes]]] = {
    "torch 2.2": [
        (PROPERTIES, b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n"),
        (
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n",
            b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n",
        ),
    ],
    "torch 1.13": [(NEW, OLD)],
    "Python 3.13": [(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")],
    "Windows": [(b"cpathlib\nPosixPath\n", b"cpathlib\nWindowsPath\n")],
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_other_generations_name_their_classes_otherwise(tmp_path: Path, generation: str) -> None:
    data = pickle.dumps(whole(), protocol=2)
    for ours, theirs in GENERATIONS[generation]:
        assert ours in data
        data = data.replace(ours, theirs)
    (tmp_path / ".metadata").write_bytes(data)
    assert said(read_metadata([tmp_path / ".metadata"])) == EXPECTED


@pytest.mark.parametrize("field", ["storage_meta", "version"])
def test_fields_that_older_torch_does_not_write_are_not_needed(tmp_path: Path, field: str) -> None:
    value = whole()
    value.__dict__.pop(field, None)
    assert said(read(tmp_path, value)) == EXPECTED


def test_without_planner_data_there_are_no_paths(tmp_path: Path) -> None:
    found = read(tmp_path, whole(planner_data=None))
    assert found.paths == {}
    assert tensors_of(found) == EXPECTED[0]


def test_list_indices_in_a_path_are_words(tmp_path: Path) -> None:
    paths = {"model.w": ("model", "w"), "step": ["step"], "a.0.b": ("a", 0, "b")}
    found = read(tmp_path, whole(planner_data=paths))
    assert found.paths["a.0.b"] == ("a", "0", "b")
    assert found.steps["a.0.b"] == ("a", 0, "b")
    assert found.paths["step"] == ("step",)


def test_the_tensors_are_in_the_order_of_the_saved_dict(tmp_path: Path) -> None:
    names = ["b", "c", "a"]
    chunks: list[Chunk] = [((0,), (3,))]
    value = whole(
        state_dict_metadata={name: tensor((3,), chunks) for name in sorted(names)},
        planner_data={name: (name,) for name in names},
    )
    assert list(read(tmp_path, value).tensors) == names


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "bool", "uint16"])
def test_dtypes_are_known(tmp_path: Path, name: str) -> None:
    value = whole(state_dict_metadata={"model.w": tensor(dtype=getattr(torch, name))})
    assert read(tmp_path, value).tensors["model.w"].dtype is BY_NAME[name]


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_tensors_without_dimensions_or_elements_are_read(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    chunk = ((0,) * len(shape), shape)
    found = read(tmp_path, whole(state_dict_metadata={"model.w": tensor(shape, [chunk])}))
    assert plain(found.tensors["model.w"]) == (FLOAT32, shape, [chunk])


def test_the_metadata_of_ranks_are_united(tmp_path: Path) -> None:
    files = []
    for rank, chunk in enumerate(TWO):
        index = MetadataIndex("model.w", torch.Size(chunk[0]), 0)
        value = whole(
            state_dict_metadata={"model.w": tensor(chunks=[chunk])},
            storage_data={index: _StorageInfo(f"__{rank}_0.distcp", 0, 100)},
        )
        files.append(stored(tmp_path, value, name=f"__{rank}.metadata"))
    found = read_metadata(files)
    assert tensors_of(found) == EXPECTED[0]
    assert {at: item.path for (_, at), item in items_of(found).items()} == {
        (0, 0): "__0_0.distcp",
        (2, 0): "__1_0.distcp",
    }


@pytest.mark.parametrize("other", [tensor((4, 3)), tensor(dtype=torch.float16)])
def test_ranks_that_contradict_each_other_are_refused(
    tmp_path: Path, other: TensorStorageMetadata
) -> None:
    first = stored(tmp_path, whole(), name="__0.metadata")
    value = whole(state_dict_metadata={"model.w": other})
    with pytest.raises(CorruptError, match=r"__1\.metadata: tensor model\.w: "):
        read_metadata([first, stored(tmp_path, value, name="__1.metadata")])


@pytest.mark.parametrize(
    ("transforms", "compressed"),
    [(None, False), ([], False), (["stream.zstd/1"], True), (["stream.zstd/1.2"], True)],
)
def test_transforms_say_whether_an_item_is_compressed(
    tmp_path: Path, transforms: list[str] | None, *, compressed: bool
) -> None:
    info = _StorageInfo("__0_0.distcp", 0, 100, transform_descriptors=transforms)
    value = whole(storage_data={MetadataIndex("model.w", torch.Size((0, 0))): info})
    assert [item.compressed for item in items_of(read(tmp_path, value)).values()] == [compressed]


@pytest.mark.parametrize("transforms", [["stream.lz4/1"], ["stream.zstd/1", "x/1"], "x", [3]])
def test_an_unknown_transform_is_refused(tmp_path: Path, transforms: Any) -> None:
    info = _StorageInfo("__0_0.distcp", 0, 100, transform_descriptors=transforms)
    value = whole(storage_data={MetadataIndex("model.w", torch.Size((0, 0))): info})
    with pytest.raises(NotMergeableError, match="transformed") as caught:
        read(tmp_path, value)
    assert "stream.zstd/1" in caught.value.expected


@pytest.mark.parametrize("path", ["../x.distcp", "/etc/passwd", "", "a/../../b", "a\nb", "."])
def test_an_item_outside_the_directory_is_refused(tmp_path: Path, path: str) -> None:
    value = whole(storage_data={MetadataIndex("step"): _StorageInfo(path, 0, 100)})
    with pytest.raises(CorruptError, match="not a file in this directory"):
        read(tmp_path, value)


WRONG: dict[str, Callable[[], object]] = {
    "a dict": lambda: {"state_dict_metadata": {}},
    "a list of pairs": lambda: whole(state_dict_metadata=[("model.w", 3)]),
    "a name that is a number": lambda: whole(state_dict_metadata={3: tensor()}),
    "neither tensor nor bytes": lambda: whole(state_dict_metadata={"w": "text"}),
    "no chunks": lambda: whole(state_dict_metadata={"w": Broken(tensor(), "chunks", None)}),
    "a chunk beyond the shape": lambda: whole(
        state_dict_metadata={"w": tensor((3, 3), [((2, 0), (2, 3))])}
    ),
    "a chunk of another rank": lambda: whole(state_dict_metadata={"w": tensor((3,), TWO)}),
    "a negative offset": lambda: whole(
        storage_data={MetadataIndex("step"): _StorageInfo("x", -1, 9)}
    ),
    "a negative length": lambda: whole(
        storage_data={MetadataIndex("step"): _StorageInfo("x", 1, -9)}
    ),
    "an offset that is text": lambda: whole(
        storage_data={MetadataIndex("step"): _StorageInfo("x", "1", 9)}  # type: ignore[arg-type]
    ),
    "storage data of another kind": lambda: whole(storage_data={MetadataIndex("step"): "x"}),
    "no storage data": lambda: whole(storage_data=None),
}


class Broken:
    """Pickles as the object does, with another value in one field."""

    def __init__(self, value: object, field: str, other: object) -> None:
        self.parts = (value, field, other)

    def __reduce__(self) -> tuple[object, ...]:
        value, field, other = self.parts
        return (type(value).__new__, (type(value),), {**vars(value), field: other})


@pytest.mark.parametrize("what", WRONG)
def test_metadata_of_another_form_is_refused_with_the_file(tmp_path: Path, what: str) -> None:
    with pytest.raises(CorruptError, match=r"\.metadata: not a valid DCP metadata file: "):
        read(tmp_path, WRONG[what]())


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit",))


def test_a_pickle_that_runs_commands_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match=r"\.metadata: .*exec"):
        read(tmp_path, whole(planner_data={"x": Bomb()}))


@pytest.mark.parametrize(
    ("data", "error"),
    [(b"", IncompleteError), (b"no pickle", CorruptError), (b"\x80\x04N", CorruptError)],
)
def test_a_file_that_is_not_a_pickle_is_named(
    tmp_path: Path, data: bytes, error: type[CheckpointError]
) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(error, match=r"\.metadata: "):
        read_metadata([tmp_path / ".metadata"])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(whole(), protocol=4)
    path = tmp_path / ".metadata"
    for length in range(0, len(data) - 1, 7):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_metadata([path])


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(CorruptError, match="are too many for metadata"):
        read_metadata([path])


def write_many(directory: Path, shape: tuple[int, ...], tensors: int) -> Path:
    """Write the metadata of tensors in 64 chunks each."""
    inner = shape[1:]
    chunks = [((start, *(0 for _ in inner)), (64, *inner)) for start in range(0, 4096, 64)]
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(tensors)]
    storage = {
        MetadataIndex(name, torch.Size(offsets)): _StorageInfo(f"__{rank}_0.distcp", 9000, 9000)
        for name in names
        for rank, (offsets, _) in enumerate(chunks)
    }
    described = {name: tensor(shape, chunks) for name in names}
    one = Metadata(described, {name: (name,) for name in names}, storage)  # type: ignore[arg-type]
    return stored(directory, one)


def test_of_several_items_for_a_chunk_the_last_counts(tmp_path: Path) -> None:
    storage = {
        MetadataIndex("model.w", torch.Size((0, 0)), at): _StorageInfo(f"__{at}_0.distcp", 0, 100)
        for at in (2, 0, 1)
    }
    (item,) = items_of(read(tmp_path, whole(storage_data=storage))).values()
    assert item.path == "__1_0.distcp"


def test_an_item_takes_few_bytes(tmp_path: Path) -> None:
    path = write_many(tmp_path, (4096, 64), 320)
    tracemalloc.start()
    try:
        found = read_metadata([path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.stored.keys) == 64 * 320
    assert peak - path.stat().st_size < 64 * 320 * 500


@pytest.mark.parametrize("shape", [(4096,), (4096, 64), (4096, 8, 8)])
def test_metadata_of_any_length_is_within_the_bound_of_pickles(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_MEMORY_FLOOR", 0)  # as where there are a million items
    path = write_many(tmp_path, shape, 80)
    assert len(items_of(read_metadata([path]))) == 64 * 80
