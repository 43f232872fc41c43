"""Light verification finds an output that is not what was laid out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unshard.convert.outputs import Converted
from unshard.convert.recipes import take
from unshard.errors import OutputError
from unshard.plan.layout import Layout, index_json, lay_out
from unshard.read.chunk_rows import ChunkRows
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME
from unshard.write.verify import verify_light

TENSORS = {"a": torch.rand(3, 2), "b": torch.rand(4)}


def layout(max_shard_size: int = 1000) -> Layout:
    converted = []
    for name, tensor in TENSORS.items():
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        rows = ChunkRows(tensor.ndim).table(())
        entry = TensorEntry(name, dtype, tuple(tensor.shape), rows)
        converted.append(Converted(name, dtype, take(entry)))
    return lay_out(converted, max_shard_size)


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_right_output_passes(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    verify_light(tmp_path, layout())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (TENSORS | {"c": torch.rand(1)}, "bytes"),
        ({"a": TENSORS["a"], "c": TENSORS["b"]}, "tensor names"),
        (TENSORS | {"a": torch.rand(2, 3)}, r"tensor a[\s\S]*\(3, 2\)[\s\S]*\(2, 3\)"),
        (TENSORS | {"b": torch.zeros(4, dtype=torch.int32)}, r"tensor b[\s\S]*F32[\s\S]*I32"),
    ],
    ids=["size", "names", "shape", "dtype"],
)
def test_a_wrong_output_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    write(tmp_path, tensors)
    with pytest.raises(OutputError, match=words):
        verify_light(tmp_path, layout())


def test_a_file_that_safetensors_cannot_open_is_named(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:10] = b"!!"
    path.write_bytes(data)
    with pytest.raises(OutputError, match="safetensors cannot open it"):
        verify_light(tmp_path, layout())


def test_a_wrong_index_is_named(tmp_path: Path) -> None:
    several = layout(max_shard_size=20)
    for file in several.files:
        tensors = {tensor.name: TENSORS[tensor.name] for tensor in file.tensors}
        save_file(tensors, tmp_path / file.filename, metadata={"format": "pt"})
    index = json.loads(index_json(several))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    verify_light(tmp_path, several)
    index["weight_map"]["a"] = "elsewhere"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OutputError, match="weight map"):
        verify_light(tmp_path, several)
