"""Experts that every group of ranks saved under the same names (see `expert_copies.py`)."""

from pathlib import Path

import pytest
import torch

import unshard
from expert_copies import BLOCKS, EXPERTS, INTERLEAVED, Groups, save_experts, truth
from ranks import assert_same, merged, rank_path, some_tensors
from unshard import NotMergeableError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture(params=[INTERLEAVED, BLOCKS], ids=["groups 02 13", "groups 01 23"])
def groups(request: pytest.FixtureRequest) -> Groups:
    found: Groups = request.param
    return found


def test_without_ep_size_they_are_refused_and_it_is_named(tmp_path: Path, groups: Groups) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), groups)
    with pytest.raises(NotMergeableError, match="ep_size=2") as caught:
        unshard.merge(checkpoint, tmp_path / "out")
    assert "stores 2 tensors 2 times" in caught.value.subject
    assert EXPERTS[0] in caught.value.subject
    assert not (tmp_path / "out").exists()


def test_with_ep_size_the_groups_are_joined(tmp_path: Path, groups: Groups) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), groups)
    report = unshard.merge(checkpoint, tmp_path / "out", ep_size=2, verify="full", config="none")
    assert_same(merged(tmp_path / "out"), {**some_tensors(), **truth()})
    (said,) = [one for one in report.warnings if "ep_size=2" in one]
    assert all(name in said for name in EXPERTS)


@pytest.mark.parametrize("ep_size", [3, 4])
def test_another_ep_size_is_refused(tmp_path: Path, groups: Groups, ep_size: int) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), groups)
    with pytest.raises(NotMergeableError, match=rf"ep_size={ep_size} does not fit[\s\S]*2 times"):
        unshard.merge(checkpoint, tmp_path / "out", ep_size=ep_size)


@pytest.mark.parametrize("ep_size", [-1, 0, 1])
def test_an_ep_size_that_is_none_is_refused(tmp_path: Path, ep_size: int) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), BLOCKS)
    with pytest.raises(UsageError, match="ep_size="):
        unshard.merge(checkpoint, tmp_path / "out", ep_size=ep_size)


def test_ep_size_where_no_experts_differ_is_refused(tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", {}, BLOCKS)
    with pytest.raises(UsageError, match=r"ep_size=2: .*has no experts"):
        unshard.merge(checkpoint, tmp_path / "out", ep_size=2)


def test_honest_copies_on_submeshes_are_merged_as_one(tmp_path: Path, groups: Groups) -> None:
    """Parameters outside the plan of expert parallelism: every group holds all of them."""
    checkpoint = save_experts(tmp_path / "ckpt", truth(), groups, whole=True)
    unshard.merge(checkpoint, tmp_path / "out", verify="full", config="none")
    assert_same(merged(tmp_path / "out"), {**some_tensors(), **truth()})


@pytest.mark.parametrize("at", [0, 17, 29])
def test_a_single_element_that_differs_shows_that_they_are_experts(tmp_path: Path, at: int) -> None:
    """Experts that were all initialised alike, and trained a little."""
    base = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(3))
    value = base.repeat(2, 1, 1)
    value[1].view(-1)[at] += 1
    checkpoint = save_experts(tmp_path / "ckpt", {EXPERTS[0]: value}, BLOCKS)
    with pytest.raises(NotMergeableError, match="ep_size=2"):
        unshard.merge(checkpoint, tmp_path / "out")
    unshard.merge(checkpoint, tmp_path / "out", ep_size=2, config="none")
    assert_same(merged(tmp_path / "out"), {**some_tensors(), EXPERTS[0]: value})


def test_equal_experts_among_different_ones_are_joined_too(tmp_path: Path) -> None:
    """Zeros (a bias, a LoRA B) are equal in all groups, and parts all the same."""
    experts = {**truth(), "layers.0.mlp.experts.bias": torch.zeros(4, 6)}
    checkpoint = save_experts(tmp_path / "ckpt", experts, INTERLEAVED)
    unshard.merge(checkpoint, tmp_path / "out", ep_size=2, config="none")
    assert_same(merged(tmp_path / "out"), {**some_tensors(), **experts})


def test_inspect_refuses_and_joins_as_merge_does(tmp_path: Path) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), BLOCKS)
    with pytest.raises(NotMergeableError, match="ep_size=2"):
        unshard.inspect(checkpoint)
    found = {one.name: one.shape for one in unshard.inspect(checkpoint, ep_size=2).tensors}
    assert found[EXPERTS[0]] == (4, 6, 5)


def test_a_rank_of_a_group_that_is_missing_is_noticed(tmp_path: Path, groups: Groups) -> None:
    checkpoint = save_experts(tmp_path / "ckpt", truth(), groups)
    rank_path(checkpoint, 4, 2).unlink()
    for ep_size in (None, 2):
        with pytest.raises(unshard.CheckpointError):
            unshard.merge(checkpoint, tmp_path / "out", ep_size=ep_size)
    assert not (tmp_path / "out").exists()


def test_a_missing_rank_does_not_hide_that_groups_differ(tmp_path: Path) -> None:
    """The other tensors are replicated, so that nothing else has a hole."""
    checkpoint = save_experts(tmp_path / "ckpt", truth(), INTERLEAVED, replicas=2)
    unshard.merge(checkpoint, tmp_path / "whole", ep_size=2, config="none")
    assert_same(merged(tmp_path / "whole"), {**some_tensors(), **truth()})
    rank_path(checkpoint, 4, 2).unlink()
    with pytest.raises(unshard.CheckpointError):
        unshard.merge(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
