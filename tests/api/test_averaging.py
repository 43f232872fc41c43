"""`average`: the mean of checkpoints, bit for bit that of numpy, whatever they are stored as."""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from properties import examples
from ranks import assert_same, bits, merged, rank_path, save_ranks, snapshot, some_tensors
from unshard import ConversionError, MergeOptions, OutputError, UsageError
from unshard.progress import Event, Warned

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = Mapping[str, torch.Tensor]
COUNTER = "model.counter"


def models(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    return [
        {name: tensor.to(dtype) for name, tensor in some_tensors(seed).items()}
        for seed in range(count)
    ]


def save_run(directory: Path, several: Sequence[Tensors], step: int = 10) -> Path:
    """Save each as a step of one run, on one rank more than the one before."""
    for number, tensors in enumerate(several, start=1):
        save_ranks(directory / f"global_step_{number * step}" / "actor", tensors, number)
    return directory


def steps(run: Path, count: int, step: int = 10) -> list[Path]:
    return [run / f"global_step_{number * step}" for number in range(1, count + 1)]


def as_float32(tensor: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.to(torch.float32).numpy()
    return values


def mean_of(several: Sequence[Tensors], weights: Sequence[float] | None = None) -> dict[str, bytes]:
    """The definition: float32, in order, one rounding to the sources' dtype at the end."""
    mean = {}
    for name, first in several[0].items():
        parts = [as_float32(model[name]) for model in several]
        if weights is None:
            exact = np.stack(parts).mean(axis=0)
        else:
            exact = np.float32(weights[0]) * parts[0]
            for weight, part in zip(weights[1:], parts[1:], strict=True):
                exact = exact + np.float32(weight) * part
            exact = exact / np.float32(sum(weights))
        assert exact.dtype == np.float32
        bfloat16 = first.dtype == torch.bfloat16
        rounded = exact.astype(ml_dtypes.bfloat16 if bfloat16 else first.numpy().dtype)
        mean[name] = rounded.tobytes()
    return mean


def bits_of(output: Path) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in merged(output).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_weights_give_the_mean_of_numpy(
    tmp_path: Path, dtype: torch.dtype, count: int
) -> None:
    several = models(count, dtype)
    run = save_run(tmp_path / "run", several)
    before = snapshot(run)
    report = unshard.average(
        steps(run, count), tmp_path / "out", options=MergeOptions(verify="full"), config="none"
    )
    assert bits_of(tmp_path / "out") == mean_of(several)
    assert {tensor.dtype for tensor in merged(tmp_path / "out").values()} == {dtype}
    assert len(report.sources) == count
    assert snapshot(run) == before


def test_signs_of_zeros_and_infinities_are_those_of_numpy(tmp_path: Path) -> None:
    zeros = {"w": torch.tensor([-0.0, 0.0, -0.0, 1.0, torch.inf])}
    others = {"w": torch.tensor([-0.0, -0.0, 0.0, -1.0, 1.0])}
    run = save_run(tmp_path / "run", [zeros, others])
    unshard.average(run, tmp_path / "out", config="none")
    assert bits_of(tmp_path / "out") == mean_of([zeros, others])


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.1, 0.2, 0.3], [2.0, -1.0, 0.5]])
def test_coefficients_count_in_the_order_given(tmp_path: Path, weights: list[float]) -> None:
    several = models(3)
    run = save_run(tmp_path / "run", several)
    unshard.average(steps(run, 3), tmp_path / "out", coefficients=weights, config="none")
    assert bits_of(tmp_path / "out") == mean_of(several, weights)
    unshard.average(
        steps(run, 3)[::-1], tmp_path / "back", coefficients=weights[::-1], config="none"
    )
    assert bits_of(tmp_path / "back") == mean_of(several[::-1], weights[::-1])


def test_an_ema_moves_with_every_checkpoint(tmp_path: Path) -> None:
    several = models(4)
    run = save_run(tmp_path / "run", several)
    unshard.average(run, tmp_path / "out", ema_decay=0.75, config="none")
    ema = {name: tensor.double() for name, tensor in several[0].items()}
    for model in several[1:]:
        ema = {name: 0.75 * ema[name] + 0.25 * model[name].double() for name in ema}
    for name, tensor in merged(tmp_path / "out").items():
        torch.testing.assert_close(tensor.double(), ema[name], atol=1e-6, rtol=1e-6)
    weights = [0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25]
    assert bits_of(tmp_path / "out") == mean_of(several, weights)


DECAYS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + np.cos(np.pi * done)) / 2,
    "1-sqrt": lambda done: 1 - np.sqrt(done),
}


@pytest.mark.parametrize("schedule", DECAYS)
def test_a_schedule_gives_what_training_with_that_decay_would_have_given(
    tmp_path: Path, schedule: str
) -> None:
    """The same updates, each times the learning rate at the end of its part of the decay."""
    count, random = 5, np.random.default_rng(0)
    updates = random.standard_normal((count, 33))
    several = [{"w": torch.tensor(updates[: at + 1].sum(axis=0)).float()} for at in range(count)]
    run = save_run(tmp_path / "run", several)
    unshard.average(run, tmp_path / "out", schedule=schedule, config="none")
    rates = [1.0, *(DECAYS[schedule](done / count) for done in range(1, count))]
    decayed = sum(rate * update for rate, update in zip(rates, updates, strict=True))
    np.testing.assert_allclose(merged(tmp_path / "out")["w"], decayed, atol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "weights"),
    [
        ("linear", [1.0, 1.0, 1.0, 1.0]),
        ("1-sqrt", [1 / 2, 2**0.5 / 2 - 1 / 2, 3**0.5 / 2 - 2**0.5 / 2, 1 - 3**0.5 / 2]),
        ("cosine", [1 / 2 - 2**0.5 / 4, 2**0.5 / 4, 2**0.5 / 4, 1 / 2 - 2**0.5 / 4]),
        ("ema:0.75", [0.75**3, 0.25 * 0.75**2, 0.25 * 0.75, 0.25]),
    ],
)
def test_the_coefficients_of_a_schedule_are_recorded(
    tmp_path: Path, schedule: str, weights: list[float]
) -> None:
    several = models(4)
    run = save_run(tmp_path / "run", several)
    unshard.average(run, tmp_path / "out", schedule=schedule, config="none")
    record = json.loads((tmp_path / "out" / "unshard.json").read_bytes())
    assert [one["weight"] for one in record["average_of"]] == pytest.approx(weights, rel=1e-12)
    if schedule == "linear":
        assert bits_of(tmp_path / "out") == mean_of(several)


def save_dcp(directory: Path, tensors: Tensors, *, compressed: bool = False) -> Path:
    extensions = [ZStandard()] if compressed else []
    writer = FileSystemWriter(directory, sync_files=False, _extensions=extensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save({"model": dict(tensors)}, storage_writer=writer, no_dist=True)
    return directory


def test_formats_and_world_sizes_may_be_mixed(tmp_path: Path) -> None:
    several = models(4)
    ranks = save_ranks(tmp_path / "ranks" / "global_step_1" / "actor", several[0], 3)
    dcp = save_dcp(tmp_path / "step-2", several[1])
    unshard.merge(save_ranks(tmp_path / "third", several[2], 2), tmp_path / "whole", config="none")
    small = save_dcp(tmp_path / "step-4", several[3], compressed=True)
    unshard.average([ranks, dcp, tmp_path / "whole", small], tmp_path / "out", config="none")
    assert bits_of(tmp_path / "out") == mean_of(several)


def test_one_rounding_at_the_end(tmp_path: Path) -> None:
    """Of float32 sources the mean is rounded to bfloat16 once, not the sources before."""
    several = models(3)
    run = save_run(tmp_path / "run", several)
    unshard.average(run, tmp_path / "out", options=MergeOptions(dtype="bfloat16"), config="none")
    exact = {
        name: np.stack([as_float32(model[name]) for model in several]).mean(axis=0)
        for name in several[0]
    }
    expected = {name: one.astype(ml_dtypes.bfloat16).tobytes() for name, one in exact.items()}
    assert bits_of(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("last", "every", "taken"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (2, None, [4, 5]),
        (None, 2, [1, 3, 5]),
        (2, 2, [3, 5]),
        (1, 7, [5]),
    ],
)
def test_the_steps_of_a_run_are_chosen_from_the_highest_back(
    tmp_path: Path, last: int | None, every: int | None, taken: list[int]
) -> None:
    several = models(5)
    run = save_run(tmp_path / "run", several)
    report = unshard.average(run, tmp_path / "out", last=last, every=every, config="none")
    assert [
        int(Path(source).parent.name.split("_")[-1]) // 10 for source in report.sources
    ] == taken
    assert bits_of(tmp_path / "out") == mean_of([several[number - 1] for number in taken])


def test_incomplete_steps_are_passed_over_and_named(tmp_path: Path) -> None:
    several = models(4)
    run = save_run(tmp_path / "run", several)
    rank_path(run / "global_step_30" / "actor", 3, 1).unlink()
    events: list[Event] = []
    unshard.average(run, tmp_path / "out", last=2, listener=events.append, config="none")
    assert bits_of(tmp_path / "out") == mean_of([several[1], several[3]])
    said = [event.message for event in events if isinstance(event, Warned)]
    (warning,) = [message for message in said if "passed over" in message]
    assert "global_step_30" in warning
    with pytest.raises(UsageError, match=r"has only 3 complete steps$"):
        unshard.average(run, tmp_path / "more", last=4)
    with pytest.raises(UsageError, match=r"only 3 complete steps, of which every=2 takes 2$"):
        unshard.average(run, tmp_path / "more", last=3, every=2)


def test_the_average_of_a_run_may_be_in_the_run_itself(tmp_path: Path) -> None:
    several = models(2)
    run = save_run(tmp_path / "run", several)
    shards = snapshot(run)
    with pytest.raises(OutputError, match="exists already"):
        unshard.average(run, run, config="none")
    unshard.average(run, run, options=MergeOptions(overwrite=True), config="none")
    assert bits_of(run) == mean_of(several)
    assert shards.items() <= snapshot(run).items()


def other_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()


@pytest.mark.parametrize("change", [other_name, other_shape, other_dtype])
def test_models_that_do_not_match_are_one_error(tmp_path: Path, change: object) -> None:
    several = models(3)
    assert callable(change)
    change(several[1])
    run = save_run(tmp_path / "run", several)
    with pytest.raises(ConversionError) as error:
        unshard.average(run, tmp_path / "out", config="none")
    assert "model.norm.weight" in str(error.value)
    assert "global_step_20" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_all_mismatches_are_named_at_once(tmp_path: Path) -> None:
    several = models(2)
    other_dtype(several[1])
    several[1]["lm_head.weight"] = several[1]["lm_head.weight"][:5].clone()
    run = save_run(tmp_path / "run", several)
    with pytest.raises(ConversionError, match="2 problems") as error:
        unshard.average(run, tmp_path / "out", config="none")
    assert "bfloat16 [6]" in str(error.value)
    assert "float32 [5, 6]" in str(error.value)


def counted(model: Tensors, count: int) -> dict[str, torch.Tensor]:
    return {**model, COUNTER: torch.tensor([count, 7])}


@pytest.mark.parametrize("step", [0, 1])
def test_integers_are_the_last_ones_and_the_report_says_so(tmp_path: Path, step: int) -> None:
    several = [counted(model, number * step) for number, model in enumerate(models(3))]
    run = save_run(tmp_path / "run", several)
    report = unshard.average(run, tmp_path / "out", config="none")
    assert torch.equal(merged(tmp_path / "out")[COUNTER], several[-1][COUNTER])
    said = [warning for warning in report.warnings if COUNTER in warning]
    assert len(said) == step


def test_integers_of_compressed_checkpoints_are_compared_too(tmp_path: Path) -> None:
    several = [counted(model, number) for number, model in enumerate(models(2))]
    paths = [
        save_dcp(tmp_path / f"step-{number}", model, compressed=True)
        for number, model in enumerate(several)
    ]
    unshard.average(paths, tmp_path / "out", config="none")
    expected = mean_of([{k: v for k, v in m.items() if k != COUNTER} for m in several])
    assert bits_of(tmp_path / "out") == expected | {COUNTER: bits(several[-1][COUNTER])}


def test_sums_that_are_too_large_are_counted_and_named(tmp_path: Path) -> None:
    several = [{"w": torch.tensor([3e38, 1.0, torch.inf, torch.nan])} for _ in range(2)]
    run = save_run(tmp_path / "run", several)
    report = unshard.average(run, tmp_path / "out", config="none")
    assert merged(tmp_path / "out")["w"][:3].tolist() == [torch.inf, 1.0, torch.inf]
    (said,) = [warning for warning in report.warnings if "too large" in warning]
    assert said.startswith("1 value of 1 tensor became infinite, too large for float32")


def test_float64_loses_digits_and_the_report_says_so(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", [{"w": torch.rand(5, dtype=torch.float64)}] * 2)
    report = unshard.average(run, tmp_path / "out", config="none")
    assert any("float64 values are averaged in float32" in one for one in report.warnings)
    assert merged(tmp_path / "out")["w"].dtype == torch.float64


def test_nothing_at_all_has_no_average(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint to average"):
        unshard.average([], tmp_path / "out")


def test_other_nodes_directories_complete_the_checkpoints(tmp_path: Path) -> None:
    several = models(2)
    here, there = tmp_path / "here", tmp_path / "there"
    for step, tensors in enumerate(several, start=1):
        actor = save_ranks(here / f"global_step_{step}" / "actor", tensors, 2)
        other = there / f"global_step_{step}" / "actor"
        other.mkdir(parents=True)
        rank_path(actor, 2, 1).rename(rank_path(other, 2, 1))
    with pytest.raises(unshard.IncompleteError):
        unshard.average(here, tmp_path / "out")
    unshard.average(
        steps(here, 2, 1), tmp_path / "out", options=MergeOptions(also=[there]), config="none"
    )
    assert bits_of(tmp_path / "out") == mean_of(several)


def test_quantised_values_have_no_mean(tmp_path: Path) -> None:
    several = [
        {**model, "w": torch.full((4, 4), 1.0 + number).to(torch.float8_e4m3fn)}
        for number, model in enumerate(models(2))
    ]
    run = save_run(tmp_path / "run", several)
    with pytest.raises(ConversionError, match="tensor w: differs, and float8"):
        unshard.average(run, tmp_path / "out", config="none")
    same = [{**model, "w": several[0]["w"]} for model in several]
    unshard.average(save_run(tmp_path / "same", same), tmp_path / "out", config="none")
    assert bits(merged(tmp_path / "out")["w"]) == bits(several[0]["w"])


@pytest.mark.parametrize("dtypes", [(torch.complex64,) * 2, (torch.int64, torch.int32)])
def test_what_a_merge_does_not_cast_gets_no_advice_to_cast_it(
    tmp_path: Path, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    run = save_run(
        tmp_path / "run", [{"w": torch.ones(2).to(dtypes[0])}, {"w": torch.zeros(2).to(dtypes[1])}]
    )
    with pytest.raises(ConversionError, match=r"tensor w:? differs") as refused:
        unshard.average(run, tmp_path / "out", config="none")
    assert "hint" not in str(refused.value)


def test_adapters_are_to_be_merged_first(tmp_path: Path) -> None:
    several = [
        {
            "q.base_layer.weight": torch.randn(4, 4),
            "q.lora_A.default.weight": torch.randn(2, 4),
            "q.lora_B.default.weight": torch.randn(4, 2),
        }
        for _ in range(2)
    ]
    run = save_run(tmp_path / "run", several)
    with pytest.raises(ConversionError, match=r"q\.weight has a LoRA adapter") as error:
        unshard.average(run, tmp_path / "out", options=MergeOptions(lora_alpha=4.0), config="none")
    assert "merge each checkpoint first" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coefficients": [1.0]}, "1 numbers for 2 checkpoints"),
        ({"coefficients": [1.0, -1.0]}, "whose sum is not 0"),
        ({"coefficients": [1.0, float("nan")]}, "must be numbers"),
        ({"ema_decay": 1.0}, "above 0 and below 1"),
        ({"ema_decay": 0.5, "coefficients": [1.0, 2.0]}, "exclude each other"),
        ({"schedule": "cosine", "coefficients": [1.0, 2.0]}, "exclude each other"),
        ({"schedule": "ema:1.0"}, "above 0 and below 1"),
        ({"schedule": "sqrt"}, "linear, cosine, 1-sqrt or ema:0.99"),
        ({"last": 0}, "at least 1"),
        ({"every": -1}, "at least 1"),
        ({"options": MergeOptions(lora="both")}, "lora=… and step=… do not apply"),
        ({"coefficients": [0.3, -0.30000000001]}, "whose sum is not 0"),
        ({"coefficients": [1e300, 1e300]}, "too large for float32"),
        ({"coefficients": [1e-50, 1e-50]}, "too small"),
    ],
)
def test_requests_that_make_no_sense(
    tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    run = save_run(tmp_path / "run", models(2))
    with pytest.raises(UsageError, match=message):
        unshard.average(run, tmp_path / "out", **arguments)  # type: ignore[arg-type]  # as a user


def test_one_checkpoint_has_no_average(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", models(1))
    for path in (steps(run, 1)[0], steps(run, 1)[0] / "actor"):
        with pytest.raises(UsageError, match="nothing to average"):
            unshard.average(path, tmp_path / "out")
    with pytest.raises(UsageError, match="of one run"):
        unshard.average([run, run], tmp_path / "out", last=2)


def test_the_record_says_what_counted_how_much(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", models(2))
    unshard.average(run, tmp_path / "out", coefficients=[1, 3], config="none")
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    found = [(one["weight"], one["name"], one["world_size"]) for one in record["average_of"]]
    assert found == [(1.0, "global_step_10", 1), (3.0, "global_step_20", 2)]
    assert str(tmp_path) not in json.dumps(record)


def test_settings_do_not_change_the_bytes(tmp_path: Path) -> None:
    large = [{"w": torch.randn(300, 200), "s": torch.randn(3)} for _ in range(3)]
    run = save_run(tmp_path / "run", large)
    unshard.average(run, tmp_path / "a", config="none")
    unshard.average(
        run, tmp_path / "b", options=MergeOptions(workers=1, memory="140KB"), config="none"
    )
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b") == mean_of(large)


RANDOM_BITS = {name: np.dtype(name) for name in ("float16", "bfloat16", "float32")}
SHAPE = (301, 199)
NINE = [1.0, -2.0, 0.5, 3.0, 1.0, 0.25, 1.0, -1.0, 2.0]


def save_random_bits(directory: Path, dtype: str, count: int) -> list[Path]:
    """Save models of random bits: infinities, and NaNs of all signs and payloads."""
    stored = RANDOM_BITS[dtype]
    random = np.random.default_rng(0)
    paths = [directory / f"{dtype}-{number}" for number in range(count)]
    for path in paths:
        path.mkdir()
        data = random.bytes(prod(SHAPE) * stored.itemsize)
        save_file({"w": np.frombuffer(data, stored).reshape(SHAPE)}, path / "model.safetensors")
    return paths


def mean_of_numpy(paths: Sequence[Path], weights: Sequence[float], dtype: str) -> bytes:
    """The definition, for all values at once; a NaN is numpy's own."""
    total = np.zeros(SHAPE, np.float32)
    with np.errstate(all="ignore"):
        for path, weight in zip(paths, weights, strict=True):
            total += np.float32(weight) * load_file(path / "model.safetensors")["w"].astype("f4")
        total /= np.float32(sum(weights))
        total[np.isnan(total)] = np.nan
        return total.astype(RANDOM_BITS[dtype]).tobytes()


@pytest.mark.parametrize("dtype", RANDOM_BITS)
def test_settings_do_not_change_the_bytes_of_random_bits(tmp_path: Path, dtype: str) -> None:
    paths = save_random_bits(tmp_path, dtype, len(NINE))
    expected = mean_of_numpy(paths, NINE, dtype)
    assert np.isnan(np.frombuffer(expected, RANDOM_BITS[dtype]).astype("f4")).any()
    for number, (memory, workers) in enumerate(
        [("64MB", 1), ("140KB", 1), ("200KB", 1), ("333333", 2), ("1MB", 2)]
    ):
        out = tmp_path / f"out-{number}"
        options = MergeOptions(memory=memory, workers=workers, verify="full")
        unshard.average(paths, out, coefficients=NINE, options=options, config="none")
        assert load_file(out / "model.safetensors")["w"].tobytes() == expected


@settings(max_examples=examples(50))  # an average each, verified in full
@given(st.data(), st.sampled_from(sorted(RANDOM_BITS)))
def test_tiles_of_any_size_have_the_same_bytes(data: st.DataObject, dtype: str) -> None:
    weights = data.draw(
        st.lists(st.sampled_from([1.0, 0.5, -2.0, 0.1, 3.0]), min_size=2, max_size=5)
    )
    assume(sum(weights))
    with TemporaryDirectory() as scratch:
        paths = save_random_bits(Path(scratch), dtype, len(weights))
        memory, workers = data.draw(st.integers(140_000, 3_000_000)), data.draw(st.integers(1, 2))
        options = MergeOptions(memory=memory * workers, workers=workers, verify="full")
        unshard.average(
            paths, Path(scratch, "out"), coefficients=weights, options=options, config="none"
        )
        found = load_file(Path(scratch, "out", "model.safetensors"))["w"].tobytes()
        assert found == mean_of_numpy(paths, weights, dtype)


def test_the_command(tmp_path: Path) -> None:
    several = models(3)
    run = save_run(tmp_path / "run", several)
    paths = [str(path) for path in steps(run, 3)]
    command = [sys.executable, "-m", "unshard", "average", *paths, "-o", str(tmp_path / "out")]
    command += ["--config", "none"]
    done = subprocess.run(
        [*command, "--coefficients", "1,2,3"], capture_output=True, text=True, check=True
    )
    assert "averaged 3 checkpoints" in done.stdout
    assert bits_of(tmp_path / "out") == mean_of(several, [1.0, 2.0, 3.0])
    again = subprocess.run(
        [*command, "--coefficients", "1,x"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "not numbers" in again.stderr


def test_tied_heads_are_left_out_as_in_a_merge(tmp_path: Path) -> None:
    several = []
    for model in models(2):
        tied = {**model, "lm_head.weight": model["model.embed_tokens.weight"]}
        several.append(tied)
    run = save_run(tmp_path / "run", several)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    unshard.average(run, tmp_path / "out", options=MergeOptions(config=config))
    expected = mean_of(several)
    del expected["lm_head.weight"]
    assert bits_of(tmp_path / "out") == expected


def test_sharding_may_differ_between_checkpoints(tmp_path: Path) -> None:
    """Along another dimension, on another mesh: what counts is the whole tensor."""
    from torch.distributed.tensor import Replicate, Shard

    several = [{"w": torch.randn(7, 5)} for _ in range(2)]
    save_ranks(
        tmp_path / "a",
        several[0],
        4,
        mesh_shape=(2, 2),
        mesh_names=("ddp", "fsdp"),
        placements=[Replicate(), Shard(1)],
    )
    save_ranks(tmp_path / "b", several[1], 3)
    unshard.average([tmp_path / "a", tmp_path / "b"], tmp_path / "out", config="none")
    assert bits_of(tmp_path / "out") == mean_of(several)
    assert_same(merged(tmp_path / "out"), {"w": (several[0]["w"] + several[1]["w"]) / 2})


def said(run: Path | Sequence[Path], output: Path, last: int | None = None) -> list[str]:
    events: list[Event] = []
    unshard.average(run, output, listener=events.append, last=last, config="none")
    return [event.text for event in events if isinstance(event, Warned)]


@pytest.mark.parametrize("name", ["global_step_{}", "checkpoint-{}", "epoch_{}"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_without_weights_is_named(tmp_path: Path, number: int, name: str) -> None:
    run = tmp_path / "run"
    for step, tensors in enumerate(models(3), start=1):
        save_ranks(run / name.format(step), tensors, 2)
    empty = run / name.format(number)
    for file in empty.iterdir():
        file.unlink()
    (empty / "optim_world_size_2_rank_0.pt").write_bytes(b"1")
    expected = f"passed over {empty}: it has no weights"
    notes = said(run, tmp_path / "all")
    assert notes.count(expected) == 1
    # Of the last step only what lies above it is said.
    assert (expected in said(run, tmp_path / "last", last=1)) is (number == 3)


def save_with_config(directory: Path, tensors: Tensors, config: Mapping[str, object]) -> Path:
    save_ranks(directory, tensors, 2)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"rope_theta": 2.0}, "rope_theta"),
        ({"text_config": {"a": [1, 2, 4]}}, "text_config"),
        ({"rms_norm_eps": 1e-6, "eos_token_id": [1, 2]}, "eos_token_id, rms_norm_eps"),
        ({"transformers_version": "5", "_name_or_path": "x", "dtype": "float16"}, ""),
    ],
)
def test_configs_that_differ_are_named(
    tmp_path: Path, change: Mapping[str, object], keys: str
) -> None:
    config = {"model_type": "own", "rope_theta": 1.0, "text_config": {"a": [1, 2, 3]}}
    first, second = models(2)
    one = save_with_config(tmp_path / "a" / "checkpoint-1", first, {**config, **change})
    other = save_with_config(tmp_path / "b" / "checkpoint-2", second, config)
    notes = [note for note in said([one, other], tmp_path / "out") if "config.json of" in note]
    assert len(notes) == bool(keys)
    assert not keys or (notes[0].endswith(f"is used: {keys}") and "checkpoint-1" in notes[0])
