"""Files in a run's `_unshard` may be another user's: not followed, waited for or believed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from evaluation.runs import lmms_checkpoint
from unshard.evaluate.pins.files import ExpiredError, PinError, list_checkpoint
from unshard.evaluate.pins.pin import (
    Quota,
    enforce_quota,
    list_pins,
    pin_checkpoint,
    read_pin,
    unpin,
)
from unshard.evaluate.run_folder import RunFolder, opened, read_record, write_record
from unshard.evaluate.sinks.base import JsonlSink, Marks
from unshard.evaluate.trainer.courier import release
from unshard.evaluate.trainer.spool import Spool

ANY = Quota(count=None, bytes=None)
NONE = Quota(count=0, bytes=None)
HOSTILE = {
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "list": "[]",
    "number": "7",
    "torn": '{"st',
    "empty": "",
    "binary": "\x00\x01",
    "twice": '{"step": 1, "step": 2}',
    "not text": '{"step": 1, "run": "\\ud800"}',
}


def tree(place: Path) -> dict[str, str]:
    """Return what is in a directory, by path; contents of files, targets of links."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_text("latin-1") if path.is_file() else "directory"
    return found


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A directory of the user's that looks like ours, as far as it can."""
    place = tmp_path / "precious"
    for name in ("queue", "jobs", "results", "refused", "pins", "spool", "old.partial"):
        (place / name).mkdir(parents=True)
        (place / name / "settings.json").write_text('{"colour": "blue"}')
        os.utime(place / name, (0, 0))
    (place / "pin.json").write_text(pin_record())
    os.utime(place / "old.partial", (0, 0))
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    lmms_checkpoint(place, 1)
    return place


def pin_record(**fields: object) -> str:
    usual: dict[str, object] = {
        "checkpoint": "/x/checkpoint-1",
        "name": "checkpoint-1",
        "step": 1,
        "created": 0,
        "files": {"a": [1, 1, 1]},
        "owner": "",
    }
    return json.dumps({**usual, **fields})


def use(run: Path) -> None:
    """Do with a run's pins and spool what trainers, `watch` and servers do."""
    spool = Spool(run)
    for entries in (spool.waiting, spool.pending, spool.arrived, spool.refused):
        for entry in entries():
            spool.remove(entry)
    for pin in list_pins(run):
        unpin(pin)
    enforce_quota(run, NONE)


@pytest.mark.parametrize("place", ["_unshard", "_unshard/pins", "_unshard/spool"])
def test_a_link_to_a_directory_is_not_followed(run: Path, precious: Path, place: str) -> None:
    before = tree(precious)
    (run / place).parent.mkdir(exist_ok=True)
    (run / place).symlink_to(precious)
    use(run)
    if place != "_unshard/spool":
        with pytest.raises(PinError, match="links are not followed"):
            pin_checkpoint(run / "checkpoint-1", quota=ANY)
    if place != "_unshard/pins":
        with pytest.raises(OSError, match="links are not followed"):
            Spool(run).add({"step": 1})
    if place == "_unshard":
        with pytest.raises(OSError, match="links are not followed"):
            RunFolder(run).lock("spool.lock")
    assert tree(precious) == before


@pytest.mark.parametrize("folder", ["queue", "jobs", "results", "refused"])
def test_a_folder_of_the_spool_that_is_a_link_is_not_followed(
    run: Path, precious: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = tree(precious)
    (run / "_unshard" / "spool").mkdir(parents=True)
    (run / "_unshard" / "spool" / folder).symlink_to(precious / folder)
    use(run)
    assert tree(precious) == before
    assert f"spool/{folder}" in caplog.text


def test_pins_that_are_links_are_named_and_left(
    run: Path, precious: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, pins = tree(precious), run / "_unshard" / "pins"
    pins.mkdir(parents=True)
    (pins / "0123456789abcdef").symlink_to(precious)
    (pins / "fedcba9876543210-01234567.partial").symlink_to(precious)
    (pins / "pin.json").write_text(pin_record())  # of the directory of pins itself
    assert list_pins(run) == []
    use(run)
    assert tree(precious) == before
    assert len(list(pins.iterdir())) == 3
    assert "0123456789abcdef" in caplog.text
    assert "fedcba9876543210" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "../../../precious"},
        {"name": "/etc"},
        {"name": ".."},
        {"name": "a\0b"},
        {"name": "\ud800"},
        {"name": ["checkpoint-1"]},
        {"files": {"../../../../precious/pin.json": [1, 1, 1]}},
        {"files": {"/etc/passwd": [1, 1, 1]}},
        {"files": {"a": [1, 1]}},
        {"files": {"a": ["1", 1, 1]}},
        {"files": {"a\0": [1, 1, 1]}},
        {"files": []},
        {"created": 10**400},
        {"created": float("nan")},
        {"created": "yesterday"},
        {"step": "one"},
        {"step": True},
        {"checkpoint": 7},
        {"checkpoint": "\ud800"},
        {"owner": None},
        {"inode": 1},
    ],
)
def test_a_copied_or_crafted_pin_is_named_and_left(
    run: Path, fields: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    crafted = run / "_unshard" / "pins" / "0123456789abcdef"
    (crafted / "checkpoint-1").mkdir(parents=True)
    (crafted / "checkpoint-1" / "a").write_text("a stranger's only copy")
    (crafted / "pin.json").write_text(pin_record(**fields))
    before = tree(crafted)
    own = pin_checkpoint(run / "checkpoint-1", quota=ANY)
    assert [pin.is_ours for pin in list_pins(run)] == (
        [False, True] if fields in READABLE else [True]
    )
    for pin in list_pins(run):
        assert pin.path.parent == pin.directory
        pin.changed()
    use(run)
    assert tree(crafted) == before
    assert not own.directory.exists()
    assert "0123456789abcdef" in caplog.text


READABLE: list[dict[str, object]] = [{}, {"inode": 1}]


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_json_that_cannot_be_read_hinders_nothing(
    run: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    spool, pins = run / "_unshard" / "spool", run / "_unshard" / "pins"
    crafted = [spool / name / "1.json" for name in ("queue", "jobs", "results", "refused")]
    crafted.append(pins / "0123456789abcdef" / "pin.json")
    crafted.append(pins / "0123456789abcdef-01234567.partial" / "pin.json")
    for file in crafted:
        file.parent.mkdir(parents=True)
        file.write_text(content)
    own = Spool(run).add({"step": 1})
    assert Spool(run).waiting() == [own]
    use(run)
    for file in crafted:
        assert file.read_text() == content
        assert str(file if file.name == "1.json" else file.parent) in caplog.text


def test_pipes_links_and_directories_are_not_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"step": 1}')
    queue = run / "_unshard" / "spool" / "queue"
    pins = run / "_unshard" / "pins"
    for folder in (queue, pins / "a", pins / "b"):
        folder.mkdir(parents=True)
    os.mkfifo(queue / "1.json")
    (queue / "2.json").symlink_to(tmp_path / "secret.json")
    (queue / "3.json").mkdir()
    os.mkfifo(pins / "a" / "pin.json")
    (pins / "b" / "pin.json").symlink_to(tmp_path / "secret.json")
    assert (Spool(run).waiting(), list_pins(run)) == ([], [])
    use(run)
    assert (tmp_path / "secret.json").exists()
    assert len(list(queue.iterdir())) == 3


def test_a_copied_entry_is_not_sent_and_our_own_is(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = Spool(run).add({"step": 1})
    assert [one.step for one in Spool(run).waiting()] == [1]
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    assert Spool(copied).waiting() == []
    assert f"{copied}/_unshard/spool/queue/{entry.name}.json" in caplog.text
    assert tree(copied) == tree(run)


@pytest.mark.parametrize("name", ["spool.lock", "watch.lock"])
def test_a_lock_is_not_a_link_or_a_pipe(run: Path, precious: Path, name: str) -> None:
    (run / "_unshard").mkdir()
    (run / "_unshard" / name).symlink_to(precious / "new")
    with pytest.raises(OSError, match=name):
        RunFolder(run).lock(name)
    assert not (precious / "new").exists()
    (run / "_unshard" / name).unlink()
    os.mkfifo(run / "_unshard" / name)
    with pytest.raises(OSError, match="not a regular file"):
        RunFolder(run).lock(name)


def test_results_and_marks_are_not_written_through_links(run: Path, precious: Path) -> None:
    state = run / "_unshard"
    state.mkdir()
    target = precious / "pin.json"
    before = target.read_text()
    (state / "results.jsonl").symlink_to(target)
    with pytest.raises(OSError, match="results"):
        JsonlSink(state / "results.jsonl").log(1, {"a": 1.0}, "job")
    (state / "watched.txt").symlink_to(target)
    with pytest.raises(OSError, match="watched"):
        Marks(state, "watched").add("job")
    (state / "exports").symlink_to(precious)
    with pytest.raises(OSError, match="exports"):
        Marks(state / "exports", "sink").add("job")
    assert target.read_text() == before
    assert not (precious / "sink.txt").exists()


def test_a_pin_of_another_run_is_not_released(run: Path, tmp_path: Path) -> None:
    other = pin_checkpoint(lmms_checkpoint(tmp_path / "other", 1), quota=ANY)
    own = pin_checkpoint(run / "checkpoint-1", quota=ANY)
    release([str(other.path), str(other.directory), "/etc", str(own.path)], Spool(run))
    assert (list_pins(tmp_path / "other"), list_pins(run)) == ([other], [])


def test_a_file_that_is_too_large_is_not_read(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unshard.write.dirfd._LONGEST", 1000)
    Spool(run).add({"step": 1, "error": "e" * 1000})
    assert Spool(run).waiting() == []
    assert "more than 1000 bytes" in caplog.text


def test_a_checkpoint_of_any_depth_is_listed(tmp_path: Path) -> None:
    folders = [tmp_path.joinpath(*"a" * depth) for depth in range(1, 1200)]
    for folder in folders:
        folder.mkdir()
    file = folders[-1] / "x.pt"
    file.write_bytes(b"x")
    try:
        assert list(list_checkpoint(tmp_path).files) == ["a/" * 1199 + "x.pt"]
    finally:
        file.unlink()
        for folder in reversed(folders):
            folder.rmdir()


def test_results_in_a_foreign_form_are_passed_over(run: Path) -> None:
    file = run / "_unshard" / "results.jsonl"
    file.parent.mkdir()
    file.write_text('{"job": "known"}\n' + "[" * 100_000 + '\n7\n{"job": ')
    sink = JsonlSink(file)
    sink.log(1, {"a": 1.0}, "known")
    sink.log(1, {"a": 1.0}, "new")
    assert json.loads(file.read_text().splitlines()[-1])["job"] == "new"


def test_only_a_path_of_a_pin_is_read_as_one(run: Path) -> None:
    place = run / "elsewhere"
    place.mkdir()
    (place / "pin.json").write_text(pin_record())
    for path in (place, place / "checkpoint-1", run / "_unshard" / "pins", Path("/")):
        with pytest.raises(ExpiredError):
            read_pin(path)


def test_a_record_is_ours_where_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with opened(tmp_path, "here", make=True) as here, opened(tmp_path, "there") as there:
        write_record(here, "x.json", {"a": 1})
        assert read_record(here, "x.json").is_ours
        os.rename("x.json", "y.json", src_dir_fd=here, dst_dir_fd=there)
        assert read_record(there, "y.json").is_ours
        shutil.copy2(tmp_path / "there" / "y.json", tmp_path / "there" / "z.json")
        copied = read_record(there, "z.json")
        assert (copied.fields, copied.is_ours) == ({"a": 1}, False)
    assert sorted(tree(tmp_path)) == ["here", "there", "there/y.json", "there/z.json"]


def test_a_file_whose_name_is_not_text_hinders_no_pin(run: Path) -> None:
    stray = run / "checkpoint-1" / os.fsdecode(b"caf\xe9.txt")
    stray.write_text("notes")
    pin = pin_checkpoint(run / "checkpoint-1", quota=ANY)
    assert list_pins(run) == [pin]
    assert stray.name not in pin.files


def test_a_path_that_is_not_text_is_refused_before_anything_is_kept(run: Path) -> None:
    place = run.rename(run.with_name(os.fsdecode(b"caf\xe9")))
    with pytest.raises(PinError, match="not UTF-8"):
        pin_checkpoint(place / "checkpoint-1", quota=ANY)
    assert list((place / "_unshard" / "pins").iterdir()) == []


def test_a_pin_that_cannot_be_removed_whole_keeps_its_record(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = pin_checkpoint(run / "checkpoint-1", quota=ANY)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)
        unpin(pin)
    (left,) = pin.directory.parent.iterdir()
    assert (left / "pin.json").exists()
    enforce_quota(run, ANY)
    assert not left.exists()


def test_half_made_and_half_removed_pins_of_ours_are_finished(run: Path) -> None:
    pins = [pin_checkpoint(run / "checkpoint-1", quota=ANY) for _ in range(3)]
    removed = pins[0].directory.with_name(f"{pins[0].name}-01234567.partial")
    pins[0].directory.rename(removed)  # and killed
    made = pins[1].directory.with_name(f"{pins[1].name}.partial")
    pins[1].directory.rename(made)
    fresh = pins[2].directory.with_name(f"{pins[2].name}.partial")
    pins[2].directory.rename(fresh)
    os.utime(made, (time.time() - 4000,) * 2)
    enforce_quota(run, ANY)
    assert [path.exists() for path in (removed, made, fresh)] == [False, False, True]
    assert (run / "checkpoint-1" / "config.json").stat().st_nlink == 2
