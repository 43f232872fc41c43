"""Random bytes never end a parser in anything but its own errors."""

import json
import pickle
from pathlib import Path
from random import Random

import pytest
import torch
import zstandard

from hostile.fuzzing import TARGETS, mutated, try_input
from hostile.pickles import CALLS, FORMS
from hostile.texts import CORRUPT
from ranks import save_ranks, some_tensors

INPUTS = 300  # of every parser; `python -m hostile.fuzzing` tries as many as it is told


def seeds_of(target: str, place: Path) -> list[bytes]:
    """Return good inputs of a parser, and some that are nearly good."""
    tensors = some_tensors()
    torch.save(tensors, place / "zip")
    torch.save(tensors, place / "legacy", _use_new_zipfile_serialization=False)
    (rank,) = save_ranks(place / "ranks", tensors, 1).iterdir()
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
        "zstd": [zstandard.compress(bytes(5000)), zstandard.compress(whole[:500])],
        "record": [index, b'{"unshard": "1", "output": {"files": {"a": 1}}}'],
        "rank file": [rank.read_bytes()],
        "model": [whole, old],
    }
    return known[target]


@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_are_read_or_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "seeds").mkdir()
    seeds, random = seeds_of(target, tmp_path / "seeds"), Random(target)
    for _ in range(INPUTS):
        data = mutated(seeds, random)
        try:
            try_input(target, data, tmp_path)
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise
