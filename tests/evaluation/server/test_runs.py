"""Which runs there are, what distinguishes those of one name, and which run a request is of."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

from evaluation.running import whole_model
from unshard.errors import UsageError
from unshard.evaluate.jobs import Request
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.server.placing import RunFinder, place
from unshard.evaluate.server.store.runs import tell_apart
from unshard.evaluate.server.store.store import Store


@pytest.mark.parametrize(
    ("directories", "parts"),
    [
        (["/x/a/output"], [""]),
        (["/x/a/output", "/x/b/output"], ["a", "b"]),
        (["/e/1/run/output", "/e/2/run/output"], ["1", "2"]),
        (["/x/output", "/x/y/output"], ["x", "y"]),
        (["/x/a/1/output", "/x/b/1/output", "/x/a/2/output"], ["a-1", "b-1", "a-2"]),
        (["/x/a", "/x/b"], ["a", "b"]),  # named alike by the user
        (["s3://one/run", "/x/run"], ["one", "x"]),
        (["/x-y/run", "/x/y/run"], ["x-y", "y"]),
        (["/run", "/x/run"], ["run", "x-run"]),
        (["", "/x/run"], ["", "run"]),  # known by its name alone
    ],
)
def test_runs_of_one_name_are_told_apart_by_their_directories(
    directories: list[str], parts: list[str]
) -> None:
    assert list(tell_apart(dict(enumerate(directories))).values()) == parts  # type: ignore[arg-type]


def test_runs_that_were_in_one_directory_are_told_apart_by_their_ids() -> None:
    told = tell_apart({"aaaaaaaaaaaa": "/x/run", "bbbbbbbbbbbb": "/x/run", "cccc": "/y/run"})
    assert told == {"aaaaaaaaaaaa": "aaaaaa", "bbbbbbbbbbbb": "bbbbbb", "cccc": "/y"} | {
        "cccc": told["cccc"]
    }
    assert len(set(told.values())) == 3


def test_labels_follow_names_and_directories(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        store.runs.record("1" * 16, "output", "/x/a/output")
        assert [run.label for run in store.runs.all()] == ["output"]
        store.runs.record("2" * 16, "output", "/x/b/output")
        assert [run.label for run in store.runs.all()] == ["output (a)", "output (b)"]
        assert len(store.runs.called("output")) == 2
        assert [run.id for run in store.runs.called("/x/b/output")] == ["2" * 16]
        store.runs.record("2" * 16, "renamed", "/x/b/renamed")
        assert [run.label for run in store.runs.all()] == ["output", "renamed"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def run_of(store: Store, root: Path, path: Path, **more: object) -> str:
    request = Request(str(path), "p", ("t",), **more)  # type: ignore[arg-type]
    return RunFinder(store.runs, [root]).add_run(place(request)).run_id


def test_files_of_two_runs_are_two_runs(tmp_path: Path, root: Path) -> None:
    """Lightning writes one file for each step into the run's directory."""
    files = [root / run / f"epoch=0-step={step}.ckpt" for run in ("a", "b") for step in (2, 4)]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2"}, path)
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        found = {path: run_of(store, root, path) for path in (*files, root / "a", root / "b")}
        assert len({*found.values()}) == 2
        assert {one.directory for one in store.runs.all()} == {str(root / "a"), str(root / "b")}
        assert found[root / "a"] == found[files[0]] == found[files[1]]


def test_a_directory_that_is_made_anew_is_another_run(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        model = whole_model(root / "run" / "checkpoint-1")
        first = run_of(store, root, model)
        shutil.rmtree(root / "run")
        assert run_of(store, root, model) == first  # it is gone
        anew = run_of(store, root, whole_model(root / "run" / "checkpoint-2"))
        assert anew != first
        assert [run.id for run in store.runs.called(str(root / "run"))] == [anew]
        assert len(store.runs.called("run")) == 2


def test_a_run_that_took_the_place_of_another_is_told_from_it(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        first = run_of(store, root, whole_model(root / "output" / "checkpoint-1"))
        (root / "output").rename(root / "kept")
        second = run_of(store, root, whole_model(root / "output" / "checkpoint-1"))
        assert run_of(store, root, root / "kept" / "checkpoint-1") == first != second
        assert {run.label for run in store.runs.all()} == {"output", "kept"}


def test_of_two_copies_of_a_run_one_can_be_adopted(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        first = run_of(store, root, whole_model(root / "run" / "checkpoint-1"))
        for name in ("one", "two"):
            shutil.copytree(root / "run", root / name)
        shutil.rmtree(root / "run")
        for name in ("one", "two"):
            RunFolder(root / name).adopt()
        ids = [run_of(store, root, root / name / "checkpoint-1") for name in ("one", "two")]
        assert ids[0] == first != ids[1]


def test_a_copy_at_the_place_of_the_original_is_another_run(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        model = whole_model(root / "run" / "checkpoint-1")
        first = run_of(store, root, model)
        (root / "run").rename(root / "kept")
        shutil.copytree(root / "kept", root / "run")
        assert run_of(store, root, model) != first
        assert run_of(store, root, root / "kept" / "checkpoint-1") == first


def test_two_servers_know_a_run_by_the_same_id(tmp_path: Path, root: Path) -> None:
    model = whole_model(root / "run" / "checkpoint-1")
    with closing(Store(tmp_path / "a.sqlite")) as one, closing(Store(tmp_path / "b.sqlite")) as two:
        assert run_of(one, root, model) == run_of(two, root, model)


def test_nothing_is_written_into_a_model_or_outside_the_roots(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        alone = whole_model(root / "models" / "alone")
        first = run_of(store, root, alone)
        assert run_of(store, root, alone) == first
        outside = whole_model(tmp_path / "elsewhere" / "checkpoint-1")
        run_of(store, root, outside)
        assert run_of(store, root, whole_model(outside.parent / "checkpoint-2")) == run_of(
            store, root, outside
        )
        link = root / "linked"
        link.symlink_to(outside.parent)
        run_of(store, root, link / "checkpoint-1")
    assert not list(tmp_path.rglob("_unshard"))


def test_a_model_without_a_step_in_its_name_is_of_the_run_that_is_named(
    tmp_path: Path, root: Path
) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        of_run = run_of(store, root, whole_model(root / "a" / "output" / "checkpoint-1"))
        base = whole_model(root / "models" / "base")
        named = {"run": "output", "step": 0}
        assert run_of(store, root, base, **named) == of_run
        other = run_of(store, root, whole_model(root / "b" / "output" / "checkpoint-1"))
        with pytest.raises(UsageError, match="several training runs") as caught:
            run_of(store, root, base, **named)
        assert str(root / "a" / "output") in caught.value.found
        place_of = str(root / "b" / "output")
        assert run_of(store, root, base, **named, directory=place_of) == other


def test_a_run_keeps_its_first_name_and_is_found_by_all(tmp_path: Path, root: Path) -> None:
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        whole_model(root / "run" / "checkpoint-1")
        finder = RunFinder(store.runs, [root])
        assert finder.at(root / "run").name == "run"
        (root / "run").rename(root / "better")
        assert finder.at(root / "better").name == "better"  # nobody gave it the other name
        assert finder.at(root / "better", "mine").name == "better"
        assert (
            finder.at(whole_model(root / "other" / "checkpoint-1").parent, "given").name == "given"
        )
        (root / "other").rename(root / "again")
        assert finder.at(root / "again").name == "given"
        for text in ("run", "better", "mine", str(root / "better")):
            assert [run.name for run in store.runs.called(text)] == ["better"], text
        assert [run.name for run in store.runs.called("given")] == ["given"]


def test_a_run_is_only_adopted_if_it_was_moved(tmp_path: Path) -> None:
    run, copy = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "copy")
    run.path.mkdir()
    with pytest.raises(UsageError, match="is not a copy"):
        run.adopt()
    run.write_identity("1" * 16)
    shutil.copytree(run.path, copy.path)
    with pytest.raises(UsageError, match="which is still there"):
        copy.adopt()
    shutil.rmtree(run.path)
    assert copy.adopt() == "1" * 16
    found = copy.read_identity()
    assert found is not None
    assert (found.id, found.is_copy) == ("1" * 16, False)
