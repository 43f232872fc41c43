"""False data about whole and sharded safetensors: indices, offsets, names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from damage import assert_refused, judge
from ranks import Tensors
from unshard import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
WHOLE = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.ones(3).bfloat16()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "output" / "merged"


def write_index(directory: Path, index: Any) -> Path:
    directory.mkdir()
    save_file({"a": WHOLE["a"]}, directory / ONE)
    save_file({"b": WHOLE["b"]}, directory / TWO)
    text = index if isinstance(index, str) else json.dumps(index)
    (directory / INDEX).write_text(text)
    return directory


INDICES: dict[str, Any] = {
    "a missing file": {"weight_map": {"a": ONE, "b": "model-00003-of-00003.safetensors"}},
    "a file above": {"weight_map": {"a": ONE, "b": f"../{TWO}"}},
    "a file below": {"weight_map": {"a": ONE, "b": f"x/../{TWO}"}},
    "an absolute file": {"weight_map": {"a": ONE, "b": "/etc/passwd"}},
    "a directory": {"weight_map": {"a": ONE, "b": "."}},
    "nothing": {"weight_map": {"a": ONE, "b": ""}},
    "a zero byte": {"weight_map": {"a": ONE, "b": f"{TWO}\0"}},
    "half a surrogate": {"weight_map": {"a": ONE, "b": "\udcff"}},
    "a long name": {"weight_map": {"a": ONE, "b": "x" * 300 + ".safetensors"}},
    "a number": {"weight_map": {"a": ONE, "b": 2}},
    "a list": {"weight_map": {"a": ONE, "b": [TWO]}},
    "the other file": {"weight_map": {"a": ONE, "b": ONE}},
    "swapped files": {"weight_map": {"a": TWO, "b": ONE}},
    "a tensor that is not there": {"weight_map": {"a": ONE, "b": TWO, "c": TWO}},
    "itself": {"weight_map": {"a": ONE, "b": INDEX}},
    "no map": {"metadata": {}},
    "an empty map": {"weight_map": {}},
    "a map that is a list": {"weight_map": [ONE, TWO]},
    "a list instead": [ONE, TWO],
    "no JSON": "{",
    "deep JSON": "[" * 100_000,
    "deep JSON inside": '{"weight_map": {"a": ' + "[" * 100_000,
    "an endless number": '{"weight_map": {"a": ' + "9" * 5000 + "}}",
}


@pytest.mark.parametrize("kind", INDICES)
def test_a_false_index_is_refused(tmp_path: Path, out: Path, kind: str) -> None:
    source = write_index(tmp_path / "source", INDICES[kind])
    assert_refused(source, out, CheckpointError)


def test_an_index_that_lists_less_loses_nothing(tmp_path: Path, out: Path) -> None:
    source = write_index(tmp_path / "source", {"weight_map": {"a": ONE}})
    assert judge(source, {"a": WHOLE["a"]}, out) is None


def shard(rank: int, count: int = 1) -> str:
    return f"shard-{rank:05d}-model-00001-of-{count:05d}.safetensors"


def write_shards(directory: Path, info: Any = None, rank: int = 2, **changed: torch.Tensor) -> Path:
    """Write two ranks' halves; one rank says something else of its pieces, or holds others."""
    directory.mkdir(exist_ok=True)
    for number, start in ((1, 0), (2, 3)):
        pieces = {"a": WHOLE["a"][start : start + 3].clone()}
        offsets: Any = {"a": {"saved_offsets": [start, 0]}}
        if number == 1:
            pieces["b"], offsets["b"] = WHOLE["b"], {"saved_offsets": [0]}
        if number == rank:
            pieces |= changed
            offsets = offsets if info is None else info
        text = offsets if isinstance(offsets, str) else json.dumps(offsets)
        save_file(pieces, directory / shard(number), {"DCP_SHARDING_INFO": text})
    return directory


INFOS: dict[str, Any] = {
    "overlap": {"a": {"saved_offsets": [2, 0]}},
    "gap": {"a": {"saved_offsets": [4, 0]}},
    "same place": {"a": {"saved_offsets": [0, 0]}},
    "beside": {"a": {"saved_offsets": [3, 1]}},
    "negative": {"a": {"saved_offsets": [-3, 0]}},
    "huge": {"a": {"saved_offsets": [2**63, 0]}},
    "nearly huge": {"a": {"saved_offsets": [2**63 - 4, 0]}},
    "big": {"a": {"saved_offsets": [2**62, 2**62]}},
    "short": {"a": {"saved_offsets": [3]}},
    "long": {"a": {"saved_offsets": [3, 0, 0]}},
    "fractions": {"a": {"saved_offsets": [3.0, 0.0]}},
    "truths": {"a": {"saved_offsets": [True, False]}},
    "text": {"a": {"saved_offsets": "30"}},
    "nothing": {"a": {}},
    "no tensor": {},
    "another tensor": {"c": {"saved_offsets": [3, 0]}},
    "list": [3, 0],
    "no JSON": "{",
    "deep": "[" * 100_000,
    "deep inside": '{"a": {"saved_offsets": ' + "[" * 100_000,
    "endless": '{"a": {"saved_offsets": [' + "9" * 5000 + ", 0]}}",
}


@pytest.mark.parametrize("kind", INFOS)
def test_false_offsets_are_refused(tmp_path: Path, out: Path, kind: str) -> None:
    source = write_shards(tmp_path / "source", INFOS[kind])
    assert_refused(source, out, CheckpointError, "a")


PIECES: dict[str, torch.Tensor] = {
    "another dtype": WHOLE["a"][3:].int(),
    "another width": torch.ones(3, 3),
    "other dimensions": torch.ones(3, 2, 1),
    "fewer dimensions": torch.ones(3),
}


@pytest.mark.parametrize("kind", PIECES)
def test_shards_of_two_saves_are_refused(tmp_path: Path, out: Path, kind: str) -> None:
    source = write_shards(tmp_path / "source", a=PIECES[kind])
    assert_refused(source, out, CheckpointError, "tensor a")


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda at: (at / old).rename(at / new)


def copy(old: str, new: str) -> Callable[[Path], object]:
    return lambda at: shutil.copy(at / old, at / new)


NAMES: dict[str, tuple[Callable[[Path], object], Tensors | None]] = {
    "a stale file of another count": (copy(shard(1), shard(2, 3)), WHOLE),
    "a file of one rank twice": (copy(shard(1), shard(3)), WHOLE),
    "half a file of a third rank": (copy(shard(2), shard(4)), WHOLE),
    "a file of another count alone": (rename(shard(1), shard(1, 2)), None),
    "a file that skips a rank": (rename(shard(2), shard(3)), WHOLE),
    "a file of rank zero": (rename(shard(1), shard(0)), None),
    "an index beyond the count": (rename(shard(1), shard(1, 0)), None),
}


@pytest.mark.parametrize("kind", NAMES)
def test_shards_of_other_names_are_refused_or_do_not_matter(
    tmp_path: Path, out: Path, kind: str
) -> None:
    change, truth = NAMES[kind]
    source = write_shards(tmp_path / "source")
    change(source)
    error = judge(source, truth, out)
    assert error is None or isinstance(error, CheckpointError)
