"""Light verification finds an output that is not what was laid out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import take
from unshard.errors import OutputError
from unshard.plan.layout import Layout, index_json, lay_out
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME
from unshard.write.verification.output import verify_light

TENSORS = {"a": torch.rand(3, 2), "b": torch.rand(4)}


def layout(max_shard_size: int = 1000) -> Layout:
    converted = []
    for name, tensor in TENSORS.items():
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        rows = ChunkRows(tensor.ndim).table(())
        entry = TensorEntry(name, dtype, tuple(tensor.shape), rows)
        converted.append(ConvertedTensor(name, dtype, take(entry)))
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


def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:10] = b"!!"
    path.write_bytes(data)
    with pytest.raises(OutputError, match="not a valid safetensors file"):
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


LIMITED = """
import resource, sys
from unshard.__main__ import main
import unshard.api, unshard.cli.main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + 400_000_000  # below the output's size; threads reserve stacks and arenas
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_an_output_larger_than_the_address_space_is_verified(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    size = 1_000_000_000
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (checkpoint / "model.safetensors").open("wb") as file:  # sparse: takes no space
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    command = ["merge", str(checkpoint), str(tmp_path / "out"), "--workers", "1"]
    command += ["--config", "none"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > size
