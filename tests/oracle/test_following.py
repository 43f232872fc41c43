"""`unshard merge --follow` next to real trainings that keep one checkpoint of many."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import unshard
from following import STATE, Follower, assert_whole, following, outputs_in, weights
from oracle.writers.rotating import (
    STEPS,
    WAITED_FOR,
    Copies,
    lmms_engine_rotating,
    trainer_rotating,
)
from oracle.writers.scenarios import Scenario
from oracle.writers.workers import WorkerPool
from ranks import snapshot
from tiny_models import tiny_model, tiny_tokenizer

VERL = os.environ.get("UNSHARD_VERL_PYTHON", "")
TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore"),  # what transformers says, and unshard of tied weights
]

Train = Callable[[Path, Copies], None]
Record = Callable[[str, object], None]


@dataclass(frozen=True, slots=True)
class Followed:
    """A training that has ended, and what its follower has left."""

    run: Path
    outputs: Path
    copies: Path
    base: Path | None
    follower: Follower
    used: dict[str, float]

    @property
    def steps(self) -> dict[int, dict[str, object]]:
        """What was reported of each step, once."""
        found = {int(str(one["step"])): one for one in self.follower.steps()}
        assert len(found) == len(self.follower.steps())
        return found


def follow_a_training(directory: Path, train: Train, base: Path | None = None) -> Followed:
    """Follow a training from before its first step to its last."""
    run = directory / "run"
    copies = Copies(directory / "copies", directory / "outputs")
    run.mkdir()
    words = [] if base is None else [f"--base={base}"]
    with following(run, copies.outputs, f"--until={STEPS}", *words) as follower:
        train(run, copies)
        used = follower.wait()
    return Followed(run, copies.outputs, copies.copies, base, follower, used)


def assert_followed(found: Followed) -> None:
    """Hold every output against a merge by hand of the copy, and the run against its last copy."""
    outputs = outputs_in(found.outputs)
    numbers = {int(name.rpartition("-" if "-" in name else "_")[2]): name for name in outputs}
    assert {*WAITED_FOR, STEPS} <= numbers.keys() <= set(range(1, STEPS + 1))
    assert numbers.keys() == {step for step, one in found.steps.items() if "files" in one}
    base = None if found.base is None else str(found.base)
    by_hand = found.copies.with_name("by-hand")
    for name, output in outputs.items():
        assert_whole(output)
        unshard.merge(found.copies / name, by_hand / name, base=base)
        assert weights(output) == weights(by_hand / name), name
    values = {tuple(sorted(weights(output).items())) for output in outputs.values()}
    assert len(values) == len(outputs)  # the steps differ
    (last,) = (path for path in found.copies.iterdir() if path.name == numbers[STEPS])
    assert snapshot(found.run / last.name) == snapshot(last)
    assert (found.run / last.name).stat().st_mtime_ns == last.stat().st_mtime_ns
    assert {path.name for path in found.outputs.iterdir()} == {STATE, *outputs}


def of_pool(pool: WorkerPool, scenario: Callable[..., None]) -> Train:
    def train(run: Path, copies: Copies) -> None:
        given: Scenario = partial(scenario, copies=copies)
        pool.run(given, 2, run)

    return train


def with_verl(run: Path, copies: Copies) -> None:
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    words = [VERL, TESTS / "verl_child.py", run, "rotate", copies.copies, copies.outputs]
    child = subprocess.run(
        list(map(str, words)),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not child.returncode, child.stderr[-4000:]


def test_transformers_trainer(
    worker_pool: WorkerPool, tmp_path: Path, record_property: Record
) -> None:
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    train = of_pool(worker_pool, trainer_rotating)
    found = follow_a_training(tmp_path, train, base)
    record_property("follower", found.used)
    assert_followed(found)


@pytest.mark.evaluators
@pytest.mark.skipif(find_spec("wandb") is None, reason="lmms-engine's trainer imports wandb")
def test_lmms_engines_trainer(
    worker_pool: WorkerPool, tmp_path: Path, record_property: Record
) -> None:
    found = follow_a_training(tmp_path, of_pool(worker_pool, lmms_engine_rotating))
    record_property("follower", found.used)
    assert_followed(found)


@pytest.mark.ray
@pytest.mark.skipif(not VERL, reason="UNSHARD_VERL_PYTHON names no interpreter with verl 0.9.1")
def test_verls_checkpoint_manager(tmp_path: Path, record_property: Record) -> None:
    found = follow_a_training(tmp_path, with_verl)
    record_property("follower", found.used)
    assert_followed(found)
