"""Rank files: which are read, and what is refused with which words."""

import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, snapshot, some_tensors
from unshard import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnsafeError,
    UnshardError,
)

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", some_tensors(), 4)


def refused(
    checkpoint: Path, kind: type[UnshardError], *words: str, assume_dim0: bool = False
) -> str:
    """Merge, expect this refusal; the source is untouched and no output is left."""
    before = snapshot(checkpoint)
    output = checkpoint.parent / "out"
    with pytest.raises(kind) as error:
        unshard.merge(checkpoint, output, assume_dim0=assume_dim0)
    assert type(error.value) is kind
    for word in words:
        assert word in str(error.value)
    assert list(checkpoint.parent.iterdir()) == [checkpoint]
    assert snapshot(checkpoint) == before
    return str(error.value)


def replace_pickle(path: Path, data: bytes) -> None:
    """Write a rank file with this pickle and no storages."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")


def test_a_missing_rank_is_named_with_its_file(checkpoint: Path) -> None:
    rank_path(checkpoint, 4, 2).unlink()
    refused(checkpoint, IncompleteError, "Missing checkpoint for rank 2", "rank_2.pt")


@pytest.mark.parametrize("size", [0, 100, 1000, -1])
def test_an_empty_or_truncated_rank_is_named(checkpoint: Path, size: int) -> None:
    path = rank_path(checkpoint, 4, 1)
    data = path.read_bytes()
    path.write_bytes(data[:size])
    refused(checkpoint, IncompleteError, "rank_1.pt", "empty" if size == 0 else "truncated")


def test_a_missing_replica_is_not_an_error(tmp_path: Path) -> None:
    directory = save_ranks(
        tmp_path / "ckpt", some_tensors(), 4, mesh_shape=(2, 2), mesh_names=("ddp", "fsdp")
    )
    for rank in (0, 3):
        rank_path(directory, 4, rank).unlink()
    report = unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert any(
        "the file of rank 0, 3 is missing; other ranks" in warning for warning in report.warnings
    )


def test_a_missing_rank_and_its_replica_are_an_error(tmp_path: Path) -> None:
    directory = save_ranks(
        tmp_path / "ckpt", some_tensors(), 4, mesh_shape=(2, 2), mesh_names=("ddp", "fsdp")
    )
    for rank in (1, 3):
        rank_path(directory, 4, rank).unlink()
    refused(directory, IncompleteError, "Missing checkpoint for rank 1, 3")


def test_stale_files_of_another_world_size_are_left_out(checkpoint: Path, tmp_path: Path) -> None:
    stale = save_ranks(tmp_path / "stale", some_tensors(seed=1), 2)
    rank_path(stale, 2, 1).rename(rank_path(checkpoint, 2, 1))
    report = unshard.merge(checkpoint, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert any("1 stale rank file of world size 2" in warning for warning in report.warnings)


@pytest.mark.parametrize("world", [2, 4])
def test_of_two_complete_sets_fsdp_config_decides(tmp_path: Path, world: int) -> None:
    directory = save_ranks(tmp_path / "ckpt", some_tensors(4), 4)
    save_ranks(directory, some_tensors(2), 2)
    (directory / "fsdp_config.json").write_text(json.dumps({"world_size": world}))
    unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors(world))


def test_of_two_complete_sets_none_is_guessed(checkpoint: Path) -> None:
    save_ranks(checkpoint, some_tensors(), 2)
    refused(checkpoint, NotMergeableError, "several world sizes", "2 of 2 ranks; 4 of 4 ranks")


def test_the_world_size_is_what_the_names_say_not_a_count(checkpoint: Path) -> None:
    for rank in (1, 2, 3):
        rank_path(checkpoint, 4, rank).unlink()
    refused(checkpoint, IncompleteError, "rank 1, 2, 3 of world size 4")


def test_ranks_that_disagree_on_a_shape_are_both_quoted(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "ckpt", {"w": torch.rand(8, 2)}, 2)
    save_ranks(tmp_path / "b", {"w": torch.rand(10, 2)}, 2)
    rank_path(tmp_path / "b", 2, 1).replace(rank_path(directory, 2, 1))
    for path in (tmp_path / "b").iterdir():
        path.unlink()
    (tmp_path / "b").rmdir()
    refused(directory, CorruptError, "tensor w: rank 1", "[10, 2]", "rank 0 has", "[8, 2]")


def test_ranks_that_disagree_on_a_dtype_are_both_quoted(tmp_path: Path) -> None:
    directory = save_ranks(
        tmp_path / "ckpt", {}, 2, plain=[{"w": torch.ones(2)}, {"w": torch.ones(2).half()}]
    )
    refused(directory, CorruptError, "tensor w: rank 1", "float16", "rank 0 has", "float32")


def test_a_rank_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}]
    directory = save_ranks(tmp_path / "ckpt", {}, 2, plain=parts)
    refused(directory, CorruptError, "rank_1.pt: lacks 1 tensor that other ranks have", "no b")


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    parts = [{"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}]
    directory = save_ranks(tmp_path / "ckpt", {}, 2, plain=parts)
    refused(directory, NotMergeableError, "(2 problems)", "tensor a", "and 1 more tensor: b")


def test_a_fault_of_many_tensors_is_reported_once(tmp_path: Path) -> None:
    """The sizes differ from tensor to tensor, the fault does not."""
    names = [f"layers.{number}.w" for number in range(27)]
    first = {name: torch.ones(number + 1) for number, name in enumerate(names)}
    parts = [first, {name: value.half() for name, value in first.items()}]
    directory = save_ranks(tmp_path / "ckpt", {}, 2, plain=parts)
    message = refused(
        directory, NotMergeableError, "(27 problems)", "tensor layers.0.w: rank 1", "float16"
    )
    assert message.count("rank 0 has") == 1
    assert "and 26 more tensors: layers.1.w, layers.2.w, layers.3.w, …" in message


def test_a_renamed_rank_file_is_noticed(checkpoint: Path) -> None:
    first, second = rank_path(checkpoint, 4, 0), rank_path(checkpoint, 4, 1)
    spare = checkpoint / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    refused(checkpoint, NotMergeableError, "mesh has rank 1, the file's name rank 0")


@pytest.mark.parametrize("world", [3, 4])
def test_shards_of_a_later_dimension_are_placed(tmp_path: Path, world: int) -> None:
    tensors = {"w": torch.rand(5, 12, 3)}
    directory = save_ranks(tmp_path / "ckpt", tensors, world, placements=[Shard(1)])
    unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), tensors)


def test_replicated_tensors_are_taken_once(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "ckpt", some_tensors(), 3, placements=[Replicate()])
    unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, ("touch /tmp/unshard-was-here",)


def test_a_pickle_that_runs_commands_is_refused_and_runs_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    mark = Path("/tmp/unshard-was-here")  # noqa: S108 (the attack's own)
    path = rank_path(checkpoint, 4, 3)
    replace_pickle(path, pickle.dumps({"w": Evil()}, protocol=2))
    message = refused(checkpoint, UnsafeError, "rank_3.pt", "posix.system")
    assert "nothing was run" in message
    assert not mark.exists()
    assert tmp_path.exists()


def test_a_broken_pickle_is_named(checkpoint: Path) -> None:
    replace_pickle(rank_path(checkpoint, 4, 0), b"\x80\x02}q\x00(X")
    refused(checkpoint, CorruptError, "rank_0.pt", "pickle is not valid")


def test_something_else_than_a_state_dict_is_named(checkpoint: Path) -> None:
    replace_pickle(rank_path(checkpoint, 4, 0), pickle.dumps([1, 2], protocol=2))
    refused(checkpoint, NotMergeableError, "rank_0.pt: not a state dict", "list")


class Unknown:
    def __init__(self, value: object) -> None:
        self.value = value


def test_values_that_are_not_tensors_are_skipped_and_reported(tmp_path: Path) -> None:
    directory = save_ranks(
        tmp_path / "ckpt", some_tensors(), 2, extra={"extra": Unknown(3), "epoch": 7, "none": None}
    )
    report = unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert {item.fqn: item.reason for item in report.skipped} == {
        "extra": "not a tensor: test_rank_files.Unknown",
        "epoch": "not a tensor: int",
        "none": "not a tensor: NoneType",
    }


class Special(torch.Tensor):
    """A tensor subclass that only its author knows."""


def special() -> dict[str, torch.Tensor]:
    tensor = torch.rand(3).as_subclass(Special)
    tensor.note = 1  # type: ignore[attr-defined]
    return {"w": tensor}


def test_an_unknown_tensor_subclass_is_refused_unless_vouched_for(tmp_path: Path) -> None:
    plain = special()
    directory = save_ranks(tmp_path / "ckpt", {}, 1, plain=[plain])
    refused(directory, NotMergeableError, "tensor w", "allow_globals=['test_rank_files.Special']")
    unshard.merge(
        directory, tmp_path / "out", allow_globals=["test_rank_files.Special"], config="none"
    )
    assert_same(merged(tmp_path / "out"), {"w": plain["w"].as_subclass(torch.Tensor)})


def test_a_plain_tensor_that_carries_attributes_is_read(tmp_path: Path) -> None:
    tensor = torch.rand(3)
    tensor._has_been_cloned = True  # type: ignore[attr-defined]
    directory = save_ranks(tmp_path / "ckpt", {}, 1, plain=[{"w": tensor}])
    unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), {"w": tensor})


def test_parameters_views_and_shared_storages_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    plain = {
        "parameter": torch.nn.Parameter(base[3:9].reshape(2, 3)),
        "view": base[10:20:2],
        "transposed": base.reshape(4, 6).t(),
        "expanded": base[:1].expand(5),
    }
    directory = save_ranks(tmp_path / "ckpt", {}, 1, plain=[plain])
    unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), {name: t.detach() for name, t in plain.items()})


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.rand(2, 2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta device"),
        (torch.tensor([1 + 2j]).conj(), "conjugation"),
        (torch.tensor([1 + 2j]).conj().imag, "negation"),
    ],
    ids=["sparse", "meta", "conj", "neg"],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused(
    tmp_path: Path, tensor: torch.Tensor, words: str
) -> None:
    directory = save_ranks(tmp_path / "ckpt", {}, 1, plain=[{"w": tensor}])
    refused(directory, NotMergeableError, "tensor w: rank 0", words)


def test_a_storage_shorter_than_its_pickle_says_is_corrupt(checkpoint: Path) -> None:
    path = rank_path(checkpoint, 4, 0)
    with zipfile.ZipFile(path) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, data in records.items():
            file.writestr(name, data[: len(data) // 2] if "/data/0" in name else data)
    refused(checkpoint, CorruptError, "rank 0", "its storage 0 has", "its pickle needs")


def test_a_world_size_that_fsdp_config_states_but_no_file_has_is_a_conflict(
    checkpoint: Path,
) -> None:
    (checkpoint / "fsdp_config.json").write_text(json.dumps({"world_size": 8}))
    refused(checkpoint, IncompleteError, "the world size in fsdp_config.json", "world size 4")
