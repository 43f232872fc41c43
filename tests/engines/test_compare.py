"""Two models compared, tile by tile, against the same comparison in numpy."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ranks import save_ranks, some_tensors
from sources import Chunk, Sources, Tensor, column_major, row_major
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import LowRank, Recipe, Stack, WeightedSum, stored_dtype, take
from unshard.engines.compare import compare
from unshard.engines.crew import Threads
from unshard.engines.threads import Resources, run_plan
from unshard.errors import CorruptError, UsageError
from unshard.plan import work
from unshard.plan.layout import lay_out
from unshard.plan.planner import make_plan
from unshard.plan.work import PAIR_BYTES, as_stored
from unshard.progress import Advanced, Event, Stage, ignore
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import open_latest
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME
from unshard.write.verification.comparison import Comparison, TensorComparison, Tolerances, Values

EXACT = Tolerances()
TWO = Resources(workers=2, memory_bytes=64_000_000)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def opened(path: Path) -> list[ConvertedTensor]:
    return as_stored(open_latest(path, Choice(), ReadOptions()).catalog)


def saved(path: Path, tensors: Mapping[str, torch.Tensor]) -> list[ConvertedTensor]:
    save_file(dict(tensors), path)
    return opened(path)


def compared(
    tmp_path: Path,
    ours: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    tolerances: Tolerances = EXACT,
) -> Comparison:
    return compare(
        saved(tmp_path / "ours.safetensors", ours),
        saved(tmp_path / "theirs.safetensors", theirs),
        tolerances,
        Threads(TWO, ignore),
    )


def one(
    tmp_path: Path, ours: torch.Tensor, theirs: torch.Tensor, tolerances: Tolerances = EXACT
) -> TensorComparison:
    (found,) = compared(tmp_path, {"w": ours}, {"w": theirs}, tolerances).tensors
    return found


def values(found: TensorComparison) -> Values:
    assert found.values is not None
    return found.values


# what is found


def test_a_model_equals_itself(tmp_path: Path) -> None:
    found = compared(tmp_path, some_tensors(), some_tensors())
    assert found.equal
    assert [tensor.name for tensor in found.tensors] == sorted(some_tensors())
    norm = some_tensors()["lm_head.weight"].double().norm()
    assert math.isclose(values(found.tensors[0]).norm_ours, norm, rel_tol=1e-12)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *INTEGERS, torch.bool, torch.complex64])
def test_one_flipped_bit_of_any_dtype_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    ours = torch.arange(1, 21).to(dtype).reshape(4, 5)
    raw = ours.clone().view(torch.uint8)
    raw[2, 0] ^= 1
    found = one(tmp_path, ours, raw.view(dtype))
    assert not found.equal
    assert (values(found).elements, values(found).different) == (20, 1)
    assert values(found).max_abs_diff > 0


def test_the_differences_are_those_of_numpy(tmp_path: Path) -> None:
    ours = torch.tensor([1.0, 2.0, 4.0, 0.0])
    theirs = torch.tensor([1.0, 2.5, 3.0, 0.0])
    found = values(one(tmp_path, ours, theirs))
    assert found == Values(
        elements=4,
        different=2,
        different_values=2,
        max_abs_diff=1.0,
        max_rel_diff=1.0 / 3.0,
        norm_ours=math.sqrt(21),
        norm_theirs=math.sqrt(1 + 6.25 + 9),
        nans_ours=0,
        nans_theirs=0,
        all_zero_ours=False,
        all_zero_theirs=False,
        rms_diff=math.sqrt(1.25) / 2,
    )


def test_permuted_rows_have_the_same_norm_and_differ(tmp_path: Path) -> None:
    ours = torch.arange(12.0).reshape(4, 3)
    found = one(tmp_path, ours, ours[[1, 0, 2, 3]])
    assert not found.equal
    assert values(found).different == 6
    assert values(found).norm_ours == values(found).norm_theirs


def test_names_that_only_one_side_has_are_named(tmp_path: Path) -> None:
    ours, theirs = some_tensors(), some_tensors()
    theirs["extra"] = torch.ones(1)
    del theirs["model.norm.weight"]
    found = compared(tmp_path, ours, theirs)
    assert (found.missing, found.unexpected) == (("extra",), ("model.norm.weight",))
    assert not found.equal
    assert len(found.tensors) == 2


def test_other_shapes_are_reported_and_not_compared(tmp_path: Path) -> None:
    found = one(tmp_path, torch.ones(2, 3), torch.ones(3, 2))
    assert (found.equal, found.values) == (False, None)
    assert (found.shape_ours, found.shape_theirs) == ((2, 3), (3, 2))


def test_tensors_without_dimensions_or_elements_are_compared(tmp_path: Path) -> None:
    same = {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    found = compared(tmp_path, same, same)
    assert found.equal
    assert not found.all_zero
    found = compared(tmp_path, same, same | {"scalar": torch.tensor(4.0)})
    assert [tensor.name for tensor in found.different] == ["scalar"]


def test_nan_and_zeros_are_flagged(tmp_path: Path) -> None:
    tensors = {
        "nan": torch.tensor([1.0, math.nan, math.nan]),
        "zero": torch.zeros(5),
        "tiny": torch.tensor([0.0, 5e-324], dtype=torch.float64),
        "minus": -torch.zeros(5),
    }
    found = compared(tmp_path, tensors, tensors)
    assert found.equal
    assert [tensor.name for tensor in found.with_nan] == ["nan"]
    assert values(found.with_nan[0]).nans_ours == 2
    assert math.isnan(values(found.with_nan[0]).norm_ours)
    assert [tensor.name for tensor in found.all_zero] == ["minus", "zero"]


def test_exact_means_bits_and_the_report_says_so_where_values_are_equal(tmp_path: Path) -> None:
    payload = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    ours = torch.cat([payload[:1], torch.tensor([0.0, 1.0])])
    theirs = torch.cat([payload[1:], torch.tensor([-0.0, 1.0])])
    found = one(tmp_path, ours, theirs)
    assert not found.equal
    assert (values(found).different, values(found).different_values) == (2, 0)
    assert (values(found).max_abs_diff, values(found).max_rel_diff) == (0, 0)
    assert one(tmp_path, ours, theirs, Tolerances(atol=1e-30)).equal


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerances", "equal"),
    [
        (1.0, 1.01, Tolerances(atol=0.02), True),
        (1.0, 1.01, Tolerances(atol=0.005), False),
        (100.0, 101.0, Tolerances(rtol=0.01), True),
        (100.0, 102.0, Tolerances(rtol=0.01), False),
        (math.nan, math.nan, Tolerances(atol=1), True),
        (math.nan, 1.0, Tolerances(atol=1), False),
        (1.0, math.nan, Tolerances(rtol=1), False),
        (math.inf, math.inf, Tolerances(atol=1), True),
        (math.inf, -math.inf, Tolerances(atol=1, rtol=1), False),
        (1.0, math.inf, Tolerances(rtol=1), False),
        (math.inf, 1.0, Tolerances(atol=1, rtol=1), False),
    ],
)
def test_tolerances_are_those_of_numpy(
    tmp_path: Path, ours: float, theirs: float, tolerances: Tolerances, *, equal: bool
) -> None:
    first, second = torch.tensor([0.0, ours]), torch.tensor([0.0, theirs])
    assert one(tmp_path, first, second, tolerances).equal is equal
    close = np.isclose(ours, theirs, tolerances.rtol, tolerances.atol, equal_nan=True)
    assert bool(close) is equal


def test_differences_of_large_integers_are_exact(tmp_path: Path) -> None:
    ours = torch.tensor([2**62, -(2**63), 5])
    theirs = torch.tensor([2**62 + 1, 2**63 - 1, 5])
    found = values(one(tmp_path, ours, theirs))
    assert (found.different, found.max_abs_diff) == (2, 2.0**64)
    assert values(one(tmp_path, ours[:1], theirs[:1])).max_abs_diff == 1.0


def test_an_infinite_difference_is_infinite_and_nan_is_left_out(tmp_path: Path) -> None:
    ours = torch.tensor([math.inf, math.nan, math.inf])
    found = values(one(tmp_path, ours, torch.tensor([1.0, 2.0, math.inf])))
    assert (found.max_abs_diff, found.max_rel_diff) == (math.inf, math.inf)
    assert (found.different, found.nans_ours, found.nans_theirs) == (2, 1, 0)


def test_the_worst_come_first(tmp_path: Path) -> None:
    ours = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3), "d": torch.ones(2)}
    theirs = {
        "a": torch.full((3,), 0.1),
        "b": torch.full((3,), 7.0),
        "c": torch.zeros(4),
        "d": torch.ones(2),
    }
    found = compared(tmp_path, ours, theirs)
    assert [tensor.name for tensor in found.different] == ["c", "b", "a"]


# dtypes


@pytest.mark.parametrize("ours", FLOATS)
@pytest.mark.parametrize("theirs", FLOATS)
def test_what_a_merge_may_cast_is_compared_in_our_dtype(
    tmp_path: Path, ours: torch.dtype, theirs: torch.dtype
) -> None:
    stored = torch.randn(500, generator=torch.Generator().manual_seed(1)).to(theirs)
    expected = (stored.float() if theirs == torch.float64 != ours else stored).to(ours)
    found = one(tmp_path, expected, stored)
    assert found.equal
    assert found.cast is (ours != theirs)
    assert not one(tmp_path, expected, stored * 2).equal


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (torch.int32, torch.int64),
        (torch.float32, torch.int32),
        (torch.bool, torch.uint8),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_other_dtypes_differ_even_where_the_values_are_the_same(
    tmp_path: Path, ours: torch.dtype, theirs: torch.dtype
) -> None:
    numbers = torch.tensor([0.0, 1.0, 1.0])
    for tolerances in (EXACT, Tolerances(atol=1.0)):
        found = one(tmp_path, numbers.to(ours), numbers.to(theirs), tolerances)
        assert (found.equal, found.cast) == (False, False)
        assert values(found).different_values == 0


# where the tensors come from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_equal_the_whole_that_they_make(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = some_tensors()
    checkpoint = opened(save_ranks(tmp_path / "ckpt", tensors, 3))
    whole = saved(tmp_path / "w.safetensors", {k: v.to(dtype) for k, v in tensors.items()})
    found = compare(whole, checkpoint, EXACT, Threads(TWO, ignore))
    assert found.equal
    assert all(tensor.cast is (dtype != torch.float32) for tensor in found.tensors)


def test_several_files_are_one_model(tmp_path: Path) -> None:
    tensors = some_tensors()
    names = sorted(tensors)
    (tmp_path / "split").mkdir()
    for number, part in enumerate((names[:1], names[1:]), start=1):
        path = tmp_path / "split" / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path)
    whole = saved(tmp_path / "w.safetensors", tensors)
    assert compare(opened(tmp_path / "split"), whole, EXACT, Threads(TWO, ignore)).equal


def filled(sources: Sources, name: str, shape: tuple[int, ...], *, odd: bool = False) -> Recipe:
    lie = column_major if odd else row_major
    tensor = Tensor(BY_NAME["float32"], shape, (Chunk(Box.whole(shape), lie(shape)),))
    numbers = np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32)
    sources.add(name, tensor, numbers.view(np.uint32))
    return take(sources.entries[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_recipe_equals_what_a_merge_makes_of_it(tmp_path: Path, dtype: str) -> None:
    sources = Sources(tmp_path)
    base, odd = filled(sources, "w", (300, 700)), filled(sources, "odd", (300, 700), odd=True)
    adapter = filled(sources, "a", (8, 700)), filled(sources, "b", (300, 8))
    recipes = {
        "taken": odd,
        "stacked": Stack(0, (base, odd)),
        "summed": WeightedSum(((1.0, base), (3.0, odd))),
        "fused": LowRank(base, *adapter, 0.25),
    }
    sources.plan()  # writes the files
    theirs = [
        ConvertedTensor(name, stored_dtype(recipe), recipe) for name, recipe in recipes.items()
    ]
    wanted = [tensor._replace(dtype=BY_NAME[dtype]) for tensor in theirs]
    (tmp_path / "out").mkdir()
    run_plan(make_plan(lay_out(wanted, 10**9)), tmp_path / "out", TWO, ignore)
    found = compare(opened(tmp_path / "out"), theirs, EXACT, Threads(TWO, ignore))
    assert found.equal
    assert len(found.tensors) == 4


# machinery


def test_the_result_does_not_depend_on_the_settings(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    ours = {
        "wide": torch.randn(3, 700_000, generator=generator),
        "long": torch.randn(900_000, 2, generator=generator) * 1e20,
    }
    theirs = {name: tensor * 1.001 for name, tensor in ours.items()}
    first = saved(tmp_path / "ours.safetensors", ours)
    second = saved(tmp_path / "theirs.safetensors", theirs)
    found = [
        compare(first, second, EXACT, Threads(Resources(workers, memory), ignore))
        for workers, memory in ((1, PAIR_BYTES), (5, 64_000_000), (3, 13_000_000))
    ]
    assert found[0] == found[1] == found[2]


def test_progress_adds_up_to_our_bytes(tmp_path: Path) -> None:
    events: list[Event] = []
    tensors = some_tensors()
    model = saved(tmp_path / "w.safetensors", tensors)
    compare(model, model, EXACT, Threads(TWO, events.append))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert events[0] == Stage("comparing", total)
    assert total == sum(event.written_bytes for event in events if isinstance(event, Advanced))


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "w.safetensors", some_tensors())
    with pytest.raises(UsageError, match="too little to compare"):
        compare(model, model, EXACT, Threads(Resources(1, PAIR_BYTES - 1), ignore))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    model = saved(tmp_path / "w.safetensors", some_tensors())
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"w\.safetensors: no longer exists"):
        compare(model, model, EXACT, Threads(TWO, ignore))


MEASURE = """
import sys
from pathlib import Path
from unshard.engines.compare import compare
from unshard.engines.crew import Threads
from unshard.engines.threads import Resources
from unshard.plan.work import as_stored
from unshard.progress import ignore
from unshard.read.format import ReadOptions, Choice
from unshard.read.open import open_latest
from unshard.write.verification.comparison import Tolerances
from unshard.write.report import peak_memory

ours, theirs = (
    as_stored(open_latest(Path(path), Choice(), ReadOptions()).catalog) for path in sys.argv[1:]
)
found = compare(ours, theirs, Tolerances(), Threads(Resources(2, 64_000_000), ignore))
assert len(found.different) == 1
print(peak_memory())
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    big = torch.zeros(5000, 10_000)
    save_file({"same": big, "other": big[:500].clone()}, tmp_path / "theirs.safetensors")
    changed = big[:500] + 1
    save_file({"same": big.bfloat16(), "other": changed}, tmp_path / "ours.safetensors")
    paths = [str(tmp_path / "ours.safetensors"), str(tmp_path / "theirs.safetensors")]
    command = [sys.executable, "-c", MEASURE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128_000_000


# numpy is the judge

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    st.lists(st.tuples(NUMBERS, st.one_of(st.none(), NUMBERS)), min_size=1, max_size=40),
    st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    st.sampled_from([EXACT, Tolerances(atol=0.5), Tolerances(rtol=0.1), Tolerances(1e-3, 1e-3)]),
    st.sampled_from([1, 7, 1000]),
)
def test_numpy_says_the_same(
    numbers: list[tuple[float, float | None]], dtype: str, tolerances: Tolerances, tile: int
) -> None:
    ours = torch.tensor([mine for mine, _ in numbers]).to(getattr(torch, dtype))
    theirs = torch.tensor([mine if other is None else other for mine, other in numbers])
    theirs = theirs.to(ours.dtype)
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "_MAKING", tile * 40)
        found = one(Path(place), ours, theirs, tolerances)
    a, b = ours.double().numpy(), theirs.double().numpy()
    with np.errstate(all="ignore"):
        diff = np.where(a == b, 0, np.abs(a - b))
        norms = np.linalg.norm(a), np.linalg.norm(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if tolerances.exact:
        bits = [side.view(torch.uint8).reshape(len(a), -1).numpy() for side in (ours, theirs)]
        apart = (bits[0] != bits[1]).any(axis=1)
    else:
        apart = ~np.isclose(a, b, tolerances.rtol, tolerances.atol, equal_nan=True)
    told = values(found)
    assert told.different == np.count_nonzero(apart)
    assert told.different_values == np.count_nonzero(~same)
    assert found.equal is (told.different == 0)
    assert told.max_abs_diff == np.nanmax(np.append(diff, 0))
    assert (told.nans_ours, told.nans_theirs) == (np.isnan(a).sum(), np.isnan(b).sum())
    np.testing.assert_allclose((told.norm_ours, told.norm_theirs), norms, rtol=1e-12)
    assert told.all_zero_ours is bool((a == 0).all())
