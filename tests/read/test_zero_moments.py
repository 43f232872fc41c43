"""Every group of DeepSpeed's optimizer has moments of its own kinds; all files have checksums."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import unshard
from ranks import assert_same
from unshard import CorruptError, IncompleteError, NotMergeableError
from zero_files import ZeroModel, save_universal, save_zero

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

SHAPES: Sequence[Mapping[str, tuple[int, ...]]] = (
    {"up.weight": (6, 5), "down.weight": (5, 6)},
    {"up.bias": (7,), "norm.weight": (5,)},
)
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LAYOUTS = [(1, 1), (2, 3), (3, 2)]  # stage, ranks

Optimizer = type[torch.optim.Optimizer]
ADAM, SGD = torch.optim.AdamW, torch.optim.SGD


def trained(*each: tuple[Optimizer, Mapping[str, object]]) -> ZeroModel:
    """Return what torch's optimizers, one per group, make of a model in two steps."""
    torch.manual_seed(0)
    groups, settings = [], []
    states: dict[str, dict[str, torch.Tensor]] = {}
    for shapes, (kind, options) in zip(SHAPES, each, strict=True):
        params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        optimizer = kind(list(params.values()), **options)  # type: ignore[arg-type]
        for _ in range(2):
            for one in params.values():
                one.grad = torch.randn_like(one)
            optimizer.step()
        for name, one in params.items():
            own = optimizer.state[one].items()
            states[name] = {key: value for key, value in own if value is not None}
        groups.append({name: one.detach() for name, one in params.items()})
        (group,) = optimizer.state_dict()["param_groups"]
        settings.append({key: value for key, value in group.items() if key != "params"})
    return ZeroModel(groups, states=states, settings=settings)


CASES: dict[str, Sequence[tuple[Optimizer, Mapping[str, object]]]] = {
    "amsgrad in the second group": [(ADAM, {}), (ADAM, {"amsgrad": True})],
    "amsgrad in the first group": [(ADAM, {"amsgrad": True}), (ADAM, {})],
    "Muon, Adam": [(SGD, {"momentum": 0.9}), (ADAM, {})],
    "Adam, Muon": [(ADAM, {}), (SGD, {"momentum": 0.9})],
    "momentum in the second group": [(SGD, {}), (SGD, {"momentum": 0.9})],
    "momentum in the first group": [(SGD, {"momentum": 0.9}), (SGD, {})],
    "other optimizers": [(torch.optim.RMSprop, {"centered": True}), (torch.optim.Adagrad, {})],
    "numbers besides the step": [(torch.optim.NAdam, {}), (ADAM, {})],
}


def check(place: Path, model: ZeroModel, output: Path) -> None:
    """Check that the moments, steps and other numbers are those of torch."""
    unshard.merge(place, output, names="training", optimizer=True, verify="full")
    states = {(name, key): one for name, own in model.states.items() for key, one in own.items()}
    truth = {f"state.{name}.{key}": one for (name, key), one in states.items() if one.ndim}
    assert_same(load_file(output / "optimizer.safetensors"), truth)
    saved = json.loads((output / "optimizer.json").read_text())
    for (name, key), one in states.items():
        if not one.ndim:
            own = {"step": saved["step"], **saved["values"].get(name, {})}
            assert own[key] == one.item()
    assert [group["params"] for group in saved["param_groups"]] == [
        list(shapes) for shapes in SHAPES
    ]


@pytest.mark.parametrize(("stage", "world"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_every_group_has_moments_of_its_own(
    tmp_path: Path, case: str, stage: int, world: int
) -> None:
    model = trained(*CASES[case])
    check(save_zero(tmp_path / "tag", model, world=world, stage=stage), model, tmp_path / "out")


@pytest.mark.parametrize("case", [one for one in CASES if "numbers" not in one])
def test_every_group_of_a_universal_checkpoint_has_moments_of_its_own(
    tmp_path: Path, case: str
) -> None:
    model = trained(*CASES[case])
    check(save_universal(tmp_path / "tag", model), model, tmp_path / "out")


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_of_several_parts_and_aligned_ones(tmp_path: Path, stage: int) -> None:
    model = trained(*CASES["amsgrad in the second group"])
    tag = save_zero(tmp_path / "tag", model, world=2, stage=stage, align=4, sub_group=6)
    check(tag, model, tmp_path / "out")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_kind_that_one_rank_lacks_is_named(tmp_path: Path, rank: int) -> None:
    model = trained(*CASES["amsgrad in the second group"])
    tag = save_zero(tmp_path / "tag", model, world=2, stage=2)
    path = tag / OPTIM.format(rank)
    saved = torch.load(path, weights_only=False)
    del saved["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["max_exp_avg_sq"]
    torch.save(saved, path)
    with pytest.raises(CorruptError, match="max_exp_avg_sq of flat tensor 1") as raised:
        unshard.merge(tag, dry_run=True, optimizer=True)
    assert path.name in raised.value.subject


def test_eight_bits_in_any_group_are_refused(tmp_path: Path) -> None:
    model = trained(*CASES["Adam, Muon"])
    states = {**model.states, **{name: {"state1": torch.ones(5)} for name in SHAPES[1]}}
    model = replace(model, states={name: states[name] for name in model.states})
    tag = save_zero(tmp_path / "tag", model, world=1, stage=2)
    with pytest.raises(NotMergeableError, match="8-bit optimizer"):
        unshard.merge(tag, dry_run=True, optimizer=True)


@pytest.mark.parametrize(("name", "key"), [("up.bias", "exp_avg"), ("up.weight", "exp_avg_sq")])
def test_a_moment_that_one_parameter_lacks_is_named(tmp_path: Path, name: str, key: str) -> None:
    tag = save_universal(tmp_path / "tag", trained((ADAM, {}), (ADAM, {"weight_decay": 0})))
    (tag / "zero" / name / f"{key}.pt").unlink()
    with pytest.raises(IncompleteError, match=rf"{name}: {key}\.pt is missing"):
        unshard.merge(tag, dry_run=True, optimizer=True)


def test_a_moment_that_a_group_lacks_and_a_like_one_has_is_named(tmp_path: Path) -> None:
    tag = save_universal(tmp_path / "tag", trained((ADAM, {}), (ADAM, {"weight_decay": 0})))
    for name in SHAPES[1]:
        (tag / "zero" / name / "exp_avg.pt").unlink()
    with pytest.raises(IncompleteError, match=r"exp_avg\.pt is missing"):
        unshard.merge(tag, dry_run=True, optimizer=True)


def flipped(path: Path, key: str) -> None:
    """Flip one bit of a tensor in a saved file."""
    data = bytearray(path.read_bytes())
    value = torch.load(path, weights_only=False)
    for part in key.split("/"):
        value = value[int(part) if part.isdigit() else part]
    at = data.find(value.numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "file", "key"),
    [
        ("universal", "zero/up.bias/max_exp_avg_sq.pt", "param"),
        ("universal", "zero/up.weight/exp_avg.pt", "param"),
        ("universal", "zero/down.weight/fp32.pt", "param"),
        ("zero", OPTIM.format(0), "optimizer_state_dict/base_optimizer_state/state/1/exp_avg"),
        ("zero", OPTIM.format(0), "optimizer_state_dict/base_optimizer_state/state/0/exp_avg_sq"),
    ],
)
def test_full_verification_notices_a_flipped_bit(
    tmp_path: Path, kind: str, file: str, key: str
) -> None:
    model = trained(*CASES["amsgrad in the second group"])
    if kind == "universal":
        tag = save_universal(tmp_path / "tag", model)
    else:
        tag = save_zero(tmp_path / "tag", model, world=1, stage=2)
    flipped(tag / file, key)
    with pytest.raises(CorruptError, match="does not match its checksum") as raised:
        unshard.merge(tag, tmp_path / "out", optimizer=True, verify="full", config="none")
    assert Path(file).name in str(raised.value)


@pytest.mark.parametrize("kind", ["universal", "zero"])
def test_no_note_says_that_there_are_no_checksums(tmp_path: Path, kind: str) -> None:
    model = trained(*CASES["amsgrad in the second group"])
    tag = tmp_path / "tag"
    place = (
        save_universal(tag, model)
        if kind == "universal"
        else save_zero(tag, model, world=2, stage=2)
    )
    report = unshard.merge(place, tmp_path / "out", optimizer=True, verify="full", config="none")
    assert not [note for note in report.warnings if "checksum" in note]
