"""Files of `torch.save` that are laid out without their data are those that torch wrote."""

import zipfile
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from other_versions import unpack_rank_files
from properties import examples
from ranks import save_ranks, some_tensors
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import SavedTensor, write_pickle
from unshard.containers.torch_files.zip_layout import ZipLayout, lay_out_zip
from unshard.tensors.dtypes import BY_NAME

NEW = (2, 13)


@pytest.fixture(scope="module")
def rank_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_rank_files(tmp_path_factory.mktemp("rank_files"))


def written(layout: ZipLayout, data: list[bytes]) -> bytes:
    """Return the file: what is fixed, and the storages."""
    file = bytearray(layout.size)
    for at, piece in layout.fixed([crc32(one) for one in data]):
        file[at : at + len(piece)] = piece
    for (at, size), one in zip(layout.storages, data, strict=True):
        file[at : at + size] = one
    return bytes(file)


def assert_rewritten(path: Path, version: tuple[int, int]) -> None:
    """The file of torch is equal to the one that is laid out for what it has."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        keys = sorted(int(name.split("/")[2]) for name in names if "/data/" in name)
        root = names[0].split("/")[0]
        data = [archive.read(f"{root}/data/{key}") for key in keys]
        pickle = archive.read(f"{root}/data.pkl")
    ours = written(lay_out_zip(root, pickle, [len(one) for one in data], version), data)
    assert ours == path.read_bytes()


@pytest.mark.parametrize("version", ["2.4", "2.6", "2.8", "2.10", "2.12", "2.15"])
def test_the_files_of_other_versions_are_rewritten_byte_for_byte(
    version: str, rank_files: Path
) -> None:
    found = sorted((rank_files / f"torch-{version}").rglob("*.pt"))
    assert len(found) >= 10
    for path in found:
        assert_rewritten(path, (2, int(version.split(".")[1])))


def test_the_files_of_this_torch_are_rewritten_byte_for_byte(tmp_path: Path) -> None:
    many = {f"layer.{number}.weight": torch.rand(3, number) for number in range(120)}
    save_ranks(tmp_path, some_tensors() | many, 2)
    for rank in (0, 1):
        assert_rewritten(tmp_path / f"model_world_size_2_rank_{rank}.pt", NEW)


@settings(max_examples=examples(50))
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12),
    st.sampled_from([(2, 4), NEW]),
)
def test_torch_reads_what_was_laid_out(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    version: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("laid_out") / "file.pt"
    truth = {f"t{number}": torch.rand(shape) for number, shape in enumerate(shapes)}
    value = {name: SavedTensor(BY_NAME["float32"], one.shape, None) for name, one in truth.items()}
    pickle, tensors = write_pickle(value)
    layout = lay_out_zip("file", pickle, [one.nbytes for one in tensors], version)
    path.write_bytes(written(layout, [one.numpy().tobytes() for one in truth.values()]))
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], one) for name, one in truth.items())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_storages_of_more_than_4_gib_are_read_by_torch(tmp_path: Path) -> None:
    """The file is sparse: nearly all of it are zeros that are on no disk."""
    count = (1 << 32) // 4 + 3
    value = {
        "large": SavedTensor(BY_NAME["float32"], (count,), None),
        "behind": SavedTensor(BY_NAME["float32"], (2,), None),
    }
    pickle, tensors = write_pickle(value)
    layout = lay_out_zip("large", pickle, [one.nbytes for one in tensors], NEW)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.truncate(layout.size)
        for at, piece in layout.fixed():
            file.seek(at)
            file.write(piece)
        start, size = layout.storages[0]
        for at, number in ((start + size - 4, 7.0), (layout.storages[1][0] + 4, 8.0)):
            file.seek(at)
            file.write(torch.tensor([number]).numpy().tobytes())
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["large"].shape == (count,)
    assert found["large"][-2:].tolist() == [0.0, 7.0]
    assert found["behind"].tolist() == [0.0, 8.0]
    storages = read_torch_file(path).storages
    assert [(one.offset, one.size) for one in storages.values()] == list(layout.storages)
