"""RUN@last=N: an average of steps as a checkpoint, of which nothing needs to be written."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import unshard
from hub_server import Hub, standing_in
from ranks import rank_path, save_ranks, snapshot
from tiny_models import assert_same_model, tiny_config, tiny_model
from unshard import CorruptError, UsageError
from unshard.progress import Event, Warned

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    # huggingface_hub sends files in a way that its own HTTP client warns of
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]
STEPS = (10, 20, 30, 40)
WEIGHTS, RECORD = "model.safetensors", "unshard.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps of a tiny Qwen2, each with its config, and one that is not complete."""
    trained = tiny_model().bfloat16().state_dict()
    for step in STEPS:
        folder = tmp_path / "run" / f"global_step_{step}" / "actor"
        save_ranks(folder, {name: value * step / 30 for name, value in trained.items()}, 2)
        tiny_config().save_pretrained(folder / "huggingface")
    incomplete = save_ranks(tmp_path / "run" / "global_step_50" / "actor", trained, 2)
    rank_path(incomplete, 2, 1).unlink()
    return tmp_path / "run"


@pytest.mark.parametrize("schedule", [None, "1-sqrt"])
def test_its_files_are_those_of_an_average(run: Path, tmp_path: Path, schedule: str | None) -> None:
    unshard.average(run, tmp_path / "out", last=3, schedule=schedule)
    name = f"{run}@last=3" + (f",schedule={schedule}" if schedule else "")
    before, heard = snapshot(run), list[Event]()
    with unshard.virtual(name, listener=heard.append) as files:
        found = {name: file.read() for name, file in files.items()}
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    names = [one["name"] for one in json.loads(found[RECORD])["average_of"]]
    assert names == ["global_step_20", "global_step_30", "global_step_40"]
    assert any(isinstance(event, Warned) and "global_step_50" in event.text for event in heard)
    unshard.merge(name, tmp_path / "merged")
    assert (tmp_path / "merged" / WEIGHTS).read_bytes() == found[WEIGHTS]
    assert snapshot(run) == before


def test_transformers_loads_it_from_the_shards(run: Path, tmp_path: Path) -> None:
    unshard.average(run, tmp_path / "out", last=2)
    model = unshard.from_pretrained(f"{run}/@last=2")
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto"))


def test_it_is_pushed(hub: Hub, run: Path, tmp_path: Path) -> None:
    unshard.average(run, tmp_path / "out", last=4)
    unshard.push(f"{run}@last=4", "someone/mean")
    found = hub.repos["someone/mean"].files
    assert found[WEIGHTS] == (tmp_path / "out" / WEIGHTS).read_bytes()
    assert len(json.loads(found[RECORD])["average_of"]) == 4


def test_a_change_of_any_step_is_noticed(run: Path) -> None:
    first = rank_path(run / "global_step_30" / "actor", 2, 0)
    with unshard.virtual(f"{run}@last=2", config="none") as files:
        first.write_bytes(first.read_bytes()[:-1] + b"x")
        with pytest.raises(CorruptError, match=re.escape(str(first))):
            files[WEIGHTS].read()
        with pytest.raises(CorruptError, match=re.escape(str(first))):
            files.check_sources()


def test_sums_that_overflow_are_counted_without_an_output(tmp_path: Path, hub: Hub) -> None:
    large = {"w": torch.full((4,), 60_000.0).half()}
    for step in (1, 2):
        save_ranks(tmp_path / f"run/global_step_{step}/actor", large, 1)
    name = f"{tmp_path / 'run'}@last=2,schedule=ema:0.5"
    report = unshard.push(name, "mean", config="none")
    assert not any("became infinite" in note for note in report.warnings)
    save_ranks(tmp_path / "run/global_step_3/actor", {"w": torch.full((4,), 3e38)}, 1)
    save_ranks(tmp_path / "run/global_step_4/actor", {"w": torch.full((4,), 3e38)}, 1)
    report = unshard.push(f"{tmp_path / 'run'}@last=2", "large", config="none")
    assert any("4 values of 1 tensor became infinite" in note for note in report.warnings)
    assert hub.repos.keys() == {"someone/mean", "someone/large"}


def test_a_directory_of_that_name_is_what_it_is(run: Path, tmp_path: Path) -> None:
    (run / "global_step_20").rename(tmp_path / "run@last=2")
    report = unshard.merge(f"{run}@last=2", tmp_path / "out")
    assert (len(report.sources), report.step) == (1, None)


def test_other_uses_are_refused(run: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="an average of steps has no default output"):
        unshard.merge(f"{run}@last=2")
    with pytest.raises(UsageError, match="has only 4 complete steps"):
        unshard.merge(f"{run}@last=9", tmp_path / "out")
    with pytest.raises(UsageError, match=r"linear, cosine, 1-sqrt or ema:0\.99"):
        unshard.merge(f"{run}@last=2,schedule=sin", tmp_path / "out")
    with pytest.raises(UsageError, match="is an average of steps, not a checkpoint") as error:
        unshard.inspect(f"{run}@last=2,schedule=cosine")
    assert f"unshard average {run} OUTPUT, last=2 and schedule='cosine'" in str(error.value)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["@last=x", "@last=-1", "@last", "@LAST=3", "@every=2,last=2"])
def test_a_name_that_is_misspelt_is_told_the_form(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(unshard.UnknownFormatError) as error:
        unshard.merge(f"{run}{name}", tmp_path / "out", config="none")
    assert f"{run}@last=5 or {run}@last=5,schedule=cosine" in error.value.hint
    with pytest.raises(unshard.UnknownFormatError, match="no such file or directory") as error:
        unshard.merge(f"{tmp_path / 'nothing'}{name}", tmp_path / "out", config="none")
    assert not error.value.hint


def test_other_functions_than_merges_say_what_it_is(run: Path, tmp_path: Path) -> None:
    average, out = f"{run}@last=2", tmp_path / "out"
    uses: list[Callable[[], object]] = [
        lambda: unshard.reshard(average, out, world_size=1),
        lambda: unshard.archive(average, out),
        lambda: unshard.average(average, out),
        lambda: next(unshard.follow(average, out)),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="is an average of steps, not a checkpoint"):
            use()
    assert not out.exists()
