"""Compressed DCP checkpoints: decompressed next to the output, in bounded memory, or refused."""

import builtins
import json
import os
import pickle
import struct
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import assert_same, merged, snapshot, some_tensors
from unshard import CheckpointError, CorruptError, UsageError
from unshard.api import MergeOptions
from unshard.api.making import PlannedMerge
from unshard.api.merging import merge_checkpoint
from unshard.containers.zstd import decompress
from unshard.progress import ignore
from unshard.read.dcp.items import inflate, inflated_bytes
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import open_latest

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

NAME = "model.norm.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of torch's own, every item compressed in a file of its own."""
    return save_compressed(tmp_path / "run" / "step-3", some_tensors())


def save_compressed(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    writer = FileSystemWriter(
        directory, single_file_per_rank=False, sync_files=False, _extensions=[ZStandard()]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save({"model": tensors, "step": 3}, storage_writer=writer, no_dist=True)
    return directory


def item(value: object) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def replace_item(checkpoint: Path, name: str, data: bytes) -> None:
    """Put other bytes in the place of a tensor's item, and let the metadata say so."""
    metadata: Metadata = FileSystemReader(checkpoint).read_metadata()
    (index,) = (index for index in metadata.storage_data if index.fqn == f"model.{name}")
    info = metadata.storage_data[index]
    (checkpoint / info.relative_path).write_bytes(data)
    info.offset, info.length = 0, len(data)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def compressed(value: object) -> bytes:
    return zstandard.ZstdCompressor().compress(item(value))


def streamed(data: bytes) -> bytes:
    """Compress into a frame that does not say how much it holds."""
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return stream.compress(data) + stream.flush()


def test_the_items_are_really_compressed(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.distcp"):
        assert path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"


def test_a_merge_gives_the_tensors_and_leaves_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = snapshot(checkpoint)
    report = unshard.merge(checkpoint, tmp_path / "out" / "merged", verify="full", config="none")
    assert_same(merged(tmp_path / "out" / "merged"), some_tensors())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"merged"}
    assert {path.name for path in (tmp_path / "out" / "merged").iterdir()} == {
        "model.safetensors",
        "unshard.json",
    }
    assert [one.fqn for one in report.skipped] == ["step"]
    assert snapshot(checkpoint) == before


def test_scheduler_and_random_state_come_along(checkpoint: Path, tmp_path: Path) -> None:
    torch.save({"last_epoch": 3}, checkpoint / "scheduler.bin")
    report = unshard.merge(checkpoint, tmp_path / "out", config="none")
    assert report.companions == ("extra_state_merged.pt", "lr_scheduler_state.json")
    found = torch.load(tmp_path / "out" / "extra_state_merged.pt")
    assert found == {"lr_scheduler": {"last_epoch": 3}}


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_are_compared_once_they_are_decompressed(
    tmp_path: Path, *, equal: bool
) -> None:
    embedding = torch.rand(60, 4)
    head = embedding.clone() if equal else embedding + 1
    model = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    step = save_compressed(tmp_path / "step-3", model)
    (step / "config.json").write_text('{"tie_word_embeddings": true}')
    report = unshard.merge(step, tmp_path / "out")
    out = tmp_path / "out"
    if equal:
        del model["lm_head.weight"]
    assert_same(merged(out), model)
    assert report.tensors == len(model)
    assert report.files == {"model.safetensors": (out / "model.safetensors").stat().st_size}
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is equal
    assert any("lm_head.weight differs" in note for note in report.notes) is not equal


def test_names_that_differ_by_a_wrapper_only_cannot_be_compared_compressed(tmp_path: Path) -> None:
    same = torch.rand(60, 4)
    model = {"model.a.weight": same, "model._orig_mod.a.weight": same.clone()}
    step = save_compressed(tmp_path / "step-3", model)
    with pytest.raises(CorruptError, match=r"tensor model\.a\.weight: .*both are compressed"):
        unshard.merge(step, tmp_path / "out")


def test_files_that_a_caller_adds_before_the_merge_are_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    def add(prepared: PlannedMerge) -> PlannedMerge:
        return replace(prepared, files={"more.json": b"{}"})

    report = merge_checkpoint(
        checkpoint, tmp_path / "out", MergeOptions(config="none"), ignore, before=add
    )
    assert report.companions == ("more.json",)
    assert (tmp_path / "out" / "more.json").read_bytes() == b"{}"


def test_other_cuts_and_dtypes_of_the_output_work_too(checkpoint: Path, tmp_path: Path) -> None:
    unshard.merge(
        checkpoint, tmp_path / "out", dtype="bfloat16", max_shard_size=200, workers=2, config="none"
    )
    truth = {name: value.bfloat16() for name, value in some_tensors().items()}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert_same(merged(tmp_path / "out"), truth)


def test_a_dry_run_plans_without_decompressing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_zstd(monkeypatch)
    before = snapshot(tmp_path)
    report = unshard.merge(checkpoint, tmp_path / "out", dry_run=True, config="none")
    assert report.tensors == 3
    assert report.bytes_written >= sum(value.nbytes for value in some_tensors().values())
    assert unshard.inspect(checkpoint).parameters == 162
    assert snapshot(tmp_path) == before


def without_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".", maxsplit=1)[0] in ("zstandard", "compression"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_without_a_library_the_extra_is_named(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_zstd(monkeypatch)
    with pytest.raises(UsageError, match=r"\[zstd\]"):
        unshard.merge(checkpoint, tmp_path / "out" / "merged", config="none")
    assert not list((tmp_path).glob("out/*"))


def test_the_disk_must_have_room_for_what_is_decompressed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the output alone is not enough."""
    monkeypatch.setattr("unshard.read.dcp.items._SLACK", 1 << 50)
    with pytest.raises(unshard.OutputError, match="space"):
        unshard.merge(checkpoint, tmp_path / "out", config="none")


def test_the_place_of_temporary_files_must_have_room_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unshard.read.dcp.items._SLACK", 1 << 50)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(unshard.OutputError, match=r"space[\s\S]*TMPDIR"):
        unshard.load_state_dict(checkpoint)
    assert not list(tmp_path.glob("_unshard-*"))


def test_what_is_decompressed_is_about_what_was_announced(checkpoint: Path, tmp_path: Path) -> None:
    catalog = open_latest(checkpoint, Choice(), ReadOptions()).catalog
    inflate(catalog, tmp_path / "scratch")
    size = (tmp_path / "scratch").stat().st_size
    assert sum(value.nbytes for value in some_tensors().values()) < size
    assert size <= inflated_bytes(catalog)


def test_an_inflated_catalog_has_bytes_where_it_says(checkpoint: Path, tmp_path: Path) -> None:
    catalog = open_latest(checkpoint, Choice(), ReadOptions()).catalog
    found = inflate(catalog, tmp_path / "scratch")
    data = (tmp_path / "scratch").read_bytes()
    for name, tensor in some_tensors().items():
        (chunk,) = found.tensors[name].chunks
        source = chunk.source
        assert source.path == tmp_path / "scratch"
        values = struct.unpack_from(f"{tensor.numel()}f", data, source.offset)
        assert list(values) == tensor.reshape(-1).tolist()
    assert inflated_bytes(found) == 0
    assert inflate(found, tmp_path / "unused") is found
    assert not (tmp_path / "unused").exists()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "no frame": (lambda: item(torch.randn(6)), "cannot be decompressed"),
    "nothing": (lambda: b"", r"norm\.weight|step-3"),
    "a truncated frame": (lambda: compressed(torch.randn(6))[:-9], r"norm\.weight|step-3"),
    "a damaged frame": (
        lambda: compressed(torch.randn(6))[:20] + bytes(300),
        r"norm\.weight|step-3",
    ),
    "a frame of zeros": (
        lambda: zstandard.ZstdCompressor().compress(bytes(3000)),
        r"norm\.weight|step-3",
    ),
    "an empty frame": (lambda: zstandard.ZstdCompressor().compress(b""), r"norm\.weight|step-3"),
    "a longer tensor": (lambda: compressed(torch.randn(7)), r"norm\.weight[\s\S]*\[7\]"),
    "another dtype": (lambda: compressed(torch.randn(6).bfloat16()), r"bfloat16 \[6\]"),
    "no tensor": (lambda: compressed({"a": 1}), r"norm\.weight|step-3"),
    "a bomb": (lambda: compressed(torch.zeros(1 << 20)), "is larger than its tensor"),
    "a small bomb": (lambda: compressed(torch.zeros(1 << 15)), "is larger than its tensor"),
    "a bomb that states no size": (lambda: streamed(bytes(1 << 24)), "is larger than its tensor"),
    "two frames": (lambda: compressed(torch.randn(6)) * 2, "has bytes after its end"),
    "a frame and a bomb": (
        lambda: compressed(torch.randn(6)) + streamed(bytes(1 << 24)),
        "has bytes after its end",
    ),
    "a frame and junk": (lambda: compressed(torch.randn(6)) + b"junk", "has bytes after its end"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_item_that_is_not_the_tensor_is_refused(
    checkpoint: Path, tmp_path: Path, what: str
) -> None:
    make, words = BAD[what]
    replace_item(checkpoint, NAME, make())
    with pytest.raises(CheckpointError, match=words):
        unshard.merge(checkpoint, tmp_path / "out" / "merged", config="none")
    assert not list(tmp_path.glob("out/*"))


def test_an_item_is_bounded_by_its_own_box(checkpoint: Path, tmp_path: Path) -> None:
    """Not by the tensor, of which other ranks hold more: each item could fill the disk with it."""
    replace_item(checkpoint, NAME, compressed(torch.zeros(1 << 19)))
    catalog = open_latest(checkpoint, Choice(), ReadOptions()).catalog
    of_many = replace(catalog.tensors[NAME], shape=(1 << 20,))
    catalog = replace(catalog, tensors={NAME: of_many})
    with pytest.raises(
        CorruptError, match=rf"tensor {NAME}: \S+distcp: the item at byte 0 is larger"
    ):
        inflate(catalog, tmp_path / "scratch")
    assert (tmp_path / "scratch").stat().st_size <= inflated_bytes(catalog) < 100_000


def test_an_uncompressed_item_among_compressed_ones_is_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    data = item(some_tensors()[NAME])
    replace_item(checkpoint, NAME, data)
    metadata = FileSystemReader(checkpoint).read_metadata()
    index = next(one for one in metadata.storage_data if one.fqn == f"model.{NAME}")
    assert isinstance(index, MetadataIndex)
    metadata.storage_data[index].transform_descriptors = None
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    unshard.merge(checkpoint, tmp_path / "out", verify="full", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


class TestDecompress:
    @staticmethod
    def run(tmp_path: Path, data: bytes, limit: int = 1 << 20, skip: int = 0) -> tuple[bytes, int]:
        path = tmp_path / "source"
        path.write_bytes(bytes(skip) + data + b"more")
        out = BytesIO()
        fd = os.open(path, os.O_RDONLY)
        try:
            size = decompress(path.name, fd, (skip, len(data)), out, limit)
        finally:
            os.close(fd)
        return out.getvalue(), size

    @pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 21) + 3])
    def test_a_frame_gives_its_bytes(self, tmp_path: Path, size: int) -> None:
        plain = bytes(range(256)) * (size // 256 + 1)
        plain = plain[:size]
        data = zstandard.ZstdCompressor().compress(plain)
        assert self.run(tmp_path, data, limit=size, skip=77) == (plain, size)

    def test_a_frame_that_does_not_state_its_size_gives_its_bytes(self, tmp_path: Path) -> None:
        data = streamed(b"abc" * 5000)
        assert self.run(tmp_path, data)[0] == b"abc" * 5000

    def test_no_byte_more_than_the_limit_is_written(self, tmp_path: Path) -> None:
        data = zstandard.ZstdCompressor().compress(bytes(5000))
        with pytest.raises(CorruptError, match="at most 4999 bytes"):
            self.run(tmp_path, data, limit=4999)

    @pytest.mark.parametrize("cut", [1, 4, 10, 30])
    def test_a_truncated_frame_is_an_error(self, tmp_path: Path, cut: int) -> None:
        plain = os.urandom(3000)
        data = zstandard.ZstdCompressor().compress(plain)
        with pytest.raises(CorruptError, match="source: the item at byte 0"):
            self.run(tmp_path, data[:-cut])

    def test_a_damaged_checksum_is_an_error(self, tmp_path: Path) -> None:
        data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(os.urandom(3000)))
        data[-1] ^= 1
        with pytest.raises(CorruptError, match="cannot be decompressed"):
            self.run(tmp_path, bytes(data))
