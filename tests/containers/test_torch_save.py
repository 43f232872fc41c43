"""The writer of torch.save files: what torch reads, where bytes are, how much memory it takes."""

import tracemalloc
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

import pytest
import torch

from ranks import bits
from unshard.containers.torch_files import writer as torch_save
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import SavedTensor, write_torch_file
from unshard.errors import CorruptError
from unshard.tensors.catalog import ByteRange
from unshard.tensors.dtypes import BY_NAME

SHAPES = ((), (1,), (0,), (3, 0, 2), (5,), (2, 3, 4))


def saved(tensor: torch.Tensor) -> SavedTensor:
    name = str(tensor.dtype).removeprefix("torch.")
    return SavedTensor(BY_NAME[name], tuple(tensor.shape), bits(tensor))


@pytest.mark.parametrize("name", BY_NAME)
def test_torch_reads_tensors_of_every_dtype_and_shape(tmp_path: Path, name: str) -> None:
    dtype = BY_NAME[name]
    made: dict[str, torch.Tensor] = {}
    for shape in SHAPES:
        count = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.arange(count, dtype=torch.uint8) % (2 if name == "bool" else 251)
        made[str(shape)] = raw.view(getattr(torch, name)).reshape(shape)
    write_torch_file(tmp_path / "x.pt", {key: saved(value) for key, value in made.items()})
    for mmap in (False, True):
        found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        for key, value in made.items():
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert found[key].is_contiguous()
            assert bits(found[key]) == bits(value)


def test_a_tensor_that_occurs_twice_stays_one_as_in_torchs_own_files(tmp_path: Path) -> None:
    tensor = saved(torch.zeros(3))
    write_torch_file(tmp_path / "x.pt", [tensor, tensor])
    first, second = torch.load(tmp_path / "x.pt")
    first += 1
    assert second.tolist() == [1, 1, 1]


def test_records_are_stored_at_multiples_of_64_bytes_and_check(tmp_path: Path) -> None:
    value = {"a": saved(torch.rand(7)), "b": saved(torch.rand(1000)), "c": "x" * 200}
    write_torch_file(tmp_path / "x.pt", value)
    with ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        records = archive.infolist()
    names = ["data.pkl", "byteorder", "data/0", "data/1", "version"]
    assert [record.filename for record in records] == [f"archive/{name}" for name in names]
    assert {record.compress_type for record in records} == {ZIP_STORED}
    assert {record.date_time for record in records} == {(1980, 1, 1, 0, 0, 0)}
    storages = read_torch_file(tmp_path / "x.pt").storages
    assert [storage.offset % 64 for storage in storages.values()] == [0, 0]
    assert [storage.size for storage in storages.values()] == [28, 4000]


def test_the_same_value_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.pt", "two.pt"):
        write_torch_file(tmp_path / name, {"a": saved(torch.ones(3)), "b": {"x", "y", 3}})
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_large_records_have_64_bit_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_save, "_ZIP64_FROM", 100)
    tensor = torch.rand(50)
    write_torch_file(tmp_path / "x.pt", [saved(tensor), saved(tensor)])
    for mmap in (False, True):
        assert all(torch.equal(found, tensor) for found in torch.load(tmp_path / "x.pt", mmap=mmap))
    storages = read_torch_file(tmp_path / "x.pt").storages
    assert [storage.offset % 64 for storage in storages.values()] == [0, 0]


def test_elements_are_copied_from_a_file_block_by_block(tmp_path: Path) -> None:
    count = 40_000_000
    with (tmp_path / "source").open("wb") as out:
        out.write(b"12345")
        out.truncate(count + 5)
    source = ByteRange(tmp_path / "source", 3, count)
    tracemalloc.start()
    try:
        write_torch_file(tmp_path / "x.pt", SavedTensor(BY_NAME["uint8"], (count,), source))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000
    found = torch.load(tmp_path / "x.pt", mmap=True)
    assert found.shape == (count,)
    assert found[:3].tolist() == [ord("4"), ord("5"), 0]


def test_a_source_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(10))
    tensor = SavedTensor(BY_NAME["uint8"], (11,), ByteRange(tmp_path / "source", 0, 11))
    with pytest.raises(CorruptError, match="ends at byte 10"):
        write_torch_file(tmp_path / "x.pt", tensor)
