"""Reading many rank files in several processes gives what one process gives."""

import gc
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import unshard
import unshard.read.rank_files.workers
from ranks import assert_same, merged, rank_path, save_ranks, some_tensors
from unshard import CorruptError, IncompleteError, NotMergeableError
from unshard.read.rank_files.workers import read_rank_files
from unshard.read.torch_save import alike
from unshard.read.torch_save.table import RankTable

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture(autouse=True)
def processes_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unshard.read.rank_files.workers, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(alike, "_KEPT", 0)


def files(directory: Path, world: int) -> list[tuple[int, Path]]:
    return [(rank, rank_path(directory, world, rank)) for rank in range(world)]


def tables(directory: Path, world: int, processes: int) -> list[RankTable]:
    found = read_rank_files(files(directory, world), allowed=frozenset(), processes=processes)
    return list(found)


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """Every placement, odd strides, a value that is not a tensor, one that cannot be merged."""
    base = torch.rand(6, 4)
    plain = {
        "transposed": base.t(),
        "scalar": torch.tensor(3),
        "meta": torch.empty(2, device="meta"),
    }
    return save_ranks(
        tmp_path / "ckpt",
        some_tensors(),
        4,
        mesh_shape=(2, 2),
        mesh_names=("dp", "tp"),
        placements=[_StridedShard(0, split_factor=2), Shard(0)],
        plain=[plain] * 4,
        extra={"epoch": 3},
    )


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_processes_yield_the_same_tables_in_the_same_order(varied: Path, processes: int) -> None:
    alone = tables(varied, 4, 1)
    together = tables(varied, 4, processes)
    assert [table.rank for table in together] == [0, 1, 2, 3]
    for one, other in zip(alone, together, strict=True):
        assert one.to_bytes() == other.to_bytes()
        assert one.forms() == other.forms()
        assert [str(p) for p in one.problems] == [str(p) for p in other.problems]
        assert one.problems
        assert one.cut_table == other.cut_table
        assert any(box.strides for cut in one.cut_table for box in cut.boxes)
        assert one.skipped == {"epoch": "not a tensor: int"}


def test_files_that_are_alike_are_read_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_ranks(tmp_path / "ckpt", some_tensors(), 8)
    through_processes = [table.to_bytes() for table in tables(directory, 8, 4)]
    monkeypatch.setattr(alike, "_KEPT", 2)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert [table.to_bytes() for table in tables(directory, 8, 4)] == through_processes


def test_processes_read_what_follows_files_that_are_not_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ckpt").mkdir()
    for rank in range(6):
        tensors = {f"layers.{at}": torch.ones(6) for at in range(rank, 8)}
        one = save_ranks(tmp_path / f"{rank}", tensors, 6)
        rank_path(one, 6, rank).rename(rank_path(tmp_path / "ckpt", 6, rank))
    monkeypatch.setattr(alike, "_KEPT", 2)
    alone = [table.to_bytes() for table in tables(tmp_path / "ckpt", 6, 1)]
    started = []
    real = subprocess.Popen

    def noted(*arguments: object, **options: object) -> object:
        started.append(arguments)
        return real(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", noted)
    assert [table.to_bytes() for table in tables(tmp_path / "ckpt", 6, 8)] == alone
    assert len(started) == 3  # one for each of those that follow the first three


def test_a_merge_through_processes_is_exact(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 7, placements=[Replicate()])
    save_ranks(tmp_path / "b", some_tensors(), 7)
    for name in ("ckpt", "b"):
        unshard.merge(tmp_path / name, tmp_path / f"{name}-out", workers=3)
        assert_same(merged(tmp_path / f"{name}-out"), some_tensors())


@pytest.mark.parametrize(
    ("data", "kind"), [(b"", IncompleteError), (b"garbage" * 100, CorruptError)]
)
def test_an_error_of_a_worker_is_the_error_of_the_merge(
    tmp_path: Path, data: bytes, kind: type[Exception]
) -> None:
    directory = save_ranks(tmp_path / "ckpt", some_tensors(), 5)
    rank_path(directory, 5, 3).write_bytes(data)
    with pytest.raises(kind, match=r"rank_3\.pt"):
        unshard.merge(directory, tmp_path / "out", workers=2)
    gc.collect()  # a pipe left open would warn here


def test_a_problem_of_a_tensor_survives_the_way(tmp_path: Path) -> None:
    directory = save_ranks(
        tmp_path / "ckpt", {}, 3, plain=[{"w": torch.empty(2, device="meta")}] * 3
    )
    with pytest.raises(NotMergeableError, match=r"\(3 problems\)[\s\S]*tensor w: rank 2"):
        unshard.merge(directory, tmp_path / "out", workers=2)


@pytest.mark.parametrize("early", [False, True], ids=["at any time", "before it has its files"])
def test_a_worker_that_dies_is_a_file_that_is_not_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, early: bool
) -> None:
    directory = save_ranks(tmp_path / "ckpt", some_tensors(), 3)
    real = subprocess.Popen

    def dying(command: list[str], **options: object) -> object:
        child = real([command[0], "-c", "import os; os.abort()"], **options)  # type: ignore[call-overload]
        if early:
            child.wait()
        return child

    monkeypatch.setattr(subprocess, "Popen", dying)
    with pytest.raises(CorruptError, match=r"rank_1\.pt: the process that read it died"):
        unshard.merge(directory, tmp_path / "out", workers=2)
