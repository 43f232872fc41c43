"""The trees that training tools leave: from every level of one, its weights are found."""

import shutil
from pathlib import Path

import pytest

from unshard.errors import UsageError
from unshard.read.finding.discover import discover
from unshard.read.format import Choice, Location


def only(path: Path, *, step: int | None = None, role: str | None = None) -> Location:
    (found,) = discover(path, Choice(step, role))
    return found


DCP_FILES = (".metadata", "__0_0.distcp")
RANK_NAMES = tuple(f"model_world_size_2_rank_{rank}.pt" for rank in range(2))
SHARDS = ("shard-00001-model-00001-of-00001.safetensors",)

# tool: the weights' directory in the run, its files, what is next to them, the step's directory
TREES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "verl": (
        "global_step_10/actor",
        RANK_NAMES,
        ("global_step_10/data.pt", "latest_checkpointed_iteration.txt"),
        "global_step_10",
    ),
    "SkyRL": (
        "global_step_10/policy",
        RANK_NAMES,
        (
            "global_step_10/data.pt",
            "global_step_10/trainer_state.pt",
            "latest_ckpt_global_step.txt",
        ),
        "global_step_10",
    ),
    "lmms-engine": (
        "checkpoint-10/pytorch_model_fsdp_0",
        RANK_NAMES,
        (
            "checkpoint-10/config.json",
            "checkpoint-10/optimizer/optimizer_world_size_2_rank_0.pt",
            "checkpoint-10/extra_state/extra_state_world_size_2_rank_0.pt",
        ),
        "checkpoint-10",
    ),
    "HF Trainer": (
        "checkpoint-10/pytorch_model_fsdp_0",
        DCP_FILES,
        (
            "checkpoint-10/optimizer_0/.metadata",
            "checkpoint-10/trainer_state.json",
            "checkpoint-10/rng_state_0.pth",
            "checkpoint-10/scheduler.pt",
        ),
        "checkpoint-10",
    ),
    "accelerate": (
        "checkpoints/checkpoint_10/pytorch_model_fsdp_0",
        DCP_FILES,
        (
            "checkpoints/checkpoint_10/optimizer_0/.metadata",
            "checkpoints/checkpoint_10/sampler.bin",
        ),
        "checkpoints/checkpoint_10",
    ),
    "torchtitan": ("step-10", DCP_FILES, (), "step-10"),
    "Composer": ("ep0-ba10", DCP_FILES, (), "ep0-ba10"),
    "OLMo-core": (
        "step10/model_and_optim",
        DCP_FILES,
        ("step10/train/rank0.pt", "step10/.metadata.json", "step10/config.json"),
        "step10",
    ),
    "NeMo AutoModel": (
        "epoch_0_step_10/model",
        SHARDS,
        ("epoch_0_step_10/optim/.metadata", "epoch_0_step_10/model/.hf_metadata/config.json"),
        "epoch_0_step_10",
    ),
    "Lightning": ("epoch=1-step=10.ckpt", (*DCP_FILES, "meta.pt"), (), "epoch=1-step=10.ckpt"),
    "torchtune": ("epoch_10/dist_epoch_10", DCP_FILES, (), "epoch_10/dist_epoch_10"),
    "verl's torchtitan engine": (
        "global_step_10/step-10",
        DCP_FILES,
        ("global_step_10/data.pt",),
        "global_step_10/step-10",
    ),
}


def plant(run: Path, tool: str) -> tuple[Path, Path]:
    """Make the tree that a tool leaves; return the directories of weights and step."""
    place, files, beside, step = TREES[tool]
    for name in (*(f"{place}/{file}" for file in files), *beside):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"x")
    return run / place, run / step


def levels(run: Path, weights: Path, files: tuple[str, ...]) -> list[Path]:
    """Return the run, everything on the way to the weights, and their files."""
    above = [weights, *weights.parents]
    return [*above[above.index(run) :: -1], *(weights / name for name in files)]


@pytest.mark.parametrize("tool", TREES)
def test_every_level_of_a_tools_tree_means_its_weights(tmp_path: Path, tool: str) -> None:
    weights, step = plant(tmp_path / "run", tool)
    for level in levels(tmp_path / "run", weights, TREES[tool][1]):
        if level.name == "meta.pt":
            continue
        if tool == "accelerate" and level == tmp_path / "run":
            continue  # `checkpoints` is the run
        found = only(level)
        assert (found.weights_dir, found.step_dir, found.step) == (weights, step, 10), level


@pytest.mark.parametrize("tool", TREES)
def test_the_default_output_does_not_depend_on_the_level(tmp_path: Path, tool: str) -> None:
    weights, step = plant(tmp_path / "run", tool)
    for level in levels(tmp_path / "run", weights, TREES[tool][1]):
        if level.name != "meta.pt" and (tool, level) != ("accelerate", tmp_path / "run"):
            name = step.name.removesuffix(".ckpt")
            assert only(level).default_output == step.parent / "merged" / name, level


@pytest.mark.parametrize("tool", TREES)
def test_the_highest_of_several_steps_comes_first(tmp_path: Path, tool: str) -> None:
    run = tmp_path / "run"
    plant(run, tool)
    shutil.copytree(run, tmp_path / "other")
    for path in sorted((tmp_path / "other").rglob("*10*"), reverse=True):
        path.rename(path.with_name(path.name.replace("10", "9")))
    shutil.copytree(tmp_path / "other", run, dirs_exist_ok=True)
    top = run / "checkpoints" if tool == "accelerate" else run
    assert [at.step for at in discover(top, Choice())] == [10, 9]
    assert only(top, step=9).step == 9


def test_the_config_next_to_lmms_engines_weights_means_them(tmp_path: Path) -> None:
    weights, step = plant(tmp_path, "lmms-engine")
    assert only(step / "config.json").weights_dir == weights


@pytest.mark.parametrize("beside", ["optimizer/optimizer_world_size_2_rank_0.pt", "extra_state"])
def test_training_state_next_to_lmms_engines_weights_does_not(tmp_path: Path, beside: str) -> None:
    _, step = plant(tmp_path, "lmms-engine")
    with pytest.raises(UsageError, match="is training state"):
        discover(step / beside, Choice())


def test_a_path_next_to_a_trainers_weights_means_them(tmp_path: Path) -> None:
    weights, step = plant(tmp_path, "HF Trainer")
    assert only(step / "trainer_state.json").weights_dir == weights


def test_the_final_model_of_axolotl_is_next_to_its_checkpoints(tmp_path: Path) -> None:
    plant(tmp_path, "HF Trainer")
    for name in DCP_FILES:
        (tmp_path / "pytorch_model_fsdp_0").mkdir(exist_ok=True)
        (tmp_path / "pytorch_model_fsdp_0" / name).write_bytes(b"x")
    assert only(tmp_path).weights_dir == tmp_path / "pytorch_model_fsdp_0"
    assert only(tmp_path / "checkpoint-10").step == 10
    assert only(tmp_path / "checkpoint-10" / "pytorch_model_fsdp_0").step == 10


def test_checkpoints_win_over_a_whole_model_next_to_them(tmp_path: Path) -> None:
    """A run's root may hold the base model, or what an earlier merge made."""
    weights, _ = plant(tmp_path, "HF Trainer")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert only(tmp_path).weights_dir == weights
    assert only(tmp_path / "model.safetensors").format.name == "whole files"


def test_two_models_of_one_step_need_a_choice(tmp_path: Path) -> None:
    weights, step = plant(tmp_path, "HF Trainer")
    shutil.copytree(weights, step / "pytorch_model_fsdp_1")
    with pytest.raises(UsageError, match="2 sets of weights") as refused:
        discover(step, Choice())
    assert refused.value.found == "pytorch_model_fsdp_1 (2 B), pytorch_model_fsdp_0 (2 B)"
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1"):
        found = only(step / name)
        assert (found.weights_dir, found.step) == (step / name, 10)


def test_two_models_of_one_step_have_outputs_of_their_own(tmp_path: Path) -> None:
    weights, step = plant(tmp_path, "HF Trainer")
    shutil.copytree(weights, step / "pytorch_model_fsdp_1")
    outputs = {only(step / f"pytorch_model_fsdp_{number}").default_output for number in (0, 1)}
    assert len(outputs) == 2


@pytest.mark.parametrize("name", ["last.ckpt", "model.pt", "best.safetensors"])
def test_the_output_of_a_directory_with_the_name_of_a_file_is_not_called_so(
    tmp_path: Path, name: str
) -> None:
    for file in DCP_FILES:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_bytes(b"x")
    assert only(tmp_path / name).default_output == tmp_path / "merged" / Path(name).stem


@pytest.mark.parametrize(
    "name", ["weight_v{:06d}-fsdp", "weight_v{:06d}", "global_step{}_universal"]
)
def test_the_number_of_these_names_is_the_step(tmp_path: Path, name: str) -> None:
    for step in (3, 12):
        for file in SHARDS:
            (tmp_path / name.format(step)).mkdir()
            (tmp_path / name.format(step) / file).write_bytes(b"x")
    assert [at.step for at in discover(tmp_path, Choice())] == [12, 3]
    found = only(tmp_path / name.format(3))
    assert (found.step, found.role) == (3, None)


@pytest.mark.parametrize("places", ["model/{}", "{}/model", "weights/modules/{}", "{}/model/dcp"])
def test_the_modules_of_a_step_have_their_names_in_the_error(tmp_path: Path, places: str) -> None:
    """VeOmni saves a folder per module."""
    for module in ("talker", "thinker"):
        folder = tmp_path / "global_step_10" / places.format(module)
        folder.mkdir(parents=True)
        for file in DCP_FILES:
            (folder / file).write_bytes(b"x")
    with pytest.raises(UsageError, match="2 sets of weights") as refused:
        discover(tmp_path, Choice())
    assert refused.value.found == "talker (2 B), thinker (2 B)"
    assert "role='talker' or 'thinker'" in refused.value.hint
    assert places.format("talker") in str(only(tmp_path, role="talker").weights_dir)


@pytest.mark.parametrize("name", ["ema.pt", "last.ckpt", "weights.safetensors", "model.pth"])
def test_a_file_that_is_named_means_itself(tmp_path: Path, name: str) -> None:
    _, step = plant(tmp_path, "lmms-engine")
    (step / name).write_bytes(b"x")
    found = only(step / name)
    assert (found.file, found.weights_dir) == (step / name, step)
    assert found.format.name == "whole files"
    assert found.default_output == step / "merged" / Path(name).stem
