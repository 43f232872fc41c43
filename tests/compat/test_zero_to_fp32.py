"""The command that replaces DeepSpeed's zero_to_fp32.py, with its arguments and its file names."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, some_tensors
from unshard.compat import zero_to_fp32
from unshard.errors import IncompleteError, NotMergeableError, UnknownFormatError, UsageError
from zero_files import ZeroModel, save_zero

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FROZEN = {"base.weight": torch.linspace(0, 1, 12).bfloat16().reshape(3, 4)}
MODEL = ZeroModel([some_tensors()], FROZEN, {"steps": torch.tensor(3)})
NAMED = some_tensors().items()
Run = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(params=[1, 2, 3])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a trainer's step with two tags, of which `latest` names the first."""
    step = tmp_path / "checkpoint-7"
    save_zero(step / "global_step7", MODEL, world=3, stage=request.param)
    other = ZeroModel([some_tensors(1)])
    save_zero(step / "best", other, world=2, stage=request.param)
    (step / "latest").write_text("global_step7")
    return step


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return `convert(checkpoint, *arguments)`, which returns the tensors of the output."""

    def run(checkpoint: Path, *arguments: str) -> dict[str, torch.Tensor]:
        line = ["zero_to_fp32.py", str(checkpoint), str(tmp_path / "out"), *arguments]
        monkeypatch.setattr(sys, "argv", line)
        zero_to_fp32.main()
        return merged(tmp_path / "out")

    return run


def test_the_tag_that_latest_names_is_converted(checkpoint: Path, convert: Run) -> None:
    assert_same(convert(checkpoint, "--safe_serialization", "-d"), MODEL.truth)


def test_another_tag_may_be_named(checkpoint: Path, convert: Run) -> None:
    for option in ("-t", "--tag"):
        assert_same(convert(checkpoint, option, "best"), some_tensors(1))


def test_frozen_parameters_may_be_left_out(checkpoint: Path, convert: Run) -> None:
    found = convert(checkpoint, "--exclude_frozen_parameters")
    assert_same(found, {name: MODEL.truth[name] for name in (*some_tensors(), "steps")})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_may_be_inside_of_wrappers(
    tmp_path: Path, convert: Run, stage: int
) -> None:
    trained = {f"module.a._checkpoint_wrapped_module.{name}": value for name, value in NAMED}
    frozen = {"module.c._orig_mod.weight": torch.ones(2, 2).bfloat16()}
    model = ZeroModel([trained], frozen, shared={"module.tied": "module.c._orig_mod.weight"})
    save_zero(tmp_path / "step" / "tag", model, world=2, stage=stage)
    found = convert(tmp_path / "step", "--tag", "tag", "--exclude_frozen_parameters")
    assert_same(found, {f"a.{name}": value for name, value in NAMED})
    assert {"c.weight", "tied"} < {*convert(tmp_path / "step", "--tag", "tag")}


@pytest.mark.parametrize("has_base", [True, False])
def test_an_adapter_stays_as_training_has_it(
    tmp_path: Path, convert: Run, *, has_base: bool
) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    trained = {
        f"{layer}.lora_A.default.weight": torch.arange(16.0).reshape(2, 8),
        f"{layer}.lora_B.default.weight": torch.ones(8, 2),
    }
    frozen = {f"{layer}.base_layer.weight": torch.ones(8, 8).bfloat16()} if has_base else {}
    model = ZeroModel([trained], frozen)
    step = tmp_path / "checkpoint-3"
    save_zero(step / "global_step3", model, world=2, stage=2)
    (step / "latest").write_text("global_step3")
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (step / "adapter_config.json").write_text(json.dumps(stated))
    assert_same(convert(step), model.truth)
    assert unshard.verify(tmp_path / "out", against=step).equal
    with pytest.raises(UsageError, match="lora='keep' needs names='training'"):
        unshard.merge(step, lora="keep", dry_run=True)


def test_several_files_are_named_as_those_of_the_original(
    checkpoint: Path, convert: Run, tmp_path: Path
) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    assert_same(convert(checkpoint, "--max_shard_size", "400B"), MODEL.truth)
    split = split_torch_state_dict_into_shards(
        MODEL.truth, filename_pattern="model{suffix}.safetensors", max_shard_size=400
    )
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"] == split.tensor_to_filename
    written = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert written == set(split.filename_to_tensors)


def test_without_latest_the_tag_is_needed(checkpoint: Path, convert: Run) -> None:
    (checkpoint / "latest").unlink()
    with pytest.raises(UnknownFormatError, match="Unable to find 'latest' file"):
        convert(checkpoint)
    with pytest.raises(UnknownFormatError, match="nope' doesn't exist"):
        convert(checkpoint, "--tag", "nope")
    assert_same(convert(checkpoint, "--tag", "global_step7"), MODEL.truth)


def test_a_missing_rank_is_named(checkpoint: Path, convert: Run, tmp_path: Path) -> None:
    (checkpoint / "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 1 of world size 3"):
        convert(checkpoint)
    assert not (tmp_path / "out").exists()


def test_one_tensor_is_a_tensor(
    tmp_path: Path, convert: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ZeroModel([{"one": torch.ones(3)}])
    save_zero(tmp_path / "step/tag", model, world=2, stage=2)
    assert_same(convert(tmp_path / "step", "-t", "tag"), model.truth)
    assert f"Saved 1 tensor to {tmp_path / 'out'}" in capsys.readouterr().out


def test_stage_0_has_no_float32_weights(tmp_path: Path, convert: Run) -> None:
    tag = save_zero(tmp_path / "step/tag", MODEL, world=2, stage=1)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    state = torch.load(tag / "mp_rank_00_model_states.pt")
    state["param_shapes"] = state["ds_config"] = None
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    with pytest.raises(NotMergeableError, match="of ZeRO stage 0") as error:
        convert(tmp_path / "step", "-t", "tag")
    line = f"unshard merge {tag} {tmp_path / 'out'} --names training"
    assert str(error.value).endswith(f"\n  use:      {line}")
    assert not (tmp_path / "out").exists()
