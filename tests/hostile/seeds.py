"""Inputs of every parser to begin with: good ones, and some that are nearly good."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import zstandard

from hostile.pickles import CALLS, FORMS
from hostile.texts import CORRUPT
from ranks import save_ranks, some_tensors
from unshard import merge
from unshard.progress import ignore

__all__ = ["seeds_of"]


def seeds_of(target: str, place: Path) -> list[bytes]:
    """Return good inputs of a parser, and some that are nearly good."""
    tensors = some_tensors()
    torch.save(tensors, place / "zip")
    torch.save(tensors, place / "legacy", _use_new_zipfile_serialization=False)
    (rank,) = save_ranks(place / "ranks", tensors, 1).iterdir()
    states = place / "mp_rank_00_model_states.pt"
    torch.save({"module": tensors, "buffer_names": [], "dp_world_size": 2}, states)
    whole, old = (place / "zip").read_bytes(), (place / "legacy").read_bytes()
    pickles = [pickle.dumps({"a": [1, 2.5, ("x", b"y")]}, protocol) for protocol in range(6)]
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "b"}}).encode()
    calls = [*CALLS.values(), *(form("a.b", "c") for form in FORMS.values())]
    known: dict[str, list[bytes]] = {
        "pickle": pickles + calls,
        "template": pickles,
        "zip": [whole, rank.read_bytes()],
        "legacy": [old],
        "safetensors": [data for data in CORRUPT.values() if len(data) < 4096],
        "json": [index, b"[]", b'{"a": [1e999, NaN, "\\ud800"]}'],
        "dcp": pickles,
        "zstd": list(_frames(whole)),
        "record": list(_records(rank.parent, place / "out")),
        "rank file": [rank.read_bytes()],
        "model": [whole, old],
        "model states": [states.read_bytes()],
    }
    return known[target]


def _frames(data: bytes) -> Iterator[bytes]:
    """Yield zstd frames with every kind of block and header, and what may be around them.

    None has a checksum at its end but the last: a changed byte goes on to the next check.
    """
    random = Random(0).randbytes(300)  # cannot be compressed: raw blocks
    words = b"layers.weight layers.bias " * 40  # tables of literals and sequences
    for text in (b"", bytes(5000), random, words, data[:3000], random + bytes(9990 - 300)):
        for level in (1, 19):
            yield zstandard.ZstdCompressor(level).compress(text)
        yield zstandard.ZstdCompressor(write_content_size=False).compress(text)
    streamed = zstandard.ZstdCompressor().compressobj()  # several blocks, of unknown size
    parts = [streamed.compress(words), streamed.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    yield b"".join([*parts, streamed.compress(random), streamed.flush()])
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(words)
    yield from (frame, frame + frame, b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + frame, frame[:-4])


def _records(checkpoint: Path, output: Path) -> Iterator[bytes]:
    """Yield the record of a real merge, and the smallest ones that have each part."""
    merge(checkpoint, output, listener=ignore, config="none")
    yield (output / "unshard.json").read_bytes()
    parts: list[dict[str, object]] = [
        {"files": {"model.safetensors": 1}},
        {"files": {"a": 1, "b": "2"}, "companions": {"config.json": 2, "a/b": 3}},
        {"files": {}, "companions": None, "training_state": ["optimizer.json", 1]},
        {"files": {"../a": -1, "/b": 1e99}, "training_state": {}},
    ]
    for output_fields in parts:
        yield json.dumps({"unshard": "0.1.0", "output": output_fields}).encode()
