"""Weights that are whole already: Hugging Face directories and single files, read and refused."""

import json
import os
import random
import shutil
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from ranks import Tensors, assert_same, merged, save_ranks, some_tensors
from tiny_models import tiny_model
from unshard import (
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnshardError,
)
from unshard.read.format import Location, ReadOptions
from unshard.read.whole_files.reader import WHOLE_FILES
from unshard.tensors.catalog import ByteRange, Catalog

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

INDEX = "model.safetensors.index.json"


def read(path: Path) -> Catalog:
    file = path if path.is_file() else None
    folder = path.parent if file else path
    return WHOLE_FILES.read(
        Location(folder, folder, None, None, "model", WHOLE_FILES, file), ReadOptions()
    )


def merge(source: Path, directory: Path) -> Tensors:
    output = directory / "merged.out"
    unshard.merge(source, output, verify="full", config="none")
    return merged(output)


def numbered(number: int, count: int, stem: str = "model", suffix: str = "safetensors") -> str:
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def write_set(directory: Path, count: int = 3, stem: str = "model") -> dict[str, torch.Tensor]:
    """Write numbered files of two tensors each."""
    torch.manual_seed(1)
    directory.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(1, count + 1):
        held = {f"layers.{number}.{name}": torch.randn(3, 2) for name in ("a", "b")}
        save_file(held, directory / numbered(number, count, stem))
        tensors |= held
    return tensors


def write_index(path: Path, listed: Mapping[str, object]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))


def listed_in(count: int = 3, stem: str = "model") -> dict[str, object]:
    return {
        f"layers.{number}.{name}": numbered(number, count, stem)
        for number in range(1, count + 1)
        for name in ("a", "b")
    }


# --- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["10GB", "8KB"])
def test_what_transformers_saves_is_merged(tmp_path: Path, size: str) -> None:
    model = tiny_model(num_hidden_layers=11)
    model.save_pretrained(tmp_path / "in", max_shard_size=size)
    assert (tmp_path / "in" / INDEX).exists() is (size == "8KB")
    reading = read(tmp_path / "in")
    assert reading.writer == "transformers"
    assert reading.world_size == 1
    assert not reading.archives
    assert not reading.notes
    assert not reading.skipped
    assert_same(merge(tmp_path / "in", tmp_path), model.state_dict())
    names = [name for name in reading.tensors if name.endswith("q_proj.weight")]
    assert names == [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(11)]


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("stem", ["model", "model.safetensors", "model.fp16"])
def test_numbered_files_are_a_set(tmp_path: Path, stem: str, *, index: bool) -> None:
    tensors = write_set(tmp_path / "in", stem=stem)
    if index:
        write_index(tmp_path / "in" / INDEX, listed_in(stem=stem))
    assert_same(merge(tmp_path / "in", tmp_path), tensors)
    reading = read(tmp_path / "in" / numbered(2, 3, stem))
    assert list(reading.tensors) == list(tensors)


def test_a_file_that_is_given_is_all_that_is_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.fp16.safetensors")
    assert_same(merge(tmp_path / "model.fp16.safetensors", tmp_path), tensors)
    assert list(read(tmp_path).tensors) == ["other"]


def test_files_of_torch_in_a_directory_are_merged(tmp_path: Path) -> None:
    tensors = some_tensors()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    reading = read(tmp_path)
    size = (tmp_path / "pytorch_model.bin").stat().st_size
    assert reading.archives == (ByteRange(tmp_path / "pytorch_model.bin", 0, size),)
    assert list(reading.tensors) == list(tensors)
    assert_same(merge(tmp_path, tmp_path), tensors)


@pytest.mark.parametrize("index", [True, False])
def test_several_files_of_torch_are_merged(tmp_path: Path, *, index: bool) -> None:
    tensors = some_tensors()
    names = {
        name: numbered(number, 3, "pytorch_model", "bin")
        for number, name in enumerate(tensors, start=1)
    }
    (tmp_path / "in").mkdir()
    for name, file in names.items():
        zipped = name != "lm_head.weight"
        held = {name: tensors[name]}
        torch.save(held, tmp_path / "in" / file, _use_new_zipfile_serialization=zipped)
    if index:
        write_index(tmp_path / "in" / "pytorch_model.bin.index.json", dict(names))
    assert len([*read(tmp_path / "in").archives]) == 2
    assert_same(merge(tmp_path / "in", tmp_path), tensors)


def test_safetensors_come_before_files_of_torch(tmp_path: Path) -> None:
    torch.save({"old": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file({"new": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(read(tmp_path).tensors) == ["new"]
    assert list(read(tmp_path / "pytorch_model.bin").tensors) == ["old"]


def test_the_full_state_dict_of_accelerate_is_merged(tmp_path: Path) -> None:
    tensors = OrderedDict(some_tensors())
    torch.save(tensors, tmp_path / "pytorch_model_fsdp.bin")
    assert read(tmp_path).writer == "accelerate"
    assert_same(merge(tmp_path, tmp_path), tensors)


def test_what_unshard_made_says_where_it_comes_from(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_ranks(tmp_path / "global_step_7", tensors, 2)
    unshard.merge(tmp_path / "global_step_7", tmp_path / "out", config="none")
    reading = read(tmp_path / "out")
    assert reading.writer == f"unshard {unshard.__version__}"
    made = (
        "made by unshard from global_step_7 (FSDP rank files, unknown writer, world size 2, step 7)"
    )
    assert reading.notes == (made,)
    assert_same(merge(tmp_path / "out", tmp_path), tensors)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"output": {"files": {"other": 1}}, "source": {}}']
)
def test_a_record_of_something_else_is_not_believed(tmp_path: Path, text: str) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors")
    (tmp_path / "unshard.json").write_text(text)
    reading = read(tmp_path)
    assert (reading.writer, reading.notes) == ("unknown", ())


def test_every_dtype_of_safetensors_is_read(tmp_path: Path) -> None:
    tensors = {
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "int": torch.tensor(2**40),
        "empty": torch.empty(3, 0),
        "u16": torch.tensor([65535], dtype=torch.uint16),
        "c64": torch.tensor([1 + 2j]),
    }
    save_file(tensors, tmp_path / "odd.safetensors")
    assert_same(merge(tmp_path / "odd.safetensors", tmp_path), tensors)


# --- sets and indices that are wrong -------------------------------------------------------------


def test_missing_files_of_an_index_are_all_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    write_index(tmp_path / INDEX, listed_in())
    for number in (1, 3):
        (tmp_path / numbered(number, 3)).unlink()
    with pytest.raises(IncompleteError, match="2 of its 3 files") as caught:
        read(tmp_path)
    assert caught.value.expected == f"{numbered(1, 3)}, {numbered(3, 3)}"


def test_missing_files_of_a_set_are_all_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / numbered(2, 3)).unlink()
    with pytest.raises(IncompleteError, match="1 of 3 numbered files") as caught:
        read(tmp_path)
    assert caught.value.expected == numbered(2, 3)


def test_of_several_sets_the_complete_one_is_read(tmp_path: Path) -> None:
    tensors = write_set(tmp_path, 2)
    write_set(tmp_path, 4)
    (tmp_path / numbered(3, 4)).unlink()
    reading = read(tmp_path)
    assert reading.tensors.keys() == tensors.keys()
    assert "stale files of a set of 4" in reading.notes[0]
    write_set(tmp_path, 3)
    with pytest.raises(NotMergeableError, match="several sets"):
        read(tmp_path)


def test_a_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    shutil.copy(tmp_path / numbered(1, 3), tmp_path / numbered(4, 3))
    with pytest.raises(CorruptError, match="exceed the total 3"):
        read(tmp_path)


def test_one_file_next_to_an_index_of_others_is_refused(tmp_path: Path) -> None:
    tensors = write_set(tmp_path)
    write_index(tmp_path / INDEX, listed_in())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(NotMergeableError, match="two sets of weights"):
        read(tmp_path)
    assert read(tmp_path / "model.safetensors").tensors.keys() == tensors.keys()


def test_a_name_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    listed = listed_in() | {"layers.1.a": numbered(2, 3), "layers.9.z": numbered(2, 3)}
    write_index(tmp_path / INDEX, listed)
    with pytest.raises(CorruptError, match=r"00002-of-00003.safetensors lacks 2 tensors") as caught:
        read(tmp_path)
    assert caught.value.found == "no layers.1.a, layers.9.z"


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = write_set(tmp_path)
    held = {"layers.3.a": tensors["layers.3.a"], "layers.1.b": tensors["layers.1.b"]}
    save_file({**held, "layers.3.b": tensors["layers.3.b"]}, tmp_path / numbered(3, 3))
    for index in (False, True):
        if index:
            write_index(tmp_path / INDEX, listed_in())
        with pytest.raises(CorruptError, match=r"layers\.1\.b: two files have it") as caught:
            read(tmp_path)
        assert caught.value.found == f"{numbered(1, 3)} and {numbered(3, 3)}"


def test_a_name_that_the_index_leaves_out_is_read_and_reported(tmp_path: Path) -> None:
    tensors = write_set(tmp_path)
    listed = listed_in()
    del listed["layers.2.b"]
    write_index(tmp_path / INDEX, listed)
    reading = read(tmp_path)
    assert reading.tensors.keys() == tensors.keys()
    assert reading.notes == (f"{INDEX} does not list 1 tensor that its files have: layers.2.b",)


@pytest.mark.parametrize(
    "file",
    ["../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 300, 3, None, []],
)
def test_an_index_names_files_of_its_own_directory(tmp_path: Path, file: object) -> None:
    write_set(tmp_path)
    write_index(tmp_path / INDEX, listed_in() | {"layers.1.a": file})
    with pytest.raises(CorruptError, match=r"'layers\.1\.a': its file is not a name"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000, "\xff"],
)
def test_an_index_that_is_malformed_is_refused(tmp_path: Path, text: str) -> None:
    write_set(tmp_path)
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(CorruptError, match=INDEX):
        read(tmp_path)


def test_an_index_of_endless_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, 1 << 40)
    with pytest.raises(CorruptError, match="longer than"):
        read(tmp_path)


def test_one_shard_of_several_ranks_is_not_a_model(tmp_path: Path) -> None:
    info = json.dumps({"a": {"saved_offsets": [4, 0]}})
    save_file({"a": torch.zeros(4, 2)}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(NotMergeableError, match="one rank's shard"):
        read(tmp_path / "x.safetensors")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors")
    torch.save(some_tensors(), tmp_path / "model.pt")
    for path in (tmp_path / "model.safetensors", tmp_path / "model.pt"):
        data = path.read_bytes()
        for size in [*range(0, len(data), 61), len(data) - 1]:
            path.write_bytes(data[:size])
            with pytest.raises(UnshardError, match=path.name):
                read(path)


def test_damage_never_ends_in_a_traceback(tmp_path: Path) -> None:
    write_set(tmp_path)
    write_index(tmp_path / INDEX, listed_in())
    torch.save({"model": some_tensors(), "step": 3}, tmp_path / "model.pt")
    sources = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    chance = random.Random(11)
    refused = 0
    for _ in range(500):
        path = chance.choice(list(sources))
        data = bytearray(sources[path])
        for _ in range(chance.choice([1, 4])):
            data[chance.randrange(min(len(data), 1500))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            read(path)
        except UnshardError:
            refused += 1
        path.write_bytes(sources[path])
    assert refused > 100


# --- a state dict within a file ------------------------------------------------------------------

STEP = {"epoch": 3, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []}}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
@pytest.mark.parametrize("names", [("model",), ("state_dict",), ("module",), ("state", "model")])
def test_a_state_dict_is_found_under_the_names_of_frameworks(
    tmp_path: Path, names: tuple[str, ...], suffix: str
) -> None:
    tensors = some_tensors()
    saved: dict[str, object] = dict(tensors)
    for name in reversed(names):
        saved = {**STEP, name: OrderedDict(saved)}
    path = tmp_path / f"x{suffix}"
    torch.save(saved, path)
    reading = read(path)
    assert reading.notes == (f"x{suffix}: the weights were taken from {'.'.join(names)}",)
    left = {skipped.fqn: skipped.reason for skipped in reading.skipped}
    assert {"epoch", "optimizer"} <= left.keys()
    assert left["epoch"] == f"not the model's weights, which were taken from {'.'.join(names)}"
    assert_same(merge(path, tmp_path), tensors)


def test_the_model_is_taken_rather_than_its_average(tmp_path: Path) -> None:
    tensors = some_tensors()
    average = {name: tensor / 2 for name, tensor in tensors.items()}
    torch.save({"model_ema": average, "model": tensors, "ema": average}, tmp_path / "x.pt")
    reading = read(tmp_path / "x.pt")
    assert [skipped.fqn for skipped in reading.skipped] == ["model_ema", "ema"]
    assert "tensors next to the model's" in reading.skipped[0].reason
    assert_same(merge(tmp_path / "x.pt", tmp_path), tensors)


def test_a_single_unknown_name_is_taken(tmp_path: Path) -> None:
    torch.save({"generator": some_tensors(), "epoch": 1}, tmp_path / "x.pt")
    assert_same(merge(tmp_path / "x.pt", tmp_path), some_tensors())


def test_several_unknown_names_are_listed(tmp_path: Path) -> None:
    saved = {"generator": some_tensors(), "critic": some_tensors(), "epoch": 1}
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(NotMergeableError, match="several of its values have tensors") as caught:
        read(tmp_path / "x.pt")
    assert caught.value.found == "critic, generator"


def test_tensors_at_the_top_are_the_state_dict(tmp_path: Path) -> None:
    tensors = some_tensors()
    torch.save({**tensors, "extra": {"scale": torch.ones(1)}, "n": 3}, tmp_path / "x.pt")
    reading = read(tmp_path / "x.pt")
    assert reading.tensors.keys() == tensors.keys()
    assert [skipped.fqn for skipped in reading.skipped] == ["extra", "n"]


@pytest.mark.parametrize(
    "saved",
    [3, [torch.zeros(1)], {}, {"a": 1}, {1: torch.zeros(1)}, {"optimizer": {"state": {0: {}}}}],
    ids=str,
)
def test_a_file_without_tensors_by_name_is_refused(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(NotMergeableError, match=r"x\.pt: (not a state dict|has no tensors)"):
        read(tmp_path / "x.pt")


def test_a_pickled_module_is_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(NotMergeableError, match="not a state dict") as caught:
        read(tmp_path / "x.pt")
    assert "state_dict()" in caught.value.hint
    assert caught.value.found == "torch.nn.modules.linear.Linear"


def test_one_rank_of_several_leaves_holes(tmp_path: Path) -> None:
    save_ranks(tmp_path, some_tensors(), 2)
    shutil.copy(tmp_path / "model_world_size_2_rank_0.pt", tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="is missing from every rank"):
        unshard.merge(tmp_path / "x.pt", tmp_path / "out")


def test_sizes_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    header = {"w": {"dtype": "U8", "shape": [2**63, 0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CorruptError, match="sizes that no tensor can have"):
        read(tmp_path)
