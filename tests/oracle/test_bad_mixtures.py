"""Files of a good form that do not belong together: swapped, of another world, step or model."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch

from damage import Findings, assert_refused, judge
from oracle.writers.samples import Samples
from ranks import Tensors, assert_same, rank_path, save_ranks, some_tensors
from unshard import CheckpointError, UnshardError

pytestmark = pytest.mark.xdist_group("torch processes")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "output" / "merged"


RANKED = (
    "rank files",
    "rank files, HSDP",
    "rank files, ShardedTensors",
    "bins",
    "bins, ShardedTensors",
)
PATTERNS = ("model_world_size_*.pt", "pytorch_model_fsdp_0_rank*.bin")


def rank_files(directory: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in directory.glob(pattern))


def swap(first: Path, second: Path) -> None:
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


@pytest.mark.parametrize("name", RANKED)
def test_rank_files_swapped_are_named(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    shutil.copytree(samples[name].directory, tmp_path / "copy")
    for first, second in itertools.combinations(rank_files(tmp_path / "copy"), 2):
        swap(first, second)
        assert_refused(tmp_path / "copy", out, CheckpointError, first.name, "renamed")
        swap(first, second)


@pytest.mark.parametrize("name", RANKED)
def test_a_rank_file_in_place_of_another_is_named(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    shutil.copytree(samples[name].directory, tmp_path / "copy")
    for first, second in itertools.permutations(rank_files(tmp_path / "copy"), 2):
        kept = first.read_bytes()
        shutil.copyfile(second, first)
        assert_refused(tmp_path / "copy", out, CheckpointError, first.name, "renamed")
        first.write_bytes(kept)


@pytest.mark.parametrize("scenario", ["fsdp2", "fsdp1_sharded"])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_a_rank_file_of_another_world_size_is_noticed(
    samples: Samples, tmp_path: Path, out: Path, scenario: str, world: int
) -> None:
    good, other = samples.write(scenario, 3), samples.write(scenario, world)
    for rank in range(min(world, 3)):
        copy = tmp_path / f"copy {rank}"
        shutil.copytree(good.directory, copy)
        shutil.copyfile(rank_path(other.directory, world, rank), rank_path(copy, 3, rank))
        assert_refused(copy, out, CheckpointError)


def test_rank_files_of_two_worlds_that_fit_by_chance_are_noticed(tmp_path: Path, out: Path) -> None:
    """The first of two ranks holds what the first two of four hold."""
    tensors = {"rows": torch.arange(8.0)}
    save_ranks(tmp_path / "four", tensors, 4)
    save_ranks(tmp_path / "two", {"rows": -tensors["rows"]}, 2)
    shutil.copyfile(rank_path(tmp_path / "two", 2, 0), rank_path(tmp_path / "four", 4, 0))
    rank_path(tmp_path / "four", 4, 1).unlink()
    assert_refused(tmp_path / "four", out, CheckpointError)


def test_a_rank_file_of_other_shapes_is_named(tmp_path: Path, out: Path) -> None:
    save_ranks(tmp_path / "a", some_tensors(), 3)
    wider = {name: torch.cat([value, value]) for name, value in some_tensors(1).items()}
    save_ranks(tmp_path / "b", wider, 3)
    for rank in range(3):
        shutil.copytree(tmp_path / "a", tmp_path / f"copy {rank}")
        shutil.copyfile(
            rank_path(tmp_path / "b", 3, rank), rank_path(tmp_path / f"copy {rank}", 3, rank)
        )
        assert_refused(tmp_path / f"copy {rank}", out, CheckpointError, "lm_head.weight", "rank")


def test_a_replica_of_another_step_is_noticed_by_full_verification(
    tmp_path: Path, out: Path
) -> None:
    for seed in (0, 1):
        save_ranks(
            tmp_path / f"step {seed}",
            some_tensors(seed),
            4,
            mesh_shape=(2, 2),
            mesh_names=("ddp", "fsdp"),
        )
    for rank in range(4):
        copy = tmp_path / f"copy {rank}"
        shutil.copytree(tmp_path / "step 0", copy)
        shutil.copyfile(rank_path(tmp_path / "step 1", 4, rank), rank_path(copy, 4, rank))
        assert_refused(copy, out, CheckpointError, "rank", verify="full")


MIXED = list(itertools.permutations(["DCP", "DCP, zstd", "DCP, optimizer", "DCP, Lightning"], 2))
DCPS = ("DCP", "DCP, no collectives", "DCP, many files", "DCP, zstd", "DCP, optimizer")


@pytest.mark.parametrize("name", DCPS)
def test_item_files_swapped_are_noticed_where_they_can_be(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    """An item does not say which it is: only its shape and dtype tell."""
    sample, findings = samples[name], Findings()
    shutil.copytree(sample.directory, tmp_path / "copy")
    files = sorted((tmp_path / "copy").glob("*.distcp"))
    for first, second in itertools.combinations(files[:8], 2):
        alike = first.stat().st_size == second.stat().st_size
        with findings.attempt(first.name, second.name):
            swap(first, second)
            try:
                judge(
                    tmp_path / "copy", sample.truth, out, compare=anything if alike else assert_same
                )
            finally:
                swap(first, second)
    findings.tell()


def anything(found: Tensors, truth: Tensors) -> None:
    del found, truth


@pytest.mark.parametrize(("first", "second"), MIXED)
def test_metadata_of_another_run_are_noticed(
    samples: Samples, tmp_path: Path, out: Path, first: str, second: str
) -> None:
    shutil.copytree(samples[first].directory, tmp_path / "copy")
    shutil.copyfile(samples[second].directory / ".metadata", tmp_path / "copy" / ".metadata")
    assert_refused(tmp_path / "copy", out, CheckpointError)


def test_metadata_of_one_rank_twice_are_noticed(
    samples: Samples, tmp_path: Path, out: Path
) -> None:
    shutil.copytree(samples["DCP, no collectives"].directory, tmp_path / "copy")
    shutil.copyfile(tmp_path / "copy/__0.metadata", tmp_path / "copy/__1.metadata")
    assert_refused(tmp_path / "copy", out, CheckpointError, "embed.weight")


Pair = dict[str, torch.Tensor]
ONE, OTHER = torch.arange(6.0).reshape(3, 2), torch.ones(3, 2)
COLLISIONS = {
    "compile": ["a.weight", "_orig_mod.a.weight"],
    "inner": ["a._orig_mod.weight", "a._checkpoint_wrapped_module.weight"],
    "twice": ["_fsdp_wrapped_module._fsdp_wrapped_module.a", "_fsdp_wrapped_module.a"],
    "all of module": ["module.a", "module._orig_mod.a"],
    "module inside": ["_orig_mod.module.a", "module.a"],
}


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", COLLISIONS)
@pytest.mark.parametrize("form", ["ranks", "safetensors", "torch"])
def test_names_that_become_one_must_have_equal_values(
    tmp_path: Path, out: Path, form: str, kind: str, *, equal: bool
) -> None:
    from safetensors.torch import save_file

    first, second = COLLISIONS[kind]
    tensors = {first: ONE.clone(), second: ONE.clone() if equal else OTHER.clone()}
    source = tmp_path / "source"
    source.mkdir()
    if form == "ranks":
        save_ranks(source, tensors, 2)
    elif form == "torch":
        torch.save(tensors, source / "pytorch_model.bin")
    else:
        save_file(tensors, source / "model.safetensors")
    if equal:
        error = judge(source, {"a.weight" if "weight" in first else "a": ONE}, out)
        assert error is None, error
    else:
        assert_refused(source, out, CheckpointError, "wrapper")


ODD_NAMES = [
    "",
    "/",
    "../x",
    "a\0b",
    "a\nb",
    "x" * 10_000,
    "größe.重み",
    "\U0001f600",
    " ",
    ".",
    "a..b",
    "." * 50,
    "\u202egnp",
    '"',
    "\\",
    "__meta__",
]
REFUSED_NAMES = ["__metadata__", "\udcff", "a\ud800b"]


@pytest.mark.parametrize("form", ["ranks", "torch", "legacy"])
@pytest.mark.parametrize("name", [*ODD_NAMES, *REFUSED_NAMES])
def test_odd_names_are_kept_or_refused(tmp_path: Path, out: Path, form: str, name: str) -> None:
    tensors = {"good": OTHER, name: ONE}
    source = tmp_path / "source"
    source.mkdir()
    if form == "ranks":
        save_ranks(source, tensors, 2)
    else:
        torch.save(
            tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=form == "torch"
        )
    error = judge(source, tensors if name in ODD_NAMES else None, out)
    if name in REFUSED_NAMES:
        assert isinstance(error, UnshardError)
