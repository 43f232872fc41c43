"""Experts that every group of ranks saved under the same names, as verl's VeOmni engine does.

The files are real: in each expert group the local experts are a DTensor on a mesh of that group's
ranks, whose shape says nothing of the other groups.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import unshard
from ranks import as_rank, assert_same, merged, rank_path, shard, some_tensors
from unshard import NotMergeableError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

INTERLEAVED = ((0, 2), (1, 3))
BLOCKS = ((0, 1), (2, 3))
EXPERTS = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")
Groups = Sequence[Sequence[int]]


def save_experts(
    directory: Path,
    experts: dict[str, torch.Tensor],
    groups: Groups,
    *,
    whole: bool = False,
    replicas: int = 1,
) -> Path:
    """Save tensors of 4 ranks: `experts` in equal parts of dimension 0 by group, others by all.

    Within a group, a part is a DTensor of its own shape, sharded along dimension 1 on the mesh of
    the group. `whole`: every group holds all of a tensor, which is an honest copy. `replicas`: of
    the other tensors (HSDP).
    """
    directory.mkdir(parents=True)
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh(
                "cpu", (replicas, 4 // replicas), mesh_dim_names=("ddp", "fsdp")
            )
            number = next(n for n, ranks in enumerate(groups) if rank in ranks)
            inner = DeviceMesh(
                "cpu", list(groups[number]), mesh_dim_names=("ep_fsdp",), _init_backend=False
            )
            state = {name: shard(value, mesh, None) for name, value in some_tensors().items()}
            for name, value in experts.items():
                part = value if whole else value.chunk(len(groups))[number]
                state[name] = on_submesh(part, inner, groups[number].index(rank))
            torch.save(state, rank_path(directory, 4, rank))
    return directory


def on_submesh(value: torch.Tensor, mesh: DeviceMesh, at: int) -> DTensor:
    """Return the DTensor that FSDP makes of a part along dimension 1, here at place `at`."""
    pieces = list(value.chunk(mesh.size(), dim=1))
    pieces += [value[:, :0]] * (mesh.size() - len(pieces))
    return DTensor.from_local(
        pieces[at].contiguous().clone(),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def truth(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EXPERTS[0]: torch.randn(4, 6, 5, generator=generator),
        EXPERTS[1]: torch.randn(4, 5, 3, generator=generator).bfloat16(),
    }


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
    report = unshard.merge(checkpoint, tmp_path / "out", ep_size=2, verify="full")
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
    unshard.merge(checkpoint, tmp_path / "out", verify="full")
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
    unshard.merge(checkpoint, tmp_path / "out", ep_size=2)
    assert_same(merged(tmp_path / "out"), {**some_tensors(), EXPERTS[0]: value})


def test_equal_experts_among_different_ones_are_joined_too(tmp_path: Path) -> None:
    """Zeros (a bias, a LoRA B) are equal in all groups, and parts all the same."""
    experts = {**truth(), "layers.0.mlp.experts.bias": torch.zeros(4, 6)}
    checkpoint = save_experts(tmp_path / "ckpt", experts, INTERLEAVED)
    unshard.merge(checkpoint, tmp_path / "out", ep_size=2)
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
    unshard.merge(checkpoint, tmp_path / "whole", ep_size=2)
    assert_same(merged(tmp_path / "whole"), {**some_tensors(), **truth()})
    rank_path(checkpoint, 4, 2).unlink()
    with pytest.raises(unshard.CheckpointError):
        unshard.merge(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
