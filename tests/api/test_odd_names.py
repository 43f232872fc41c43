"""Names that no model should have: sorted, written, or refused with a printable sentence."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import unshard
from properties import examples
from unshard import CorruptError, MergeOptions, UnshardError
from unshard.api.merging import merge_checkpoint
from unshard.progress import Event, Warned
from unshard.read.hub_files import natural_order

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

DIGITS_FIRST = ["layers.0.w", "layers.0.w1"]
SOME = st.one_of(
    st.text(st.sampled_from("0189aw.٣²"), max_size=8),
    st.text(max_size=12),
    st.builds("/".join, st.lists(st.sampled_from(["", "..", "a", "0"]), max_size=4)),
    st.integers(1, 1000).map("x1.".__mul__),
)


@given(st.lists(SOME, unique=True))
@example(DIGITS_FIRST)
@example(["1", "a", "", "01", "001"])
def test_names_have_one_order(names: list[str]) -> None:
    ordered = sorted(names, key=natural_order)
    backwards = names[::-1]
    assert sorted(backwards, key=natural_order) == ordered
    assert set(ordered) == set(names)


def test_numbers_are_ordered_as_numbers() -> None:
    names = ["layers.9.w", "layers.10.w", "layers.010.w", "layers.10.w1", "layers.10.w02"]
    ordered = ["layers.9.w", "layers.010.w", "layers.10.w", "layers.10.w1", "layers.10.w02"]
    assert sorted(names, key=natural_order) == ordered


def save_whole(folder: Path, names: Sequence[str]) -> None:
    save_file(
        {name: np.full(1, n, np.float32) for n, name in enumerate(names)},
        folder / "model.safetensors",
    )


def save_shards(folder: Path, names: Sequence[str]) -> None:
    for rank in range(2):
        tensors = {name: np.full(1, n, np.float32) for n, name in enumerate(names) if n % 2 == rank}
        offsets = {name: {"saved_offsets": [0]} for name in tensors}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(tensors, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", info)


def save_pickled(folder: Path, names: Sequence[str]) -> None:
    tensors = {name: torch.tensor([float(n)]) for n, name in enumerate(names)}
    torch.save(tensors, folder / "model_world_size_1_rank_0.pt")


@pytest.mark.parametrize("write", [save_whole, save_shards, save_pickled])
@settings(max_examples=examples(50))  # a merge each, in three formats
@given(names=st.lists(SOME, unique=True, min_size=1, max_size=6))
@example(names=DIGITS_FIRST)
@example(names=["größe.é", "层.0.权重", "\U0001f600", "e\u0301", "a/b/../c", "/abs", " "])
def test_tensors_of_any_name_are_merged_or_refused(write: object, names: list[str]) -> None:
    assert callable(write)
    names = [name for name in names if name != "__metadata__"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "in")
        folder.mkdir()
        write(folder, names)
        refused = ""
        try:
            unshard.merge(folder, Path(scratch, "out"), config="none")
        except UnshardError as error:
            refused = str(error)
        if refused:
            assert any(repr(name)[1:-1] in refused for name in names)
        else:
            found = load_file(Path(scratch, "out", "model.safetensors"))
            assert {name: value.item() for name, value in found.items()} == {
                name: float(n) for n, name in enumerate(names)
            }


def test_half_a_surrogate_pair_in_a_pickled_name_is_refused_in_a_printable_sentence(
    tmp_path: Path,
) -> None:
    save_pickled(tmp_path, ["a\ud800b", "fine"])
    with pytest.raises(UnshardError) as caught:
        unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert r"a\ud800b" in str(caught.value)
    str(caught.value).encode("utf-8")


def test_a_path_that_is_not_utf8_is_named_in_a_printable_sentence(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"12345678 not JSON")
    with pytest.raises(UnshardError, match=r"caf\\udce9") as caught:
        unshard.merge(folder, tmp_path / "out")
    for part in (str(caught.value), caught.value.subject, *map(str, caught.value.args)):
        part.encode("utf-8")


def test_what_is_wrong_with_a_map_of_text_is_printable() -> None:
    error = CorruptError("a\ud800", expected="b\udcff", found="c\udfff", hint="d\ud900")
    assert str(error).encode("utf-8").count(b"\\ud") == 4


def test_a_warning_is_printable(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    save_shards(folder, ["a", "b"])
    stale = folder / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(stale, folder / "shard-00002-model-00003-of-00003.safetensors")
    heard: list[Event] = []
    merge_checkpoint(folder, tmp_path / "out", MergeOptions(config="none"), heard.append)
    warnings = [event.message for event in heard if isinstance(event, Warned)]
    assert any("stale" in warning and r"caf\udce9" in warning for warning in warnings)
    assert all(warning.isprintable() for warning in warnings)


def test_a_path_too_long_for_any_file_system_is_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, ["a"])
    long = "x" * 300
    for attempt in (
        lambda: unshard.merge(long, tmp_path / "out"),
        lambda: unshard.merge(tmp_path, tmp_path / long, config="none"),
        lambda: unshard.merge(tmp_path, tmp_path / "out", base=long),
        lambda: unshard.merge(tmp_path, tmp_path / "out", config=long),
        lambda: unshard.merge(tmp_path, tmp_path / "out", also=[long]),
        lambda: unshard.verify(long, tmp_path),
    ):
        with pytest.raises(UnshardError, match=f"{long}.*name too long"):
            attempt()
