"""Rank files that are compared with one that was read give what reading them in full gives."""

import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from properties import examples
from ranks import as_rank, rank_path, shard
from unshard import UnshardError
from unshard.containers.pickles.template import make_template
from unshard.containers.torch_files.reader import open_torch_file, read_torch_file
from unshard.containers.torch_files.reader import unpickled as unpickled_
from unshard.containers.torch_files.zip import read_torch_zip
from unshard.read.torch_save import template_reader
from unshard.read.torch_save.state_dict import rank_table
from unshard.read.torch_save.table import RankTable
from unshard.read.torch_save.template_reader import RankFileReader

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2))


def save(directory: Path, rank: int, world: tuple[int, ...], state: dict[str, object]) -> Path:
    """Save a rank's part of tensors, with specs that a trainer has hashed."""
    count = int(np.prod(world))
    numbers = random.Random(rank)
    with as_rank(rank, count):
        names = ("dp", "tp")[: len(world)]
        mesh = init_device_mesh("cpu", world, mesh_dim_names=names)
        parts: dict[str, object] = {}
        for name, value in state.items():
            if not isinstance(value, tuple):
                parts[name] = value
                continue
            shape, placements = value
            part = shard(torch.zeros(shape), mesh, placements[-len(world) :])
            assert isinstance(part, DTensor)
            object.__setattr__(part._spec, "_hash", numbers.getrandbits(64) - (1 << 63))
            parts[name] = part
        torch.save(parts, rank_path(directory, count, rank))
    return rank_path(directory, count, rank)


def fitting(shape: tuple[int, ...], placements: list[Placement]) -> list[Placement]:
    """Return the placements, with Replicate where a dimension does not exist."""
    return [
        one if isinstance(one, Replicate) or getattr(one, "dim", 9) < len(shape) else Replicate()
        for one in placements
    ]


def result(read: object) -> object:
    """Return a table as values that can be compared."""
    assert isinstance(read, RankTable)
    cuts = [read.cut_table[number] for number in read.cuts.tolist()]
    problems = list(map(str, read.problems))
    starts = read.starts.tolist()
    return read.names, cuts, starts, read.skipped, problems, read.world_size, read.rank, read.file


def in_full(path: Path, rank: int) -> object:
    try:
        file = read_torch_file(path)
        return result(rank_table(file, rank=rank, file=rank, allowed=frozenset()))
    except UnshardError as error:
        return str(error)


def compared(reader: RankFileReader, path: Path, rank: int) -> object:
    try:
        return result(reader.read(open_torch_file(path), rank=rank, file=rank))
    except UnshardError as error:
        return str(error)


@settings(max_examples=examples(25))  # each saves four files
@given(
    tensors=st.lists(
        st.tuples(SHAPES, st.lists(st.sampled_from(PLACEMENTS), min_size=2, max_size=2)),
        min_size=1,
        max_size=4,
    ),
    world=st.sampled_from([(4,), (2, 2)]),
    plain=st.lists(SHAPES, max_size=2),
)
def test_every_rank_is_read_as_in_full(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[tuple[int, ...], list[Placement]]],
    world: tuple[int, ...],
    plain: list[tuple[int, ...]],
) -> None:
    directory = tmp_path_factory.mktemp("ranks")
    state: dict[str, object] = {
        f"t{number}": (shape, fitting(shape, placements))
        for number, (shape, placements) in enumerate(tensors)
    }
    state |= {f"p{number}": torch.zeros(shape) for number, shape in enumerate(plain)}
    state["epoch"] = 3
    reader = RankFileReader(frozenset())
    for rank in range(4):
        path = save(directory, rank, world, state)
        assert compared(reader, path, rank) == in_full(path, rank)


def four(directory: Path) -> list[Path]:
    """Files of four ranks that are alike."""
    even: dict[str, object] = {
        "a": ((8, 6), [Shard(0)]),
        "uneven": ((7, 300), [Shard(0)]),
        "b": ((600, 4), [Shard(1)]),
        "c": ((5,), [Replicate()]),
        "mine": torch.zeros(3),
    }
    return [save(directory, rank, (4,), even) for rank in range(4)]


def test_only_the_first_file_is_read_in_full(tmp_path: Path) -> None:
    reader = RankFileReader(frozenset())
    with patch.object(template_reader, "unpickled", wraps=unpickled_) as unpickled:
        for rank, path in enumerate(four(tmp_path)):
            assert compared(reader, path, rank) == in_full(path, rank)
    assert unpickled.call_count == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return four(tmp_path_factory.mktemp("four"))


@given(data=st.data())
def test_a_changed_file_is_read_as_in_full(files: list[Path], data: st.DataObject) -> None:
    reader = RankFileReader(frozenset())
    for rank in range(2):
        reader.read(open_torch_file(files[rank]), rank=rank, file=rank)
    whole = bytearray(files[2].read_bytes())
    pickle = read_torch_zip(files[2]).pickle
    begin = whole.find(pickle)
    entry = whole.rfind(b"PK\x01\x02", 0, whole.rfind(b"/data.pkl"))
    whole[entry + 16 : entry + 20] = bytes(4)  # without a checksum
    for _ in range(data.draw(st.integers(1, 2))):
        at = begin + data.draw(st.integers(0, len(pickle) - 1))
        whole[at] = data.draw(st.integers(0, 255) | st.just(whole[at] ^ 1))
    changed = files[0].with_name(files[2].name + ".changed")
    changed.write_bytes(whole)
    assert compared(reader, changed, 2) == in_full(changed, 2)


def test_a_file_of_other_tensors_is_read_in_full(tmp_path: Path) -> None:
    paths = four(tmp_path)
    paths[2] = save(tmp_path, 2, (4,), {"other": ((8, 6), [Shard(0)])})
    reader = RankFileReader(frozenset())
    for rank, path in enumerate(paths):
        assert compared(reader, path, rank) == in_full(path, rank)


def test_files_that_are_not_alike_are_all_read_in_full(tmp_path: Path) -> None:
    reader = RankFileReader(frozenset())
    with patch.object(template_reader, "make_template", wraps=make_template) as templates:
        for rank in range(7):
            tensors: dict[str, object] = {f"t{at}": ((7,), [Shard(0)]) for at in range(rank, 8)}
            path = save(tmp_path, rank, (7,), tensors)
            assert compared(reader, path, rank) == in_full(path, rank)
    assert templates.call_count == 4  # then it gives up


def test_a_storage_that_is_too_short_is_a_problem_as_in_full(tmp_path: Path) -> None:
    paths = four(tmp_path)
    reader = RankFileReader(frozenset())
    for rank in range(2):
        reader.read(open_torch_file(paths[rank]), rank=rank, file=rank)
    archive = read_torch_zip(paths[2])
    size = archive.storages["0"].size
    whole = paths[2].read_bytes()
    for at in [at for at in range(len(whole)) if whole.startswith(b"PK\x01\x02", at)]:
        name = whole[at + 46 : at + 46 + whole[at + 28]]
        if name.endswith(b"/data/0"):
            short = (size - 4).to_bytes(4, "little") * 2
            whole = whole[: at + 20] + short + whole[at + 28 :]
    paths[2].write_bytes(whole)
    found = compared(reader, paths[2], 2)
    assert found == in_full(paths[2], 2)
    assert "its storage 0 has" in str(found)
