"""Buffers that differ between ranks, as real training leaves them: rank 0's are the model's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unshard
from oracle.writers import buffers
from oracle.writers.saving import truth_file
from oracle.writers.workers import WorkerPool
from ranks import assert_same, merged, rank_path
from unshard import NotMergeableError
from unshard.keywords import ReadKeywords

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

Scenario = Callable[[int, int, Path], None]
Run = Callable[[Scenario, int], Path]
OPTIMIZER = "optim_world_size_*"


@pytest.fixture
def run(worker_pool: WorkerPool, tmp_path: Path) -> Run:
    """Return a function that writes a checkpoint and returns its directory."""

    def write(scenario: Scenario, world: int) -> Path:
        directory = tmp_path / "run"
        directory.mkdir()
        worker_pool.run(scenario, world, directory)
        return directory

    return write


def truth(directory: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(truth_file(directory))
    return loaded


def differing(directory: Path, world: int) -> set[str]:
    """The plain tensors of which the files have different values."""
    first, *others = (torch.load(rank_path(directory, world, rank)) for rank in range(world))
    plain = [name for name, one in first.items() if type(one) is torch.Tensor]
    return {n for n in plain for one in others if not torch.equal(first[n], one[n])}


BUFFERS: dict[Scenario, str] = {
    buffers.statistics: """
        norm.running_mean bare.running_var fake.scale fake.zero_point histogram.histogram
        histogram.max_val fake.activation_post_process.min_val codebook.embed codebook.embed_avg
        codebook.cluster_size codebook.initted counted.steps counted.seen counted.mean_norm
        counted.input_amax old.weight_u old.weight_v new.parametrizations.weight.0._u
    """,
    buffers.fsdp1_statistics: "1.running_mean 1.running_var",
}


@pytest.mark.parametrize("options", [{}, {"assume_dim0": True}])
@pytest.mark.parametrize(("scenario", "world"), [*zip(BUFFERS, (3, 2), strict=True)])
def test_the_first_ranks_buffers_are_taken_as_torch_does(
    run: Run, tmp_path: Path, scenario: Scenario, world: int, options: ReadKeywords
) -> None:
    directory = run(scenario, world)
    expected = differing(directory, world)
    assert expected >= {*BUFFERS[scenario].split()}
    report = unshard.merge(directory, tmp_path / "out", config="none", **options)
    assert_same(merged(tmp_path / "out"), truth(directory))
    (note,) = (one for one in report.warnings if "with other values on other ranks" in one)
    assert {*note.rpartition(": ")[2].split(", ")} == expected


@pytest.mark.parametrize("scenario", [buffers.ignored, buffers.ignored_named])
def test_parameters_that_the_optimizer_lists_are_no_buffers(
    run: Run, tmp_path: Path, scenario: Scenario
) -> None:
    directory = run(scenario, 2)
    parameters = {"logit_scale", "running_gain"}
    assert differing(directory, 2) == {*parameters, "norm.running_mean", "norm.running_var"}
    with pytest.raises(NotMergeableError) as error:
        unshard.merge(directory, tmp_path / "out")
    assert all(f"tensor {name}: a plain tensor" in str(error.value) for name in parameters)
    assert "running_mean" not in str(error.value)
    unshard.merge(
        directory, tmp_path / "out", exclude="logit_scale", assume_dim0=True, config="none"
    )
    made, whole = merged(tmp_path / "out"), truth(directory)
    assert torch.equal(made["running_gain"][:4], whole["running_gain"])
    assert made["running_gain"].shape == (8,)
    for name in ("norm.running_mean", "norm.running_var", "linear.weight"):
        assert torch.equal(made[name], whole[name])


def test_scalars_are_buffers_where_nothing_lists_them(run: Run, tmp_path: Path) -> None:
    directory = run(buffers.ignored, 2)
    for path in directory.glob(OPTIMIZER):
        path.unlink()
    report = unshard.merge(directory, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), truth(directory))
    assert any("logit_scale" in one for one in report.warnings)


def test_every_command_takes_the_same_buffers(run: Run, tmp_path: Path) -> None:
    directory = run(buffers.statistics, 2)
    whole = truth(directory)
    assert_same(unshard.load_state_dict(directory), whole)
    unshard.merge(directory, tmp_path / "out", config="none")
    assert unshard.verify(tmp_path / "out", directory).equal
    unshard.reshard(directory, tmp_path / "again", world_size=3)
    unshard.merge(tmp_path / "again", tmp_path / "out-again", config="none")
    assert_same(merged(tmp_path / "out-again"), whole)
