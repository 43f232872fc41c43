"""Sharded safetensors, as torch's HuggingFaceStorageWriter saves them: read, merged and refused.

Files of several real ranks are in `tests/oracle`; here they are made in one process, in the same
form (a test compares it with the real writer's).
"""

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import Tensors, assert_same, merged
from safetensors_shards import Piece, cut, read, shard_path, whole, write_shard
from unshard import CorruptError, IncompleteError, NotMergeableError, UnshardError
from unshard.read.finding.discover import discover
from unshard.read.format import Choice
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "layers.2.rows": torch.randn(13, 5),
        "layers.10.rows": torch.randn(9, 3).bfloat16(),
        "columns": torch.randn(4, 11),
        "few": torch.tensor([0.25, -1.5]),
        "float8": torch.randn(10, 2).to(torch.float8_e4m3fn),
        "int64": torch.arange(2**40, 2**40 + 9),
        "bool": torch.tensor([True, False, True, True, False]),
        "scalar": torch.tensor(0.75),
        "counter": torch.tensor(2**40 + 1),
        "empty": torch.empty(0, 4),
        "lone": torch.randn(3, 3),
    }


def write_odd(directory: Path, world: int = 4) -> dict[str, torch.Tensor]:
    """Write shards: cut along rows and columns, replicated, held by one rank only."""
    tensors = odd_tensors()
    for rank in range(world):
        pieces = {
            name: cut(tensor, world, dim=int(name == "columns"))[rank]
            for name, tensor in tensors.items()
            if tensor.ndim and name != "lone"
        }
        pieces["scalar"] = whole(tensors["scalar"])
        if rank == 2:
            pieces |= {name: whole(tensors[name]) for name in ("counter", "lone")}
        write_shard(shard_path(directory, rank), pieces)
    return tensors


def write_rows(
    directory: Path, rows: int, world: int, name: str = "model.norm.weight", **more: Piece
) -> torch.Tensor:
    """Write one tensor, cut along its rows, and whatever else every rank holds."""
    tensor = torch.randn(rows, 3)
    for rank, piece in enumerate(cut(tensor, world)):
        write_shard(shard_path(directory, rank), {name: piece, **more})
    return tensor


# --- what is right -------------------------------------------------------------------------------


def test_the_files_made_here_have_the_form_of_the_real_writer(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.tensor(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path / "real"), save_distributed=True)
        save(dict(tensors), storage_writer=writer, no_dist=True)
    made = shard_path(tmp_path / "made", 0)
    write_shard(made, {name: whole(tensor) for name, tensor in tensors.items()})
    with safe_open(tmp_path / "real" / made.name, "pt") as real, safe_open(made, "pt") as ours:
        assert real.metadata() == ours.metadata()
    assert_same(merge(tmp_path / "real", tmp_path), tensors)


def merge(source: Path, directory: Path) -> Tensors:
    output = directory / f"{source.name}.out"
    unshard.merge(source, output, verify="full", config="none")
    return merged(output)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_tensors_of_every_kind_are_merged(tmp_path: Path, world: int) -> None:
    tensors = write_odd(tmp_path / "in", max(world, 3))
    assert_same(merge(tmp_path / "in", tmp_path), tensors)


def test_several_files_per_rank_are_merged_in_their_order(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(12)]
    tensors = {name: torch.randn(5, 2) for name in names}
    for rank in range(3):
        for index, held in ((1, names[2:]), (2, names[:2])):
            pieces = {name: cut(tensors[name], 3)[rank] for name in held}
            write_shard(shard_path(tmp_path / "in", rank, index, 2), pieces)
    reading = read(tmp_path / "in")
    assert list(reading.tensors) == [*names[2:], *names[:2]]
    assert reading.world_size == 3
    assert len({id(entry.chunks.paths) for entry in reading.tensors.values()}) == 1
    assert_same(merge(tmp_path / "in", tmp_path), tensors)


def test_shards_of_several_nodes_are_read_as_one(tmp_path: Path) -> None:
    tensors = write_odd(tmp_path / "a")
    (tmp_path / "b").mkdir()
    for rank in (1, 3):
        shard_path(tmp_path / "a", rank).rename(shard_path(tmp_path / "b", rank))
    reading = read(tmp_path / "a", [tmp_path / "b"])
    assert reading.missing == ()
    assert reading.tensors.keys() == tensors.keys()
    unshard.merge(tmp_path / "a", tmp_path / "out", also=[tmp_path / "b"], config="none")
    assert_same(merged(tmp_path / "out"), tensors)


def test_a_rank_without_tensors_writes_no_file(tmp_path: Path) -> None:
    pieces = cut(torch.randn(9, 2), 2)
    write_shard(shard_path(tmp_path, 0), {"a": pieces[0]})
    write_shard(shard_path(tmp_path, 3), {"a": pieces[1]})
    reading = read(tmp_path)
    assert reading.missing_ranks == (1, 2)
    assert reading.missing == (shard_path(tmp_path, 1), shard_path(tmp_path, 2))
    assert reading.tensors["a"].shape == (9, 2)
    unshard.merge(tmp_path, tmp_path / "out", config="none")


def test_a_shard_in_the_path_means_all_of_them(tmp_path: Path) -> None:
    tensors = write_odd(tmp_path / "in")
    (found,) = discover(shard_path(tmp_path / "in", 2), Choice())
    assert found.format is SAFETENSORS_SHARDS
    unshard.merge(shard_path(tmp_path / "in", 2), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), tensors)


# --- what is missing -----------------------------------------------------------------------------


def test_a_missing_rank_that_leaves_a_hole_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path, 12, 4)
    shard_path(tmp_path, 1).unlink()
    with pytest.raises(IncompleteError, match="rank 1 ") as caught:
        unshard.merge(tmp_path, tmp_path / "out")
    assert shard_path(tmp_path, 1).name in str(caught.value)


def test_a_missing_file_of_a_rank_that_has_others_is_named(tmp_path: Path) -> None:
    for index in (1, 2):
        for rank, piece in enumerate(cut(torch.randn(12, 2), 3)):
            write_shard(shard_path(tmp_path, rank, index, 2), {f"w{index}": piece})
    shard_path(tmp_path, 1, 2, 2).unlink()
    with pytest.raises(IncompleteError, match=shard_path(tmp_path, 1, 2, 2).name):
        unshard.merge(tmp_path, tmp_path / "out")


def test_a_file_replaced_by_a_copy_of_one_of_another_number_is_named(tmp_path: Path) -> None:
    """It would hide that the last pieces of its own tensors are lost."""
    for index in (1, 2):
        for rank, piece in enumerate(cut(torch.randn(12, 2), 2)):
            write_shard(shard_path(tmp_path, rank, index, 2), {f"w{index}": piece})
    lost = shard_path(tmp_path, 1, 1, 2)
    shutil.copyfile(shard_path(tmp_path, 1, 2, 2), lost)
    with pytest.raises(CorruptError, match=rf"tensor w2: is in .*{lost.name}"):
        unshard.merge(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("copied", [0, 1])
def test_the_last_file_replaced_by_a_copy_of_another_ranks_is_named(
    tmp_path: Path, count: int, copied: int
) -> None:
    """It would hide that the last pieces are lost: nothing states the sizes of the tensors."""
    for index in range(1, count + 1):
        once = {f"norm{index}": whole(torch.randn(3)), f"none{index}": whole(torch.randn(0))}
        for rank, piece in enumerate(cut(torch.randn(12, 2), 3)):
            held = {f"w{index}": piece} | (once if rank == 0 else {})
            write_shard(shard_path(tmp_path, rank, index, count), held)
    assert read(tmp_path).tensors["w1"].shape == (12, 2)
    kept, lost = (shard_path(tmp_path, rank, count, count) for rank in (copied, 2))
    shutil.copyfile(kept, lost)
    with pytest.raises(CorruptError, match=rf"{lost.name}: has the same pieces as {kept.name}"):
        unshard.merge(tmp_path, tmp_path / "out")


def test_a_piece_that_two_files_have_among_others_is_no_evidence_of_a_copy(tmp_path: Path) -> None:
    norm, rows = torch.randn(3), torch.randn(12, 2)
    for rank, piece in enumerate(cut(rows, 3)):
        write_shard(shard_path(tmp_path, rank), {"w": piece, "norm": whole(norm)})
    unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), {"w": rows, "norm": norm})


def test_an_index_of_which_no_rank_has_a_file_is_named(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 0, 1, 3), {"a": whole(torch.randn(2))})
    write_shard(shard_path(tmp_path, 0, 3, 3), {"b": whole(torch.randn(2))})
    with pytest.raises(IncompleteError, match=r"no rank has file 2 of 3"):
        read(tmp_path)


def test_an_empty_piece_at_the_end_tells_where_the_tensor_ends(tmp_path: Path) -> None:
    write_rows(tmp_path, 5, 4)  # 2, 2, 1 and no rows
    shard_path(tmp_path, 2).unlink()
    with pytest.raises(IncompleteError, match="rank 2"):
        unshard.merge(tmp_path, tmp_path / "out")


def index_of(path: Path, tensors: Tensors, *, total: int | None = None) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    fields = {
        "metadata": {"total_size": size if total is None else total},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("beside", [True, False])
def test_an_index_tells_that_the_last_rank_is_missing(tmp_path: Path, *, beside: bool) -> None:
    folder = tmp_path / "sharded"
    tensor = write_rows(folder, 12, 4)
    index = (folder if beside else tmp_path) / "model.safetensors.index.json"
    index_of(index, {"model.norm.weight": tensor})
    assert read(folder).tensors["model.norm.weight"].shape == (12, 3)
    shard_path(folder, 3).unlink()
    with pytest.raises(IncompleteError, match="more bytes than the shards have"):
        read(folder)


def test_an_index_tells_that_a_tensor_is_missing(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3), "b": torch.randn(3)}
    write_shard(shard_path(tmp_path, 0), {"a": whole(tensors["a"])})
    index_of(tmp_path / "model.safetensors.index.json", tensors)
    with pytest.raises(IncompleteError, match="lists 1 tensor that no shard has") as caught:
        read(tmp_path)
    assert caught.value.expected == "b"


def test_an_index_of_other_weights_is_not_asked(tmp_path: Path) -> None:
    tensor = write_rows(tmp_path, 12, 4)
    index_of(tmp_path / "model.safetensors.index.json", {"model.other": tensor})
    (note,) = read(tmp_path).notes
    assert "about other weights" in note


@pytest.mark.parametrize(
    "config", ['{"tie_word_embeddings": true}', '{"model_type": "gemma2"}'], ids=["said", "default"]
)
def test_a_tied_output_layer_is_not_missed(tmp_path: Path, config: str) -> None:
    tensor = write_rows(tmp_path, 12, 4)
    listed = {"model.norm.weight": tensor, "lm_head.weight": tensor}
    index_of(tmp_path / "model.safetensors.index.json", listed)
    with pytest.raises(IncompleteError):
        read(tmp_path)
    (tmp_path / "config.json").write_text(config)
    read(tmp_path)


def test_a_config_of_transformers_next_to_shards_names_their_writer(tmp_path: Path) -> None:
    write_rows(tmp_path, 12, 4)
    (tmp_path / "config.json").write_text('{"transformers_version": "5.0.0"}')
    assert read(tmp_path).writer == "transformers"


def test_the_names_of_nemo_tell_that_a_tensor_is_missing(tmp_path: Path) -> None:
    write_rows(tmp_path, 12, 4)
    names = tmp_path / ".hf_metadata" / "fqn_to_file_index_mapping.json"
    names.parent.mkdir()
    names.write_text('{"model.norm.weight": 1}')
    assert read(tmp_path).writer == "NeMo AutoModel"
    names.write_text('{"model.norm.weight": 1, "lm_head.weight": 1}')
    with pytest.raises(IncompleteError, match="lists 1 tensor"):
        read(tmp_path)


EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("place", [".", "..", ".hf_metadata"])
@pytest.mark.parametrize("nested", [True, False])
def test_the_vocabulary_tells_that_the_last_rank_is_missing(
    tmp_path: Path, place: str, *, nested: bool
) -> None:
    folder = tmp_path / "in"
    write_rows(folder, 16, 4, EMBEDDING)
    (folder / place).mkdir(exist_ok=True)
    fields: dict[str, object] = {"vocab_size": 16}
    (folder / place / "config.json").write_text(
        json.dumps({"text_config": fields} if nested else fields)
    )
    assert read(folder).tensors[EMBEDDING].shape == (16, 3)
    shard_path(folder, 3).unlink()
    with pytest.raises(IncompleteError, match="smaller than the vocabulary"):
        read(folder)


@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(16, 13), (13, 14)], ids=["padded", "cut unevenly"]
)
def test_embeddings_of_another_size_than_the_vocabulary_may_be_right(
    tmp_path: Path, rows: int, vocabulary: int
) -> None:
    write_rows(tmp_path, rows, 4, EMBEDDING)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    assert read(tmp_path).tensors[EMBEDDING].shape == (rows, 3)


def test_smaller_embeddings_next_to_the_main_ones_may_be_right(tmp_path: Path) -> None:
    small = {"talker.embed_tokens.weight": whole(torch.randn(4, 3))}
    write_rows(tmp_path, 16, 4, EMBEDDING, **small)
    (tmp_path / "config.json").write_text('{"vocab_size": 16}')
    read(tmp_path)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_columns_of_projections_tell_that_the_last_rank_is_missing(
    tmp_path: Path, world: int
) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.randn(20, 12),
        "model.layers.0.input_layernorm.weight": torch.randn(12),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(24, 12),
        "model.layers.0.mlp.up_proj.weight": torch.randn(36, 12),
        "model.layers.0.mlp.down_proj.weight": torch.randn(12, 36),
    }
    for rank in range(world):
        write_shard(
            shard_path(tmp_path, rank), {n: cut(one, world)[rank] for n, one in tensors.items()}
        )
    assert read(tmp_path).tensors["model.layers.0.mlp.down_proj.weight"].shape == (12, 36)
    shard_path(tmp_path, world - 1).unlink()
    with pytest.raises(
        IncompleteError, match=r"12 rows \(the number of columns of model\.layers\.0\.self_attn\.q"
    ):
        read(tmp_path)


def test_projections_that_disagree_are_not_evidence(tmp_path: Path) -> None:
    write_rows(tmp_path, 8, 4, "model.layers.0.mlp.down_proj.weight")
    other = {
        "model.layers.0.self_attn.q_proj.weight": whole(torch.randn(4, 24)),
        "model.layers.0.mlp.up_proj.weight": whole(torch.randn(4, 12)),
    }
    write_shard(shard_path(tmp_path, 4), other)
    assert read(tmp_path).tensors["model.layers.0.mlp.down_proj.weight"].shape == (8, 3)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vocab_size": "16"}', '{"text_config": 3}'])
def test_a_config_that_says_nothing_is_not_evidence(tmp_path: Path, text: str) -> None:
    write_rows(tmp_path, 16, 4, EMBEDDING)
    (tmp_path / "config.json").write_text(text)
    read(tmp_path)


# --- several saves in one directory --------------------------------------------------------------


def test_stale_files_of_another_count_are_left_out(tmp_path: Path) -> None:
    tensor = write_rows(tmp_path, 12, 4)
    write_shard(shard_path(tmp_path, 2, 3, 3), {"old": whole(torch.randn(3))})
    (note,) = read(tmp_path).notes
    assert "stale" in note
    unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), {"model.norm.weight": tensor})


def test_several_complete_sets_are_refused_unless_a_file_of_one_is_given(tmp_path: Path) -> None:
    tensor = write_rows(tmp_path, 12, 4)
    for index in (1, 2):
        write_shard(shard_path(tmp_path, 0, index, 2), {f"w{index}": whole(torch.randn(3))})
    with pytest.raises(NotMergeableError, match="several saves") as caught:
        read(tmp_path)
    assert caught.value.found == (
        "4 files of 4 ranks, numbered 1 to 1; 2 files of 1 ranks, numbered 1 to 2"
    )
    unshard.merge(shard_path(tmp_path, 0), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), {"model.norm.weight": tensor})


def test_stale_files_of_more_ranks_overlap(tmp_path: Path) -> None:
    write_rows(tmp_path, 12, 4)
    write_rows(tmp_path, 12, 3)
    with pytest.raises(CorruptError, match="is stored twice, with different chunk boundaries"):
        unshard.merge(tmp_path, tmp_path / "out")


# --- what is wrong -------------------------------------------------------------------------------

ROWS: Piece = ([0, 0], torch.zeros(2, 3))


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"other": {"saved_offsets": [0, 0]}},
        {"w": {}},
        {"w": [0, 0]},
        {"w": None},
        {"w": {"saved_offsets": None}},
        {"w": {"saved_offsets": 0}},
        {"w": {"saved_offsets": [0]}},
        {"w": {"saved_offsets": [0, 0, 0]}},
        {"w": {"saved_offsets": [0, -1]}},
        {"w": {"saved_offsets": [0, 0.5]}},
        {"w": {"saved_offsets": [0, True]}},
        {"w": {"saved_offsets": ["0", 0]}},
        {"w": {"saved_offsets": [[0], 0]}},
        {"w": {"saved_offsets": [2**63, 0]}},
        {"w": {"saved_offsets": [2**63 - 2, 0]}},
    ],
    ids=str,
)
def test_offsets_that_say_no_place_are_refused(tmp_path: Path, info: object) -> None:
    write_shard(shard_path(tmp_path, 0), {"w": ROWS}, info)
    with pytest.raises(CorruptError, match="tensor w: the file has no valid offsets"):
        unshard.merge(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("start", [1, 2**40, 2**62])
def test_false_offsets_leave_a_hole(tmp_path: Path, start: int) -> None:
    write_shard(shard_path(tmp_path, 0), {"w": ([start, 0], torch.zeros(2, 3))})
    with pytest.raises(UnshardError, match="is missing from every rank"):
        unshard.merge(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '"w"', "9" * 5000])
def test_offsets_that_are_not_an_object_are_refused(tmp_path: Path, text: str) -> None:
    save_file({"w": torch.zeros(2)}, shard_path(tmp_path, 0), {"DCP_SHARDING_INFO": text})
    with pytest.raises(CorruptError, match="DCP_SHARDING_INFO is not"):
        read(tmp_path)


def test_a_file_without_offsets_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, shard_path(tmp_path, 0), {"format": "pt"})
    with pytest.raises(CorruptError, match="has no offsets of its pieces"):
        read(tmp_path)


@pytest.mark.parametrize("other", [torch.zeros(2, 3).half(), torch.zeros(2), torch.zeros(2, 3, 1)])
def test_ranks_that_contradict_each_other_are_named(tmp_path: Path, other: torch.Tensor) -> None:
    write_shard(shard_path(tmp_path, 0), {"w": ROWS})
    write_shard(shard_path(tmp_path, 5), {"w": ([2] * other.ndim, other)})
    with pytest.raises(CorruptError, match=r"tensor w: rank 5 .* contradicts"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000-model-00001-of-00001.safetensors",
        "shard-00001-model-00000-of-00001.safetensors",
        "shard-00001-model-00002-of-00001.safetensors",
    ],
)
def test_names_that_no_writer_gives_are_refused(tmp_path: Path, name: str) -> None:
    write_shard(tmp_path / name, {"w": ROWS})
    with pytest.raises(CorruptError, match="not a name that any writer gives"):
        read(tmp_path)


def test_numbers_in_names_cost_nothing(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, 99_998), {"w": ROWS})
    assert len(read(tmp_path).missing) == 1000
    write_shard(tmp_path / "shard-99999-model-00001-of-99999.safetensors", {"w": ROWS})
    shard_path(tmp_path, 99_998).unlink()
    with pytest.raises(IncompleteError, match="no rank has file 2, 3, 4, 5 of 99999"):
        read(tmp_path)


def test_sizes_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    for shape in ([2**63, 0], [1] * 40):
        header = {"w": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0 if 0 in shape else 1]}}
        info = json.dumps({"w": {"saved_offsets": [0] * len(shape)}})
        text = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": info}, **header}).encode()
        data = b"" if 0 in shape else b"x"
        shard_path(tmp_path, 0).write_bytes(len(text).to_bytes(8, "little") + text + data)
        with pytest.raises(CorruptError, match="sizes that no tensor can have"):
            read(tmp_path)


def test_a_shard_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_odd(tmp_path / "in")
    for rank in (0, 3):
        path = shard_path(tmp_path / "in", rank)
        data = path.read_bytes()
        for size in [*range(0, len(data), 53), len(data) - 1]:
            path.write_bytes(data[:size])
            with pytest.raises(UnshardError, match=path.name):
                read(tmp_path / "in")
        path.write_bytes(data)


def test_damage_never_ends_in_a_traceback(tmp_path: Path) -> None:
    write_odd(tmp_path / "in")
    index_of(tmp_path / "in" / "model.safetensors.index.json", odd_tensors())
    chance = random.Random(7)
    refused = 0
    for number in range(300):
        shutil.copytree(tmp_path / "in", tmp_path / str(number))
        path = chance.choice(sorted((tmp_path / str(number)).iterdir()))
        data = bytearray(path.read_bytes())
        for _ in range(chance.choice([1, 4])):
            data[chance.randrange(min(len(data), 900))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            read(tmp_path / str(number))
        except UnshardError:
            refused += 1
    assert refused > 50
