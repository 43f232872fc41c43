"""`unshard.delta` and `apply_delta`: the merge of a checkpoint again, bit for bit, or an error."""

import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import Shard

import unshard
from command import unshard as command
from damage import change_byte, places_to_flip
from properties import examples
from ranks import bits, contents, merged, save_ranks, snapshot
from unshard import ConversionError, CorruptError, NotMergeableError, UnshardError, UsageError
from unshard.progress import Stage

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = Mapping[str, torch.Tensor]
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int64, torch.uint8, torch.bool),
)
INDEX = "model.safetensors.index.json"
FILE = "model-00000-of-00001.safetensors"


def save_whole(place: Path, tensors: Tensors) -> None:
    place.mkdir(parents=True)
    save_file(dict(tensors), place / "model.safetensors")


def save_dcp(place: Path, tensors: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(dict(tensors), checkpoint_id=place, no_dist=True)


def save_columns(place: Path, tensors: Tensors) -> None:
    cut = {name: one for name, one in tensors.items() if one.ndim > 1}
    plain = {name: one for name, one in tensors.items() if one.ndim <= 1}
    save_ranks(place, cut, 2, placements=[Shard(1)], extra=plain)


LAYOUTS: Mapping[str, Callable[[Path, Tensors], object]] = {
    "whole": save_whole,
    "dcp": save_dcp,
    "columns": save_columns,
    "1 rank": lambda place, tensors: save_ranks(place, tensors, 1),
    "3 ranks": lambda place, tensors: save_ranks(place, tensors, 3),
}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two models: tensors that changed in places, or whole, or in more than values, or are gone."""
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kinds = ["same", "some", "all"] * 4 + ["kind", "shape", "gone", "new"]
    for number in range(draw(st.integers(1, 4))):
        name = f"model.layers.{number % 2}.w{number}"
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (5,), (0, 3), (7, 9), (40, 64), (2, 3, 4), (1, 16)]))
        tensor = (torch.randn(shape, generator=generator) * 5).to(dtype)
        other, what = tensor.clone(), draw(st.sampled_from(kinds))
        if what == "some" and other.numel():
            other.view(-1)[:: 1 + other.numel() // 3] = 1
        elif what == "all":
            other = (torch.randn(shape, generator=generator) * 5).to(dtype)
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


def kinds(tensors: Tensors) -> dict[str, object]:
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def weights(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("*.safetensors")}


@settings(max_examples=examples(200))
@given(pairs(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)), st.booleans())
def test_what_a_delta_makes_is_the_merge_or_there_is_no_delta(
    models: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    first: str,
    second: str,
    is_merged: bool,  # noqa: FBT001 (drawn)
) -> None:
    before, after = models
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        LAYOUTS[first](top / "a", before)
        LAYOUTS[second](top / "b", after)
        if kinds(before) != kinds(after):
            with pytest.raises(ConversionError, match="a delta cannot express the change"):
                unshard.delta(top / "a", top / "b", top / "delta")
            assert {one.name for one in top.iterdir()} == {"a", "b"}
            return
        report = unshard.delta(top / "a", top / "b", top / "delta", config="none")
        changed = {name for name, one in before.items() if bits(one) != bits(after[name])}
        assert report.tensors == len(changed)
        unshard.merge(top / "b", top / "merged", config="none")
        if is_merged:
            unshard.merge(top / "a", top / "base", config="none")
        base = top / ("base" if is_merged else "a")
        unshard.apply_delta(base, [top / "delta"], top / "out", config="none")
        assert weights(top / "out") == weights(top / "merged")
        if changed:  # the delta again would undo itself
            with pytest.raises(CorruptError, match="is damaged, or the checkpoint is not version"):
                unshard.apply_delta(top / "merged", [top / "delta"], top / "no", config="none")


def some(seed: int, *, like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Return tensors, or others of which a few values differ."""
    generator = torch.Generator().manual_seed(seed)
    if like is None:
        shapes = {"a.weight": (300, 70), "b.weight": (64, 50), "norm.weight": (50,)}
        return {name: torch.randn(one, generator=generator) for name, one in shapes.items()}
    made = {name: one.clone() for name, one in like.items()}
    for one in list(made.values())[: 1 + seed % 3]:
        one.view(-1)[seed::37] += 0.5
    return made


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Make versions 0 to 3 of a model, `v0` and so on, and the deltas `d1` to `d3` between them."""
    tensors = some(0)
    save_whole(tmp_path / "v0", tensors)
    for number in range(1, 4):
        tensors = some(number, like=tensors)
        save_ranks(tmp_path / f"v{number}", tensors, 2)
        paths = (tmp_path / f"v{number - 1}", tmp_path / f"v{number}", tmp_path / f"d{number}")
        names: Any = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
        unshard.delta(*paths, **names, config="none")
    return tmp_path


def refused(chain: Path, base: str, *deltas: str) -> UnshardError:
    """Apply deltas in vain, check that nothing was left, and return the error."""
    before = snapshot(chain)
    with pytest.raises(UnshardError) as told:
        paths = [chain / one for one in deltas]
        unshard.apply_delta(chain / base, paths, chain / "no" / "out", config="none")
    assert snapshot(chain) == before
    assert not (chain / "no").exists()
    return told.value


def test_a_chain_is_applied_at_once(chain: Path) -> None:
    unshard.merge(chain / "v3", chain / "merged", config="none")
    deltas = [chain / f"d{number}" for number in (1, 2, 3)]
    report = unshard.apply_delta(chain / "v0", deltas, chain / "out", config="none")
    assert weights(chain / "out") == weights(chain / "merged")
    assert report.output == str(chain / "out")
    with pytest.raises(unshard.OutputError, match="exists already"):  # not the merge of its base
        unshard.merge(chain / "v0", chain / "out", config="none", reuse=True)
    unshard.merge(chain / "v0", chain / "out", config="none", overwrite=True)
    assert weights(chain / "out") != weights(chain / "merged")


def test_deltas_in_the_wrong_order_are_refused(chain: Path) -> None:
    assert "version 000001, not to version 000003" in str(refused(chain, "v0", "d3", "d2"))
    assert "version 000002, not to version 000001" in str(refused(chain, "v0", "d1", "d3"))
    assert isinstance(refused(chain, "v0", "d2"), CorruptError)  # in tensors that it leaves, too
    assert isinstance(refused(chain, "v2", "d1", "d2"), CorruptError)


def test_what_is_no_such_delta_is_refused(chain: Path) -> None:
    assert isinstance(refused(chain, "v0", "v1"), UsageError)
    for key, value in (("delta_encoding", "overwrite"), ("checksum_format", "xxh3-128")):
        shutil.copytree(chain / "d1", chain / key)
        index = json.loads((chain / key / INDEX).read_text())
        index["metadata"][key] = value
        (chain / key / INDEX).write_text(json.dumps(index))
        error = refused(chain, "v0", key)
        assert isinstance(error, NotMergeableError)
        assert value in error.found
    save_whole(chain / "other", {**some(0), "new.weight": torch.ones(3)})
    assert "new.weight is not in both" in str(refused(chain, "other", "d1"))


def test_every_damage_is_noticed_or_makes_no_difference(chain: Path) -> None:
    unshard.merge(chain / "v1", chain / "merged", config="none")
    truth, random, noticed = weights(chain / "merged"), Random(1), 0
    for name in (INDEX, FILE):
        size = (chain / "d1" / name).stat().st_size
        for place in places_to_flip(size, [], 40, random):
            shutil.copytree(chain / "d1", chain / "damaged")
            change_byte(chain / "damaged" / name, place, random)
            try:
                unshard.apply_delta(chain / "v0", [chain / "damaged"], chain / "out", config="none")
            except UnshardError:
                noticed += 1
                assert not (chain / "out").exists()
            else:
                assert weights(chain / "out") == truth
                shutil.rmtree(chain / "out")
            shutil.rmtree(chain / "damaged")
    assert noticed > 40
    (chain / "d1" / FILE).unlink()
    assert FILE in str(refused(chain, "v0", "d1"))


def test_a_delta_that_foreign_code_reads(chain: Path) -> None:
    """As the code of SGLang does: see `unshard.read.delta`."""
    index = json.loads((chain / "d1" / INDEX).read_text())
    form = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
    assert index["metadata"] == {"version": "000001", "base_version": "000000", **form}
    frames = load_file(chain / "d1" / FILE)
    assert dict.fromkeys(frames, FILE) == index["weight_map"]
    before, after = merged(chain / "v0"), some(1, like=some(0))
    for name, frame in frames.items():
        found = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)
        old, new = (np.frombuffer(bits(one[name]), np.uint8) for one in (before, after))
        assert (found == old ^ new).all()
    assert index["unchanged"].keys() == before.keys() - frames.keys()


def test_both_are_merged_with_the_same_options(chain: Path) -> None:
    how: Any = {"dtype": "bfloat16", "config": "none"}
    unshard.delta(chain / "v0", chain / "v1", chain / "half", **how)
    unshard.merge(chain / "v1", chain / "merged", **how)
    unshard.apply_delta(chain / "v0", [chain / "half"], chain / "out", **how)
    assert weights(chain / "out") == weights(chain / "merged")
    assert "with the options of the delta" in refused(chain, "v0", "half").hint


def test_the_base_is_not_replaced_by_its_delta(chain: Path) -> None:
    before = snapshot(chain / "v0")
    with pytest.raises(unshard.OutputError):
        unshard.delta(chain / "v0", chain / "v1", chain / "v0", config="none", overwrite=True)
    assert snapshot(chain / "v0") == before


def test_without_a_zstd_library_the_error_says_so(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("Python has its own")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="is compressed") as told:
        unshard.delta(chain / "v0", chain / "v1", chain / "out", config="none")
    assert "zstandard" in told.value.hint
    assert not (chain / "out").exists()
    assert isinstance(refused(chain, "v0", "d1"), UsageError)


def train(run: Path, *, dtype: torch.dtype) -> None:
    """Train a small model for 20 steps, and save bfloat16 weights after some of them."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(256, 256, generator=generator) / 16 for _ in range(4)]
    masters = [one.to(dtype).requires_grad_() for one in made]
    optimizer = torch.optim.Adam(masters, lr=1e-5)
    for step in range(1, 21):
        values = torch.randn(32, 256, generator=generator).to(dtype)
        target = values.roll(1, 1)
        for one in masters:
            values = torch.tanh(values @ one)
        optimizer.zero_grad()
        torch.autograd.backward((values - target).square().mean())
        optimizer.step()
        if step % 5 == 0 or step > 18:
            tensors = {f"w{n}": one.detach().bfloat16() for n, one in enumerate(masters)}
            save_ranks(run / f"global_step_{step}" / "actor", tensors, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_training_is_archived_and_every_step_comes_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    train(run, dtype=dtype)
    shutil.move(run / "global_step_20", tmp_path / "later")
    steps = [5, 10, 15, 19]
    made = unshard.archive(run, archive, config="none")
    assert [one.step for one in made] == steps
    assert unshard.archive(run, archive, config="none") == []
    shutil.move(tmp_path / "later", run / "global_step_20")
    (last,) = unshard.archive(run, archive, config="none")
    names = [f"weight_v{number:06d}" for number in range(5)]
    assert sorted(one.name for one in archive.iterdir()) == names
    for number, step in enumerate([*steps, 20]):
        unshard.merge(run, tmp_path / "merged", config="none", step=step, overwrite=True)
        truth, own = weights(tmp_path / "merged"), archive / names[number]
        unshard.apply_delta(archive, [], tmp_path / str(step), config="none", step=step)
        assert weights(tmp_path / str(step)) == truth
        if number:
            before = merged(tmp_path / str([*steps, 20][number - 1]))
            after = merged(tmp_path / str(step))
            xor = {n: np.frombuffer(bits(one), np.uint16) for n, one in after.items()}
            xor = {n: one ^ np.frombuffer(bits(before[n]), np.uint16) for n, one in xor.items()}
            by_hand = sum(len(zstandard.compress(one.tobytes(), 1)) for one in xor.values())
            size = sum(one.stat().st_size for one in own.glob("*.safetensors"))
            assert size <= 1.1 * by_hand
            changed = sum(int(np.count_nonzero(one)) for one in xor.values())
            assert 0 < changed < sum(map(len, xor.values())) / 2
            assert json.loads((own / INDEX).read_text())["metadata"]["base_version"] == (
                f"{number - 1:06d}"
            )
    assert last.step == 20


def save_step(run: Path, step: int, tensors: Tensors) -> None:
    save_ranks(run / f"global_step_{step}" / "actor", tensors, 2)


def test_an_archive_goes_on_with_a_whole_model_where_no_delta_may_follow(tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    truth = {1: some(0), 2: some(1, like=some(0)), 3: {**some(5), "new.weight": torch.ones(3)}}
    truth |= {5: {**some(6), "new.weight": torch.zeros(3)}, 6: some(8), 7: some(7, like=some(8))}
    for step in (1, 2, 3):
        save_step(run, step, truth[step])
    assert len(unshard.archive(run, archive, config="none")) == 3  # the third has another tensor
    save_step(run, 4, some(2))
    next((run / "global_step_4" / "actor").iterdir()).unlink()
    shutil.rmtree(run / "global_step_3")
    save_step(run, 5, truth[5])
    assert [one.step for one in unshard.archive(run, archive, config="none")] == [5]
    save_step(run, 5, some(9))  # a training that went back
    save_step(run, 6, truth[6])
    save_step(run, 7, truth[7])
    assert [one.step for one in unshard.archive(run, archive, config="none")] == [6, 7]
    whole = [one.name for one in sorted(archive.iterdir()) if not (one / INDEX).exists()]
    assert whole == [f"weight_v00000{number}" for number in (0, 2, 3, 4)]
    for step, tensors in truth.items():
        unshard.apply_delta(archive, [], tmp_path / str(step), config="none", step=step)
        found = merged(tmp_path / str(step))
        assert {name: bits(one) for name, one in found.items()} == {
            name: bits(one) for name, one in tensors.items()
        }
    with pytest.raises(UsageError, match="no version of step 4"):
        unshard.apply_delta(archive, [], tmp_path / "4", config="none", step=4)
    shutil.rmtree(archive / whole.pop())
    for name in whole:
        shutil.rmtree(archive / name)
        with pytest.raises(UsageError, match="as weight_v000004 is missing"):
            unshard.apply_delta(archive, [], tmp_path / "8", config="none", step=7)


HOWS: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"include": "a|norm"}]


@pytest.mark.parametrize("how", HOWS)
def test_an_archive_goes_on_with_a_whole_model_after_other_options(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    truth, run = some(0), tmp_path / "run"
    for step in (1, 2):
        truth = some(step, like=truth)
        save_step(run, step, truth)
    unshard.archive(run, tmp_path / "archive", config="none", **how)
    save_step(run, 3, some(3, like=truth))
    unshard.archive(run, tmp_path / "archive", config="none")  # forgotten
    save_step(run, 4, some(4, like=truth))
    unshard.archive(run, tmp_path / "archive", config="none", **how)  # after a whole model, too
    for step, options in ((3, {}), (4, how)):
        out = tmp_path / str(step)
        unshard.apply_delta(tmp_path / "archive", [], out, config="none", step=step)
        unshard.merge(run, tmp_path / f"m{step}", config="none", step=step, **options)
        assert weights(out) == weights(tmp_path / f"m{step}")


@pytest.mark.parametrize("archived", [1, 2])
def test_a_step_that_was_replaced_with_its_times_is_no_base(tmp_path: Path, archived: int) -> None:
    run, archive, last = tmp_path / "run", tmp_path / "archive", some(0)
    for step in range(1, archived + 1):
        save_step(run, step, last := some(step, like=last))
    unshard.archive(run, archive, config="none")
    files = [*(run / f"global_step_{archived}" / "actor").iterdir()]
    times = {one: one.stat() for one in files}
    save_step(run, archived, some(6, like=last))
    for one, before in times.items():
        assert one.stat().st_size == before.st_size
        os.utime(one, ns=(before.st_atime_ns, before.st_mtime_ns))
    save_step(run, 3, some(7, like=last))
    unshard.archive(run, archive, config="none")
    unshard.apply_delta(archive, [], tmp_path / "out", config="none")
    unshard.merge(run, tmp_path / "merged", config="none", step=3)
    assert weights(tmp_path / "out") == weights(tmp_path / "merged")


@pytest.mark.parametrize("changed", ["v0", "v1"])
@pytest.mark.parametrize("when", ["verifying", "committing"])
def test_nothing_is_left_if_a_source_changes(chain: Path, changed: str, when: str) -> None:
    def listener(event: object) -> None:
        if isinstance(event, Stage) and event.name == when:
            file = next((chain / changed).iterdir())
            file.write_bytes(file.read_bytes())

    paths = chain / "v0", chain / "v1", chain / "out"
    with pytest.raises(CorruptError, match="has changed"):
        unshard.delta(*paths, config="none", listener=listener)
    assert not (chain / "out").exists()
    if changed == "v0":
        how: Any = {"config": "none", "listener": listener}
        with pytest.raises(CorruptError, match="has changed"):
            unshard.apply_delta(chain / "v0", [chain / "d1"], chain / "out", **how)
        assert not (chain / "out").exists()


def test_what_is_read_is_not_replaced(chain: Path) -> None:
    run, archive = chain / "run", chain / "archive"
    save_step(run, 1, some(0))
    save_step(run, 2, some(1, like=some(0)))
    unshard.archive(run, archive, config="none")
    before, how = snapshot(chain), {"config": "none", "overwrite": True}
    for target in (chain / "d1", chain / "d1" / "sub"):
        with pytest.raises(unshard.OutputError, match="which is read"):
            unshard.apply_delta(chain / "v0", [chain / "d1"], target, **how)  # type: ignore[arg-type]
    with pytest.raises(unshard.OutputError, match="which is read"):
        unshard.apply_delta(archive, [], archive / "weight_v000001", step=1, **how)  # type: ignore[arg-type]
    for target in (run, run / "archive"):
        with pytest.raises(unshard.OutputError, match="which is read"):
            unshard.archive(run, target, config="none")
    with pytest.raises(unshard.OutputError, match="which is read"):
        unshard.delta(chain / "v0", chain / "v1", chain / "v0" / "sub", config="none")
    assert snapshot(chain) == before


def test_an_archive_is_told_by_the_steps_of_training(tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    for step in (10, 20, 30):
        save_step(run, step, some(step, like=some(0)))
    unshard.archive(run, archive, config="none")
    for step in (10, 20):
        out = tmp_path / f"out-{step}-x"
        report = unshard.apply_delta(archive, [], out, config="none", step=step)
        source = json.loads((out / "unshard.json").read_text())["source"]
        assert (source["name"], source["step"], report.step) == (f"global_step_{step}", step, step)
    unshard.delta(tmp_path / "out-10-x", tmp_path / "out-20-x", tmp_path / "delta", config="none")
    stated = json.loads((tmp_path / "delta" / INDEX).read_text())["metadata"]
    assert (stated["base_version"], stated["version"]) == ("000010", "000020")
    for path in (archive, archive / "weight_v000002"):
        with pytest.raises(unshard.IncompleteError, match="a delta, not a model") as told:
            unshard.inspect(path)
        assert told.value.hint == f"make it with unshard apply {archive} OUTPUT, step=30"
    save_step(run, 31, some(30, like=some(0)))  # nothing has changed
    unshard.archive(run, archive, config="none")
    with pytest.raises(unshard.IncompleteError, match="weight_v000003: a delta, not a model"):
        unshard.inspect(archive)
    shutil.rmtree(archive / "weight_v000003")
    (archive / "weight_v000001").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="as weight_v000001 is missing") as missing:
        unshard.apply_delta(archive, [], tmp_path / "no", config="none")
    assert missing.value.found == "10"
    save_step(run, 40, some(2, like=some(30, like=some(0))))
    unshard.archive(run, archive, config="none")
    assert not (archive / "weight_v000003" / INDEX).exists()  # whole
    shutil.copytree(archive / "weight_v000002", archive / "weight_v000001")
    with pytest.raises(UsageError, match="applies to version 000001, not to version 000000"):
        unshard.apply_delta(archive, [], tmp_path / "no", config="none", step=30)


def rewrite(place: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Write the file of a delta again, with other frames."""
    with safe_open(place / FILE, "np") as file:
        known = file.metadata()
    frames = {name: change(name, one) for name, one in load_file(place / FILE).items()}
    save_numpy(frames, place / FILE, known)


def bytes_of(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def halved(frame: bytes) -> bytes:
    whole = zstandard.decompress(frame)
    assert not any(whole[len(whole) // 2 :])
    return zstandard.compress(whole[: len(whole) // 2])


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "half": halved,
    "longer": lambda frame: zstandard.compress(zstandard.decompress(frame) + bytes(4)),
    "followed": lambda frame: frame + b"more",
    "two": lambda frame: frame * 2,
}


@pytest.mark.parametrize("what", [*FRAMES, "I8"])
def test_a_frame_that_is_not_whole_is_refused(tmp_path: Path, what: str) -> None:
    before = some(0)
    after = {name: one.clone() for name, one in before.items()}
    after["a.weight"][0, 3] += 1
    save_whole(tmp_path / "v0", before)
    save_whole(tmp_path / "v1", after)
    unshard.delta(tmp_path / "v0", tmp_path / "v1", tmp_path / "d1", config="none")
    if what == "I8":
        rewrite(tmp_path / "d1", lambda _, frame: frame.view(np.int8))
    else:
        rewrite(tmp_path / "d1", lambda _, frame: bytes_of(FRAMES[what](frame.tobytes())))
    assert isinstance(refused(tmp_path, "v0", "d1"), CorruptError)


@pytest.mark.parametrize("what", ["version", "NaN", "twice"])
def test_an_index_that_is_not_right_is_refused(chain: Path, what: str) -> None:
    path = chain / "d1" / INDEX
    index = json.loads(path.read_text())
    name = min(index["weight_map"])
    if what == "version":
        index["metadata"]["version"] = ""
    elif what == "NaN":
        index["metadata"]["total_size"] = math.nan
    else:
        shutil.copyfile(chain / "d1" / FILE, chain / "d1" / "other.safetensors")
        index["weight_map"][name] = "other.safetensors"
    path.write_text(json.dumps(index))
    assert isinstance(refused(chain, "v0", "d1"), UsageError | CorruptError)


def test_a_path_that_is_no_delta_or_no_run_is_told_why(chain: Path) -> None:
    assert "no such file or directory" in str(refused(chain, "v0", "nowhere"))
    unshard.apply_delta(chain / "v0", [chain / "d1" / INDEX], chain / "out", config="none")
    average = f"{chain / 'run'}@last=2"
    with pytest.raises(UsageError, match="is an average of steps"):
        unshard.apply_delta(average, [chain / "d1"], chain / "no", config="none")
    save_step(chain / "run", 1, some(0))
    for wrong, options, message in (
        (average, {}, "is an average of steps"),
        (chain / "v0", {}, "is not a run"),
        (chain / "run", {"step": 1}, "all steps are archived"),
        (chain / "run", {"overwrite": True}, "are not replaced"),
    ):
        with pytest.raises(UsageError, match=message):
            unshard.archive(wrong, chain / "no", config="none", **options)
    save_whole(chain / "other", {"norm.weight": torch.ones(2, dtype=torch.int32)})
    save_whole(chain / "another", {"norm.weight": torch.ones(2)})
    with pytest.raises(ConversionError) as told:
        unshard.delta(chain / "other", chain / "another", chain / "no", config="none")
    assert (told.value.expected, told.value.found) == ("int32 [2]", "float32 [2]")
    assert not (chain / "no").exists()


def test_the_commands(chain: Path) -> None:
    save_step(chain / "run", 10, some(0))
    save_step(chain / "run", 20, some(1, like=some(0)))
    steps = [chain / "run" / f"global_step_{step}" for step in (10, 20)]
    done = command("delta", *steps, chain / "new", "--config", "none", "--json")
    assert json.loads(done.stdout)["tensors"] == 2
    stated = json.loads((chain / "new" / INDEX).read_text())["metadata"]
    assert (stated["base_version"], stated["version"]) == ("000010", "000020")
    done = command("apply", steps[0], chain / "new", chain / "out", "--config", "none")
    assert "saved to" in done.stdout
    done = command("delta", "--run", chain / "run", chain / "archive", "--config", "none")
    assert done.stdout.count("saved ") == 2
    again = chain / "again"
    done = command("apply", chain / "archive", again, "--step", "20", "--config", "none")
    assert weights(again) == weights(chain / "out")
    lines: list[list[str | Path]] = [["delta", *steps], ["delta", "--run", *steps, again]]
    lines.append(["apply", again])
    for wrong in lines:
        assert command(*wrong).returncode == 2
    assert contents(again)
