"""Files that torch_checkpointing 0.1.1 wrote, bit for bit; and what is refused of them.

See tests/data/README.md.
"""

import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import unshard
from damage import assert_refused, bomb, cycle, in_bounds, in_time, judge
from item_files import save_item_files
from properties import examples
from ranks import assert_same, some_tensors
from unshard.errors import (
    CheckpointError,
    CorruptError,
    IncompleteError,
    NotMergeableError,
    UnknownFormatError,
    UnsafeError,
)
from unshard.read.torch_checkpointing.metadata import read_metadata

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

ARCHIVE = Path(__file__).parent.parent / "data" / "torch_checkpointing.tar.xz"
CASES = (
    "fsdp2_no_resharder",
    "fsdp2_safetensors",
    "fsdp2_torch",
    "fsdp2_torch_async",
    "fsdp2_torch_bf16",
    "hsdp_torch",
)
STATED = [case for case in CASES if case != "fsdp2_no_resharder"]
Metadata = dict[str, Any]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torch_checkpointing")
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(directory, filter="data")
    return directory


@pytest.fixture
def step(cases: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return `step(case)`: a copy of its step directory."""

    def copied(case: str) -> Path:
        place = tmp_path / case / "step-5"
        shutil.copytree(cases / case / "step-5", place)
        return place

    return copied


Step = Callable[[str], Path]


def truth_of(case: Path) -> dict[str, torch.Tensor]:
    shapes = json.loads((case / "truth.json").read_text())
    with np.load(case / "truth.npz") as truth:
        return {
            name: torch.from_numpy(truth[name].copy())
            .view(getattr(torch, one["dtype"]))
            .reshape(one["shape"])
            for name, one in shapes.items()
        }


@pytest.mark.parametrize("case", CASES)
def test_a_merge_gives_the_truth_bit_for_bit(cases: Path, tmp_path: Path, case: str) -> None:
    error = judge(cases / case, truth_of(cases / case), tmp_path / "out" / "out", verify="full")
    assert error is None


@pytest.mark.parametrize("case", CASES)
def test_inspect_says_what_there_is(cases: Path, case: str) -> None:
    found = unshard.inspect(cases / case)
    world = 4 if case == "hsdp_torch" else 2
    assert (found.format, found.writer) == ("torch_checkpointing", "torch_checkpointing")
    assert (found.world_size, found.step, found.missing) == (world, 5, ())
    items = ("optimizer", "train_state")
    assert found.training_state == tuple(f"{a}_{rank}.pt" for a in items for rank in range(world))


@pytest.mark.parametrize("case", ["fsdp2_no_resharder", "fsdp2_safetensors", "fsdp2_torch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_is_named(step: Step, tmp_path: Path, case: str, rank: int) -> None:
    place = step(case)
    next(place.glob(f"model_{rank}.*")).unlink()
    words = f"Missing checkpoint for rank {rank} of world size 2", f"model_{rank}."
    assert_refused(place, tmp_path / "out" / "out", IncompleteError, *words)


def test_replicas_make_up_for_missing_ranks(cases: Path, step: Step, tmp_path: Path) -> None:
    place = step("hsdp_torch")
    for rank in (0, 3):
        (place / f"model_{rank}.pt").unlink()
    assert judge(place, truth_of(cases / "hsdp_torch"), tmp_path / "out" / "out") is None
    (place / "model_1.pt").rename(place / "model_1.lost")
    words = "rank 0, 1, 3 of world size 4"
    assert_refused(place, tmp_path / "out" / "out", IncompleteError, words)


def test_tensors_of_missing_ranks_alone_are_missed(step: Step, tmp_path: Path) -> None:
    """As those of a lost stage of a pipeline: no other file shows them."""
    place = step("fsdp2_torch")
    metadata = pickle.loads((place / "metadata.pkl").read_bytes())
    listed = metadata["metadata"]["model"]["nested_path_to_metadata"]
    listed['["later.weight"]'] = listed['["up.weight"]']
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    words = "in no file: 1 tensor of metadata.pkl", "later.weight"
    assert_refused(place, tmp_path / "out" / "out", CorruptError, *words)
    (place / "model_1.pt").unlink()
    words = "Missing checkpoint for rank 1 of world size 2", "later.weight"
    assert_refused(place, tmp_path / "out" / "out", IncompleteError, *words)


def test_safetensors_without_metadata_are_refused(step: Step, tmp_path: Path) -> None:
    place = step("fsdp2_safetensors")
    (place / "metadata.pkl").unlink()
    words = "without the cuts of their tensors", "metadata.pkl"
    assert_refused(place, tmp_path / "out" / "out", NotMergeableError, *words)


def test_metadata_without_any_file_of_the_form_that_it_states(step: Step, tmp_path: Path) -> None:
    place = step("fsdp2_safetensors")
    for rank in range(2):
        shutil.move(place / f"model_{rank}.safetensors", place / f"model_{rank}.pt")
    words = "the files of all 2 ranks are missing", "model_0.safetensors"
    assert_refused(place, tmp_path / "out" / "out", IncompleteError, *words)


def model_of(metadata: Metadata) -> Any:
    return metadata["metadata"]["model"]


def data_of(metadata: Metadata, name: str = "up.weight") -> Any:
    (group,) = model_of(metadata)["nested_path_to_metadata"][json.dumps([name])]
    return group["sharding_metadata"]["data"]


def lose(metadata: Metadata) -> None:
    del model_of(metadata)["nested_path_to_metadata"]['["up.weight"]']


def add_a_rank(metadata: Metadata) -> None:
    data_of(metadata)["mesh_spec"] |= {"mesh_shape": (3,), "mesh_data": (0, 1, 2)}


def lose_a_rank(metadata: Metadata) -> None:
    del model_of(metadata)["rank_to_layout_info"][1]
    metadata["world_size"] = 1


CONTRADICTIONS: dict[str, Callable[[Metadata], object]] = {
    "another shape": lambda one: data_of(one).update(global_shape=[12, 6]),
    "another dtype": lambda one: data_of(one).update(dtype="torch.int32"),
    "another dimension": lambda one: data_of(one).update(placements=[{"type": "Shard", "dim": 1}]),
    "a dimension that is not there": lambda one: data_of(one).update(
        placements=[{"type": "Shard", "dim": 2}]
    ),
    "a copy": lambda one: data_of(one).update(placements=[{"type": "Replicate"}]),
    "a larger mesh": add_a_rank,
    "an unknown tensor": lose,
    "fewer ranks": lose_a_rank,
    "a plain tensor of another shape": lambda one: data_of(one, "inv_freq").update(
        global_shape=[6]
    ),
}


def stated_at(place: Path) -> Metadata:
    """Return the metadata; what many tensors share (a mesh) is one object for each."""
    metadata: Metadata = unshared(pickle.loads((place / "metadata.pkl").read_bytes()))
    return metadata


def unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unshared(one) for key, one in value.items()}
    return type(value)(map(unshared, value)) if isinstance(value, list | tuple) else value


def write(place: Path, metadata: object) -> None:
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("case", ["fsdp2_safetensors", "fsdp2_torch"])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_the_files_is_refused(
    step: Step, tmp_path: Path, case: str, name: str
) -> None:
    place = step(case)
    metadata = stated_at(place)
    CONTRADICTIONS[name](metadata)
    write(place, metadata)
    assert_refused(place, tmp_path / "out" / "out", CorruptError, "metadata.pkl")


@pytest.mark.parametrize("case", ["fsdp2_safetensors", "fsdp2_torch"])
def test_a_mesh_whose_ranks_do_not_ascend_is_cut_by_the_sorted_group(
    cases: Path, step: Step, tmp_path: Path, case: str
) -> None:
    place = step(case)
    metadata = stated_at(place)
    data_of(metadata)["mesh_spec"]["mesh_data"] = (1, 0)
    write(place, metadata)
    assert judge(place, truth_of(cases / case), tmp_path / "out" / "out") is None


def old(metadata: Metadata) -> None:
    metadata["version"] = "1.0"


def rename(metadata: Metadata) -> None:
    layout = {"file_path": "a/model_0.pt", "serialization_format": {"type": "TorchSerialization"}}
    model_of(metadata)["rank_to_layout_info"][0] = layout


def cut_otherwise(metadata: Metadata) -> None:
    (group,) = model_of(metadata)["nested_path_to_metadata"]['["up.weight"]']
    group["sharding_metadata"]["type"] = "default_tensor_v1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (old, "metadata of version '1.0'"),
        (rename, "a file called 'a/model_0.pt'"),
        (cut_otherwise, "default_tensor_v1"),
    ],
)
def test_what_is_stated_in_an_unknown_way_is_refused(
    step: Step, tmp_path: Path, change: Callable[[Metadata], None], words: str
) -> None:
    place = step("fsdp2_torch")
    metadata = stated_at(place)
    change(metadata)
    write(place, metadata)
    assert_refused(place, tmp_path / "out" / "out", NotMergeableError, words)


class Command:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/unshard-was-here",)


def test_metadata_that_run_a_command_are_refused_and_run_nothing(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = step("fsdp2_safetensors")
    ran: list[object] = []
    write(place, {**stated_at(place), "more": Command()})
    monkeypatch.setattr(os, "system", ran.append)
    assert_refused(place, tmp_path / "out" / "out", UnsafeError, "system", "nothing was run")
    assert not ran


@pytest.mark.parametrize("kept", [*range(0, 3600, 311), -1])
def test_truncated_metadata_are_refused(step: Step, tmp_path: Path, kept: int) -> None:
    place = step("fsdp2_safetensors")
    data = (place / "metadata.pkl").read_bytes()
    (place / "metadata.pkl").write_bytes(data[:kept])
    assert_refused(place, tmp_path / "out" / "out", CheckpointError, "metadata.pkl")


At = tuple[Any, ...]


def nodes(value: Any, at: At = ()) -> Iterator[At]:
    """Every place of a value inside other values."""
    yield at
    inside = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    for key, one in inside.items() if isinstance(inside, dict) else ():
        yield from nodes(one, (*at, key))


def put(value: Any, at: At, new: Any) -> Any:
    """Return a value with another at a place inside of it."""
    if not at:
        return new
    changed = list(value) if isinstance(value, tuple) else value
    changed[at[0]] = put(changed[at[0]], at[1:], new)
    return tuple(changed) if isinstance(value, tuple) else changed


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    5,
    1 << 40,
    0.5,
    "",
    "x",
    b"x",
    (),
    [],
    {},
    [[]],
    {"type": []},
    {1: 2},
)


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_wrong_types_at_every_level_are_refused_or_make_no_difference(
    cases: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    case = data.draw(st.sampled_from(["fsdp2_safetensors", "hsdp_torch"]))
    place = tmp_path_factory.mktemp("wrong")
    shutil.copytree(cases / case / "step-5", place / "step-5")
    metadata = stated_at(place / "step-5")
    del metadata["metadata"]["optimizer"]
    at = data.draw(st.sampled_from(list(nodes(metadata))))
    write(place / "step-5", put(metadata, at, data.draw(st.sampled_from(WRONG))))
    error = judge(place / "step-5", truth_of(cases / case), place / "out" / "out")
    assert error is None or isinstance(error, CheckpointError)


@pytest.mark.parametrize("value", [cycle(), bomb(16), {"metadata": cycle()}, 3])
def test_values_that_are_no_metadata_are_refused_at_once(
    step: Step, tmp_path: Path, value: object
) -> None:
    place = step("fsdp2_safetensors")
    write(place, value)
    assert_refused(place, tmp_path / "out" / "out", CheckpointError, "metadata.pkl")


def test_values_that_are_shared_very_often_take_no_time(step: Step) -> None:
    """A pickle may refer to one long value a million times: to ranks, or to a tensor's meshes."""
    place = step("fsdp2_safetensors")
    metadata = stated_at(place)
    ranks = tuple(range(20_000))
    spec = {**data_of(metadata)["mesh_spec"], "mesh_shape": (len(ranks),), "mesh_data": ranks}
    kind = "DTensorShardingMetadata"
    groups = [
        {"sharding_metadata": {"type": kind, "data": {**data_of(metadata), "mesh_spec": {**spec}}}}
        for _ in range(1000)
    ]
    model_of(metadata)["nested_path_to_metadata"] = {f"[{n}]": groups for n in range(10_000)}
    write(place, metadata)
    with in_time(), in_bounds(), pytest.raises(CorruptError, match="refer to one another too"):
        read_metadata(place / "metadata.pkl", "model")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Replicate(), Shard(1))])
def test_tensors_may_be_cut_along_several_dimensions(
    tmp_path: Path, suffix: str, placements: tuple[Placement, ...]
) -> None:
    tensors = {"a.weight": torch.randn(5, 7), "b.weight": torch.randn(3, 2)}
    place = tmp_path / "step-5"
    save_item_files(place, tensors, 6, suffix=suffix, mesh_shape=(2, 3), placements=placements)
    assert judge(place, tensors, tmp_path / "out" / "out") is None


def plain(place: Path, *names: str, number: int = 0) -> dict[str, torch.Tensor]:
    """Save files of a person, each with a model of its own."""
    place.mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        torch.save(some_tensors(seed), place / name)
    return some_tensors(number)


class TestNamesOfAPerson:
    def test_a_file_alone_is_not_taken_for_a_checkpoint_of_ranks(self, tmp_path: Path) -> None:
        tensors = plain(tmp_path / "mine", "model_0.pt", "data_0.pth", "model_0.txt")
        assert_same(unshard.load_state_dict(tmp_path / "mine" / "model_0.pt"), tensors)
        with pytest.raises(UnknownFormatError, match="no checkpoint found"):
            unshard.inspect(tmp_path / "mine")

    @pytest.mark.parametrize("others", [(), ("optimizer_0.pt", "optimizer_1.pt")])
    def test_a_file_of_one_epoch_is_read_alone(
        self, tmp_path: Path, others: tuple[str, ...]
    ) -> None:
        tensors = plain(tmp_path / "mine", "model_0.pt", "model_1.pt", *others, number=1)
        assert_same(unshard.load_state_dict(tmp_path / "mine" / "model_1.pt"), tensors)
        with pytest.raises(NotMergeableError, match="differs between ranks"):
            unshard.inspect(tmp_path / "mine")

    def test_whole_weights_next_to_them_are_taken(self, tmp_path: Path) -> None:
        plain(tmp_path / "mine", "pytorch_model.bin", "model_0.pt", "model_1.pt")
        assert unshard.inspect(tmp_path / "mine").format == "whole files"

    def test_rank_files_of_others_stay_theirs(self, tmp_path: Path) -> None:
        names = ("model_world_size_1_rank_0.pt", "model_0.pt", "optimizer_0.pt")
        plain(tmp_path / "mine", *names)
        assert unshard.inspect(tmp_path / "mine").format == "FSDP rank files"


def test_the_optimizer_is_never_the_model(cases: Path, step: Step, tmp_path: Path) -> None:
    place = step("fsdp2_torch")
    truth = truth_of(cases / "fsdp2_torch")
    for name in ("optimizer_0.pt", "train_state_1.pt"):
        assert judge(place / name, truth, tmp_path / "out" / "out") is None
    for path in place.glob("model_*"):
        path.unlink()
    for name in ("optimizer_0.pt", "."):
        with pytest.raises(UnknownFormatError, match="no checkpoint found"):
            unshard.inspect(place / name)


def test_the_files_of_several_nodes_are_united(cases: Path, step: Step, tmp_path: Path) -> None:
    place, other = step("fsdp2_torch"), tmp_path / "node-1" / "step-5"
    other.mkdir(parents=True)
    for path in place.glob("*_1.pt"):
        path.rename(other / path.name)
    assert judge(place, truth_of(cases / "fsdp2_torch"), tmp_path / "o" / "o", also=[other]) is None


def renamed(place: Path, name: str) -> Path:
    """Give the item `model` another name, in its files and in the metadata."""
    metadata = pickle.loads((place / "metadata.pkl").read_bytes())
    stated = metadata["metadata"].pop("model")
    layouts = stated["rank_to_layout_info"]
    for rank, layout in layouts.items():
        suffix = ".pt" if layout is None else Path(layout["file_path"]).suffix
        (place / f"model_{rank}{suffix}").rename(place / f"{name}_{rank}{suffix}")
        if layout is not None:
            layout["file_path"] = f"{name}_{rank}{suffix}"
    metadata["metadata"][name] = stated
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return place


@pytest.mark.parametrize("case", STATED)
@pytest.mark.parametrize("name", ["policy", "my_net"])
def test_the_model_may_have_any_name(cases: Path, step: Step, name: str, case: str) -> None:
    place = renamed(step(case), name)
    files = sorted(place.glob(f"{name}_*"))
    for level in (place.parent, place, files[0], place / "metadata.pkl"):
        assert_same(unshard.load_state_dict(level), truth_of(cases / case))
        assert unshard.inspect(level).writer == "torch_checkpointing"


def test_of_two_models_with_other_names_one_must_be_named(step: Step, cases: Path) -> None:
    place = renamed(step("fsdp2_torch"), "policy")
    metadata = pickle.loads((place / "metadata.pkl").read_bytes())
    metadata["metadata"]["teacher"] = metadata["metadata"]["policy"]
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    for rank in range(2):
        shutil.copy(place / f"policy_{rank}.pt", place / f"teacher_{rank}.pt")
    with pytest.raises(NotMergeableError, match=r"the weights of 2 models") as refused:
        unshard.inspect(place)
    assert refused.value.found == "items policy, teacher"
    truth = truth_of(cases / "fsdp2_torch")
    assert_same(unshard.load_state_dict(place / "teacher_1.pt"), truth)


def test_items_of_training_state_alone_are_not_a_model(step: Step) -> None:
    place = step("fsdp2_torch")
    for file in place.glob("model_*"):
        file.unlink()
    with pytest.raises(UnknownFormatError):
        unshard.inspect(place)
