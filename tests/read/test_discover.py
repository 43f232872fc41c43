"""Which checkpoint does a path mean?"""

from pathlib import Path

import pytest

from unshard.api import MergeOptions
from unshard.errors import IncompleteError, NotMergeableError, UnknownFormatError, UsageError
from unshard.read.finding import candidates
from unshard.read.finding.discover import discover
from unshard.read.format import Choice, Location, ReadOptions
from unshard.read.open import open_latest

VERSIONS = ("", "-v1", "-v2", "-v10")  # as Lightning names what it saves again


def make(directory: Path, world: int = 2) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        (directory / f"model_world_size_{world}_rank_{rank}.pt").write_bytes(b"x")
    return directory


def only(path: Path, **request: str | int) -> Location:
    locations = discover(path, Choice(**request))  # type: ignore[arg-type]
    assert len(locations) == 1
    return locations[0]


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (5, 10, 9):
        make(run / f"global_step_{step}" / "actor")
    make(run / "global_step_10" / "critic")
    (run / "global_step_10" / "actor" / "huggingface").mkdir()
    return run


@pytest.fixture
def lmms(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in (100, 20):
        make(run / f"checkpoint-{step}" / "pytorch_model_fsdp_0")
        (run / f"checkpoint-{step}" / "extra_state").mkdir()
        (run / f"checkpoint-{step}" / "config.json").write_text("{}")
    make(run / "checkpoint-100" / "pytorch_ema_model_fsdp_0")
    (run / "checkpoint-20" / "pytorch_ema_model_fsdp_0").mkdir()
    return run


@pytest.mark.parametrize("inside", ["", "model_world_size_2_rank_1.pt", "huggingface"])
def test_a_role_directory_and_anything_inside_it_is_that_role(verl: Path, inside: str) -> None:
    found = only(verl / "global_step_10" / "actor" / inside)
    assert found.weights_dir == verl / "global_step_10" / "actor"
    assert (found.step, found.role, found.weights) == (10, "actor", "model")


def test_steps_are_ordered_by_number_not_by_name(verl: Path) -> None:
    found = discover(verl, Choice(role="actor"))
    assert [at.step for at in found] == [10, 9, 5]


def test_a_step_can_be_chosen(verl: Path) -> None:
    assert only(verl, step=9).weights_dir == verl / "global_step_9" / "actor"


def test_a_step_that_is_not_there_is_refused_with_those_that_are(verl: Path) -> None:
    with pytest.raises(UnknownFormatError, match=r"no step 7\n.*steps 5, 9, 10"):
        discover(verl, Choice(step=7))


def test_a_step_that_contradicts_the_path_is_refused(verl: Path) -> None:
    with pytest.raises(UsageError, match="is step 5, but step=9"):
        discover(verl / "global_step_5", Choice(step=9))


def test_of_two_roles_the_actor_is_the_default(verl: Path) -> None:
    assert only(verl / "global_step_10").role == "actor"
    assert only(verl / "global_step_10", role="critic").role == "critic"


def test_policy_is_the_actor(tmp_path: Path) -> None:
    """SkyRL saves `policy/` and `critic/`."""
    step = tmp_path / "run" / "global_step_10"
    policy, critic = make(step / "policy"), make(step / "critic")
    for role in ("actor", "policy"):
        found = only(step, role=MergeOptions(role=role).choice.role or "")
        assert (found.weights_dir, found.role) == (policy, "actor")
    assert only(step, role="critic").weights_dir == critic
    assert only(tmp_path / "run").weights_dir == policy


def test_a_policy_alone_needs_no_choice(tmp_path: Path) -> None:
    policy = make(tmp_path / "run" / "global_step_10" / "policy")
    for level in (tmp_path / "run", policy.parent, policy):
        assert (only(level).weights_dir, only(level).role) == (policy, "actor")


def test_a_critic_is_never_taken_unless_it_is_named(tmp_path: Path) -> None:
    critic = make(tmp_path / "run" / "global_step_10" / "critic")
    (critic.parent / "data.pt").write_bytes(b"x")
    for level in (tmp_path / "run", critic.parent, critic.parent / "data.pt"):
        with pytest.raises(UsageError, match=r"only a critic[\s\S]*role='critic'"):
            discover(level, Choice())
        assert only(level, role="critic").weights_dir == critic
    assert only(critic).weights_dir == critic
    assert only(critic / "model_world_size_2_rank_0.pt").weights_dir == critic


@pytest.mark.parametrize("inner", ["policy/weights", "actor/huggingface", "my_shards"])
def test_an_inner_directory_belongs_to_the_step_above_it(tmp_path: Path, inner: str) -> None:
    place = tmp_path / "my-run" / "step_10" / inner
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"")
    found = only(place)
    assert (found.step, found.step_dir.parent.name) == (10, "my-run")
    assert found.role == ("actor" if "/" in inner else None)


STATE = ("optimizer", "optimizer_0", "optim", "extra_state", "dataloader_state", "dataloader")


@pytest.mark.parametrize("folder", STATE)
def test_training_state_is_not_taken_for_the_checkpoint_around_it(lmms: Path, folder: str) -> None:
    checkpoint = lmms / "checkpoint-100"
    (checkpoint / folder).mkdir(exist_ok=True)
    file = checkpoint / folder / f"{folder}_world_size_2_rank_0.pt"
    file.write_bytes(b"x")
    for path in (checkpoint / folder, *([file] if "optim" in folder else [])):
        with pytest.raises(UsageError, match="is training state, not weights") as refused:
            discover(path, Choice())
        assert refused.value.hint == f"pass the checkpoint itself: {checkpoint}"


def test_a_run_may_be_called_like_training_state(tmp_path: Path) -> None:
    assert only(make(tmp_path / "data" / "optimizer" / "checkpoint-3")).step == 3


def test_a_directory_above_the_runs_names_them(verl: Path, tmp_path: Path) -> None:
    make(tmp_path / "other" / "checkpoints" / "step-5")
    (tmp_path / "notes").mkdir()
    with pytest.raises(UnknownFormatError) as refused:
        discover(tmp_path, Choice())
    assert refused.value.hint == f"pass one of the runs below it: {tmp_path / 'other'}, {verl}"


NOT_A_MODEL = (
    *("dataloader.pt", "train_dataloader.pt", "data.pt", "trainer_state.pt", "rng_state_0.pth"),
    *("optim.pt", "optimizer.bin", "lr_scheduler.pt", "extra_state_merged.pt", "scaler.pt"),
    *("rank_0.pt", "rank0.pt", "model_rank_3.pth", "training_args.bin"),
)


def test_what_is_not_a_model_is_not_offered_as_one(tmp_path: Path) -> None:
    for name in NOT_A_MODEL:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UnknownFormatError) as refused:
        discover(tmp_path, Choice())
    assert not refused.value.hint
    (tmp_path / "model_42.pt").write_bytes(b"x")
    with pytest.raises(UnknownFormatError, match=r"pass the file itself: .*model_42\.pt"):
        discover(tmp_path, Choice())


def test_a_role_that_is_not_there_is_refused(verl: Path) -> None:
    with pytest.raises(UnknownFormatError, match="global_step_5 has no critic"):
        discover(verl / "global_step_5", Choice(role="critic"))


def test_a_file_that_is_a_checkpoint_has_no_role(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    file.write_bytes(b"x")
    with pytest.raises(UnknownFormatError, match=r"last\.ckpt has no critic\n.*last\.ckpt \(1 B\)"):
        discover(file, Choice(role="critic"))


def test_rank_files_directly_in_the_step_directory_have_no_role(tmp_path: Path) -> None:
    found = only(make(tmp_path / "global_step_3"))
    assert (found.step, found.role) == (3, None)
    assert found.default_output == tmp_path / "merged" / "global_step_3"


def test_the_default_output_is_next_to_the_step_and_names_role_and_weights(
    verl: Path, lmms: Path
) -> None:
    critic = only(verl / "global_step_10", role="critic")
    assert critic.default_output == verl / "merged" / "global_step_10-critic"
    ema = only(lmms / "checkpoint-100", weights="ema")
    assert ema.default_output == lmms / "merged" / "checkpoint-100-ema"


@pytest.mark.parametrize("inside", ["", "config.json", "pytorch_model_fsdp_0"])
def test_lmms_engine_weights_are_found_from_anywhere_in_the_checkpoint(
    lmms: Path, inside: str
) -> None:
    found = only(lmms / "checkpoint-100" / inside)
    assert found.weights_dir.name == "pytorch_model_fsdp_0"
    assert (found.step, found.weights) == (100, "model")


def test_ema_weights_are_taken_when_asked_for_or_pointed_at(lmms: Path) -> None:
    checkpoint = lmms / "checkpoint-100"
    asked = only(checkpoint, weights="ema")
    assert asked == only(checkpoint / "pytorch_ema_model_fsdp_0")
    assert asked.weights_dir.name == "pytorch_ema_model_fsdp_0"


def test_an_empty_ema_directory_is_named(lmms: Path) -> None:
    with pytest.raises(IncompleteError, match="pytorch_ema_model_fsdp_0 is empty"):
        discover(lmms / "checkpoint-20", Choice(weights="ema"))


def test_missing_ema_weights_are_refused(verl: Path) -> None:
    with pytest.raises(UnknownFormatError, match="has no ema weights"):
        discover(verl / "global_step_5", Choice(weights="ema"))


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="nowhere: no such file"):
        discover(tmp_path / "nowhere", Choice())


def test_an_error_says_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "logs").mkdir()
    with pytest.raises(UnknownFormatError, match=r"model_world_size_W_rank_R") as error:
        discover(tmp_path, Choice())
    assert "logs/, notes.txt" in error.value.found


FORMATS = {
    ".metadata": "torch DCP",
    ".metadata.tmp": "torch DCP",
    "__3.metadata": "torch DCP",
    "__0_0.distcp": "torch DCP",
    "pytorch_model_fsdp_0_rank1.bin": "FSDP rank files",
    "pytorch_model_fsdp_rank1.bin": "FSDP rank files",
    "shard-00001-model-00001-of-00002.safetensors": "sharded safetensors",
    "model.safetensors": "whole",
    "pytorch_model.bin": "whole",
    "pytorch_model_fsdp.bin": "whole",
    "common.pt": "Megatron",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": "DeepSpeed",
    "mp_rank_00_model_states.pt": "DeepSpeed",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_told_by_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert FORMATS[name] in only(tmp_path).format.name


def test_a_format_of_another_engine_is_refused_with_the_tool_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "model" / "pp_00" / "tp_00").mkdir(parents=True)
    (tmp_path / "model" / "pp_00" / "tp_00" / "sdp_00.pt").write_bytes(b"")
    with pytest.raises(NotMergeableError, match=r"hint: .*export the step .* with fairseq2"):
        open_latest(tmp_path, Choice(), ReadOptions())


def test_shards_win_over_a_whole_model_next_to_them(tmp_path: Path) -> None:
    make(tmp_path / "global_step_1")
    (tmp_path / "global_step_1" / "model.safetensors").write_bytes(b"")
    assert only(tmp_path / "global_step_1").step == 1


def test_a_symbolic_link_to_a_checkpoint_means_the_checkpoint(verl: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(verl / "global_step_9")
    assert only(link).step == 9


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "latest"])
def test_a_file_that_states_the_latest_step_is_not_a_checkpoint(verl: Path, name: str) -> None:
    (verl / name).write_text("9")  # and 10 is there, too
    with pytest.raises(UsageError, match=f"{name}: is a marker of the latest step"):
        discover(verl / name, Choice())


def test_runs_whose_names_end_in_numbers_are_not_steps(tmp_path: Path) -> None:
    for run in ("0", "1"):
        make(tmp_path / "multirun" / run / "global_step_10")
        make(tmp_path / "sweep" / f"lr_{run}")
    for place in ("multirun", "sweep"):
        with pytest.raises(UsageError, match="runs"):
            discover(tmp_path / place, Choice())


def test_in_house_names_count_if_their_numbers_grow_as_saves_do(tmp_path: Path) -> None:
    for name in ("weights_500", "weights_1000", "weights_1500"):
        make(tmp_path / name)
    assert [at.step for at in discover(tmp_path, Choice())] == [1500, 1000, 500]


def test_parts_of_a_step_are_not_steps(tmp_path: Path) -> None:
    for part in ("agent_0", "agent_1"):
        make(tmp_path / "global_step_100" / part)
    with pytest.raises(UsageError, match="2 sets of weights"):
        discover(tmp_path, Choice())
    found = only(tmp_path / "global_step_100" / "agent_1")
    assert (found.step, found.weights_dir.name) == (100, "agent_1")


@pytest.mark.parametrize("export", ["hf_global_step_20", "merged-checkpoint-20", "eval_step_20"])
def test_an_export_is_not_a_step(tmp_path: Path, export: str) -> None:
    make(tmp_path / "global_step_10")
    (tmp_path / export).mkdir()
    (tmp_path / export / "model.safetensors").write_bytes(b"")
    assert only(tmp_path).step == 10


@pytest.mark.parametrize("role", ["value", "ref", "reward"])
def test_only_an_actor_is_taken_unnamed(tmp_path: Path, role: str) -> None:
    place = make(tmp_path / "step_10" / role)
    with pytest.raises(UsageError, match=f"only a {role}"):
        discover(tmp_path, Choice())
    assert only(tmp_path, role=role).weights_dir == place
    policy = tmp_path / "step_10" / "policy" / "weights"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(b"")
    assert only(tmp_path).weights_dir == policy


@pytest.mark.parametrize("folder", ["ema", "EMA", "model_ema"])
def test_an_average_is_never_taken_unnamed(tmp_path: Path, folder: str) -> None:
    place = make(tmp_path / "step_10" / folder)
    with pytest.raises(UsageError, match="only EMA weights"):
        discover(tmp_path, Choice())
    model = make(tmp_path / "step_10" / "model")
    assert only(tmp_path).weights_dir == model
    assert only(tmp_path, weights="ema").weights_dir == place


def test_files_of_several_folders_need_a_choice(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "iter_100.pth").write_bytes(b"x")
    with pytest.raises(UsageError, match="2 sets of weights"):
        discover(tmp_path, Choice())
    assert only(tmp_path / "a").step == 100


def test_a_search_that_was_cut_short_takes_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a_run" / "step-10")
    (tmp_path / "images").mkdir()
    for number in range(8):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"")
    assert only(tmp_path).step == 10
    monkeypatch.setattr(candidates, "ENTRIES", 4)
    with pytest.raises(UnknownFormatError, match="the search ended after 4 directory entries"):
        discover(tmp_path, Choice())


def test_the_output_next_to_a_run_is_not_another_run(tmp_path: Path) -> None:
    make(tmp_path / "run" / "global_step_10")
    output = tmp_path / "run" / "merged" / "global_step_10"
    output.mkdir(parents=True)
    for name in ("unshard.json", "model.safetensors"):
        (output / name).write_text("{}")
    assert only(tmp_path).weights_dir == tmp_path / "run" / "global_step_10"


def test_a_link_to_another_step_is_not_a_second_set(tmp_path: Path) -> None:
    make(tmp_path / "step_10" / "shards")
    place = make(tmp_path / "step_20" / "shards")
    (tmp_path / "step_20" / "prev").symlink_to(tmp_path / "step_10")
    (tmp_path / "step_20" / "loop").symlink_to(tmp_path / "step_20")
    assert discover(tmp_path, Choice())[0].weights_dir == place


def test_a_run_may_save_epochs_and_steps(tmp_path: Path) -> None:
    for name in ("epoch_1", "step_500"):
        make(tmp_path / name)
    assert discover(tmp_path, Choice())[0].step == 500


@pytest.mark.parametrize("form", ["directories", "files"])
def test_of_one_step_that_was_saved_again_the_last_save_is_taken(tmp_path: Path, form: str) -> None:
    for name in ("epoch=1-step=50-v12.ckpt", *(f"epoch=1-step=100{v}.ckpt" for v in VERSIONS)):
        if form == "files":
            (tmp_path / name).write_bytes(b"x")
        else:
            make(tmp_path / name)
    found = discover(tmp_path, Choice())
    assert [(at.step, at.path.name[len("epoch=1-step=") :]) for at in found] == [
        *((100, f"100{version}.ckpt") for version in VERSIONS[::-1]),
        (50, "50-v12.ckpt"),
    ]
