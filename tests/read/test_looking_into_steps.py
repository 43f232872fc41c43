"""Which steps of a run are looked into, and what of steps that are closed, removed, or links."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import torch

import unshard
from another_user import another_user, open_directory
from ranks import assert_same, save_ranks, some_tensors
from trainers import TRAINERS
from unshard.errors import CorruptError, NotMergeableError, UnknownFormatError, UsageError
from unshard.read.finding.discover import all_steps, discover, find
from unshard.read.format import Choice, ReadOptions
from unshard.read.open import Checkpoint, open_latest

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

_EVENTS = {"os.listdir", "os.scandir", "open"}
_watching: list[Callable[[str], None]] = []


def _on_event(event: str, args: tuple[object, ...]) -> None:
    if _watching and event in _EVENTS and isinstance(args[0], str | Path):
        _watching[-1](str(args[0]))


sys.addaudithook(_on_event)  # it cannot be taken away, so it looks whether a test listens


@contextmanager
def hearing(heard: Callable[[str], None]) -> Iterator[None]:
    """Call a function with each path that is about to be listed or opened."""
    _watching.append(heard)
    try:
        yield
    finally:
        _watching.clear()


def make(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        (directory / f"model_world_size_2_rank_{rank}.pt").write_bytes(b"x")
    return directory


def taken(path: Path, choice: Choice = Choice()) -> Path:  # noqa: B008 - frozen
    return next(find(path, choice)).weights_dir


def opened(path: Path) -> Checkpoint:
    return open_latest(path, Choice(), ReadOptions())


@pytest.mark.parametrize("inner", ["actor", "policy/weights", "my_shards"])
def test_of_a_long_run_one_step_is_looked_into(tmp_path: Path, inner: str) -> None:
    for step in range(1, 8):
        make(tmp_path / f"step_{step}" / inner)
    seen: set[str] = set()
    with hearing(seen.add):
        place = taken(tmp_path)
    assert place == tmp_path / "step_7" / inner
    assert {Path(path).relative_to(tmp_path).parts[:1] for path in seen} == {(), ("step_7",)}


def test_no_folder_is_listed_twice(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path / "a" / f"step_{step}" / "shards")
    make(tmp_path / "b" / "actor")
    seen: list[str] = []
    for path in (tmp_path, tmp_path / "a", tmp_path / "b", tmp_path / "a" / "step_10" / "shards"):
        for look in (discover, lambda path, choice: next(find(path, choice)), all_steps):
            with hearing(seen.append), suppress(UsageError):
                look(path, Choice())
            assert len(seen) == len(set(seen))
            seen.clear()


def test_an_older_step_does_not_matter_until_it_is_needed(tmp_path: Path) -> None:
    for part in ("agent_0", "agent_1"):
        make(tmp_path / "step_10" / part)
    place = make(tmp_path / "step_20" / "agent_0")
    assert taken(tmp_path) == place
    with pytest.raises(UsageError, match="step_10 has 2 sets of weights"):
        all_steps(tmp_path, Choice())


def test_the_step_that_is_taken_must_be_unambiguous(tmp_path: Path) -> None:
    make(tmp_path / "step_10" / "agent_0")
    for part in ("agent_0", "agent_1"):
        make(tmp_path / "step_20" / part)
    with pytest.raises(UsageError, match="step_20 has 2 sets of weights"):
        taken(tmp_path)


@pytest.mark.parametrize(
    ("steps", "inner"),
    [
        (("step_10", "step_20"), ""),
        (("step_10", "step_20"), "actor"),
        (("step_10", "step_20"), "my_shards"),
    ],
)
def test_a_step_that_may_not_be_read_is_not_passed_over(steps: tuple[str, str], inner: str) -> None:
    with open_directory() as run:
        older, newest = (make(run / step / inner) for step in steps)
        newest.chmod(0o000)
        with another_user():
            for look in (taken, opened, lambda path: discover(path, Choice())):
                with pytest.raises(CorruptError, match=r"cannot be read: Permission denied") as got:
                    look(run)
                assert str(newest) in str(got.value)
        newest.chmod(0o755)
        older.chmod(0o000)
        with another_user():
            assert taken(run) == newest
        older.chmod(0o755)


@pytest.mark.parametrize("closed", ["weights_500", "weights_1000"])
def test_of_in_house_names_all_steps_must_be_readable(closed: str) -> None:
    """Only their numbers together show that they are steps, and not runs."""
    with open_directory() as run:
        for name in ("weights_500", "weights_1000", "weights_1500"):
            make(run / name)
        (run / closed).chmod(0o000)
        with another_user(), pytest.raises(CorruptError, match=f"{closed}: cannot be read"):
            taken(run)
        (run / closed).chmod(0o755)


def test_a_closed_directory_next_to_a_run_is_named_only_if_nothing_is_found() -> None:
    with open_directory() as top:
        (top / "lost+found").mkdir(mode=0o000)
        with another_user(), pytest.raises(UnknownFormatError) as refused:
            taken(top)
        assert f"{top / 'lost+found'}: cannot be read: Permission denied" in refused.value.found
        place = make(top / "my_run" / "step_10")
        with another_user():
            assert taken(top) == place


@pytest.mark.parametrize("inner", ["actor", "my_shards"])
def test_a_step_that_is_removed_meanwhile_is_as_if_it_had_not_been_there(
    tmp_path: Path, inner: str
) -> None:
    """The newest step is removed when it is listed or opened for the first, second, … time."""
    saved = save_ranks(tmp_path / "saved", some_tensors(), 2)
    for number in count():
        run = tmp_path / f"run-{number}"
        for step in (10, 20):
            shutil.copytree(saved, run / f"step_{step}" / inner)
        newest, at = run / "step_20", count()

        def remove(
            path: str, newest: Path = newest, at: "count[int]" = at, n: int = number
        ) -> None:
            if path.startswith(str(newest)) and next(at) == n:
                _watching.clear()
                shutil.rmtree(newest)

        with hearing(remove):
            found = opened(run)
        if newest.exists():
            break
        assert found.location.step == 10
        assert not found.passed_over
        assert not found.catalog.notes
        shutil.rmtree(run)
    assert number > 5
    assert found.location.step == 20


def test_a_step_that_loses_its_files_meanwhile_is_named(tmp_path: Path) -> None:
    """A trainer removes a step file by file."""
    for step in (10, 20):
        save_ranks(tmp_path / f"step_{step}" / "actor", some_tensors(), 2)
    file = tmp_path / "step_20" / "actor" / "model_world_size_2_rank_1.pt"

    def remove(path: str) -> None:
        if path == str(file):
            _watching.clear()
            file.unlink()

    with hearing(remove):
        found = opened(tmp_path)
    assert found.location.step == 10
    assert [one.step for one in found.passed_over] == [20]


MARKERS = {
    "latest_checkpointed_iteration.txt": "300",
    "latest_ckpt_global_step.txt": "300\n",
    "latest": "global_step300",
    "last_checkpoint": "/data/run_7/iter_300.pth",
    "latest_checkpoint.json": '{"step": 300}',
}


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_of_another_step_than_the_one_taken_is_reported(tmp_path: Path, name: str) -> None:
    for step in (100, 200):
        save_ranks(tmp_path / f"global_step_{step}" / "actor", some_tensors(), 2)
    (tmp_path / name).write_text(MARKERS[name])
    note = f"{tmp_path / name} names step 300, but step 200 was taken: the highest there that is"
    report = unshard.merge(tmp_path, tmp_path / "out", config="none")
    assert any(one.startswith(note) for one in report.warnings)
    assert any(one.startswith(note) for one in unshard.inspect(tmp_path).warnings)
    chosen = unshard.inspect(tmp_path, step=100), unshard.inspect(tmp_path / "global_step_200")
    assert not any("names step" in one for found in chosen for one in found.warnings)
    (tmp_path / name).write_text(MARKERS[name].replace("300", "200"))
    assert not any("names step" in one for one in unshard.inspect(tmp_path).warnings)


@pytest.mark.parametrize("text", ['{"step": 300, "time": "2026-01-02"}', "", "{}", "9 or 10"])
def test_a_marker_that_is_not_one_number_is_not_believed(tmp_path: Path, text: str) -> None:
    save_ranks(tmp_path / "global_step_200" / "actor", some_tensors(), 2)
    (tmp_path / "latest_checkpoint.json").write_text(text)
    found = unshard.inspect(tmp_path)
    assert found.latest == {"latest_checkpoint.json": None}
    assert not any("names step" in one for one in found.warnings)


def test_the_marker_of_files_that_are_steps_is_next_to_them(tmp_path: Path) -> None:
    torch.save({"state_dict": some_tensors()}, tmp_path / "iter_100.pth")
    (tmp_path / "last_checkpoint").write_text("/data/run/iter_300.pth")
    found = unshard.inspect(tmp_path)
    assert found.latest == {"last_checkpoint": 300}
    assert any("names step 300, but step 100" in one for one in found.warnings)


def test_a_run_and_weights_apart_from_it_need_a_choice(tmp_path: Path) -> None:
    steps = [make(tmp_path / "a" / f"checkpoint-{step}") for step in (5, 10)]
    apart = make(tmp_path / "b")
    with pytest.raises(UsageError, match="2 sets of weights") as refused:
        taken(tmp_path)
    assert refused.value.found.startswith("a (")
    assert "b (" in refused.value.found
    assert refused.value.hint == f"pass one of them: {steps[1]}, {apart}"
    assert taken(tmp_path, Choice(role="b")) == apart
    assert taken(tmp_path, Choice(step=5)) == steps[0]
    assert taken(tmp_path / "a") == steps[1]


def test_several_runs_are_listed_with_weights_apart_from_them(tmp_path: Path) -> None:
    for name in ("a/checkpoint-10", "a/final", "b", "c/step_5"):
        make(tmp_path / name)
    with pytest.raises(UnknownFormatError, match=r"2 runs .*, and other weights in 1") as refused:
        taken(tmp_path)
    listed = ", ".join(str(tmp_path / name) for name in "acb")
    assert refused.value.hint == f"pass one of them: {listed}"


def test_a_whole_model_apart_from_a_run_is_not_another_checkpoint(tmp_path: Path) -> None:
    """It may be the base model, or an export of the run."""
    steps = [make(tmp_path / "a" / f"checkpoint-{step}") for step in (5, 10)]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(b"")
    make(tmp_path / "a" / "final")
    assert [at.weights_dir for at in discover(tmp_path, Choice())] == steps[::-1]


def test_a_known_role_apart_from_the_others_is_taken(tmp_path: Path) -> None:
    actor = make(tmp_path / "actor_train" / "checkpoint-10" / "dcp")
    make(tmp_path / "reference")
    assert taken(tmp_path) == actor
    assert taken(tmp_path, Choice(role="ref")) == tmp_path / "reference"


@pytest.mark.parametrize("name", ["resumed_from", "old-run"])
def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path, name: str) -> None:
    other = make(tmp_path / "other" / "step_10").parent
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(other)
    with pytest.raises(UnknownFormatError) as refused:
        taken(tmp_path / "run")
    assert f"{name}: a link to {other}, which is not searched" in refused.value.found
    assert taken(tmp_path / "run" / name) == other / "step_10"
    own = make(tmp_path / "run" / "mine" / "step_5")
    assert taken(tmp_path / "run") == own


def test_a_link_to_a_step_may_be_given_and_is_not_a_second_run(tmp_path: Path) -> None:
    place = make(tmp_path / "run" / "my_steps" / "step_10")
    for name in ("last", "latest"):
        (tmp_path / "run" / name).symlink_to("my_steps/step_10")
        assert taken(tmp_path / "run" / name) == place
    (tmp_path / "link").symlink_to("run")
    assert taken(tmp_path / "link") == taken(tmp_path / "run") == place


def test_an_archive_of_a_step_is_not_a_checkpoint_file(tmp_path: Path) -> None:
    for name in ("iter_100.pth", "iter_200.tar"):
        (tmp_path / name).write_bytes(b"x")
    assert [at.step for at in discover(tmp_path, Choice())] == [100]


def fairseq2(run: Path, step: int, *, export: bool) -> Path:
    place = run / f"step_{step}"
    for file in ("model/pp_00/tp_00/sdp_00.pt", "trainer/rank_00.pt", "data_reader/dp_00.pt"):
        (place / file).parent.mkdir(parents=True)
        torch.save({"w": torch.ones(2)}, place / file)
    if export:
        TRAINERS["Bagel"].write(place / "hg", some_tensors())
    return place


def test_an_export_is_not_taken_instead_of_a_newer_step_of_fairseq2(tmp_path: Path) -> None:
    exported = fairseq2(tmp_path, 100, export=True)
    for level in (tmp_path, exported, exported / "hg", exported / "hg" / "model.safetensors"):
        found = unshard.inspect(level)
        assert (found.step, found.writer) == (100, "fairseq2")
        assert_same(unshard.load_state_dict(level), some_tensors())
    newest = fairseq2(tmp_path, 200, export=False)
    for level in (tmp_path, newest, newest / "model"):
        with pytest.raises(NotMergeableError, match="step_200: a fairseq2 checkpoint"):
            unshard.inspect(level)
    with pytest.raises(NotMergeableError, match="a fairseq2 checkpoint"):
        unshard.inspect(newest / "model" / "pp_00" / "tp_00" / "sdp_00.pt")
