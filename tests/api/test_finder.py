"""When a checkpoint that a trainer is writing is complete, at every moment; and when it is new."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_cases import unpack
from ranks import save_ranks, some_tensors
from safetensors_shards import cut, shard_path, write_shard
from unshard.api.following.finder import CheckpointFinder
from unshard.read.format import Choice

Writes = Iterator[Callable[[], object]]


def steps(finder: CheckpointFinder) -> list[int | None]:
    return [one.step for one in finder.look()]


def found_at(finder: CheckpointFinder, writes: Writes) -> list[list[int | None]]:
    """Return what two looks find after each write."""
    found = []
    for write in writes:
        write()
        found.append([step for _ in range(2) for step in steps(finder)])
    return found


def moved(source: Path, target: Path) -> Writes:
    """Write the files of a folder one after another, in the order of their names."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        yield lambda path=path: shutil.copy2(path, target / path.name)  # type: ignore[misc]


def touch(path: Path, text: str = "{}") -> Callable[[], object]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return lambda: path.write_text(text)


def automodel_weights(step: Path, source: Path) -> Writes:
    tensors = {name: cut(tensor, 2) for name, tensor in some_tensors().items()}
    for rank in range(2):
        write_shard(shard_path(source, rank), {name: cuts[rank] for name, cuts in tensors.items()})
    yield touch(step / "model" / ".hf_metadata" / "config.json")
    yield from moved(source, step / "model")
    yield touch(step / "optim" / "__0_0.distcp", "x")
    yield touch(step / "optim" / ".metadata", "x")


def automodel(run: Path, source: Path) -> Writes:
    """AutoModel's own mark, as main has it.

    NVIDIA-NeMo/Automodel 36044ad3d: `save_checkpoint` of recipes/base_recipe.py calls
    `CheckpointLifecycle.reserve` (a marked directory is renamed into place), writes losses.json,
    the model, the optimizer and config.yaml, and `publish` moves LATEST before it removes the mark.
    """
    step, reserved = run / "epoch_0_step_5", run / "epoch_0_step_5.reserving-0a1b2c3d"
    yield touch(reserved / ".incomplete", "")
    yield lambda: reserved.rename(step)
    yield touch(step / "losses.json")
    yield from automodel_weights(step, source)
    yield touch(step / "config.yaml")
    yield lambda: (run / "LATEST").symlink_to(step.name)
    yield (step / ".incomplete").unlink


def automodel_before(run: Path, source: Path) -> Writes:
    """`save_checkpoint` of recipes/base_recipe.py at v0.5.0, without a mark of its own."""
    step = run / "epoch_0_step_5"
    yield touch(step / "losses.json")
    yield from automodel_weights(step, source)
    yield touch(step / "config.yaml")


def verl_role(place: Path, case: Path) -> Writes:
    """`MegatronCheckpointManager.save_checkpoint` of verl 1dda039b9 (0.9.0 has it, too)."""
    yield from moved(case / "iter_0000003", place / "model" / "dist_ckpt")
    for name in ("optimizer", "extra"):
        yield from moved(case / "iter_0000003", place / name / "dist_ckpt")
    yield touch(place / "model" / "huggingface" / "config.json")
    yield touch(place / "transformer_config.json")
    yield touch(place / "ckpt_contents.json.tmp")
    yield lambda: (place / "ckpt_contents.json.tmp").rename(place / "ckpt_contents.json")


def verl_asynchronous(run: Path, source: Path) -> Writes:
    """With `async_save` each role's manager writes the run's marker itself (`_finalize_save`)."""
    yield from verl_role(run / "global_step_5" / "actor", unpack(source) / "llama_tp1")


@pytest.mark.parametrize("trainer", [automodel, automodel_before, verl_asynchronous])
def test_a_trainer_is_waited_for_at_every_moment(
    tmp_path: Path, trainer: Callable[[Path, Path], Writes]
) -> None:
    run, source = tmp_path / "run", tmp_path / "source"
    *before, last = found_at(CheckpointFinder(run), trainer(run, source))
    assert len(before) > 5
    assert before == [[]] * len(before)
    assert last == [5]


def test_a_critic_is_complete_when_its_own_mark_says_so(tmp_path: Path) -> None:
    """verl's actor writes the run's marker while its critic is still being written."""
    run, case = tmp_path / "run", unpack(tmp_path) / "llama_tp1"
    finder = CheckpointFinder(run, Choice(weights="model", role="critic"))
    *_, actor = found_at(finder, verl_role(run / "global_step_5" / "actor", case))
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    *before, last = found_at(finder, verl_role(run / "global_step_5" / "critic", case))
    assert [actor, *before] == [[]] * (len(before) + 1)
    assert last == [5]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_role_that_is_chosen_is_followed(tmp_path: Path, role: str) -> None:
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("1")
    finder = CheckpointFinder(tmp_path, Choice(weights="model", role=role))
    for step, roles in ((5, ("actor", "critic")), (10, (role,)), (15, ("actor", "critic"))):
        for one in roles:
            assert [steps(finder) for _ in range(2)] == [[], []]
            save_ranks(tmp_path / f"global_step_{step}" / one, some_tensors(), 2)
        latest.write_text(str(step))
        assert finder.look() == []
        assert [(one.step, one.role) for one in finder.look()] == [(step, role)]
