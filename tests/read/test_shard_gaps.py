"""Sharded safetensors of several files per rank: no file can be lost without a word.

Files of real ranks are in `tests/oracle/test_hub_writers.py`; these have the same form.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unshard
from properties import examples
from ranks import assert_same, merged
from safetensors_shards import Piece, cut, read, shard_path, whole, write_shard
from unshard import IncompleteError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Held = Mapping[str, Piece]


def write(directory: Path, ranks: Sequence[Mapping[int, Held]], count: int) -> None:
    """Write what each rank holds, by the index of the file."""
    for rank, files in enumerate(ranks):
        for index, pieces in files.items():
            write_shard(shard_path(directory, rank, index, count), pieces)


def sharded(tensors: Mapping[str, tuple[int, torch.Tensor]], world: int) -> list[dict[int, Held]]:
    """Cut every tensor along its rows, as FSDP does; torch saves an empty piece only once."""
    ranks: list[dict[int, dict[str, Piece]]] = [{} for _ in range(world)]
    for name, (index, tensor) in tensors.items():
        seen = set()
        for rank, (start, piece) in enumerate(cut(tensor, world)):
            if tuple(start) not in seen:
                ranks[rank].setdefault(index, {})[name] = (start, piece)
            seen.add(tuple(start))
    return [dict(files) for files in ranks]


def a_model(layers: int = 4) -> dict[str, tuple[int, torch.Tensor]]:
    """A model in two files: embedding and half of the layers, the others and the head."""
    torch.manual_seed(0)
    tensors = {"embed.weight": (1, torch.randn(22, 3))}
    for layer in range(layers):
        index = 1 + layer * 2 // layers
        tensors[f"layers.{layer}.up.weight"] = (index, torch.randn(12, 3))
        tensors[f"layers.{layer}.norm.weight"] = (index, torch.randn(9))
    return tensors | {"head.weight": (2, torch.randn(22, 3))}


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_every_file_that_is_removed_is_missed(tmp_path: Path, world: int) -> None:
    write(tmp_path, sharded(a_model(), world), 2)
    assert len(read(tmp_path).tensors) == 10
    for rank in range(world):
        for index in (1, 2):
            path = shard_path(tmp_path, rank, index, 2)
            data = path.read_bytes()
            path.unlink()
            with pytest.raises(
                IncompleteError, match=rf"{path.name}[\s\S]*rank {rank}|rank {rank}"
            ):
                unshard.merge(tmp_path, tmp_path / "out")
            path.write_bytes(data)


def test_the_message_names_file_rank_and_tensors(tmp_path: Path) -> None:
    write(tmp_path, sharded(a_model(), 3), 2)
    shard_path(tmp_path, 2, 2, 2).unlink()
    with pytest.raises(IncompleteError) as caught:
        read(tmp_path)
    assert shard_path(tmp_path, 2, 2, 2).name in caught.value.subject
    assert "rank 2 has other files" in caught.value.subject
    assert (
        "layers.2.up.weight [8, 3] has 2 pieces, layers.0.up.weight [12, 3]" in caught.value.found
    )
    assert "and 1 more tensors" in caught.value.found


def test_a_single_loss_of_several_replicas_is_missed(tmp_path: Path) -> None:
    """HSDP: either replica has saved a piece, and ranks rightly lack files."""
    ranks: list[dict[int, dict[str, Piece]]] = [{}, {}, {}, {}]
    for number, (name, (index, tensor)) in enumerate(a_model(8).items()):
        for place, piece in enumerate(cut(tensor, 2)):
            rank = place + 2 * ((number // 2) % 2)
            ranks[rank].setdefault(index, {})[name] = piece
    del ranks[2][1]["layers.2.norm.weight"]
    ranks[0][1]["layers.2.norm.weight"] = cut(a_model(8)["layers.2.norm.weight"][1], 2)[0]
    write(tmp_path, ranks, 2)
    assert len(read(tmp_path).tensors) == 18
    shard_path(tmp_path, 3, 2, 2).unlink()
    with pytest.raises(IncompleteError, match="shard-00004-model-00002-of-00002"):
        read(tmp_path)


# --- what is complete though ranks lack files ----------------------------------------------------


def test_the_stages_of_a_pipeline_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = (
        sharded({name: one for name, one in a_model().items() if one[0] == index}, 2)
        for index in (1, 2)
    )
    write(tmp_path, [*first, *second], 2)
    truth = {name: tensor for name, (_, tensor) in a_model().items()}
    unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), truth)


def test_experts_are_on_the_ranks_that_have_them(tmp_path: Path) -> None:
    ranks = [dict(files) for files in sharded({"embed.weight": (1, torch.randn(8, 3))}, 4)]
    for expert in range(4):
        ranks[expert][2 + expert // 2] = {f"experts.{expert}.up": whole(torch.randn(6, 3))}
    write(tmp_path, ranks, 3)
    assert all(one.shape == (6, 3) for one in list(read(tmp_path).tensors.values())[1:])


def test_a_copy_that_one_rank_saves_is_whole(tmp_path: Path) -> None:
    ranks = [dict(files) for files in sharded({"embed.weight": (1, torch.randn(12, 3))}, 4)]
    ranks[0][2] = {"bias": whole(torch.randn(6))}
    write(tmp_path, ranks, 2)
    assert read(tmp_path).tensors["bias"].shape == (6,)


def test_a_tensor_that_ends_with_a_smaller_piece_is_whole(tmp_path: Path) -> None:
    tensors = {"embed.weight": (1, torch.randn(12, 3)), "few": (2, torch.randn(5))}
    ranks = sharded(tensors, 4)  # few: 2, 2, 1 and no rows
    del ranks[3][2]
    write(tmp_path, ranks, 2)
    assert read(tmp_path).tensors["few"].shape == (5,)


WORDS = ["embed", "up", "down", "gate", "query", "key", "value", "norm"]


@settings(max_examples=examples(100))  # a merge each
@given(st.data())
def test_a_lost_file_never_ends_in_other_tensors(data: st.DataObject) -> None:
    """Whatever the sizes: what is merged without a file is what was saved, or nothing is."""
    world, count = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 3))
    sizes = st.integers(1, 3 * world)
    tensors = {
        name: (1 + number % count, torch.randn(data.draw(sizes), 2))
        for number, name in enumerate(WORDS)
    }
    for index in range(count):  # in every file, one tensor at least that all ranks have a piece of
        tensors[f"whole {'abc'[index]}"] = (1 + index, torch.randn(world * 2, 2))
    ranks = sharded(tensors, world)
    lost = data.draw(st.integers(0, world - 1)), data.draw(st.integers(1, count))
    del ranks[lost[0]][lost[1]]
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), ranks, count)
        with pytest.raises(IncompleteError, match=shard_path(Path(), *lost, count).name):
            unshard.merge(scratch, Path(scratch, "out"))
