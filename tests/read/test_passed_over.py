"""What must not be taken for the checkpoint, and what must not be passed over in silence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import IncompleteError, NotMergeableError, UnknownFormatError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]


def whole(directory: Path, seed: int, name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(some_tensors(seed), directory / name)
    return directory


def saved(directory: Path, state: dict[str, object], *, flat: bool = True) -> Path:
    planner = DefaultSavePlanner(flatten_state_dict=flat)
    save(state, checkpoint_id=directory, no_dist=True, planner=planner)
    return directory


def test_a_newer_whole_step_is_newer(tmp_path: Path) -> None:
    save_ranks(tmp_path / "run" / "checkpoint-10" / "pytorch_model_fsdp_0", some_tensors(1), 2)
    whole(tmp_path / "run" / "checkpoint-20", 2)
    report = unshard.merge(tmp_path / "run", tmp_path / "out", config="none")
    assert report.step == 20
    assert_same(merged(tmp_path / "out"), some_tensors(2))


def test_sharded_steps_win_over_a_whole_model_in_the_run(tmp_path: Path) -> None:
    save_ranks(tmp_path / "run" / "checkpoint-10" / "pytorch_model_fsdp_0", some_tensors(1), 2)
    whole(tmp_path / "run", 2)
    assert unshard.inspect(tmp_path / "run").step == 10


def test_a_whole_model_wins_over_whole_steps_below_it(tmp_path: Path) -> None:
    whole(tmp_path / "run" / "checkpoint-10", 1)
    whole(tmp_path / "run", 2)
    assert unshard.inspect(tmp_path / "run").step is None


def test_a_higher_step_without_weights_is_named(tmp_path: Path) -> None:
    save_ranks(tmp_path / "run" / "checkpoint-10" / "pytorch_model_fsdp_0", some_tensors(), 2)
    (tmp_path / "run" / "checkpoint-30").mkdir()
    (tmp_path / "run" / "checkpoint-30" / "trainer_state.json").write_text("{}")
    report = unshard.merge(tmp_path / "run", tmp_path / "out", config="none")
    assert any("checkpoint-30: it has no weights" in warning for warning in report.warnings)


def test_the_steps_may_be_one_level_down(tmp_path: Path) -> None:
    save_ranks(tmp_path / "run" / "checkpoints" / "step-5", some_tensors(), 2)
    assert unshard.inspect(tmp_path / "run").step == 5


def test_a_rank_file_that_is_named_means_its_own_set(tmp_path: Path) -> None:
    save_ranks(tmp_path / "actor", some_tensors(1), 2)
    save_ranks(tmp_path / "actor", some_tensors(2), 3)
    (tmp_path / "actor" / "model_world_size_3_rank_2.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 2 of world size 3"):
        unshard.merge(tmp_path / "actor" / "model_world_size_3_rank_0.pt", tmp_path / "out")


@pytest.mark.parametrize("beside", [torch.tensor(3), torch.arange(5)])
def test_a_counter_next_to_an_object_is_not_the_model(tmp_path: Path, beside: torch.Tensor) -> None:
    saved(tmp_path / "ckpt", {"model": some_tensors(), "step": beside}, flat=False)
    unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_counter_alone_is_not_a_model(tmp_path: Path) -> None:
    optimizer = {"w": {"exp_avg": torch.zeros(3)}}
    saved(tmp_path / "ckpt", {"step": torch.tensor(3), "optimizer": optimizer})
    with pytest.raises(NotMergeableError, match="has no model weights"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


def test_flat_parameters_are_refused_in_every_format(tmp_path: Path) -> None:
    flat = {"_flat_param": torch.randn(9), "layers.0._flat_param": torch.randn(9)}
    saved(tmp_path / "dcp", {"model": flat})
    whole(tmp_path / "whole", 0)
    save_file(flat, tmp_path / "whole" / "model.safetensors")
    for name in ("dcp", "whole"):
        with pytest.raises(NotMergeableError, match="LOCAL_STATE_DICT"):
            unshard.merge(tmp_path / name, tmp_path / "out")


def test_a_link_to_a_file_without_a_suffix_is_that_file(tmp_path: Path) -> None:
    whole(tmp_path / "blobs", 3, "abcdef")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.safetensors"
    link.symlink_to(tmp_path / "blobs" / "abcdef")
    unshard.merge(link, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors(3))
    assert unshard.verify(link, tmp_path / "out").equal


def test_two_full_models_of_accelerate_are_not_one(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        torch.save(some_tensors(), tmp_path / name)
    with pytest.raises(NotMergeableError, match="weights of 2 models"):
        unshard.merge(tmp_path, tmp_path / "out")
    unshard.merge(tmp_path / "pytorch_model_fsdp_1.bin", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_a_file_of_another_name_is_offered(tmp_path: Path) -> None:
    torch.save(some_tensors(), tmp_path / "my_model.pth")
    with pytest.raises(UnknownFormatError, match=r"pass the file itself: .*my_model\.pth"):
        unshard.merge(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state": {"model": state}},
        lambda state: {"state_dict": state, "pytorch-lightning_version": "2.5.0"},
    ],
    ids=["Composer", "Lightning"],
)
def test_single_files_of_wrapping_modules_lose_the_wrapper(tmp_path: Path, wrap: object) -> None:
    assert callable(wrap)
    wrapped = {f"model.{name}": tensor for name, tensor in some_tensors().items()}
    torch.save(wrap(wrapped), tmp_path / "last.pt")
    unshard.merge(tmp_path / "last.pt", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
