"""`--resume` in an object store: what is finished and whole is not put again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unshard
from bucket_server import BUCKET, Request, Store
from three_files import CHOSEN, FILES, name_of, save_three_files
from unshard import OutputError
from unshard.errors import StoreError
from unshard.progress import Chosen, Event, Stage, Warned, ignore
from unshard.stores.remote_path import RemotePath, path_of
from unshard.write.bucket.claim import CLAIM_NAME
from unshard.write.bucket.ledger import FINISHED_NAME
from unshard.write.bucket.stage import BucketStage

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of three output files, in the first of which a tensor becomes infinite."""
    return save_three_files(tmp_path / "ckpt")


@pytest.fixture
def truth(checkpoint: Path, tmp_path: Path) -> dict[str, bytes]:
    unshard.merge(checkpoint, tmp_path / "truth", listener=ignore, **CHOSEN)
    return {path.name: path.read_bytes() for path in (tmp_path / "truth").iterdir()}


def merge(
    checkpoint: Path, folder: str, listener: Callable[[Event], None] = ignore, **more: object
) -> None:
    options: dict[str, Any] = {**CHOSEN, "resume": True, **more}
    unshard.merge(checkpoint, f"s3://{BUCKET}/{folder}", listener=listener, **options)


def refusing(name: str) -> Callable[[Request], str | None]:
    """Return a fault: no file of this name is written."""

    def fault(request: Request) -> str | None:
        is_written = request.method in ("PUT", "POST") and request.key.endswith(name)
        return "403" if is_written else None

    return fault


def interrupted(store: Store, checkpoint: Path, folder: str) -> set[str]:
    """Let a merge fail at its last file of weights; return what it leaves."""
    store.fault = refusing(name_of(FILES))
    with pytest.raises(StoreError) as caught:
        merge(checkpoint, folder)
    left = f"finished files are kept in s3://{BUCKET}/{folder}; rerun with resume=True"
    assert left in caught.value.hint
    store.forget_requests()
    return set(store.files(folder))


def written(store: Store) -> set[str]:
    keys = {one.key for one in store.requests if one.method in ("PUT", "POST")}
    return {key.rpartition("/")[2] for key in keys}


def test_a_merge_that_failed_goes_on_with_its_finished_files(
    store: Store, checkpoint: Path, truth: dict[str, bytes]
) -> None:
    left = interrupted(store, checkpoint, "failed")
    assert left == {name_of(1), name_of(2), FINISHED_NAME, CLAIM_NAME}
    store.forget_requests()
    events: list[Event] = []
    merge(checkpoint, "failed", events.append)
    assert Chosen(f"resuming: 2 of {FILES} files were finished by an earlier merge") in events
    assert not written(store) & {name_of(1), name_of(2)}
    assert store.files("failed") == truth
    (lost,) = (one.text for one in events if isinstance(one, Warned) and "too large" in one.text)
    assert "l.0.b (35)" in lost  # of a file that the first merge made


def test_without_resume_it_is_refused_and_the_message_says_how_to_go_on(
    store: Store, checkpoint: Path
) -> None:
    left = interrupted(store, checkpoint, "waits")
    with pytest.raises(OutputError, match="is not complete") as caught:
        merge(checkpoint, "waits", resume=False)
    assert "resume=True" in caught.value.hint
    assert set(store.files("waits")) == left
    merge(checkpoint, "waits", dry_run=True)
    assert set(store.files("waits")) == left


def rewrite_source(store: Store, folder: str, checkpoint: Path) -> None:
    del store, folder
    (path, *_) = sorted(checkpoint.glob("*.pt"))
    path.write_bytes(path.read_bytes())


def replace_object(store: Store, folder: str, checkpoint: Path) -> None:
    del checkpoint
    store.s3.put_object(Bucket=BUCKET, Key=f"{folder}/{name_of(1)}", Body=b"theirs")


def damage_record(store: Store, folder: str, checkpoint: Path) -> None:
    del checkpoint
    store.s3.put_object(Bucket=BUCKET, Key=f"{folder}/{FINISHED_NAME}", Body=b'{"work": 1}')


@pytest.mark.parametrize(
    ("change", "kept", "why"),
    [
        (rewrite_source, set(), "the files of the checkpoint have changed"),
        (replace_object, {name_of(2)}, "1 finished file was changed since"),
        (damage_record, set(), None),
    ],
)
def test_what_is_not_as_it_was_is_made_again(  # noqa: PLR0917
    store: Store,
    checkpoint: Path,
    truth: dict[str, bytes],
    change: Callable[[Store, str, Path], None],
    kept: set[str],
    why: str | None,
) -> None:
    folder = f"made-again/{change.__name__}"
    interrupted(store, checkpoint, folder)
    change(store, folder, checkpoint)
    store.forget_requests()
    events: list[Event] = []
    merge(checkpoint, folder, events.append)
    weights = {name_of(number + 1) for number in range(FILES)}
    assert written(store) & weights == weights - kept
    warned = [one.text for one in events if isinstance(one, Warned)]
    assert why is None or any(why in text for text in warned)
    found = store.files(folder)
    records = [json.loads(one.pop("unshard.json")) for one in (found, truth)]
    assert found == truth
    outputs = [one["output"] | {"fingerprint": ""} for one in records]  # it has times of the files
    assert outputs[0] == outputs[1]


def test_other_options_begin_anew(store: Store, checkpoint: Path) -> None:
    interrupted(store, checkpoint, "other")
    events: list[Event] = []
    merge(checkpoint, "other", events.append, dtype="bfloat16")
    assert any("had other options" in one.text for one in events if isinstance(one, Warned))
    unshard.verify(f"s3://{BUCKET}/other", checkpoint, dtype="bfloat16", listener=ignore)
    assert not {CLAIM_NAME, FINISHED_NAME} & set(store.files("other"))


def test_what_no_merge_wrote_is_not_removed(store: Store, checkpoint: Path) -> None:
    left = interrupted(store, checkpoint, "strange")
    store.s3.put_object(Bucket=BUCKET, Key="strange/notes.txt", Body=b"mine")
    with pytest.raises(OutputError, match=r"since it was written: notes\.txt"):
        merge(checkpoint, "strange")
    assert store.files("strange")["notes.txt"] == b"mine"
    assert left - set(store.files("strange")) <= {CLAIM_NAME}


@pytest.mark.parametrize("stage", ["uploading", "committing"])
def test_a_merge_that_was_taken_over_stops_and_removes_nothing(
    store: Store, checkpoint: Path, truth: dict[str, bytes], stage: str
) -> None:
    folder = f"taken-{stage}"

    def take_over(event: Event) -> None:
        if isinstance(event, Stage) and event.name == stage:
            merge(checkpoint, folder)

    with pytest.raises(OutputError, match="changed by another process since it was written"):
        merge(checkpoint, folder, take_over)
    assert store.files(folder) == truth


def test_uploads_of_the_merge_that_took_over_are_not_aborted(store: Store) -> None:
    target = path_of(f"s3://{BUCKET}/uploads")
    assert isinstance(target, RemotePath)
    name = "model.safetensors"

    def begin() -> None:
        store.s3.create_multipart_upload(Bucket=BUCKET, Key=f"uploads/{name}")

    with BucketStage(target, overwrite=False, resume=True) as first:
        begin()
        assert first.abort_uploads([name])
        assert store.begun_uploads() == []
        with BucketStage(target, overwrite=False, resume=True):
            begin()
            first.abort_uploads([name])
            assert store.abort_uploads() == 1


def test_ceph_compares_tags_without_their_quotes_and_does_not_tell_that_of_an_upload(
    store: Store, checkpoint: Path, truth: dict[str, bytes]
) -> None:
    """This is what version 16 of Ceph's gateway does."""
    seen: set[str] = set()

    def as_ceph(request: Request) -> str | None:
        if request.method == "PUT" and request.if_match.startswith('"'):
            seen.add("quotes")
            return "412"
        if request.method == "POST" and "uploadId" in request.query:
            seen.add("upload")
            return "no etag"
        return None

    def fails(request: Request) -> str | None:
        return refusing(name_of(FILES))(request) or as_ceph(request)

    store.fault = fails
    with pytest.raises(StoreError, match="403"):
        merge(checkpoint, "ceph")
    store.forget_requests()
    store.fault = as_ceph
    merge(checkpoint, "ceph")
    assert not written(store) & {name_of(1), name_of(2)}
    assert store.files("ceph") == truth
    assert seen == {"quotes", "upload"}


def test_an_output_that_differs_is_removed(
    store: Store, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unshard.api import completing

    def wrong(*_: object) -> None:
        raise OutputError("it differs")

    monkeypatch.setattr(completing, "verify_output", wrong)
    with pytest.raises(OutputError, match="it differs"):
        merge(checkpoint, "differs")
    assert store.files("differs") == {}
