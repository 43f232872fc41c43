"""Layouts against what safetensors, huggingface_hub and transformers write of the same tensors."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tiny_models import tiny_model
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import take
from unshard.errors import ConversionError, UsageError
from unshard.plan import layout as module
from unshard.plan.layout import (
    Layout,
    OutputFile,
    OutputTensor,
    index_json,
    lay_out,
    size_in_bytes,
)
from unshard.read.hub_files import INDEX_NAME
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

Tensors = dict[str, torch.Tensor]

# float8_e8m0fnu and complex128: safetensors.torch writes neither
DTYPES = sorted(set(BY_NAME) - {"float8_e8m0fnu", "complex128"})
UNLIMITED = 10**15


def converted(tensors: Tensors) -> list[ConvertedTensor]:
    return [as_stored(name, tensor) for name, tensor in tensors.items()]


def as_stored(name: str, tensor: torch.Tensor) -> ConvertedTensor:
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    no_chunks = ChunkRows(tensor.dim()).table((Path("f"),))
    return ConvertedTensor(
        name, dtype, take(TensorEntry(name, dtype, tuple(tensor.shape), no_chunks))
    )


def zeros(dtype: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(getattr(torch, dtype))


def header_of(file: bytes) -> bytes:
    return file[: 8 + int.from_bytes(file[:8], "little")]


def placed_tensors(layout: Layout) -> list[OutputTensor]:
    return [tensor for file in layout.files for tensor in file.tensors]


names = st.text(
    st.characters(categories=["L", "N", "P", "S"], include_characters=" "), min_size=1, max_size=12
).filter(lambda name: name.isprintable() and name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3)
some_tensors = st.dictionaries(
    names,
    st.builds(lambda dtype, shape: zeros(dtype, *shape), st.sampled_from(DTYPES), shapes),
    min_size=1,
    max_size=8,
)
some_filled_tensors = st.dictionaries(
    names,
    st.builds(zeros, st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


# one file


@given(some_tensors)
def test_a_header_is_what_safetensors_writes(tensors: Tensors) -> None:
    (file,) = lay_out(converted(tensors), UNLIMITED).files
    written = save(tensors, metadata={"format": "pt"})
    assert file.header == header_of(written)
    assert file.size == len(written)


def test_every_dtype_takes_the_place_that_safetensors_gives_it() -> None:
    tensors = {f"{n}.{dtype}": zeros(dtype, 3) for n in "ba" for dtype in DTYPES}
    (file,) = lay_out(converted(tensors), UNLIMITED).files
    assert file.header == header_of(save(tensors, metadata={"format": "pt"}))


def test_names_are_ordered_as_bytes_of_utf_8() -> None:
    tensors = {name: zeros("int8", 1) for name in ("z", "é", "Z", "权", "🦙", "a.10", "a.9")}
    (file,) = lay_out(converted(tensors), UNLIMITED).files
    assert file.header == header_of(save(tensors, metadata={"format": "pt"}))


def test_a_header_says_its_length_and_ends_at_a_multiple_of_8() -> None:
    for length in range(1, 18):
        (file,) = lay_out(converted({"n" * length: zeros("int8", 1)}), UNLIMITED).files
        assert len(file.header) % 8 == 0
        assert header_of(file.header) == file.header
        assert json.loads(file.header[8:])["__metadata__"] == {"format": "pt"}


@given(some_tensors)
def test_tensors_follow_one_another_in_a_file(tensors: Tensors) -> None:
    (file,) = lay_out(converted(tensors), UNLIMITED).files
    at = 0
    for tensor in file.tensors:
        assert tensor.data_offsets == (at, at + tensors[tensor.name].nbytes)
        assert at % tensor.dtype.itemsize == 0
        at = tensor.data_offsets[1]
    assert file.size == len(file.header) + at


def test_a_file_without_tensors_is_its_header() -> None:
    assert OutputFile("model.safetensors", b"eight by", ()).size == 8


def test_a_tensor_keeps_its_recipe_shape_and_target_dtype() -> None:
    source = converted({"w": zeros("float32", 2, 3)})[0]
    cast = ConvertedTensor("w", BY_NAME["bfloat16"], source.recipe)
    (placed,) = placed_tensors(lay_out([cast], UNLIMITED))
    assert (placed.dtype, placed.shape) == (BY_NAME["bfloat16"], (2, 3))
    assert placed.recipe is source.recipe
    assert placed.data_offsets == (0, 12)


# several files


@given(some_filled_tensors, st.integers(1, 1500))
def test_tensors_are_split_over_files_as_huggingface_hub_splits_them(
    tensors: Tensors, limit: int
) -> None:
    layout = lay_out(converted(tensors), limit)
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    found = {file.filename: {t.name for t in file.tensors} for file in layout.files}
    assert found == {name: set(held) for name, held in theirs.filename_to_tensors.items()}
    assert layout.weight_map == theirs.tensor_to_filename
    assert layout.total_size == theirs.metadata["total_size"]


@given(some_filled_tensors, st.integers(1, 1500))
def test_each_of_several_headers_is_what_safetensors_writes(tensors: Tensors, limit: int) -> None:
    for file in lay_out(converted(tensors), limit).files:
        held = {tensor.name: tensors[tensor.name] for tensor in file.tensors}
        assert file.header == header_of(save(held, metadata={"format": "pt"}))


def test_one_file_has_no_number_and_several_are_counted() -> None:
    tensors = {name: zeros("int8", 10) for name in "abc"}
    one, several = lay_out(converted(tensors), 30), lay_out(converted(tensors), 20)
    assert [file.filename for file in one.files] == ["model.safetensors"]
    assert [file.filename for file in several.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert dict(several.weight_map) == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own() -> None:
    tensors = {"a": zeros("int8", 5), "big": zeros("int8", 50), "b": zeros("int8", 5)}
    files = lay_out(converted(tensors), 20).files
    assert [{tensor.name for tensor in file.tensors} for file in files] == [{"big"}, {"a", "b"}]


def test_totals_are_counted_over_all_files() -> None:
    tensors = {"a": zeros("int64", 3, 3), "b": zeros("int8", 7), "c": zeros("bfloat16")}
    layout = lay_out(converted(tensors), 10)
    assert len(layout.files) > 1
    assert (layout.total_size, layout.total_parameters) == (9 * 8 + 7 + 2, 9 + 7 + 1)


def test_the_index_names_totals_and_the_file_of_every_tensor() -> None:
    tensors = {"z": zeros("int8", 10), "a": zeros("float32", 5)}
    index = index_json(lay_out(converted(tensors), 15)).decode()
    assert json.loads(index) == {
        "metadata": {"total_parameters": 15, "total_size": 30},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "z": "model-00002-of-00002.safetensors",
        },
    }
    assert index.index('"a"') < index.index('"z"')
    assert index.endswith("}\n")


def test_headers_and_index_are_what_transformers_saves(tmp_path: Path) -> None:
    fields = {"vocab_size": 40, "num_hidden_layers": 3, "dtype": "bfloat16"}
    model = tiny_model("llama", **fields)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    layout = lay_out(converted(model.state_dict()), 5000)
    assert {file.filename for file in layout.files} == {p.name for p in tmp_path.glob("*.saf*rs")}
    assert (tmp_path / INDEX_NAME).read_bytes() == index_json(layout)
    for file in layout.files:
        assert header_of((tmp_path / file.filename).read_bytes()) == file.header


# what cannot be laid out


def test_no_tensors_make_no_layout() -> None:
    with pytest.raises(ConversionError, match="no tensor to write"):
        lay_out([], UNLIMITED)


def test_a_header_past_the_formats_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = converted({f"name.{n}": zeros("int8", 1) for n in range(20)})
    (file,) = lay_out(tensors, UNLIMITED).files
    monkeypatch.setattr(module, "MAX_HEADER", len(file.header) - 8)
    assert lay_out(tensors, UNLIMITED).files == (file,)
    monkeypatch.setattr(module, "MAX_HEADER", len(file.header) - 9)
    with pytest.raises(ConversionError, match=r"model\.safetensors: its header") as raised:
        lay_out(tensors, UNLIMITED)
    assert "max_shard_size=…" in raised.value.hint


# size_in_bytes


@given(
    st.one_of(st.integers(1, 10**6), st.decimals("0.01", 5000, places=2)),
    st.sampled_from(["", " "]),
    st.sampled_from(["KB", "MB", "GB", "TB", "kb", "Mb"]),
)
def test_sizes_mean_what_huggingface_hub_takes_them_for(
    number: object, space: str, unit: str
) -> None:
    text = f"{number}{space}{unit}"
    assert size_in_bytes(text) == parse_size_to_int(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1), ("64MB", 64_000_000), ("7b", 7), (" 2.5 kb ", 2500), ("1e3", 1000), ("5e-1KB", 500)],
)
def test_a_size_may_lack_a_unit_or_count_bytes(text: str, expected: int) -> None:
    assert size_in_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "GB", "0", "0GB", "-5GB", "0.4B", "nan", "inf", "infGB", "1e999", "5GiB", "x", "5PB"],
)
def test_what_is_not_a_positive_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        size_in_bytes(text)
