"""Rank files of ten torch versions, read bit for bit. See tests/data/README.md."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import unshard
from unshard import NotMergeableError
from unshard.containers.safetensors_file import read_safetensors

ARCHIVE = Path(__file__).parent / "data" / "rank_files.tar.xz"
VERSIONS = ("2.2", "2.4", "2.5", "2.6", "2.8", "2.9", "2.10", "2.12", "2.15")


def cases() -> list[str]:
    with tarfile.open(ARCHIVE) as archive:
        folders = {str(Path(name).parent) for name in archive.getnames()}
    return sorted(folder for folder in folders if folder.count("/") == 1)


CASES = cases()


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("versions")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def test_every_version_is_there() -> None:
    assert {case.split("/")[0] for case in CASES} == {f"torch-{version}" for version in VERSIONS}
    assert len(CASES) == 63


@pytest.mark.parametrize("case", [case for case in CASES if "fsdp1_sharded" not in case])
def test_a_merge_gives_the_truth_bit_for_bit(unpacked: Path, tmp_path: Path, case: str) -> None:
    unshard.merge(unpacked / case, tmp_path / "out", verify="full")
    path = tmp_path / "out" / "model.safetensors"
    file = read_safetensors(path)
    data = path.read_bytes()[file.data_start :]
    shapes = json.loads((unpacked / case / "truth.json").read_text())
    with np.load(unpacked / case / "truth.npz") as truth:
        assert {entry.name for entry in file.entries} == set(shapes)
        for entry in file.entries:
            stated = {"dtype": entry.dtype.name, "shape": list(entry.shape)}
            assert stated == shapes[entry.name], entry.name
            assert data[entry.begin : entry.end] == truth[entry.name].tobytes(), entry.name


@pytest.mark.parametrize("case", [case for case in CASES if "fsdp1_sharded" in case])
def test_sharded_tensors_are_refused_by_name(unpacked: Path, tmp_path: Path, case: str) -> None:
    with pytest.raises(NotMergeableError, match="a ShardedTensor"):
        unshard.merge(unpacked / case, tmp_path / "out")
    assert not (tmp_path / "out").exists()
