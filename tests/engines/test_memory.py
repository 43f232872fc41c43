"""The process that merges stays below 128 MB; one that reads needs what it asks for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks import save_ranks
from tiny_models import tiny_model

# A gigabyte is written once, not once per worker.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("memory")]

LIMIT = 128_000_000
ROWS, COLUMNS, COUNT = 4100, 4096, 16  # 16 x 67 MB = 1.07 GB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensor = torch.zeros(ROWS, COLUMNS)
    tensors = {f"layers.{index}.weight": tensor for index in range(COUNT)}
    return save_ranks(tmp_path_factory.mktemp("memory") / "ckpt", tensors, 2)


READING = """
import sys
import numpy as np
import unshard
from unshard.write.report import peak_memory

with unshard.open_checkpoint(sys.argv[1]) as opened:
    one = opened.get_slice("large")
    before = peak_memory()
    found = eval("one" + sys.argv[2])
    print(peak_memory() - before, found.nbytes)
"""
LOADING = """
import sys
import torch
import unshard
from unshard.write.report import peak_memory

model = torch.nn.ModuleList(torch.nn.Linear(5000, 4000, bias=False) for _ in range(4))
small = torch.nn.Linear(2, 2, bias=False)
unshard.load_into(small, sys.argv[2])  # what torch needs when it first does something
before = peak_memory()
unshard.load_into(model, sys.argv[1])
print(peak_memory() - before, float(model[3].weight.sum()))
"""
VIRTUAL = """
import sys
import unshard
from unshard.engines.files import CACHE_BYTES
from unshard.write.report import peak_memory

small = unshard.virtual(sys.argv[2], dtype=sys.argv[3], config="none")["model.safetensors"]
assert small.read()  # what is imported at the first use
before = peak_memory()
file = unshard.virtual(sys.argv[1], dtype=sys.argv[3], config="none")["model.safetensors"]
block, total = bytearray(1 << 20), 0
while count := file.readinto(block):
    total += count
file.seek(file.size // 2)
file.readinto(block)
print(peak_memory() - before - CACHE_BYTES, total - file.size)
"""
SLACK = 16_000_000  # tiles of 4 MiB, and what numpy and the allocator need


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensor = torch.zeros(80_000, 1000)  # 320 MB
    return save_ranks(tmp_path_factory.mktemp("reading") / "ckpt", {"large": tensor}, 2)


@pytest.mark.parametrize(
    "index",
    [
        "[39_999:40_001]",
        "[::1000]",
        "[:, 7]",
        "[::-1, ::100]",
        "[::2, ::2]",
        "[70_000, -1]",
        "[...]",
        "[::-1]",
    ],
)
def test_reading_takes_the_memory_of_what_is_asked_for(large: Path, index: str) -> None:
    command = [sys.executable, "-c", READING, str(large), index]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, wanted = map(int, done.stdout.split())
    assert grown < wanted + SLACK


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_files_that_are_not_written_take_the_memory_of_their_cache(
    large: Path, tmp_path: Path, dtype: str
) -> None:
    save_ranks(tmp_path / "small", {"weight": torch.ones(2, 2)}, 1)
    command = [sys.executable, "-c", VIRTUAL, str(large), str(tmp_path / "small"), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, lost = map(int, done.stdout.split())
    assert grown < SLACK
    assert lost == 0


def test_loading_into_a_model_takes_the_memory_of_a_few_tiles(tmp_path: Path) -> None:
    tensors = {f"{n}.weight": torch.ones(4000, 5000) for n in range(4)}  # 80 MB each
    save_ranks(tmp_path / "ckpt", tensors, 2)
    save_ranks(tmp_path / "small", {"weight": torch.ones(2, 2)}, 1)
    command = [sys.executable, "-c", LOADING, str(tmp_path / "ckpt"), str(tmp_path / "small")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, total = map(float, done.stdout.split())
    assert grown < SLACK
    assert total == 20_000_000


PRETRAINED = """
import sys
import torch
import unshard
from unshard.write.report import peak_memory

def written():
    lines = open("/proc/self/io").read().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])

unshard.from_pretrained(sys.argv[2])  # what transformers needs when it first loads something
before, at_first = peak_memory(), written()
model = unshard.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[3]))
size = sum(one.nbytes for one in model.parameters())
print(peak_memory() - before, size, written() - at_first)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_transformers_takes_a_few_buffers_more_than_the_model_and_no_disk(
    tmp_path: Path, dtype: str
) -> None:
    for name, width in (("ckpt", 1024), ("small", 16)):
        sizes = {"vocab_size": width * 20, "hidden_size": width, "intermediate_size": width * 4}
        model = tiny_model("qwen2", **sizes, num_hidden_layers=4)
        model.config.save_pretrained(save_ranks(tmp_path / name, model.state_dict(), 2))
    command = [sys.executable, "-c", PRETRAINED, str(tmp_path / "ckpt"), str(tmp_path / "small")]
    done = subprocess.run([*command, dtype], capture_output=True, text=True, check=True)
    grown, size, written = map(int, done.stdout.split())
    assert size > 150_000_000
    assert grown < size + 100_000_000
    assert written < 1_000_000


def run(*arguments: str | Path) -> dict[str, int]:
    """Run a command that cannot allocate more than 256 MiB; return its report."""
    # OpenBLAS reserves memory for every core.
    shell = 'ulimit -d 262144; OPENBLAS_NUM_THREADS=1 exec "$0" -m unshard "$@" --json'
    command = ["/bin/sh", "-c", shell, sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("options", "times"),
    [("--dtype keep", 1), ("--dtype bfloat16", 1), ("--quantize fp8-block", 2)],
)
def test_a_gigabyte_is_merged_in_128_mb(
    checkpoint: Path, tmp_path: Path, options: str, times: int
) -> None:
    report = run("merge", checkpoint, tmp_path / "out", *options.split(), "--config", "none")
    assert report["bytes_read"] == times * ROWS * COLUMNS * COUNT * 4 > 1_000_000_000
    assert report["peak_memory_bytes"] < LIMIT
    if "--dtype" in options:  # what is quantised differs
        run("verify", tmp_path / "out", "--against", checkpoint)


RESHARDING = """
import sys
import unshard
from unshard.write.report import peak_memory

made = unshard.reshard(sys.argv[1], sys.argv[2], world_size=3, verify="full")
print(made.bytes_written, peak_memory())
"""


def test_a_gigabyte_is_resharded_in_128_mb(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESHARDING, str(checkpoint), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written, peak = map(int, done.stdout.split())
    assert written > ROWS * COLUMNS * COUNT * 4
    assert peak < LIMIT


def test_adapters_are_fused_into_700_mb_in_128_mb(tmp_path: Path) -> None:
    layer, a, b = torch.zeros(ROWS, COLUMNS), torch.ones(8, COLUMNS), torch.ones(ROWS, 8)
    tensors = {}
    for index in range(10):
        name = f"base_model.model.model.layers.{index}.mlp.up_proj"
        tensors[f"{name}.base_layer.weight"] = layer
        tensors |= {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
    save_ranks(tmp_path / "ckpt", tensors, 2)
    options = ("--lora-alpha", "8", "--names", "training")
    report = run("merge", tmp_path / "ckpt", tmp_path / "out", *options)
    assert report["bytes_written"] > 670_000_000
    assert report["peak_memory_bytes"] < LIMIT


def test_five_checkpoints_of_a_gigabyte_are_averaged_in_128_mb(
    checkpoint: Path, tmp_path: Path
) -> None:
    """However many there are: the files are those of one checkpoint, under five names."""
    copies = [tmp_path / f"copy_{number}" for number in range(5)]
    for copy in copies:
        copy.mkdir()
        for file in checkpoint.iterdir():
            (copy / file.name).hardlink_to(file)
    report = run("average", *copies, "-o", tmp_path / "out", "--config", "none")
    assert report["bytes_read"] == 5 * ROWS * COLUMNS * COUNT * 4
    assert report["peak_memory_bytes"] < LIMIT


def test_deltas_of_tensors_of_320_mb_are_made_and_applied_in_128_mb(
    large: Path, tmp_path: Path
) -> None:
    """Frames of what is the same everywhere are thousands of times smaller than that."""
    save_ranks(tmp_path / "after", {"large": torch.ones(80_000, 1000)}, 3)
    how = ("--workers", "8", "--config", "none")
    for number, pair in enumerate([(large, tmp_path / "after"), (tmp_path / "after", large)], 1):
        names = ("--version", f"{number}", "--base-version", f"{number - 1}")
        report = run("delta", *pair, tmp_path / f"d{number}", *names, *how)
        assert report["bytes_written"] < 100_000
        assert report["peak_memory_bytes"] < LIMIT
    report = run("apply", large, tmp_path / "d1", tmp_path / "d2", tmp_path / "out", *how)
    assert report["bytes_written"] > 320_000_000
    assert report["peak_memory_bytes"] < LIMIT
    run("verify", tmp_path / "out", "--against", large)
