"""Flat ranges as boxes; checkpoints of any groups, sizes and worlds against plain arithmetic."""

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unshard
from properties import examples
from ranks import assert_same
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import open_latest
from unshard.read.zero.flat import flat_boxes
from zero_files import ZeroModel, save_zero

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

FILES = 30  # examples that write files
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.lists(st.integers(1, 5), max_size=5).map(tuple), st.data())
def test_a_flat_range_is_few_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    elements = np.arange(prod(shape)).reshape(shape)
    found: list[int] = []
    boxes = flat_boxes(shape, begin, end)
    for offsets, sizes in boxes:
        box = tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))
        found += elements[box].reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@st.composite
def models(draw: st.DrawFn) -> ZeroModel:
    numbers = iter(range(100))
    values = iter(np.random.default_rng(0).standard_normal(100_000).astype(np.float32))

    def tensors(prefix: str, most: int) -> dict[str, torch.Tensor]:
        drawn = draw(st.lists(shapes, max_size=most))
        return {
            f"{prefix}.{next(numbers)}": torch.tensor(
                [next(values) for _ in range(prod(shape))]
            ).reshape(shape)
            for shape in drawn
        }

    groups = [tensors("layer", 4) for _ in range(draw(st.integers(1, 3)))]
    trained = [name for group in groups for name in group]
    is_tied = bool(trained) and draw(st.booleans())
    shared = {"tied": draw(st.sampled_from(trained))} if is_tied else {}
    frozen = {name: value.bfloat16() for name, value in tensors("frozen", 2).items()}
    counter = {"counter": torch.tensor(3), "mask": torch.tensor([True, False])}
    names = [*trained, *frozen, *shared, *counter]
    return ZeroModel(groups, frozen, counter, shared, draw(st.permutations(names)))


@settings(max_examples=examples(FILES))  # each writes files
@given(models(), st.integers(1, 5), st.sampled_from([1, 8, 10**9]))
def test_stage_3(model: ZeroModel, world: int, sub_group: int) -> None:
    with TemporaryDirectory() as directory:
        save_zero(Path(directory) / "tag", model, world=world, stage=3, sub_group=sub_group)
        check(Path(directory), model)


@settings(max_examples=examples(FILES))  # each writes files
@given(models(), st.integers(1, 5), st.sampled_from([1, 4, 8]), st.sampled_from([1, 2]))
def test_stages_1_and_2(model: ZeroModel, world: int, align: int, stage: int) -> None:
    with TemporaryDirectory() as directory:
        save_zero(Path(directory) / "tag", model, world=world, stage=stage, align=align)
        check(Path(directory), model)


@settings(max_examples=examples(FILES))  # each writes files
@given(models(), st.integers(1, 5))
def test_bf16_optimizer_keeps_its_padding(model: ZeroModel, world: int) -> None:
    with TemporaryDirectory() as directory:
        save_zero(Path(directory) / "tag", model, world=world, stage=1, keeps_padding=True)
        check(Path(directory), model)


def check(directory: Path, model: ZeroModel) -> None:
    catalog = open_latest(directory, Choice(), ReadOptions()).catalog
    assert list(catalog.tensors) == list(model.truth)
    assert_same(unshard.load_state_dict(directory, names="training"), model.truth)


@pytest.mark.parametrize("stage", [2, 3])
def test_more_ranks_than_ten_are_counted_as_numbers(tmp_path: Path, stage: int) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [{"a": torch.randn(31, 7, generator=generator), "b": torch.randn(5)}]
    model = ZeroModel(groups, {"c": torch.arange(50.0).half()})
    save_zero(tmp_path / "tag", model, world=23, stage=stage)
    check(tmp_path, model)
