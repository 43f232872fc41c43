"""Which checkpoints of a run are complete, for every writer."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evaluation.running import whole_model
from megatron_cases import unpack
from ranks import rank_path, save_ranks, some_tensors
from trainers import dcp_under
from unshard.api.following.finder import CheckpointFinder, why_incomplete
from unshard.read.finding.discover import discover
from unshard.read.format import Choice, Location
from unshard.read.whole_files.reader import WHOLE_FILES
from zero_files import ZeroModel, save_zero

save_dcp = dcp_under("model")


def why(place: Path) -> str | None:
    return why_incomplete(discover(place, Choice(None, None, "model"))[0])


def steps(finder: CheckpointFinder) -> list[int | None]:
    return [location.step for location in finder.look()]


def lmms(run: Path, step: int) -> Path:
    place = run / f"checkpoint-{step}"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(), 2)
    loader = place / "dataloader_state"
    loader.mkdir()
    for rank in range(2):
        torch.save({"rank": rank}, loader / f"dataloader_state_world_size_2_rank_{rank}.pt")
    (place / "config.json").write_text("{}")
    return place


def test_a_checkpoint_is_returned_once_and_not_before_it_rests(tmp_path: Path) -> None:
    finder = CheckpointFinder(tmp_path)
    assert steps(finder) == []
    lmms(tmp_path, 10)
    lmms(tmp_path, 5)
    assert steps(finder) == []
    assert steps(finder) == [5, 10]
    assert steps(finder) == []


def test_files_that_grow_or_are_written_in_place_are_waited_for(tmp_path: Path) -> None:
    place = lmms(tmp_path, 5)
    finder = CheckpointFinder(tmp_path)
    for number in range(3):
        assert steps(finder) == []
        with (place / "trainer.log").open("a") as growing:
            growing.write("more")
        assert steps(finder) == []
        os.utime(place / "config.json", ns=(number, number))
    assert steps(finder) == []
    assert steps(finder) == [5]


@pytest.mark.parametrize("folder", ["pytorch_model_fsdp_0", "dataloader_state"])
def test_every_rank_of_lmms_engine_is_needed(tmp_path: Path, folder: str) -> None:
    place = lmms(tmp_path, 5)
    assert why(place) is None
    (file,) = (place / folder).glob("*rank_1.pt")
    content = file.read_bytes()
    file.unlink()
    assert why(place) == f"{folder}: rank 1 of 2 is missing"
    for partial in (b"", content[: len(content) // 2], content[:-1], bytes(len(content))):
        file.write_bytes(partial)
        assert why(place) == f"{file.name} is not finished"
    file.write_bytes(content)
    assert why(place) is None


def test_a_directory_that_is_called_like_a_file_is_no_weights(tmp_path: Path) -> None:
    step = lmms(tmp_path, 5)
    assert why(step) is None
    (step / "pytorch_model_fsdp_0" / "older.ckpt").mkdir()
    assert why(step) is None


def test_lmms_engine_writes_its_dataloaders_and_its_config_last(tmp_path: Path) -> None:
    place = lmms(tmp_path, 5)
    for file in (place / "dataloader_state").iterdir():
        file.rename(tmp_path / file.name)
    assert why(place) == "dataloader_state: rank 0 of 2 is missing"
    (place / "dataloader_state").rmdir()
    (place / "config.json").unlink()
    assert why(place) == "config.json is missing"


def test_every_file_of_an_index_and_every_numbered_one_is_needed(tmp_path: Path) -> None:
    place = whole_model(tmp_path / "checkpoint-7")
    content = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").unlink()
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (place / first).write_bytes(content)
    location = Location(place, place, 7, None, "model", WHOLE_FILES)
    assert why_incomplete(location) == f"{second} is missing"
    (place / second).write_bytes(content)
    assert why_incomplete(location) is None
    index = place / "model.safetensors.index.json"
    for text, reason in (
        ('{"weight_map": {"a": "other.safetensors"}}', "other.safetensors is missing"),
        ('{"weight_map"', "model.safetensors.index.json is not finished"),
        ('{"a":' * 100_000, "model.safetensors.index.json is not finished"),
        (json.dumps({"weight_map": {"a": first}}), None),
    ):
        index.write_text(text)
        assert why_incomplete(location) == reason


def test_a_step_without_the_weights_keeps_back_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10, 15):
        place = lmms(tmp_path, step)
        if step != 10:
            save_ranks(place / "pytorch_ema_model_fsdp_0", some_tensors(), 2)
    finder = CheckpointFinder(tmp_path, Choice(weights="ema"))
    assert [steps(finder) for _ in range(3)] == [[], [5, 15], []]
    assert caplog.text.count("step 10 is not taken yet") == 1


def test_a_step_with_a_critic_only_keeps_back_no_actor(tmp_path: Path) -> None:
    for step, roles in ((5, ("actor", "critic")), (10, ("critic",)), (15, ("actor",))):
        for role in roles:
            save_ranks(tmp_path / f"global_step_{step}" / role, some_tensors(), 2)
    finder = CheckpointFinder(tmp_path)
    assert steps(finder) == []
    assert [(one.step, one.role) for one in finder.look()] == [(5, "actor"), (15, "actor")]


def test_verl_says_itself_what_is_complete(tmp_path: Path) -> None:
    place = save_ranks(tmp_path / "global_step_20" / "actor", some_tensors(), 2).parent
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    for text, reason in (("10", "has 10"), ("", "has nothing"), ("\u00b2", "has ")):
        latest.write_text(text, encoding="utf-8")
        assert reason in str(why(place))
    for text in ("20", "30\n"):
        latest.write_text(text)
        assert why(place) is None


def skyrl(run: Path) -> Path:
    (run / "latest_ckpt_global_step.txt").write_text("5")
    return save_ranks(run / "global_step_7" / "policy", some_tensors(), 2).parent


def olmo(run: Path) -> Path:
    save_dcp(run / "step7" / "model_and_optim", some_tensors())
    return run / "step7"


def llama_factory(run: Path) -> Path:
    for step in (5, 7):
        save_dcp(run / f"checkpoint-{step}" / "model", some_tensors())
    (run / "checkpoint-5" / "CHECKPOINT_COMPLETE").write_text("")
    return run / "checkpoint-7"


def fast_llm(run: Path) -> Path:
    """The mark as Fast-LLM leaves it; only its own tools read its format."""
    for step in (5, 7):
        save_dcp(run / str(step), some_tensors())
    (run / "5" / "ok").write_text("")
    return run / "7"


def lerobot(run: Path) -> Path:
    for step in ("005000", "007000"):
        save_dcp(run / step / "pretrained_model" / "pytorch_model_fsdp_0", some_tensors())
    (run / "last").symlink_to("005000")
    return run / "007000"


# trainer: what it leaves before its mark, the mark's file, and why the step is not complete
MARKS: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "SkyRL": (skyrl, "latest_ckpt_global_step.txt", "latest_ckpt_global_step.txt has 5"),
    "OLMo-core": (olmo, "step7/.metadata.json", ".metadata.json is missing"),
    "LLaMA-Factory": (
        *(llama_factory, "checkpoint-7/CHECKPOINT_COMPLETE"),
        "CHECKPOINT_COMPLETE is missing",
    ),
    "lerobot": (lerobot, "last", "last has 5000"),
    "Fast-LLM": (fast_llm, "7/ok", "ok is missing"),
}


@pytest.mark.parametrize("trainer", MARKS)
def test_a_trainers_mark_is_waited_for(tmp_path: Path, trainer: str) -> None:
    plant, mark, reason = MARKS[trainer]
    step = plant(tmp_path)
    assert why(step) == reason
    if (tmp_path / mark).is_symlink():
        (tmp_path / mark).unlink()
        (tmp_path / mark).symlink_to(step.name)
    else:
        (tmp_path / mark).write_text("7")
    assert why(step) is None


def test_a_step_that_is_renamed_when_it_is_complete_does_not_exist_before(tmp_path: Path) -> None:
    """NeMo-RL writes `tmp_step_N` and moves the step that was there to `old_step_N`."""
    save_ranks(tmp_path / "step_5" / "policy" / "weights", some_tensors(), 2)
    for name in ("tmp_step_7", "old_step_3"):
        save_ranks(tmp_path / name / "policy" / "weights", some_tensors(), 2)
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], [5]]
    (tmp_path / "tmp_step_7").rename(tmp_path / "step_7")
    assert [steps(finder) for _ in range(2)] == [[], [7]]


def test_a_mark_of_an_earlier_run_is_not_believed(tmp_path: Path) -> None:
    place = save_ranks(tmp_path / "global_step_20" / "actor", some_tensors(), 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("900")
    assert why(place.parent) is None
    rank_path(place, 2, 1).unlink()
    assert "rank 1 of 2 is missing" in str(why(place.parent))


def test_transformers_says_at_the_end_which_step_it_was(tmp_path: Path) -> None:
    place = whole_model(tmp_path / "checkpoint-7")
    state = place / "trainer_state.json"
    for text in (
        "",
        "[]",
        '{"global_step": 6}',
        '{"global_step": "7"}',
        '{"global_st',
        "[" * 100_000,
    ):
        state.write_text(text)
        assert why(place) == "trainer_state.json is of another step"
    state.write_text(json.dumps({"global_step": 7}))
    assert why(place) is None


def test_a_safetensors_file_is_as_long_as_it_says(tmp_path: Path) -> None:
    place = whole_model(tmp_path / "checkpoint-7")
    save_file(some_tensors(), place / "model.safetensors")
    location = discover(place, Choice(None, None, "model"))[0]
    assert why_incomplete(location) is None
    content = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(content[:-1])
    assert why_incomplete(location) == "model.safetensors is not finished"


def test_deepspeed_says_itself_what_is_complete(tmp_path: Path) -> None:
    model = ZeroModel([some_tensors()])
    for step in (5, 10):
        save_zero(tmp_path / f"global_step{step}", model, world=2, stage=2)
        assert looks_twice(tmp_path) == ([5] if step == 10 else [])
        (tmp_path / "latest").write_text(f"global_step{step}")
        assert looks_twice(tmp_path) == ([5] if step == 5 else [5, 10])


def test_a_tag_of_a_trainers_step_needs_both_marks(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-5"
    save_zero(step / "global_step5", ZeroModel([some_tensors()]), world=2, stage=3)
    (step / "trainer_state.json").write_text('{"global_step": 5}')
    assert looks_twice(tmp_path) == []
    (step / "latest").write_text("global_step5")
    assert looks_twice(tmp_path) == [5]
    (step / "trainer_state.json").write_text('{"global_step": 0}')
    assert looks_twice(tmp_path) == []


def looks_twice(run: Path) -> list[int | None]:
    finder = CheckpointFinder(run)
    finder.look()
    return [one.step for one in finder.look()]


def test_dcp_needs_its_metadata(tmp_path: Path) -> None:
    place = tmp_path / "step-3"
    place.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (place / name).write_bytes(b"x")
    location = discover(place, Choice(None, None, "model"))[0]
    assert why_incomplete(location) is None
    (place / ".metadata").rename(place / ".metadata.tmp")
    assert why_incomplete(location) == ".metadata is missing"


def test_megatron_writes_metadata_json_last(tmp_path: Path) -> None:
    place = unpack(tmp_path) / "llama_tp1"
    (place / "latest_checkpointed_iteration.txt").unlink()
    assert why(place) is None
    last = place / "iter_0000003" / "metadata.json"
    last.rename(tmp_path / "later")
    assert why(place) == "metadata.json is missing"
    finder = CheckpointFinder(place)
    assert steps(finder) == steps(finder) == []
    (tmp_path / "later").rename(last)
    assert steps(finder) == []
    assert steps(finder) == [3]


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_passed_over(tmp_path: Path) -> None:
    place = lmms(tmp_path, 5)
    finder = CheckpointFinder(tmp_path)
    assert steps(finder) == []
    place.rename(tmp_path / "gone")
    assert steps(finder) == []
    assert steps(CheckpointFinder(tmp_path / "nowhere")) == []


def test_reasons_name_the_step_that_they_are_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once: one step has no checkpoint, another lacks EMA weights, a third lacks a rank."""
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "notes.txt").touch()
    lmms(tmp_path, 20)
    finder = CheckpointFinder(tmp_path, Choice(weights="ema"))
    assert [steps(finder) for _ in range(3)] == [[], [], []]
    first, second = (record.message for record in caplog.records)
    assert first.startswith(f"step 10 is not taken yet: {tmp_path}/checkpoint-10: no checkpoint")
    assert "\n" not in first + second
    assert second.startswith("step 20 is not taken yet: ")
    assert "has no ema weights" in second
    caplog.clear()
    place = lmms(tmp_path, 30)
    (place / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt").unlink()
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(3)] == [[], [20], []]
    said, also = (record.message for record in caplog.records)
    assert said == "step 30 is not complete yet: pytorch_model_fsdp_0: rank 1 of 2 is missing"
    assert also == first


def test_a_step_that_is_written_for_minutes_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As verl writes: folders, rank by rank, the run's mark; each look finds another reason."""
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("5")
    finder = CheckpointFinder(tmp_path)
    for step in (10, 20):
        place = tmp_path / f"global_step_{step}" / "actor"
        place.mkdir(parents=True)
        assert steps(finder) == []
        save_ranks(tmp_path / "whole", some_tensors(), 2)
        for file in sorted((tmp_path / "whole").iterdir()):
            file.rename(place / file.name)
            assert [steps(finder) for _ in range(2)] == [[], []]
        latest.write_text(str(step))
        assert [steps(finder) for _ in range(2)] == [[step], []]
    said = [record.message for record in caplog.records]
    assert [one.partition(" yet: ")[0] for one in said] == [
        "step 10 is not taken",
        "step 20 is not complete",
    ]
    assert not any("\n" in one for one in said)


def test_a_step_that_later_ones_overtake_is_told_for_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first reason was that it was being written; a dead trainer left it without a rank."""
    finder = CheckpointFinder(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    assert steps(finder) == []
    place = lmms(tmp_path, 5)
    rank = place / "pytorch_model_fsdp_0" / "model_world_size_2_rank_1.pt"
    rank.unlink()
    assert [steps(finder) for _ in range(2)] == [[], []]
    assert len(caplog.records) == 1
    assert finder.reasons[5].endswith("rank 1 of 2 is missing")
    lmms(tmp_path, 10)
    assert [steps(finder) for _ in range(4)] == [[], [10], [], []]
    assert len(caplog.records) == 2
    assert caplog.records[1].message.endswith("rank 1 of 2 is missing")


def test_a_directory_without_checkpoints_is_told_what_is_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], []]
    (said,) = (record.message for record in caplog.records)
    assert said.startswith(f"no checkpoint yet: {tmp_path}: ")
    assert "checkpoint-N" in said


def test_the_final_model_of_a_run_hides_no_step(tmp_path: Path) -> None:
    """transformers' Trainer saves it into the run's own directory."""
    whole_model(tmp_path)
    place = whole_model(tmp_path / "checkpoint-7")
    (place / "trainer_state.json").write_text('{"global_step": 7}')
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(2)] == [[], [7]]


def test_files_that_are_steps_are_watched_one_by_one(tmp_path: Path) -> None:
    """MMEngine writes one file a step."""
    for step in (100, 200):
        torch.save({"state_dict": some_tensors()}, tmp_path / f"iter_{step}.pth")
    whole = (tmp_path / "iter_200.pth").read_bytes()
    (tmp_path / "iter_200.pth").write_bytes(whole[: len(whole) // 2])
    finder = CheckpointFinder(tmp_path)
    assert [steps(finder) for _ in range(3)] == [[], [100], []]
    (tmp_path / "iter_200.pth").write_bytes(whole)
    assert [steps(finder) for _ in range(2)] == [[], [200]]
