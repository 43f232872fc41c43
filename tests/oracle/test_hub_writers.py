"""Checkpoints of torch's storage writer, transformers, accelerate and a Trainer, merged.

Every scenario is written once, by the real tool, and merged from every level of its tree.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import unshard
from oracle.offsets import looks_whole
from oracle.writers.hub import HUB_SCENARIOS, MERGE_WITH_ACCELERATE
from oracle.writers.samples import Samples
from oracle.writers.workers import WorkerPool
from ranks import assert_same, merged, snapshot
from tiny_models import tiny_config
from unshard import CheckpointError, NotMergeableError

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

SHARD = "shard-00001-model-00001-of-00001.safetensors"
DCP = "pytorch_model_fsdp_0"
LEVELS: dict[tuple[str, int], tuple[str, ...]] = {
    ("storage_shards", 4): (".",),  # first, so that all processes import at once
    ("storage_shards", 3): (".",),
    ("storage_shards", 2): (".", SHARD),
    ("storage_files", 3): (".", "shard-00001-model-00002-of-00003.safetensors"),
    ("storage_extras", 2): (".",),
    ("storage_extras", 3): (".", SHARD),
    ("storage_extras", 4): (".",),
    ("storage_extras_files", 4): (".",),
    ("storage_consolidated", 2): (
        ".",
        "sharded",
        f"sharded/{SHARD}",
        "model-00001-of-00001.safetensors",
    ),
    ("storage_consolidated_files", 3): (".", "sharded"),
    ("storage_consolidated_extras", 2): (".", "sharded"),
    ("storage_consolidated_scalar", 2): (".", "sharded"),
    ("storage_whole", 2): (".", "model-00001-of-00001.safetensors"),
    ("storage_whole_files", 2): (".",),
    ("pretrained_shards", 2): (".", SHARD),
    ("pretrained_shards", 4): (".",),
    ("pretrained_hsdp", 4): (".",),
    ("pretrained_tp", 4): (".",),
    ("accelerate_fsdp1", 2): (".", "step_1", f"step_1/{DCP}", f"step_1/{DCP}/.metadata"),
    ("accelerate_fsdp2", 2): (".", "checkpoint_1", f"checkpoint_1/{DCP}"),
    ("accelerate_fsdp2", 3): (".", f"checkpoint_1/{DCP}/__0_0.distcp"),
    ("accelerate_bins_fsdp1", 2): (".", "step_1", f"step_1/{DCP}_rank1.bin"),
    ("accelerate_bins_fsdp2", 3): (".", "step_1", f"step_1/{DCP}_rank0.bin"),
    ("accelerate_full", 2): (".", "step_1", "step_1/pytorch_model_fsdp.bin"),
    ("trainer_fsdp1", 2): (".", "checkpoint-2", f"checkpoint-2/{DCP}"),
    ("trainer_fsdp2", 2): (".", "checkpoint-2", f"checkpoint-2/{DCP}"),
    ("trainer_full", 2): (".", "checkpoint-2", "checkpoint-2/pytorch_model_fsdp.bin"),
}
SHARDED = [
    (scenario, world)
    for scenario, world in LEVELS
    if scenario.startswith(("storage_", "pretrained_")) and "whole" not in scenario
]
CASES = [(*key, level) for key, levels in LEVELS.items() for level in levels]


def test_every_scenario_is_tried() -> None:
    assert {name for name, _ in LEVELS} | {"accelerate_local"} == HUB_SCENARIOS.keys()


@pytest.mark.parametrize(("scenario", "world", "level"), CASES)
def test_a_merge_gives_the_whole_tensors_from_every_level(
    samples: Samples, tmp_path: Path, scenario: str, world: int, level: str
) -> None:
    source = samples.write(scenario, world)
    before = snapshot(source.directory)
    report = unshard.merge(source.directory / level, tmp_path / "out", verify="full", config="none")
    assert_same(merged(tmp_path / "out"), source.truth)
    assert report.tensors == len(source.truth) > 0
    assert snapshot(source.directory) == before


@pytest.mark.parametrize(
    ("scenario", "step"), [("accelerate_fsdp1", "step_1"), ("accelerate_fsdp2", "checkpoint_1")]
)
def test_a_merge_gives_what_accelerate_merges(
    samples: Samples, worker_pool: WorkerPool, tmp_path: Path, scenario: str, step: str
) -> None:
    source = samples.write(scenario, 2)
    shutil.copytree(source.directory / step / DCP, tmp_path / DCP)
    worker_pool.run(MERGE_WITH_ACCELERATE, 1, tmp_path / DCP)
    theirs = load_file(tmp_path / "accelerate" / "model.safetensors")
    assert_same(theirs, source.truth)
    unshard.merge(tmp_path / DCP, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), theirs)


def test_flat_parameters_are_refused(samples: Samples, tmp_path: Path) -> None:
    source = samples.write("accelerate_local", 2)
    for level in (".", "step_1", "step_1/pytorch_model_fsdp_rank0.bin"):
        with pytest.raises(NotMergeableError):
            unshard.merge(source.directory / level, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scenario", ["storage_consolidated_scalar", "storage_consolidated_extras"])
def test_the_shards_hold_what_the_consolidation_of_torch_loses(
    samples: Samples, scenario: str
) -> None:
    """Should torch mend it, the scenarios are no longer worth much."""
    source = samples.write(scenario, 2)
    whole = source.directory / "model-00001-of-00001.safetensors"
    assert not whole.exists() or not torch.equal(load_file(whole)["scale"], source.truth["scale"])


@pytest.mark.parametrize(
    ("scenario", "world"), [("pretrained_shards", 2), ("trainer_fsdp2", 2), ("accelerate_fsdp1", 2)]
)
def test_the_merged_model_loads_and_gives_the_same_logits(
    samples: Samples, tmp_path: Path, scenario: str, world: int
) -> None:
    from transformers import AutoModelForCausalLM

    source = samples.write(scenario, world)
    config = None
    if not scenario.startswith("pretrained"):
        config = tmp_path / "config"
        family = "llama" if scenario.startswith("accelerate") else "qwen2"
        tiny_config(family).save_pretrained(config)
    unshard.merge(source.directory, tmp_path / "out", config=config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").train(mode=False)
    true = type(model)(model.config).train(mode=False)
    true.load_state_dict(source.truth)
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, true(ids).logits)


@pytest.mark.parametrize(
    ("scenario", "step"),
    [
        ("accelerate_fsdp1", "step_1"),
        ("accelerate_fsdp2", "checkpoint_1"),
        ("accelerate_full", "step_1"),
        ("trainer_fsdp1", "checkpoint-2"),
        ("trainer_fsdp2", "checkpoint-2"),
        ("trainer_full", "checkpoint-2"),
    ],
)
def test_scheduler_and_random_state_come_along(
    samples: Samples, tmp_path: Path, scenario: str, step: str
) -> None:
    folder = samples.write(scenario, 2).directory / step
    is_trainer = scenario.startswith("trainer")
    scheduler = "scheduler.pt" if is_trainer else "scheduler.bin"
    states = "rng_state_{}.pth" if is_trainer else "random_states_{}.pkl"
    report = unshard.merge(folder, tmp_path / "out", config="none")
    assert not [one for one in report.warnings if one.startswith("training state")]
    found = torch.load(tmp_path / "out" / "extra_state_merged.pt", weights_only=True)
    assert found["lr_scheduler"] == torch.load(folder / scheduler, weights_only=False)
    assert len(found["rng_by_rank"]) == 2
    for rank, rng in enumerate(found["rng_by_rank"]):
        theirs = torch.load(folder / states.format(rank), weights_only=False)
        assert torch.equal(rng["cpu"], theirs.get("cpu", theirs.get("torch_manual_seed")))
        assert rng["random"] == theirs.get("python", theirs.get("random_state"))
        name, key, *rest = theirs.get("numpy", theirs.get("numpy_random_seed"))
        assert rng["numpy"] == (name, key.tolist(), *rest)


@pytest.mark.parametrize(("scenario", "world"), SHARDED)
def test_a_missing_shard_file_is_noticed(
    samples: Samples, tmp_path: Path, scenario: str, world: int
) -> None:
    source = samples.write(scenario, world)
    sharded = source.directory / "sharded"
    folder = sharded if sharded.exists() else source.directory
    noticed = 0
    for name in sorted(path.name for path in folder.glob("shard-*")):
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / name).unlink()
        if looks_whole(tmp_path / name) and nothing_tells(tmp_path / name, folder / name):
            continue
        with pytest.raises(CheckpointError) as caught:
            unshard.merge(tmp_path / name, tmp_path / "out")
        assert name in str(caught.value) or "tensor " in str(caught.value)
        assert not (tmp_path / "out").exists()
        noticed += 1
    assert noticed > 0


def nothing_tells(directory: Path, lost: Path) -> bool:
    """Return whether the rank of a lost file has no other, or nothing of its tensors is left."""
    rank = lost.name.partition("-model-")[0]
    if not any(directory.glob(f"{rank}-*")):
        return not any(directory.glob("*.json"))
    left = {name for path in directory.glob("shard-*") for name in names_in(path)}
    return not left & names_in(lost)


def names_in(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize(
    ("scenario", "world"), [("accelerate_bins_fsdp1", 2), ("accelerate_bins_fsdp2", 3)]
)
def test_a_missing_rank_file_is_noticed(
    samples: Samples, tmp_path: Path, scenario: str, world: int
) -> None:
    source = samples.write(scenario, world)
    for rank in range(world):
        step = tmp_path / f"step_{rank}"
        shutil.copytree(source.directory / "step_1", step)
        (step / f"{DCP}_rank{rank}.bin").unlink()
        with pytest.raises(CheckpointError):
            unshard.merge(step, tmp_path / "out")
        assert not (tmp_path / "out").exists()
