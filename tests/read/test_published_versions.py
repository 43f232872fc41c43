"""The versions of weights that RL trainers publish for their engines: which are meant."""

import json
import shutil
from pathlib import Path

import pytest

import unshard
from ranks import save_ranks, some_tensors
from unshard.api.following.finder import CheckpointFinder
from unshard.errors import IncompleteError
from unshard.merger import FSDP2Merger
from unshard.read.finding.discover import all_steps, discover, step_folders
from unshard.read.format import Choice

RANK_FILES = [f"pytorch_model_fsdp_0/model_world_size_2_rank_{rank}.pt" for rank in range(2)]
WHOLE = ["model.safetensors", "config.json"]
CONFIG = json.dumps({"model_type": "none", "architectures": ["None"]})


def put(root: Path, folders: dict[str, list[str]]) -> None:
    for name, files in folders.items():
        (root / name).mkdir(parents=True)
        for file in files:
            (root / name / file).parent.mkdir(exist_ok=True)
            (root / name / file).write_bytes(b"x")


def source(output: Path) -> object:
    return json.loads((output / "unshard.json").read_text())["source"]["name"]


def names(path: Path) -> list[str]:
    return [at.step_dir.name for at in discover(path, Choice())]


def test_what_was_merged_for_the_engine_is_not_a_checkpoint_next_to_rank_files(
    tmp_path: Path,
) -> None:
    for step in (9, 10, 999999, 1000000):
        put(tmp_path, {f"weight_v{step:06d}-fsdp": RANK_FILES, f"weight_v{step:06d}": WHOLE})
    put(tmp_path, {"weight_v1000001": WHOLE})  # of which the rank files were removed
    shards = [f"weight_v{step:06d}-fsdp" for step in (1000000, 999999, 10, 9)]
    expected = ["weight_v1000001", *shards]
    assert names(tmp_path) == expected
    assert [at.step for at in all_steps(tmp_path, Choice())] == [9, 10, 999999, 1000000, 1000001]
    assert [at.name for at in step_folders(tmp_path).values()] == expected[::-1]
    assert names(tmp_path / "weight_v000010") == ["weight_v000010"]  # what is named is meant


def test_the_highest_of_versions_that_are_whole_is_meant(tmp_path: Path) -> None:
    """As for `checkpoint-N` with whole models; slime, miles, SGLang."""
    for step in (1, 999999, 1000000):
        put(tmp_path, {f"run-7/weight_v{step:06d}": WHOLE})
    (tmp_path / "latest").write_text("run-7/weight_v1000000")
    for path in (tmp_path, tmp_path / "run-7"):
        assert names(path) == ["weight_v1000000", "weight_v999999", "weight_v000001"]
        assert discover(path, Choice())[0].step == 1000000


def test_other_names_that_end_alike_hide_nothing(tmp_path: Path) -> None:
    put(tmp_path, {"my-fsdp-step_3": RANK_FILES, "my-fsdp-step_12": RANK_FILES})
    assert names(tmp_path) == ["my-fsdp-step_12", "my-fsdp-step_3"]


def test_the_older_names_of_policy_syncs_are_steps(tmp_path: Path) -> None:
    for step in (0, 1, 10, 9):
        put(tmp_path, {f"policy-sync-{step}": RANK_FILES, f"policy-sync-{step}-hf": WHOLE})
    assert names(tmp_path) == [f"policy-sync-{step}" for step in (10, 9, 1, 0)]
    put(tmp_path, {"checkpoint-5": RANK_FILES})  # of the same run: what training saves counts
    assert names(tmp_path) == ["checkpoint-5"]


def save(step_dir: Path, seed: int) -> None:
    save_ranks(step_dir / "pytorch_model_fsdp_0", some_tensors(seed), 2)
    (step_dir / "config.json").write_text(CONFIG)


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
@pytest.mark.parametrize("kind", [Path, str])
def test_the_call_of_lmms_engines_trainer_merges_what_it_names(
    tmp_path: Path, kind: type[Path] | type[str]
) -> None:
    """`RLTrainRunner._prepare_policy_sync_checkpoint`, with anything next to it."""
    for step in (10, 11):
        save(tmp_path / f"weight_v{step:06d}-fsdp", step)
    put(tmp_path, {"weight_v000011": WHOLE[:1], "weight_v000012-fsdp": RANK_FILES[:1]})
    put(tmp_path, {"weight_v000013-fsdp": [], "weight_v000013": []})
    written = []
    for step in (10, 11, 10):
        shards, output = (tmp_path / f"weight_v{step:06d}{end}" for end in ("-fsdp", ""))
        shutil.rmtree(output, ignore_errors=True)  # as the trainer, of an earlier try
        found = FSDP2Merger().merge(
            kind(shards), output_path=kind(output), model_general_type="causal_lm"
        )
        assert found == output
        source = json.loads((output / "unshard.json").read_text())["source"]
        assert (source["step"], source["name"]) == (step, shards.name)
        written.append((output / "model.safetensors").read_bytes())
    assert written[0] == written[2] != written[1]


def test_the_newest_that_is_half_written_is_named(tmp_path: Path) -> None:
    root = tmp_path / "policy-sync"
    save(root / "weight_v000011-fsdp", 11)
    save(root / "weight_v000012-fsdp", 12)
    (root / "weight_v000012-fsdp" / RANK_FILES[1]).unlink()
    with pytest.raises(IncompleteError, match=r"weight_v000012-fsdp, is not complete") as refused:
        FSDP2Merger().merge(root, tmp_path / "out")
    assert str(root / "weight_v000011-fsdp") in refused.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_every_version_is_followed_and_averaged_once(tmp_path: Path) -> None:
    root, out = tmp_path / "policy-sync", tmp_path / "out"
    for step in (9, 10):
        version = root / f"weight_v{step:06d}"
        save(version.with_name(f"{version.name}-fsdp"), step)
        unshard.merge(version.with_name(f"{version.name}-fsdp"), version)
        (version / "unshard.json").unlink()  # as lmms-engine's own merger
    reports = unshard.follow(root, out, until=10, interval=0.01, config="none")
    assert [one.step for one in reports] == [9, 10]
    shards = {path.name for path in root.glob("*-fsdp")}
    assert {path.name for path in out.glob("weight_v*")} == shards
    unshard.average(root, tmp_path / "average", last=2, config="none")
    sources = json.loads((tmp_path / "average" / "unshard.json").read_text())["average_of"]
    assert {one["name"] for one in sources} == shards


def test_a_version_that_is_whole_counts_until_there_are_rank_files_of_a_later_one(
    tmp_path: Path,
) -> None:
    put(tmp_path, {"weight_v000012": WHOLE, "weight_v000013-fsdp": []})
    assert names(tmp_path) == ["weight_v000012"]
    (found,) = discover(tmp_path, Choice(step=12))
    assert found.step_dir.name == "weight_v000012"


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
@pytest.mark.parametrize("lacks", [RANK_FILES[1], "pytorch_model_fsdp_0"])
def test_a_version_that_is_whole_counts_where_its_rank_files_are_not_complete(
    tmp_path: Path, lacks: str
) -> None:
    root, broken = tmp_path / "policy-sync", "weight_v000012-fsdp"
    for step in (11, 12):
        version = root / f"weight_v{step:06d}"
        save(version.with_name(f"{version.name}-fsdp"), step)
        unshard.merge(version.with_name(f"{version.name}-fsdp"), version, config="none")
        (version / "unshard.json").unlink()  # as lmms-engine's own merger
    shutil.move(root / broken / lacks, tmp_path / "elsewhere")
    for wanted in (None, 12):
        report = unshard.merge(root, tmp_path / "out", step=wanted, overwrite=True, config="none")
        assert (report.step, source(tmp_path / "out")) == (12, "weight_v000012")
        assert [one for one in report.warnings if "passed over" in one and broken in one]
    report = unshard.average(root, tmp_path / "average", config="none")
    sources = json.loads((tmp_path / "average" / "unshard.json").read_text())["average_of"]
    assert [one["name"] for one in sources] == ["weight_v000011-fsdp", "weight_v000012"]
    followed = unshard.follow(root, tmp_path / "all", until=12, interval=0.01, config="none")
    assert [one.step for one in followed] == [11, 12]
    shutil.move(root / "weight_v000012", root / "weight_v000013")  # a version without rank files
    assert names(root)[0] == "weight_v000013"


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_a_version_is_followed_once_although_its_rank_files_are_removed(tmp_path: Path) -> None:
    shards, version = tmp_path / "weight_v000011-fsdp", tmp_path / "weight_v000011"
    save(shards, 11)
    finder = CheckpointFinder(tmp_path)
    assert [at.path for _ in range(2) for at in finder.look()] == [shards]
    unshard.merge(shards, version, config="none")
    (version / "unshard.json").unlink()  # as lmms-engine's own merger
    (shards / RANK_FILES[0]).unlink()
    assert not [at for _ in range(3) for at in finder.look()]
    shutil.rmtree(shards)
    assert not [at for _ in range(3) for at in finder.look()]
    save(shards, 12)  # by a trainer that goes back
    assert [at.path for _ in range(2) for at in finder.look()] == [shards]


DELTA_FILES = ["delta_manifest.json", "files/a", ".lmms_weight_sync_ready"]


def put_delta(version: Path, *, by: str) -> None:
    """Write a delta to version 11, as lmms-engine does, or in the form that SGLang reads."""
    base = {"base_version": 11}
    if by == "lmms-engine":
        put(version.parent, {version.name: DELTA_FILES})
        (version / "delta_manifest.json").write_text(json.dumps(base))
    else:
        put(version.parent, {version.name: ["delta.safetensors"]})
        index = {"metadata": {"delta_encoding": "xor"} | base, "weight_map": {"a": "a.safetensors"}}
        (version / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("by", ["lmms-engine", "slime"])
def test_a_delta_is_not_taken_for_a_model(tmp_path: Path, by: str) -> None:
    put_delta(tmp_path / "weight_v000012", by=by)
    put(tmp_path / "older", {"weight_v000006": WHOLE})
    for path in (tmp_path / "weight_v000012", *(tmp_path / "weight_v000012").glob("*.json")):
        with pytest.raises(IncompleteError, match=r"weight_v000012: a delta.* version 11") as told:
            unshard.inspect(path)
        assert "pass a whole version" in told.value.hint


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
@pytest.mark.parametrize("by", ["lmms-engine", "slime"])
def test_deltas_are_passed_over_only_where_other_versions_are_meant(
    tmp_path: Path, by: str
) -> None:
    """Of a parent the newest is meant: an older one would be other weights, without being asked."""
    root = tmp_path / "policy-sync"
    for step in (10, 11, 14):
        save(root / f"weight_v{step:06d}-fsdp", step)
    for step in (12, 13, 15, 16):
        put_delta(root / f"weight_v{step:06d}", by=by)
    for merge in (FSDP2Merger().merge, unshard.merge):
        with pytest.raises(IncompleteError, match=r"weight_v000016: a delta") as told:
            merge(root, tmp_path / "out")
        assert "14" in told.value.hint
    assert unshard.merge(root, tmp_path / "out", step=14, config="none").step == 14
    report = unshard.average(root, tmp_path / "average", config="none")
    sources = json.loads((tmp_path / "average" / "unshard.json").read_text())["average_of"]
    assert [one["name"] for one in sources] == [f"weight_v0000{at}-fsdp" for at in (10, 11, 14)]
    assert [one for one in report.warnings if "weight_v000013: a delta" in one]
    reports = unshard.merge_all(root, tmp_path / "all", config="none")
    assert [one.step for one in reports] == [10, 11, 14]
    followed = unshard.follow(root, tmp_path / "f", idle=0.1, interval=0.01, config="none")
    assert [one.step for one in followed] == [10, 11, 14]
