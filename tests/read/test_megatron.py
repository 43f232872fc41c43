"""Reading what megatron-core 0.16.1 wrote, under its own names; and what is refused of it."""

import json
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from signal import Signals

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from megatron_cases import CASES, truth_of, unpack
from ranks import as_rank, assert_same, merged, some_tensors
from unshard import CheckpointError, CorruptError, IncompleteError, NotMergeableError, UnsafeError
from unshard.read.format import Choice, ReadOptions
from unshard.read.megatron.reader import read_arguments
from unshard.read.open import open_latest

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

STEP = "iter_0000003"
ESSENTIAL = (".metadata", "__0_0.distcp", "__0_1.distcp", "metadata.json")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("megatron"))


@pytest.fixture
def run(cases: Path, tmp_path: Path) -> Path:
    """Return a copy of a run with one step."""
    return Path(shutil.copytree(cases / "llama_tp1", tmp_path / "run"))


@pytest.mark.parametrize("name", CASES)
def test_the_tensors_are_those_of_the_model_that_was_saved(
    cases: Path, tmp_path: Path, name: str
) -> None:
    truth = truth_of(cases / name, "megatron")
    unshard.merge(cases / name, tmp_path / "out", names="training", verify="full")
    assert_same(merged(tmp_path / "out"), truth)
    assert json.loads((tmp_path / "out" / "unshard.json").read_text())["source"] == {
        **json.loads((tmp_path / "out" / "unshard.json").read_text())["source"],
        "format": "Megatron-core distributed checkpoint",
        "step": 3,
    }


def test_inspect_says_what_there_is(cases: Path) -> None:
    found = unshard.inspect(cases / "qwen3_moe_ep2")
    assert found.format == "Megatron-core distributed checkpoint"
    assert (found.writer, found.step, found.world_size) == ("Megatron-core", 3, 2)
    assert [(one.fqn, one.reason) for one in found.skipped] == [
        ("*._extra_state", "not model weights: state of modules (20 values)")
    ]
    assert found.latest == {"latest_checkpointed_iteration.txt": 3}
    assert found.training_state == ("common.pt",)
    assert found.companions == ("config.json",)
    experts = next(one for one in found.tensors if "experts.linear_fc1" in one.name)
    assert (experts.shape, experts.chunks) == ((2, 4, 16, 16), 16)


@pytest.mark.parametrize(("stated", "expected"), [(8, 8), (1, 2), ("many", 2), (True, 2)])
def test_the_ranks_that_trained_are_counted_also_if_they_wrote_nothing(
    cases: Path, tmp_path: Path, stated: object, expected: int
) -> None:
    """Of replicas one writes; common.pt records the arguments of the training."""
    run = Path(shutil.copytree(cases / "qwen3_moe_ep2", tmp_path / "run"))
    torch.save({"args": Namespace(world_size=stated)}, run / STEP / "common.pt")
    assert unshard.inspect(run).world_size == expected


def test_a_released_checkpoint_has_no_step(run: Path, tmp_path: Path) -> None:
    (run / STEP).rename(run / "release")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    report = unshard.merge(run, tmp_path / "out")
    assert report.step is None
    assert merged(tmp_path / "out").keys() >= {"lm_head.weight"}


def test_the_highest_step_that_is_complete_is_taken(run: Path) -> None:
    """metadata.json is written last."""
    shutil.copytree(run / STEP, run / "iter_0000010")
    assert open_latest(run, Choice(), ReadOptions()).catalog.step == 10
    (run / "iter_0000010" / "metadata.json").unlink()
    found = open_latest(run, Choice(), ReadOptions())
    assert found.catalog.step == 3
    assert "metadata.json is missing" in found.passed_over[0].reason


@pytest.mark.parametrize("lost", ESSENTIAL)
def test_a_file_that_is_missing_is_noticed(run: Path, lost: str) -> None:
    (run / STEP / lost).unlink()
    with pytest.raises(IncompleteError, match="missing"):
        unshard.merge(run / STEP, dry_run=True)


@pytest.mark.parametrize("name", [*ESSENTIAL, "common.pt"])
def test_a_file_that_is_cut_is_noticed(run: Path, name: str) -> None:
    path = run / STEP / name
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError):
        unshard.merge(run / STEP, dry_run=True)


def test_without_common_pt_the_tensors_are_read(run: Path, tmp_path: Path) -> None:
    (run / STEP / "common.pt").unlink()
    unshard.merge(run, tmp_path / "out", config=str(run / "hf_config"))
    with pytest.raises(unshard.ConversionError, match=r"no config\.json"):
        unshard.merge(run, dry_run=True, config="none")


def test_the_arguments_are_read_and_nothing_is_run(tmp_path: Path, cases: Path) -> None:
    found = read_arguments(cases / "qwen3_moe_ep2" / STEP / "common.pt")
    assert found["num_experts"] == 4
    assert found["swiglu"] is True
    assert found["attention_backend"] == found["cp_comm_type"] == "<...>"
    path = tmp_path / "common.pt"
    torch.save({"args": Namespace(a=1, b=[2], c=torch.ones(1), d=Signals(15))}, path)
    assert read_arguments(path) == {"a": 1, "b": (2,), "c": "<...>", "d": "<...>"}
    torch.save({"args": {1: 2, "a": 10**5000, "b": float("nan"), "c": -0.5, "d": "x"}}, path)
    assert read_arguments(path) == {"a": "<...>", "b": "<...>", "c": -0.5, "d": "x"}
    for none in ({}, {"args": None}, {"args": [1]}, [1]):
        torch.save(none, path)
        assert read_arguments(path) == {}


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch attacked",)


def test_a_common_pt_that_runs_commands_is_refused(run: Path) -> None:
    torch.save({"args": Namespace(a=_Attack())}, run / STEP / "common.pt")
    with pytest.raises(UnsafeError, match="system"):
        unshard.merge(run, dry_run=True)


@pytest.mark.parametrize("module", ["MCoreMetadata", "MCoreSavePlan"])
def test_the_metadata_of_later_versions_has_other_classes(
    run: Path, tmp_path: Path, module: str
) -> None:
    path = run / STEP / ".metadata"
    data = path.read_bytes()
    ours = {
        "MCoreMetadata": b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        "MCoreSavePlan": b"ctorch.distributed.checkpoint.planner\nSavePlan\n",
    }[module]
    theirs = f"cmegatron.core.dist_checkpointing.strategies.torch\n{module}\n".encode()
    old = pickle.loads(data)
    if ours not in data:
        data = pickle.dumps(old, protocol=2)
    assert ours in data
    path.write_bytes(data.replace(ours, theirs))
    unshard.merge(run, tmp_path / "out", names="training")
    assert_same(merged(tmp_path / "out"), truth_of(run, "megatron"))


def test_the_optimizer_and_random_state_are_left_out(run: Path, tmp_path: Path) -> None:
    """Saved by torch, as Megatron names them in model space."""
    truth = truth_of(run, "megatron")
    others = {
        **{f"optimizer.state.exp_avg.{name}": torch.zeros(2) for name in truth},
        "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0": torch.zeros(3),
        "rng_state/shard_0_1": torch.zeros(1),
    }
    shutil.rmtree(run / STEP)
    with as_rank(0, 1):
        save({**truth, **others}, checkpoint_id=run / STEP)
    (run / STEP / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    found = unshard.inspect(run)
    assert {one.fqn: one.reason.rpartition(": ")[2] for one in found.skipped} == {
        "optimizer.*": f"optimizer state ({len(truth) + 1} values)",
        "rng_state.*": "random state (1 values)",
    }
    unshard.merge(run, tmp_path / "out", names="training")
    assert_same(merged(tmp_path / "out"), truth)


@pytest.mark.parametrize(
    ("stated", "error", "words"),
    [
        ('{"sharded_backend": "zarr"}', NotMergeableError, "with the backend zarr"),
        ('{"sharded_backend": 3}', CorruptError, "sharded_backend"),
        ('{"other": 3}', CorruptError, "has no sharded_backend"),
        ("{", CorruptError, "not valid JSON"),
    ],
)
def test_another_backend_is_refused(
    run: Path, stated: str, error: type[CheckpointError], words: str
) -> None:
    (run / STEP / "metadata.json").write_text(stated)
    with pytest.raises(error, match=words):
        unshard.merge(run, dry_run=True)


def test_one_file_per_rank_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "iter_0000005" / "mp_rank_00"
    inside.mkdir(parents=True)
    torch.save({"model": {}}, inside / "model_optim_rng.pt")
    with pytest.raises(NotMergeableError, match="one file per rank") as error:
        unshard.merge(tmp_path, dry_run=True)
    assert "--ckpt-convert-format torch_dist" in error.value.hint


@pytest.mark.parametrize("text", ['{"model": "x"}', "[]", "", "\x00"])
def test_dcp_with_another_metadata_json_is_dcp(tmp_path: Path, text: str) -> None:
    with as_rank(0, 1):
        save(some_tensors(), checkpoint_id=tmp_path / "step-5")
    (tmp_path / "step-5" / "metadata.json").write_text(text)
    assert unshard.inspect(tmp_path).format == "torch DCP"
    unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())


def test_verl_finds_the_config_next_to_dist_ckpt(run: Path, tmp_path: Path) -> None:
    actor = tmp_path / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (run / STEP).rename(actor / "dist_ckpt")
    (run / "hf_config").rename(actor / "huggingface")
    found = unshard.inspect(tmp_path)
    assert (found.role, found.step) == ("actor", 3)
    report = unshard.merge(actor, tmp_path / "out", dtype="bfloat16")
    assert not any("no config.json" in note for note in report.notes)
    command = [sys.executable, "-m", "unshard.compat.verl", "merge", "--backend", "megatron"]
    places = ["--local_dir", str(actor), "--target_dir", str(tmp_path / "by verl's command")]
    subprocess.run([*command, *places], check=True, capture_output=True)
    assert_same(merged(tmp_path / "by verl's command"), merged(tmp_path / "out"))
