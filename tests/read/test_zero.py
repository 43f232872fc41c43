"""Checkpoints that DeepSpeed 0.19.8 and 0.16.4 wrote, bit for bit, and damage to them.

See tests/data/README.md.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unshard
from ranks import Tensors, assert_same, merged
from unshard import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    UsageError,
)
from unshard.read.finding.discover import discover
from unshard.read.format import Choice

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

ARCHIVE = Path(__file__).parent.parent / "data" / "deepspeed.tar.xz"
EXCLUDED = {"zero2_no_frozen", "zero3_no_frozen"}
FROZEN = ("frozen_one", "frozen_proj.weight", "frozen_proj.bias")
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def cases(file: str = "case.json") -> list[str]:
    """Return the cases that have a file."""
    with tarfile.open(ARCHIVE) as opened:
        return sorted(str(Path(name).parent) for name in opened.getnames() if name.endswith(file))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(directory, filter="data")
    return directory


def truth_of(case: Path, name: str = "truth") -> dict[str, torch.Tensor]:
    """Return the tensors that DeepSpeed had in memory, or those that its script gave."""
    stated = json.loads((case / f"{name}.json").read_text())
    found = {}
    with np.load(case / f"{name}.npz") as arrays:
        for tensor, form in stated.items():
            value = torch.from_numpy(np.array(arrays[tensor]))
            dtype = getattr(torch, form["dtype"])
            found[tensor] = (value if value.dtype == dtype else value.view(dtype)).reshape(
                form["shape"]
            )
    return found


def without(tensors: Tensors, *names: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name not in names}


ALL = cases()
ZERO = [case for case in ALL if Path(case).name.startswith("zero")]


def test_every_case_is_there() -> None:
    assert len(ALL) == 25
    assert {Path(case).name[:5] for case in ZERO} == {"zero0", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize("case", ALL)
def test_the_weights_are_those_of_the_optimizer_bit_for_bit(
    unpacked: Path, tmp_path: Path, case: str
) -> None:
    name = Path(case).name
    unshard.merge(unpacked / case, tmp_path / "out", names="training", verify="full")
    truth = truth_of(unpacked / case)
    lost = FROZEN if name in EXCLUDED else ("lm_head.weight",) if name.startswith("hf_") else ()
    assert_same(merged(tmp_path / "out"), without(truth, *lost))


@pytest.mark.parametrize("case", ["zero1_parameter_alignment", "zero3_sub_groups"])
def test_tensors_are_read_on_demand(unpacked: Path, case: str) -> None:
    place = unpacked / "deepspeed" / case
    with unshard.open_checkpoint(place, framework="pt", names="training") as model:
        assert_same({name: model[name] for name in model}, truth_of(place))
        rows = model.get_slice("layers.1.up.weight")[3:8, 2:5]
        assert rows.equal(truth_of(place)["layers.1.up.weight"][3:8, 2:5])


@pytest.mark.parametrize("case", [case for case in ZERO if Path(case).name < "zero3"])
def test_the_weights_in_the_dtype_of_training(unpacked: Path, tmp_path: Path, case: str) -> None:
    unshard.merge(unpacked / case, tmp_path / "out", names="training", weights="module")
    lost = FROZEN if Path(case).name in EXCLUDED else ()
    assert_same(merged(tmp_path / "out"), without(truth_of(unpacked / case, "truth_live"), *lost))


def test_stage_3_has_no_whole_weights_in_the_dtype_of_training(unpacked: Path) -> None:
    with pytest.raises(NotMergeableError, match="stage 3 has no whole weights"):
        unshard.inspect(unpacked / "deepspeed/zero3_bf16", weights="module")


def test_only_deepspeed_has_weights_in_two_dtypes(unpacked: Path) -> None:
    whole = unpacked / "deepspeed/hf_trainer_zero2/checkpoint-4/model.safetensors"
    alone = unpacked / "alone"
    alone.mkdir()
    shutil.copy(whole, alone)
    with pytest.raises(UnknownFormatError, match="has no module weights"):
        unshard.inspect(alone, weights="module")


MOMENTS = [
    case
    for case in ALL
    if Path(case).name.startswith(("zero1", "zero2", "zero3", "universal"))
    and "elastic" not in case
]


@pytest.mark.parametrize("case", MOMENTS)
def test_the_moments_have_the_names_of_parameters(
    unpacked: Path, tmp_path: Path, case: str
) -> None:
    unshard.merge(unpacked / case, tmp_path / "out", names="training", optimizer=True)
    truth = truth_of(unpacked / case, "truth_optim")
    found = load_file(tmp_path / "out/optimizer.safetensors")
    assert_same(found, {f"state.{name}": value for name, value in truth.items()})
    saved = json.loads((tmp_path / "out/optimizer.json").read_text())
    assert saved["step"] == 3
    named = [name for group in saved["param_groups"] for name in group["params"]]
    assert sorted({name.rpartition(".")[0] for name in truth}) == sorted(named)


def test_the_optimizer_of_an_elastic_checkpoint_is_refused(unpacked: Path) -> None:
    with pytest.raises(NotMergeableError, match="elastic checkpoint, without parameter groups"):
        unshard.merge(unpacked / "deepspeed/zero2_elastic", dry_run=True, optimizer=True)
    with pytest.raises(NotMergeableError) as raised:
        unshard.reshard(unpacked / "deepspeed/zero2_elastic", "out", world_size=2, to="dcp")
    assert "`unshard reshard` takes what was merged" in raised.value.hint
    assert "--optimizer" not in str(raised.value)


def test_a_missing_moment_of_a_universal_checkpoint_is_named(
    unpacked: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(unpacked / "deepspeed/universal_from_zero3_bf16", tmp_path / "copy")
    zero = copy / "global_step3_universal/zero"
    (zero / "layers.0.up.bias/exp_avg.pt").unlink()
    with pytest.raises(IncompleteError, match=r"layers\.0\.up\.bias: exp_avg\.pt is missing"):
        unshard.merge(copy, dry_run=True, optimizer=True)
    unshard.merge(copy, tmp_path / "out", config="none")  # the model is whole


def test_weights_in_the_dtype_of_training_have_no_optimizer(unpacked: Path) -> None:
    with pytest.raises(UsageError, match="module weights have no optimizer"):
        unshard.merge(
            unpacked / "deepspeed/zero2_bf16", dry_run=True, optimizer=True, weights="module"
        )


def test_a_reshard_of_deepspeed_needs_a_format_to_write(unpacked: Path, tmp_path: Path) -> None:
    with pytest.raises(NotMergeableError, match="name the format to write: --to verl"):
        unshard.reshard(unpacked / "deepspeed/zero3_bf16", tmp_path / "out", world_size=2)


@pytest.mark.parametrize("case", cases("zero_to_fp32.json"))
def test_where_zero_to_fp32_differs_it_loses_something(
    unpacked: Path, tmp_path: Path, case: str
) -> None:
    """Frozen weights of stage 1; before 0.19.8 the dtypes of buffers."""
    theirs = truth_of(unpacked / case, "zero_to_fp32")
    unshard.merge(unpacked / case, tmp_path / "out", names="training")
    ours = merged(tmp_path / "out")
    assert_same({name: ours[name].to(value.dtype) for name, value in theirs.items()}, theirs)
    if "0.16.4" not in case:
        assert_same({name: ours[name] for name in theirs}, theirs)
    assert set(ours) - set(theirs) <= set(FROZEN)


def test_a_trainers_tree_means_its_own_step(unpacked: Path) -> None:
    run = unpacked / "deepspeed/hf_trainer_zero2"
    for place in (run, run / "checkpoint-4", run / "checkpoint-4/global_step4"):
        found = unshard.inspect(place)
        assert (found.step, found.format, found.writer) == (4, "DeepSpeed ZeRO", "DeepSpeed")
        assert found.would_write is not None
        assert found.would_write.startswith(f"{run / 'merged/checkpoint-4'}:")


@pytest.mark.parametrize("latest", ["global_step4", None, "global_step9"])
@pytest.mark.parametrize("others", [(), ("global_step2",)])
def test_a_run_and_its_step_give_the_same_weights_whatever_latest_says(
    unpacked: Path, tmp_path: Path, latest: str | None, others: tuple[str, ...]
) -> None:
    run = Path(shutil.copytree(unpacked / "deepspeed/hf_trainer_zero2", tmp_path / "run"))
    shutil.rmtree(run / "checkpoint-2")
    step = run / "checkpoint-4"
    for other in others:
        shutil.copytree(step / "global_step4", step / other)
    (step / "latest").unlink()
    if latest is not None:
        (step / "latest").write_text(latest)
    for place in (run, step, step / "global_step4"):
        found = unshard.inspect(place)
        assert (found.path, found.step) == (str(step / "global_step4"), 4)
        assert found.would_write is not None
        assert found.would_write.startswith(f"{run / 'merged/checkpoint-4'}:")
        noted = any("global_step4, the highest step, was taken" in one for one in found.warnings)
        assert noted is (latest != "global_step4")
    for number, place in enumerate((run, step)):
        unshard.merge(place, tmp_path / f"out{number}")
        assert (tmp_path / f"out{number}" / "lr_scheduler_state.json").is_file()
    assert_same(merged(tmp_path / "out0"), merged(tmp_path / "out1"))
    assert_same(merged(tmp_path / "out0"), without(truth_of(run), "lm_head.weight"))


def test_of_an_interrupted_save_the_weights_of_training_are_named(unpacked: Path) -> None:
    step = unpacked / "deepspeed/hf_trainer_zero2/checkpoint-2"
    with pytest.raises(IncompleteError, match=r"Missing checkpoint for rank 0, 1 of") as error:
        unshard.inspect(step)
    assert "weights='module'" in str(error.value)
    assert unshard.inspect(step, weights="module").dtypes == {"float32": 27}


@pytest.fixture
def copy(unpacked: Path, tmp_path: Path) -> Path:
    """Return a copy of stage 2 on 4 ranks."""
    return shutil.copytree(unpacked / "deepspeed/zero2_bf16", tmp_path / "copy")


@pytest.fixture
def copy3(unpacked: Path, tmp_path: Path) -> Path:
    """Return a copy of stage 3 on 4 ranks."""
    return shutil.copytree(unpacked / "deepspeed/zero3_bf16", tmp_path / "copy3")


@pytest.mark.parametrize("rank", range(4))
def test_a_missing_rank_is_named(copy: Path, copy3: Path, rank: int) -> None:
    for run in (copy, copy3):
        (run / "global_step3" / OPTIM.format(rank)).unlink()
        with pytest.raises(IncompleteError, match=f"rank {rank} of world size 4"):
            unshard.inspect(run)


def test_a_missing_part_of_frozen_weights_is_named(copy3: Path) -> None:
    (copy3 / "global_step3/zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 2 of world size 4"):
        unshard.inspect(copy3)


def test_stale_files_of_a_larger_world_are_left_out(copy: Path) -> None:
    tag = copy / "global_step3"
    for rank in (4, 10):
        torch.save({"x": 1}, tag / OPTIM.format(rank))
    shutil.copy(tag / OPTIM.format(0), tag / OPTIM.format(0).removeprefix("bf16_"))
    found = unshard.inspect(copy)
    assert found.world_size == 4
    assert any("left out 3 stale files" in note for note in found.warnings)


def test_a_renamed_rank_is_noticed(copy: Path, copy3: Path) -> None:
    for run in (copy, copy3):
        tag = run / "global_step3"
        shutil.copy(tag / OPTIM.format(1), tag / OPTIM.format(2))
        with pytest.raises(CorruptError, match=r"rank_2_.*was saved as .*rank_1_"):
            unshard.inspect(run)


def test_files_of_two_stages_in_one_tag_are_refused(copy: Path, copy3: Path) -> None:
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(copy3 / "global_step3" / name, copy / "global_step3" / name)
    with pytest.raises(CorruptError, match="files of two saves"):
        unshard.inspect(copy)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_02-model_00-model_states.pt", "the layers of a pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "expert parallelism"),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "expert parallelism"),
    ],
)
def test_other_parallelism_is_refused_with_its_files(copy: Path, name: str, what: str) -> None:
    torch.save({}, copy / "global_step3" / name)
    with pytest.raises(NotMergeableError, match=what) as error:
        unshard.inspect(copy)
    assert name in error.value.found
    assert "ds_to_universal" in error.value.hint


def test_a_universal_checkpoint_without_a_parameter_is_incomplete(
    unpacked: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(unpacked / "deepspeed/universal_from_zero2_bf16", tmp_path / "copy")
    shutil.rmtree(copy / "global_step3_universal/zero/layers.0.up.weight")
    with pytest.raises(IncompleteError, match=r"no folder of 1 parameter: layers\.0\.up\.weight"):
        unshard.inspect(copy)


def test_a_universal_checkpoint_has_the_step_of_its_name(unpacked: Path) -> None:
    run = unpacked / "deepspeed/universal_from_zero2_bf16"
    for place in (run, run / "global_step3_universal"):
        found = unshard.inspect(place)
        assert (found.step, found.world_size) == (3, 4)
        assert found.output == str(run / "merged/global_step3_universal")


def test_a_universal_checkpoint_next_to_its_original_changes_nothing(
    unpacked: Path, copy: Path
) -> None:
    universal = unpacked / "deepspeed/universal_from_zero2_bf16/global_step3_universal"
    shutil.copytree(universal, copy / universal.name)
    assert unshard.inspect(copy).path == str(copy / "global_step3")
    assert unshard.inspect(copy, step=3).path == str(copy / "global_step3")
    assert len(discover(copy, Choice())) == 1
    shutil.copytree(copy / "global_step3", copy / "global_step12")
    assert unshard.inspect(copy).step == 12


@pytest.mark.parametrize("latest", ["global_step4", None])
def test_a_universal_checkpoint_in_a_trainers_step_changes_nothing(
    unpacked: Path, tmp_path: Path, latest: str | None
) -> None:
    run = Path(shutil.copytree(unpacked / "deepspeed/hf_trainer_zero2", tmp_path / "run"))
    step = run / "checkpoint-4"
    universal = unpacked / "deepspeed/universal_from_zero2_bf16/global_step3_universal"
    shutil.copytree(universal, step / "global_step4_universal")
    (step / "latest").unlink()
    if latest is not None:
        (step / "latest").write_text(latest)
    for place in (run, step):
        assert unshard.inspect(place).path == str(step / "global_step4")
    (step / "trainer_state.json").unlink()  # accelerate's steps have none
    if latest is not None:
        assert unshard.inspect(step).path == str(step / "global_step4")
    found = unshard.inspect(step / "global_step4_universal")
    assert (found.step, found.path) == (4, str(step / "global_step4_universal"))


def test_the_ranks_that_trained_are_counted_where_one_file_has_all(unpacked: Path) -> None:
    assert unshard.inspect(unpacked / "deepspeed/zero0_bf16").world_size == 2
    assert unshard.inspect(unpacked / "deepspeed/zero2_bf16", weights="module").world_size == 4


def test_of_tags_without_steps_the_one_that_latest_names_is_taken(copy: Path) -> None:
    (copy / "global_step3").rename(copy / "best")
    shutil.copytree(copy / "best", copy / "other")
    (copy / "latest").write_text("best")
    assert unshard.inspect(copy).path == str(copy / "best")


def test_a_run_has_a_step_per_tag(copy: Path) -> None:
    shutil.copytree(copy / "global_step3", copy / "global_step12")
    assert unshard.inspect(copy).step == 12
    assert unshard.inspect(copy, step=3).step == 3
    assert any("latest names step 3" in note for note in unshard.inspect(copy).warnings)


def test_a_tag_that_latest_names_and_that_is_gone_is_reported(copy: Path) -> None:
    (copy / "latest").write_text("global_step9")
    found = unshard.inspect(copy)
    assert found.step == 3
    assert any("names step 9" in note for note in found.warnings)
