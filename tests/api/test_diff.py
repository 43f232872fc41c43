"""`unshard.diff`: what changed between two checkpoints, against the same in numpy and torch."""

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard

import unshard
from properties import examples
from ranks import bits, save_ranks, some_tensors
from tiny_models import tiny_config, tiny_model
from unshard.cli.main import main
from unshard.progress import Stage
from unshard.write.verification import measure as module
from unshard.write.verification.comparison import Comparison, TensorComparison, Tolerances, Values
from unshard.write.verification.measure import Measures, measure

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = Mapping[str, torch.Tensor]
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool),
)


def save_whole(place: Path, tensors: Tensors) -> Path:
    place.mkdir(parents=True)
    save_file(dict(tensors), place / "model.safetensors")
    return place


def save_dcp(place: Path, tensors: Tensors) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(dict(tensors), checkpoint_id=place, no_dist=True)
    return place


def save_columns(place: Path, tensors: Tensors) -> Path:
    """Save rank files that are cut along the last dimension, where there is one."""
    cut = {name: one for name, one in tensors.items() if one.ndim > 1}
    plain = {name: one for name, one in tensors.items() if one.ndim <= 1}
    return save_ranks(place, cut, 2, placements=[Shard(1)], extra=plain)


LAYOUTS: Mapping[str, Callable[[Path, Tensors], Path]] = {
    "whole": save_whole,
    "dcp": save_dcp,
    "columns": save_columns,
    "1 rank": lambda place, tensors: save_ranks(place, tensors, 1),
    "3 ranks": lambda place, tensors: save_ranks(place, tensors, 3),
}


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy().reshape(-1)


def expected(before: torch.Tensor, after: torch.Tensor) -> tuple[int, float, float, list[int]]:
    """Return how many values changed, by how much, and the numbers of NaN and infinities."""
    size = max(before.itemsize, 1)
    one, other = (
        np.frombuffer(bits(tensor), f"V{size}").view(f"u{size}") for tensor in (before, after)
    )
    mine, theirs = numbers(before), numbers(after)
    with np.errstate(all="ignore"):
        apart = np.where(mine == theirs, 0.0, np.abs(mine - theirs))
    known = apart[~np.isnan(apart)]
    largest = float(known.max(initial=0))
    mean = math.inf if largest == math.inf else math.sqrt((known**2).sum() / max(len(mine), 1))
    flags = [np.isnan(mine), np.isnan(theirs), np.isinf(mine), np.isinf(theirs)]
    return int((one != other).sum()), largest, mean, [int(flag.sum()) for flag in flags]


def values_of(one: TensorComparison) -> Values:
    assert one.values is not None
    return one.values


def found_in(one: TensorComparison) -> tuple[int, float, float, list[int]]:
    found = values_of(one)
    flags = [found.nans_theirs, found.nans_ours, found.infs_theirs, found.infs_ours]
    return found.different, found.max_abs_diff, found.rms_diff, flags


def changed_in(found: Comparison) -> int:
    return sum(values_of(one).different for one in found.tensors)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two models: some tensors changed in places, some whole, some of another kind, some gone."""
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    for number in range(draw(st.integers(1, 4))):
        name = f"model.layers.{number % 2}.w{number}"
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (5,), (3, 4), (7, 9), (40, 64), (2, 3, 4), (1, 16)]))
        tensor = (torch.randn(shape, generator=generator) * 5).to(dtype)
        other = tensor.clone()
        what = draw(st.sampled_from(["same", "some", "all", "odd", "kind", "shape", "gone", "new"]))
        flat = other.view(-1)
        if what == "some":
            flat[torch.randint(0, len(flat), (1 + len(flat) // 50,), generator=generator)] = 1
        elif what == "all":
            other = (torch.randn(shape, generator=generator) * 5).to(dtype)
        elif what == "odd" and dtype.is_floating_point and dtype.itemsize > 1:
            odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0]).to(dtype)
            flat[: len(odd)] = odd[: len(flat)]
            tensor.view(-1)[-len(odd) :] = odd[: len(flat)]
        elif what == "kind":
            other = other.to(torch.int32 if dtype.is_floating_point else torch.float32)
        elif what == "shape":
            other = torch.zeros((2, *shape), dtype=dtype)
        if what != "new":
            before[name] = tensor
        if what != "gone":
            after[name] = other
    before["model.norm.weight"] = after["model.norm.weight"] = torch.ones(3)
    return before, after


@settings(deadline=None, max_examples=examples(200))
@given(pairs(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)))
def test_the_difference_is_that_of_numpy_in_all_layouts(
    models: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], first: str, second: str
) -> None:
    before, after = models
    with tempfile.TemporaryDirectory() as folder:
        places = Path(folder) / "before", Path(folder) / "after"
        LAYOUTS[first](places[0], before)
        LAYOUTS[second](places[1], after)
        found = unshard.diff(*places)
    assert set(found.missing) == before.keys() - after.keys()
    assert set(found.unexpected) == after.keys() - before.keys()
    assert {one.name for one in found.tensors} == before.keys() & after.keys()
    for one in found.tensors:
        mine, theirs = before[one.name], after[one.name]
        assert one.dtype_theirs == str(mine.dtype).removeprefix("torch.")
        assert one.shape_ours == tuple(theirs.shape)
        assert one.equal is (
            (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and bits(mine) == bits(theirs)
        )
        if mine.dtype == theirs.dtype and mine.shape == theirs.shape:
            changed, largest, mean, flags = expected(mine, theirs)
            got = found_in(one)
            assert (got[0], got[1], got[3]) == (changed, largest, flags), one.name
            assert math.isclose(got[2], mean, rel_tol=1e-9), one.name
        elif mine.shape != theirs.shape:
            assert one.values is None


def test_a_step_of_a_training_differs_in_some_values(tmp_path: Path) -> None:
    """Two steps of Adam at the learning rate of RL, under the names of training and of the hub."""
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    masters = [one.detach().float().clone().requires_grad_() for one in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-5)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    save_ranks(tmp_path / "step_1" / "actor", before, 2)
    torch.manual_seed(0)
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    after = model.state_dict()
    save_ranks(tmp_path / "step_2" / "actor", after, 3)
    for place in (tmp_path / "step_1" / "actor", tmp_path / "step_2" / "actor"):
        tiny_config("qwen3_moe").save_pretrained(place)
    merged = tmp_path / "merged"
    unshard.merge(tmp_path / "step_2", merged)

    found = unshard.diff(tmp_path / "step_1", merged)
    changed = sum(expected(before[name], after[name])[0] for name in before)
    count = sum(one.numel() for one in before.values())
    assert 0 < changed_in(found) == changed < count / 2
    assert sum(values_of(one).elements for one in found.tensors) == count
    assert not found.missing
    assert not found.unexpected  # the experts have the names of the hub
    assert any("experts.0." in one.name for one in found.tensors)
    assert unshard.diff(tmp_path / "step_2", merged).equal
    trained = unshard.diff(tmp_path / "step_1", tmp_path / "step_2", names="training")
    assert {one.name for one in trained.tensors} == before.keys()
    assert changed_in(trained) == changed


def test_a_model_without_a_config_is_read_by_that_of_the_other(tmp_path: Path) -> None:
    tensors = dict(tiny_model("qwen3_moe").state_dict())
    save_ranks(tmp_path / "with", tensors, 2)
    tiny_config("qwen3_moe").save_pretrained(tmp_path / "with")
    save_ranks(tmp_path / "without", tensors, 3)
    for order in (("with", "without"), ("without", "with")):
        found = unshard.diff(*(tmp_path / name for name in order))
        assert found.equal
        assert any("experts.0." in one.name for one in found.tensors)


def test_the_size_of_the_delta_is_that_of_the_compressed_xor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    before = {"w": torch.randn(3000, 1000, generator=generator).bfloat16()}
    after = {"w": before["w"].clone()}
    places = torch.randint(0, 3_000_000, (18_000,), generator=generator)
    after["w"].view(-1).view(torch.int16)[places] ^= 1
    found = unshard.diff(save_whole(tmp_path / "a", before), save_ranks(tmp_path / "b", after, 2))
    xor = np.bitwise_xor(*(np.frombuffer(bits(one["w"]), np.uint8) for one in (before, after)))
    size = len(zstandard.ZstdCompressor(level=3).compress(xor.tobytes()))
    assert values_of(found.tensors[0]).delta_bytes == pytest.approx(size, rel=0.15)


def test_without_zstd_no_size_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(module, "_LOCAL", type(module._LOCAL)())
    before, after = some_tensors(0), some_tensors(1)
    places = save_whole(tmp_path / "a", before), save_whole(tmp_path / "b", after)
    found = unshard.diff(*places)
    assert {values_of(one).delta_bytes for one in found.tensors} == {None}
    with pytest.raises(SystemExit) as end:
        main(["diff", *map(str, places)])
    assert end.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "100 % of 162 values changed"


def test_measures_are_united_exactly() -> None:
    generator = np.random.default_rng(0)
    one = generator.standard_normal(100_000).astype(np.float32)
    other = np.where(generator.random(100_000) < 0.01, one * 2, one).astype(np.float32)
    exact = Tolerances(norms=False)
    cuts = [slice(at, at + 12_344) for at in range(0, 100_000, 12_344)]
    parts = [measure(one[cut], other[cut], exact) for cut in cuts]
    united, whole = sum(parts, start=Measures()), measure(one, other, exact)
    assert sum(reversed(parts), start=Measures()).values().rms_diff == united.values().rms_diff
    assert united.different == whole.different == int((one != other).sum())
    assert math.isclose(united.values().rms_diff, whole.values().rms_diff, rel_tol=1e-12)
    with_norms = measure(one, other, Tolerances())
    assert (with_norms.different, with_norms.max_abs_diff, with_norms.max_rel_diff) == (
        *(whole.different, whole.max_abs_diff, whole.max_rel_diff),
    )


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    before = {**some_tensors(), "model.layers.0.w": torch.ones(40, 64), "old": torch.ones(2)}
    after = {**some_tensors(), "model.layers.0.w": torch.ones(40, 64), "new": torch.ones(2)}
    after["model.layers.0.w"][3, :32] = math.nan
    after["model.norm.weight"] = after["model.norm.weight"].double()
    return save_whole(tmp_path / "a", before), save_ranks(tmp_path / "b", after, 2)


def test_the_command_prints_what_changed(
    steps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["diff", *map(str, steps)])
    assert end.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        "compared    4 tensors, bit by bit",
        "equal       2",
        "different   2",
        "  model.layers.0.w: 1.2 % of 2,560, by up to 0, RMS 0",
        "  model.norm.weight: float32, now float64; 0 % of 6",
        "removed     1",
        "  old",
        "added       1",
        "  new",
        "NaN         0 before, 32 after",
    ]
    assert lines[-1] == "1.2 % of 2,722 values changed"  # no delta has a tensor of another dtype


def test_what_cannot_be_compared_has_no_share_and_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"w": torch.ones(4, 4), "v": torch.arange(5.0)}
    second = {"w": torch.ones(2, 8), "v": torch.arange(5, dtype=torch.int32)}
    paths = [save_whole(tmp_path / "a", first), save_whole(tmp_path / "b", second)]
    main_code(["diff", *map(str, paths)], 1)
    printed = capsys.readouterr().out.splitlines()[3:]
    assert sorted(printed[:2]) == ["  v: float32, now int32", "  w: 4 x 4, now 2 x 8"]
    assert printed[2:] == ["100 % of 21 values changed"]
    main_code(["diff", *map(str, paths), "--json"], 1)
    found = json.loads(capsys.readouterr().out)
    assert (found["different"], found["delta_bytes"]) == (21, None)


def test_the_command_sums_by_layer_and_prints_json(
    steps: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["diff", *map(str, steps), "--layers"])
    printed = capsys.readouterr().out
    assert "  model.layers.0: 1.2 % of 2,560" in printed
    assert "  model.embed_tokens: 0 % of 78" in printed
    with pytest.raises(SystemExit) as end:
        main(["diff", *map(str, steps), "--layers", "--json"])
    assert end.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert (found["elements"], found["different"], found["nans"]) == (2722, 32, [0, 32])
    assert (found["missing"], found["unexpected"]) == (["old"], ["new"])
    assert found["layers"]["model.layers.0"]["different"] == 32
    assert {one["name"]: one["equal"] for one in found["tensors"]} == {
        "lm_head.weight": True,
        "model.embed_tokens.weight": True,
        "model.layers.0.w": False,
        "model.norm.weight": False,
    }


def test_equal_models_exit_with_0_and_errors_above_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = save_whole(tmp_path / "a", some_tensors())
    main_code(["diff", str(place), str(place)], 0)
    assert capsys.readouterr().out.splitlines()[-1] == "0 % of 162 values changed"
    main_code(["diff", str(place), str(tmp_path / "none")], 3)
    main_code(["diff", str(place), str(place), "--memory", "1MB"], 2)


def main_code(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == code


def test_a_checkpoint_that_changes_is_refused(tmp_path: Path) -> None:
    first = save_ranks(tmp_path / "a", some_tensors(), 2)
    second = save_ranks(tmp_path / "b", some_tensors(), 2)

    def listener(event: object) -> None:
        if isinstance(event, Stage) and event.name == "comparing":
            save_ranks(tmp_path / "b", some_tensors(1), 2)

    with pytest.raises(unshard.CorruptError, match="b/model_world_size_2_rank_"):
        unshard.diff(first, second, listener=listener)
