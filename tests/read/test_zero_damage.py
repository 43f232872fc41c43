"""What the pickles of ZeRO say is not trusted: a contradiction is an error that names a file."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, some_tensors
from unshard import CheckpointError, CorruptError, NotMergeableError
from zero_files import ZeroModel, save_zero

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FROZEN = {"frozen.weight": torch.linspace(0, 1, 12).bfloat16().reshape(3, 4)}
MODEL = ZeroModel([some_tensors()], FROZEN, {"steps": torch.tensor(3)})
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
EVERY: tuple[object, ...] = (
    "a text",
    -1,
    0,
    10**30,
    2**62,
    [],
    {},
    [[1]],
    [-5],
    {"a": 1},
    torch.ones(2),
    1.5,
    True,
)


@pytest.fixture(params=[2, 3])
def tag(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the directory of a save of stage 2 or 3 on two ranks."""
    return save_zero(tmp_path / "global_step1", MODEL, world=2, stage=request.param)


def model_file(tag: Path) -> Path:
    return min(tag.glob("*mp_rank_00_model_states.pt"))


def changed(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    state = torch.load(path, weights_only=False)
    change(state.get("optimizer_state_dict", state))
    torch.save(state, path)


MODEL_KEYS = (
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "checkpoint_parallel_dimensions",
)
OPTIM_KEYS = (
    "zero_stage",
    "partition_count",
    "param_alignment_paddings",
    "fp32_flat_groups",
    "single_partition_of_fp32_groups",
    "optimizer_state_dict",
    "base_optimizer_state",
)


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_values_of_any_kind_in_the_models_file_are_read_or_refused(tag: Path, key: str) -> None:
    path = model_file(tag)
    good = path.read_bytes()
    for value in EVERY:
        changed(path, lambda state, value=value: state.update({key: value}))  # type: ignore[misc]
        is_read_or_refused(tag)
        path.write_bytes(good)


@pytest.mark.parametrize("key", OPTIM_KEYS)
def test_values_of_any_kind_in_the_optimizers_file_are_read_or_refused(tag: Path, key: str) -> None:
    path = tag / OPTIM
    good = path.read_bytes()
    for value in EVERY:
        changed(path, lambda state, value=value: state.update({key: value}))  # type: ignore[misc]
        is_read_or_refused(tag)
        path.write_bytes(good)


def is_read_or_refused(tag: Path) -> None:
    try:
        unshard.inspect(tag)
    except CheckpointError as error:
        assert str(tag) in error.text or "tensor " in error.text  # noqa: PT017 (either is right)


def shapes_of(state: dict[str, object]) -> dict[str, torch.Size]:
    shapes = state["param_shapes"]
    assert isinstance(shapes, list)
    return shapes[0]  # type: ignore[no-any-return]


def test_shapes_that_the_partitions_do_not_have_are_refused(tag: Path) -> None:
    for shape in ((400, 6), (2, 2)):
        changed(
            model_file(tag),
            lambda state, shape=shape: shapes_of(state).update({"lm_head.weight": shape}),  # type: ignore[misc]
        )
        with pytest.raises(CorruptError, match="not fit param_shapes"):
            unshard.inspect(tag)


def test_a_partition_that_is_cut_short_is_refused(tag: Path) -> None:
    def shorten(state: dict[str, object]) -> None:
        for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            if isinstance(parts := state.get(key), list):
                parts[0] = parts[0][:-20].clone()

    changed(tag / OPTIM, shorten)
    with pytest.raises(CorruptError, match="fit param_shapes"):
        unshard.inspect(tag)


def test_ranks_of_another_dtype_are_refused(tag: Path) -> None:
    def halve(state: dict[str, object]) -> None:
        for key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            if isinstance(parts := state.get(key), list):
                state[key] = [part.half() for part in parts]

    changed(tag / OPTIM, halve)
    with pytest.raises(CorruptError, match="differ in their dtype"):
        unshard.inspect(tag)


def test_a_rank_of_another_world_is_refused(tag: Path) -> None:
    changed(tag / OPTIM, lambda state: state.update({"partition_count": 3}))
    with pytest.raises(CorruptError, match="was not saved together with"):
        unshard.inspect(tag)


def test_partitions_of_groups_of_ranks_are_refused(tag: Path) -> None:
    """DeepSpeed records these groups if experts of its AutoEP are cut over them."""
    changed(tag / OPTIM, lambda state: state.update({"ds_zero_partition_groups": []}))
    with pytest.raises(NotMergeableError, match=r"groups of ranks: experts of .* AutoEP"):
        unshard.inspect(tag)


def test_hpz_is_read_like_any_stage_3(tmp_path: Path) -> None:
    """Its second partition is in memory alone: the float32 weights are cut over all ranks."""
    tag = save_zero(tmp_path / "global_step1", MODEL, world=2, stage=3)
    hpz = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    for path in (*tag.glob("*model_states.pt"), *tag.glob("*optim_states.pt")):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "ds_config": {**state.get("ds_config", {}), **hpz}}, path)
    unshard.merge(tag, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), MODEL.truth)


def test_parameters_without_values_are_named(tmp_path: Path) -> None:
    tag = save_zero(tmp_path / "global_step1", MODEL, world=2, stage=3)
    for path in tag.glob("*model_states.pt"):
        changed(path, lambda state: state.update({"frozen_param_shapes": None}))
    with pytest.raises(NotMergeableError, match=r"no values in any file: frozen\.weight"):
        unshard.inspect(tag)


FROZEN_FILE = "zero_pp_rank_1_mp_rank_00_model_states.pt"


@pytest.fixture
def tag3(tmp_path: Path) -> Path:
    """Return the directory of a save of stage 3 on four ranks."""
    return save_zero(tmp_path / "global_step1", MODEL, world=4, stage=3)


def test_frozen_parts_of_another_world_are_refused(tag3: Path, tmp_path: Path) -> None:
    other = save_zero(tmp_path / "other/global_step1", MODEL, world=2, stage=3)
    (other / FROZEN_FILE).replace(tag3 / FROZEN_FILE)
    with pytest.raises(CorruptError, match="differ in dp_world_size"):
        unshard.inspect(tag3)
    changed(tag3 / FROZEN_FILE, lambda state: state.update({"dp_world_size": None}))
    with pytest.raises(CorruptError, match="does not have rank 1's part"):
        unshard.inspect(tag3)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"frozen_param_shapes": {"frozen.weight": torch.Size((4, 3))}}, "frozen_param_shapes"),
        ({"global_steps": 4}, "global_steps"),
        ({"ds_config": {"zero_optimization": {"stage": 2}}}, "the stage of ZeRO"),
    ],
)
def test_frozen_parts_of_another_save_are_refused(
    tag3: Path, change: dict[str, object], what: str
) -> None:
    for path in tag3.glob("*model_states.pt"):
        changed(path, lambda state: state.update({"global_steps": 3}))
    changed(tag3 / FROZEN_FILE, lambda state: state.update(change))
    with pytest.raises(CorruptError, match=f"differ in {what}"):
        unshard.inspect(tag3)


def with_moments(directory: Path, stage: int, steps: Sequence[float], lr: float = 0.1) -> Path:
    """Save of two ranks, each with the step of its own."""
    tag = save_zero(directory, MODEL, world=len(steps), stage=stage)
    for rank, step in enumerate(steps):

        def add(state: dict[str, object], rank: int = rank, step: float = step) -> None:
            flat = state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
            assert isinstance(flat, list)
            each = {"step": torch.tensor(step), "exp_avg": torch.zeros_like(flat[0])}
            groups = [{"lr": lr * (1 + rank * (lr > 0.1)), "params": [0]}]
            key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
            state[key] = {"state": {0: each}, "param_groups": groups}

        changed(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", add)
    return tag


@pytest.mark.parametrize("stage", [1, 3])
def test_a_value_that_is_not_a_number_is_equal_on_all_ranks(tmp_path: Path, stage: int) -> None:
    tag = with_moments(tmp_path / "tag", stage, [3.0, 3.0], lr=math.nan)
    unshard.merge(tag, dry_run=True, optimizer=True, config="none")


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_two_steps_are_refused(tmp_path: Path, stage: int) -> None:
    mixed = with_moments(tmp_path / "mixed", stage, [3.0, 4.0])
    for optimizer in (False, True):
        with pytest.raises(CorruptError, match="at another step") as error:
            unshard.merge(mixed, dry_run=True, optimizer=optimizer)
        assert OPTIM in error.value.subject
        assert (error.value.expected, error.value.found) == ("step 3", "step 4")
    alike = with_moments(tmp_path / "alike", stage, [3.0, 3.0])
    unshard.merge(alike, dry_run=True, optimizer=True, config="none")


def test_a_rank_that_has_only_padding_may_state_another_step(tmp_path: Path) -> None:
    model = ZeroModel([{"one": torch.ones(2)}])
    for keeps_padding in (False, True):
        tag = save_zero(
            tmp_path / str(keeps_padding), model, world=2, stage=1, keeps_padding=keeps_padding
        )
        for rank, step in enumerate((3, 0)):
            changed(
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                lambda state, step=step: state.update(  # type: ignore[misc]
                    {"base_optimizer_state": {"state": {0: {"step": step}}}}
                ),
            )
        assert [one.name for one in unshard.inspect(tag).tensors] == ["one"]


def test_ranks_of_other_hyper_parameters_are_refused(tmp_path: Path) -> None:
    tag = with_moments(tmp_path / "mixed", 2, [3.0, 3.0], lr=0.2)
    with pytest.raises(CorruptError, match="about lr of group 0"):
        unshard.merge(tag, dry_run=True, optimizer=True)
    unshard.merge(tag, dry_run=True, config="none")
