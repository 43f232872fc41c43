"""Of every trainer's tree, each level means the same checkpoint, step, role and writer."""

from pathlib import Path

import pytest

import unshard
from ranks import assert_same, some_tensors
from trainers import TRAINERS, plant


def levels(run: Path, weights: Path, step_dir: Path, files: list[Path]) -> list[Path]:
    """Return the run, the step, what is between it and the weights, and the weight files."""
    between = [one for one in (weights, *weights.parents) if one.is_relative_to(step_dir)]
    return [run, step_dir.parent, *between, *files] if run != step_dir else [run, *files]


@pytest.mark.filterwarnings("ignore:.*the weights were taken from:unshard.UnshardWarning")
@pytest.mark.parametrize("name", TRAINERS)
def test_every_level_of_a_trainers_tree_means_the_same_checkpoint(
    tmp_path: Path, name: str
) -> None:
    trainer, tensors = TRAINERS[name], some_tensors()
    run = tmp_path / "my-run"
    weights, step_dir, files = plant(run, name, tensors)
    step = None if trainer.step < 0 else trainer.step
    for level in levels(run, weights, step_dir, files):
        found = unshard.inspect(level)
        facts = (found.step, found.role, found.writer, found.weights)
        assert facts == (step, trainer.role, trainer.writer, "model"), level
        assert_same(unshard.load_state_dict(level), tensors)
