"""When a checkpoint that a trainer is writing is complete, at every moment; and when it is new."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_cases import unpack
from ranks import save_ranks, some_tensors
from safetensors_shards import cut, shard_path, write_shard
from trainers import dcp_under
from unshard.api.following.finder import CheckpointFinder, check_run
from unshard.errors import UsageError
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


def lmms(run: Path, step: int, world: int = 2) -> Path:
    place = run / f"checkpoint-{step}"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(), world)
    (place / "config.json").write_text("{}")
    return place


def verl(run: Path, step: int, world: int = 2) -> Path:
    place = save_ranks(run / f"global_step_{step}" / "actor", some_tensors(), world).parent
    (run / "latest_checkpointed_iteration.txt").write_text(str(step))
    return place


def set_back(path: Path, seconds: float) -> None:
    """Let a file have been written so much earlier."""
    then = path.stat().st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


def saved_again(path: Path) -> None:
    """Write a file with the bytes that it has, as a later save of the same step does."""
    before = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.mark.parametrize("save", [lmms, verl])
def test_a_step_that_is_saved_again_is_returned_again_when_every_rank_has_saved_it(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    """Also if the trainer dies in between; the run's marker has the later step until the end."""
    finder = CheckpointFinder(tmp_path)
    places = {step: save(tmp_path, step) for step in (10, 20)}
    assert [steps(finder) for _ in range(3)] == [[], [10, 20], []]
    stamps = [finder.stamp(one) for one in CheckpointFinder(tmp_path)._steps()]
    (first,), (second,) = (list(places[10].rglob(f"*rank_{rank}.pt")) for rank in range(2))
    saved_again(second)
    assert [steps(finder) for _ in range(3)] == [[], [], []]
    assert finder.reasons == {
        10: f"not complete yet: {first.name} is as it was before the step was saved again"
    }
    saved_again(first)
    if (latest := tmp_path / "latest_checkpointed_iteration.txt").is_file():
        assert [steps(finder) for _ in range(2)] == [[], []]
        assert finder.reasons == {10: f"not complete yet: its weights are newer than {latest.name}"}
        latest.write_text("10")
        set_back(latest, -2)
        assert [steps(finder) for _ in range(2)] == [[10], []]
    else:
        assert [steps(finder) for _ in range(3)] == [[], [10], []]
    again = [finder.stamp(one) for one in CheckpointFinder(tmp_path)._steps()]
    assert again[0] != stamps[0]
    assert again[1] == stamps[1]


@pytest.mark.parametrize("save", [lmms, verl])
def test_a_step_that_is_removed_and_made_anew_is_returned_again(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    finder = CheckpointFinder(tmp_path)
    save(tmp_path, 20)
    for _ in range(2):
        place = save(tmp_path, 10)
        found = [step for _ in range(2) for step in steps(finder)]
        assert 10 in found
        shutil.rmtree(place)
    assert [steps(finder) for _ in range(2)] == [[], []]
    save(tmp_path, 10)
    shutil.rmtree(place)
    save(tmp_path, 10)  # between two looks
    assert [steps(finder) for _ in range(3)] == [[], [10], []]


def transformers(run: Path, step: int) -> Path:
    place = run / f"checkpoint-{step}"
    place.mkdir()
    files = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name in files:
        save_file({name: torch.ones(4)}, place / name)
    index = {"weight_map": {name: name for name in files}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return place


@pytest.mark.parametrize("save", [transformers, verl])
def test_a_finder_that_starts_while_a_step_is_saved_again_waits_for_a_newer_mark(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    """The other file of the weights and the mark are of the earlier save."""
    places = [save(tmp_path, step) for step in (10, 20)]
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        set_back(path, 3600)
    first, _ = sorted([*places[0].rglob("model_*.pt"), *places[0].glob("*.safetensors")])
    first.write_bytes(first.read_bytes())
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(3)] == [[], [20], []]
    mark = places[0] / "trainer_state.json"
    mark = mark if mark.is_file() else tmp_path / "latest_checkpointed_iteration.txt"
    assert finder.reasons == {10: f"not complete yet: its weights are newer than {mark.name}"}
    set_back(mark, -7200)
    assert [step for _ in range(2) for step in steps(finder)] == [10]


def test_a_copy_whose_mark_was_copied_first_is_complete(tmp_path: Path) -> None:
    verl(tmp_path, 10)
    set_back(tmp_path / "latest_checkpointed_iteration.txt", 1000)
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], [10]]


def test_a_copy_whose_mark_was_copied_among_the_weights_is_complete_later(tmp_path: Path) -> None:
    place = verl(tmp_path, 10)
    set_back(tmp_path / "latest_checkpointed_iteration.txt", 1)
    first, _ = sorted(place.rglob("*.pt"))
    set_back(first, 2)
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], []]
    for path in (*place.rglob("*.pt"), tmp_path / "latest_checkpointed_iteration.txt"):
        set_back(path, 700)
    assert [steps(finder) for _ in range(2)] == [[], [10]]


@pytest.mark.parametrize("save", [lmms, verl])
def test_a_step_that_loses_a_file_is_being_removed(
    tmp_path: Path, save: Callable[[Path, int], Path]
) -> None:
    finder = CheckpointFinder(tmp_path)
    place = save(tmp_path, 10)
    save(tmp_path, 20)
    assert [steps(finder) for _ in range(2)] == [[], [10, 20]]
    for rank in (1, 0):
        (file,) = place.rglob(f"model_*rank_{rank}.pt")
        file.unlink()
        assert [steps(finder) for _ in range(3)] == [[], [], []]
        assert not rank or 10 in finder.reasons
    shutil.rmtree(place)
    save(tmp_path, 10)
    assert [steps(finder) for _ in range(3)] == [[], [10], []]


def test_files_of_more_ranks_are_left_by_a_save_that_the_marker_completes(tmp_path: Path) -> None:
    finder = CheckpointFinder(tmp_path)
    verl(tmp_path, 10, world=2)
    verl(tmp_path, 20, world=2)
    assert [steps(finder) for _ in range(2)] == [[], [10, 20]]
    os.utime(tmp_path / "latest_checkpointed_iteration.txt", (1, 1))  # times are of whole ticks
    save_ranks(tmp_path / "global_step_10" / "actor", some_tensors(), 1)
    assert [steps(finder) for _ in range(3)] == [[], [], []]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert [steps(finder) for _ in range(3)] == [[10], [], []]


def test_a_checkpoint_that_is_linked_or_gets_other_files_is_the_same(tmp_path: Path) -> None:
    finder = CheckpointFinder(tmp_path)
    place = lmms(tmp_path, 10)
    assert steps(finder) == []
    (found,) = finder.look()
    stamp = finder.stamp(found)
    weights = place / "pytorch_model_fsdp_0"
    file = weights / "model_world_size_2_rank_0.pt"
    (tmp_path / "pins").mkdir()
    os.link(file, tmp_path / "pins" / file.name)
    file.chmod(0o400)
    assert [steps(finder) for _ in range(3)] == [[], [], []]
    (weights / "notes.json").write_text("{}")
    (weights / "extra_state_world_size_2_rank_0.pt").write_bytes(file.read_bytes())
    (place / "config.json").write_text('{"changed": true}')
    assert [steps(finder) for _ in range(3)] == [[], [], []]
    shutil.copytree(tmp_path, tmp_path.parent / "mounted", copy_function=shutil.copy2)
    other = CheckpointFinder(tmp_path.parent / "mounted")
    (elsewhere,) = other._steps()
    assert [finder.stamp(found), other.stamp(elsewhere)] == [stamp, stamp]
    assert len(stamp) == 16
    shutil.rmtree(place)
    assert finder.stamp(found) == ""
    shutil.rmtree(tmp_path.parent / "mounted")


def test_a_checkpoint_is_as_it_was_found_until_weights_change_or_any_file_is_gone(
    tmp_path: Path,
) -> None:
    finder = CheckpointFinder(tmp_path)
    place = lmms(tmp_path, 10)
    (place / "tokenizer.json").write_text("{}")
    assert steps(finder) == []
    (found,) = finder.look()
    assert finder.is_as_found(found)
    (place / "pytorch_model_fsdp_0" / "notes.json").write_text("{}")
    looks = [(finder.look(), finder.is_as_found(found)) for _ in range(3)]
    assert looks == [([], True)] * 3
    (place / "tokenizer.json").unlink()
    assert not finder.is_as_found(found)
    (place / "pytorch_model_fsdp_0" / "notes.json").unlink()
    looks = [(finder.look(), finder.is_as_found(found)) for _ in range(3)]
    assert looks == [([], False)] * 3
    (place / "tokenizer.json").write_text("{}")
    assert finder.is_as_found(found)
    first, second = sorted(place.rglob("model_*.pt"))
    saved_again(first)
    looks = [(finder.look(), finder.is_as_found(found)) for _ in range(2)]
    assert looks == [([], False)] * 2
    saved_again(second)
    assert steps(finder) == []
    (again,) = finder.look()
    assert finder.is_as_found(again)
    shutil.rmtree(place)
    assert not finder.is_as_found(again)


def test_a_file_that_is_a_step_is_returned_again(tmp_path: Path) -> None:
    """MMEngine writes one file a step."""
    finder = CheckpointFinder(tmp_path)
    for step in (100, 200):
        torch.save({"state_dict": some_tensors()}, tmp_path / f"iter_{step}.pth")
    assert [steps(finder) for _ in range(3)] == [[], [100, 200], []]
    saved_again(tmp_path / "iter_100.pth")
    assert [steps(finder) for _ in range(3)] == [[], [100], []]


def test_a_run_is_a_directory_or_not_there_yet(tmp_path: Path) -> None:
    for name in ("notes.txt", "model.safetensors"):
        (tmp_path / name).write_text("")
        with pytest.raises(UsageError, match="is a file"):
            check_run(tmp_path / name)
    check_run(tmp_path / "run")


def test_a_run_in_which_nothing_changes_is_not_listed_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder = CheckpointFinder(tmp_path)
    for step in range(10, 60, 10):
        lmms(tmp_path, step)
    assert [len(finder.look()) for _ in range(3)] == [0, 5, 0]
    listed: list[str] = []
    real = Path.iterdir

    def listing(at: Path) -> Iterator[Path]:
        listed.append(at.name)
        return iter(list(real(at)))

    monkeypatch.setattr(Path, "iterdir", listing)
    assert finder.look() == []
    assert listed == [tmp_path.name]
    lmms(tmp_path, 60)
    listed.clear()
    assert finder.look() == []
    assert {one for one in listed if one.startswith("checkpoint-")} == {"checkpoint-60"}


def test_what_lightning_writes_last_is_a_mark(tmp_path: Path) -> None:
    place = tmp_path / "epoch=0-step=10.ckpt"
    dcp_under("state_dict")(place, {"model.weight": torch.ones(4)})
    torch.save({"pytorch-lightning_version": "2.6.1", "global_step": 10}, place / "meta.pt")
    set_back(place / "meta.pt", -1)
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], [10]], finder.reasons
