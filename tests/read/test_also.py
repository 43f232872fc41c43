"""A checkpoint whose files are on several nodes: `--also` reads their directories as one."""

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import unshard
from ranks import (
    as_rank,
    assert_same,
    bits,
    merged,
    rank_path,
    save_ranks,
    shard,
    snapshot,
    some_tensors,
)
from unshard import CheckpointError, CorruptError, IncompleteError, UsageError
from unshard.read.format import files_in

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

WORLD = 4
SOME_BYTES = bits(some_tensors()["model.norm.weight"])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ranks(tmp_path_factory.mktemp("whole") / "ckpt", some_tensors(), WORLD)


def split(source: Path, run: Path, parts: Sequence[Sequence[str]], place: str) -> list[Path]:
    """Copy files onto nodes; return each node's directory of runs."""
    nodes = []
    for number, names in enumerate(parts):
        node = run / f"node{number}"
        (node / place).mkdir(parents=True)
        for name in names:
            shutil.copy(source / name, node / place / name)
        nodes.append(node)
    return nodes


def names_of(*ranks: int) -> list[str]:
    return [rank_path(Path(), WORLD, rank).name for rank in ranks]


ACTOR = "global_step_3/actor"
LEVELS = (".", "global_step_3", ACTOR)
SPLITS = [[(0, 1), (2, 3)], [(3,), (0, 1, 2)], [(0,), (3,), (1, 2)], [(0, 1, 2), (1, 2, 3)]]


@pytest.mark.parametrize("parts", SPLITS)
@pytest.mark.parametrize("level", LEVELS)
def test_rank_files_of_all_nodes_are_merged(
    ranks: Path, tmp_path: Path, parts: list[tuple[int, ...]], level: str
) -> None:
    nodes = split(ranks, tmp_path, [names_of(*part) for part in parts], ACTOR)
    before = snapshot(tmp_path)
    first, *others = (node / level for node in nodes)
    report = unshard.merge(first, tmp_path / "out", also=others, verify="full", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert (report.world_size, report.step) == (WORLD, 3)
    shutil.rmtree(tmp_path / "out")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("levels", [(".", ACTOR), (ACTOR, "."), ("global_step_3", ".")])
def test_the_nodes_may_be_given_at_different_levels(
    ranks: Path, tmp_path: Path, levels: tuple[str, str]
) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 3), names_of(1, 2)], ACTOR)
    unshard.merge(one / levels[0], tmp_path / "out", also=[two / levels[1]], config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_inspect_takes_them_too(ranks: Path, tmp_path: Path) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 3), names_of(1, 2)], ACTOR)
    found = unshard.inspect(one, also=[two])
    assert (len(found.tensors), found.missing) == (3, ())


def test_without_the_other_node_the_error_names_what_is_missing(
    ranks: Path, tmp_path: Path
) -> None:
    one, _ = split(ranks, tmp_path, [names_of(0, 3), names_of(1, 2)], ACTOR)
    with pytest.raises(IncompleteError, match="rank 1, 2 of world size 4"):
        unshard.merge(one, tmp_path / "out")


def test_a_file_that_differs_between_nodes_is_refused(ranks: Path, tmp_path: Path) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 1), names_of(1, 2, 3)], ACTOR)
    other = save_ranks(tmp_path / "other", some_tensors(seed=1), WORLD)
    shutil.copy(rank_path(other, WORLD, 1), two / ACTOR)
    with pytest.raises(CorruptError, match=r"rank_1\.pt: differs from .*rank_1\.pt"):
        unshard.merge(one, tmp_path / "out", also=[two])


def test_another_step_is_refused(ranks: Path, tmp_path: Path) -> None:
    (one,) = split(ranks, tmp_path / "a", [names_of(0, 1)], "run/global_step_3/actor")
    (two,) = split(ranks, tmp_path / "b", [names_of(2, 3)], "run/global_step_4/actor")
    for other in (two / "run" / "global_step_4", two / "run"):
        with pytest.raises((IncompleteError, UsageError), match="step"):
            unshard.merge(one / "run" / "global_step_3", tmp_path / "out", also=[other])
    assert not (tmp_path / "out").exists()


def test_of_several_steps_the_same_is_taken(ranks: Path, tmp_path: Path) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 1), names_of(2, 3)], ACTOR)
    stale = save_ranks(tmp_path / "stale", some_tensors(seed=1), WORLD)
    shutil.copytree(stale, two / "global_step_9" / "actor")
    report = unshard.merge(one, tmp_path / "out", also=[two], config="none")
    assert report.step == 3
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_step_that_is_complete_on_no_node_is_passed_over(ranks: Path, tmp_path: Path) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 1), names_of(2, 3)], ACTOR)
    for node, rank in ((one, 0), (two, 2)):
        (node / "global_step_9" / "actor").mkdir(parents=True)
        shutil.copy(rank_path(ranks, WORLD, rank), node / "global_step_9" / "actor")
    report = unshard.merge(one, tmp_path / "out", also=[two], config="none")
    assert report.step == 3
    assert any("passed over" in warning for warning in report.warnings)


def test_another_format_is_refused(ranks: Path, tmp_path: Path) -> None:
    (one,) = split(ranks, tmp_path, [names_of(0, 1, 2, 3)], "global_step_3")
    other = tmp_path / "b" / "global_step_3"
    other.mkdir(parents=True)
    save_file(some_tensors(), other / "model.safetensors")
    with pytest.raises(UsageError, match=r"also=.*is not a part of"):
        unshard.merge(one, tmp_path / "out", also=[other])


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_an_empty_directory_is_named(ranks: Path, tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=what):
        unshard.merge(ranks, tmp_path / "out", also=[tmp_path / what])


def test_the_same_directory_again_changes_nothing(ranks: Path, tmp_path: Path) -> None:
    unshard.merge(ranks, tmp_path / "out", also=[ranks], config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_the_output_may_not_be_where_another_node_keeps_its_files(
    ranks: Path, tmp_path: Path
) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 1), names_of(2, 3)], ACTOR)
    before = snapshot(tmp_path)
    with pytest.raises(unshard.UnshardError):
        unshard.merge(one, two / ACTOR, also=[two], config="none")
    assert snapshot(tmp_path) == before


def test_companions_may_be_on_any_node(ranks: Path, tmp_path: Path) -> None:
    one, two = split(ranks, tmp_path, [names_of(0, 1), names_of(2, 3)], ACTOR)
    (two / ACTOR / "huggingface").mkdir()
    (two / ACTOR / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    report = unshard.merge(one, tmp_path / "out", also=[two])
    assert report.companions == ("config.json",)


def test_safetensors_shards_may_be_split(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(6, 2)
    for rank in range(3):
        folder = tmp_path / f"node{rank}" / "step-3"
        folder.mkdir(parents=True)
        known = f'{{"w": {{"saved_offsets": [{2 * rank}, 0]}}}}'
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        part = value[2 * rank : 2 * rank + 2].clone()
        save_file({"w": part}, folder / name, metadata={"DCP_SHARDING_INFO": known})
    others = [tmp_path / "node1" / "step-3", tmp_path / "node2"]
    unshard.merge(tmp_path / "node0", tmp_path / "out", also=others, config="none")
    assert_same(merged(tmp_path / "out"), {"w": value})
    with pytest.raises(CheckpointError):
        unshard.merge(tmp_path / "node0", tmp_path / "less", also=[tmp_path / "node2"])


def save_dcp(directory: Path) -> Path:
    """Save with torch, a file per tensor."""
    writer = FileSystemWriter(directory, single_file_per_rank=False, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save({"model": some_tensors()}, storage_writer=writer, no_dist=True)
    return directory


@pytest.mark.parametrize("first", [0, 1])
def test_dcp_may_be_split_with_its_metadata_on_one_node_only(tmp_path: Path, first: int) -> None:
    source = save_dcp(tmp_path / "whole")
    items = sorted(path.name for path in source.glob("*.distcp"))
    assert len(items) == 3
    nodes = split(source, tmp_path, [[".metadata", items[0]], items[1:]], "step-3")
    one, two = nodes[first], nodes[1 - first]
    unshard.merge(one, tmp_path / "out", also=[two / "step-3"], verify="full", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    with pytest.raises(IncompleteError, match=r"also="):
        unshard.merge(one, tmp_path / "less")


def test_dcp_items_that_differ_between_nodes_are_refused(tmp_path: Path) -> None:
    source = save_dcp(tmp_path / "whole")
    items = sorted(path.name for path in source.glob("*.distcp"))
    one, two = split(source, tmp_path, [[".metadata", *items[:2]], items[1:]], "step-3")
    path = two / "step-3" / items[1]
    data = path.read_bytes()
    assert data.count(SOME_BYTES) == 1
    path.write_bytes(data.replace(SOME_BYTES, bytes(reversed(SOME_BYTES))))
    with pytest.raises(CorruptError, match=f"{items[1]}: differs from"):
        unshard.merge(one, tmp_path / "out", also=[two])


def test_dcp_without_collectives_has_its_metadata_on_every_node(tmp_path: Path) -> None:
    for rank in range(WORLD):
        node = tmp_path / f"node{rank // 2}" / "step-3"
        with as_rank(rank, WORLD):
            mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
            state = {name: shard(value, mesh, None) for name, value in some_tensors().items()}
            writer = FileSystemWriter(node, sync_files=False, overwrite=True)
            save({"model": state}, storage_writer=writer, use_collectives=False)
    one, two = (tmp_path / f"node{number}" for number in range(2))
    assert {path.name for path in (two / "step-3").glob("*.metadata")} == {
        "__2.metadata",
        "__3.metadata",
    }
    unshard.merge(one, tmp_path / "out", also=[two], verify="full", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    with pytest.raises(CheckpointError):
        unshard.merge(one, tmp_path / "less")


class TestFilesIn:
    def test_files_of_all_directories_are_given_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        for path in ("a/2.x", "b/1.x", "a/3.y", "b/2.x"):
            (tmp_path / path).write_text("same")
        found = files_in([tmp_path / "a", tmp_path / "b"], lambda name: name.endswith(".x"))
        assert found == [tmp_path / "b/1.x", tmp_path / "a/2.x"]

    def test_what_has_such_a_name_and_is_not_a_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "0.x").mkdir()
        with pytest.raises(IncompleteError, match=r"0\.x: not a regular file"):
            files_in([tmp_path], bool)

    def test_of_equal_files_the_first_is_given(self, tmp_path: Path) -> None:
        for folder in ("b", "a"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "x").write_text("same")
        assert files_in([tmp_path / "b", tmp_path / "a"], bool) == [tmp_path / "b/x"]

    def test_of_different_files_none_is_given(self, tmp_path: Path) -> None:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "x").write_text(folder)
        with pytest.raises(CorruptError, match=r"b/x: differs from .*a/x"):
            files_in([tmp_path / "a", tmp_path / "b"], bool)

    def test_a_link_to_the_other_is_the_same_file(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x").write_text("x")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        assert files_in([tmp_path / "a", tmp_path / "b"], bool) == [tmp_path / "a/x"]
