"""Inputs of every parser to begin with: good ones, and some that are nearly good."""

import json
import pickle
from pathlib import Path

import torch
import zstandard

from hostile.pickles import CALLS, FORMS
from hostile.texts import CORRUPT
from ranks import save_ranks, some_tensors

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
        "zstd": [zstandard.compress(bytes(5000)), zstandard.compress(whole[:500])],
        "record": [index, b'{"unshard": "1", "output": {"files": {"a": 1}}}'],
        "rank file": [rank.read_bytes()],
        "model": [whole, old],
        "model states": [states.read_bytes()],
    }
    return known[target]
