"""Rank files and DCP directories of nine torch versions, bit for bit. See tests/data/README.md."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import unshard
from unshard.containers.safetensors_file import read_safetensors

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

DATA = Path(__file__).parent.parent / "data"
ARCHIVES = (DATA / "rank_files.tar.xz", DATA / "dcp.tar.xz")
VERSIONS = ("2.2", "2.4", "2.5", "2.6", "2.8", "2.9", "2.10", "2.12", "2.15")


def folders(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return sorted({str(Path(name).parent) for name in opened.getnames()})


CASES = [folder for folder in folders(ARCHIVES[0]) if folder.count("/") == 1]
DCP_CASES = [folder for folder in folders(ARCHIVES[1]) if folder.count("/") == 2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("versions")
    for archive in ARCHIVES:
        with tarfile.open(archive) as opened:
            opened.extractall(directory, filter="data")
    return directory


def test_every_version_is_there() -> None:
    for found, count in ((CASES, 63), (DCP_CASES, 29)):
        assert {case.split("/")[0] for case in found} == {f"torch-{one}" for one in VERSIONS}
        assert len(found) == count


@pytest.mark.parametrize("case", [*CASES, *DCP_CASES])
def test_a_merge_gives_the_truth_bit_for_bit(unpacked: Path, tmp_path: Path, case: str) -> None:
    unshard.merge(unpacked / case, tmp_path / "out", verify="full", config="none")
    path = tmp_path / "out" / "model.safetensors"
    file = read_safetensors(path)
    data = path.read_bytes()[file.data_start :]
    truth_dir = unpacked / "/".join(case.split("/")[:2])
    shapes = json.loads((truth_dir / "truth.json").read_text())
    with np.load(truth_dir / "truth.npz") as truth:
        assert {entry.name for entry in file.entries} == set(shapes)
        for entry in file.entries:
            stated = {"dtype": entry.dtype.name, "shape": list(entry.shape)}
            assert stated == shapes[entry.name], entry.name
            assert data[entry.begin : entry.end] == truth[entry.name].tobytes(), entry.name


@pytest.mark.parametrize("case", [case for case in DCP_CASES if "optimizer" in case])
def test_what_is_not_a_model_is_listed(unpacked: Path, case: str) -> None:
    skipped = unshard.inspect(unpacked / case).skipped
    assert any(one.fqn.startswith("optimizer") for one in skipped)
