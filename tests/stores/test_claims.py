"""Claims of places: their beats, and how processes wait for those of others."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from bucket_server import BUCKET, Request, Store
from unshard.errors import OutputError
from unshard.progress import Chosen, Event, Warned, ignore
from unshard.stores.remote_path import RemotePath
from unshard.write.bucket import claim as claims
from unshard.write.bucket.claim import CLAIM_NAME
from unshard.write.bucket.stage import BucketStage
from unshard.write.stage import BusyError
from waiting import wait_until

RECORD = b'{"unshard": "1", "output": {"files": {}}}\n'
LIMITS = {"part_bytes": 5 << 20, "at_once": 2}

_numbers = count()


@pytest.fixture
def target(store: Store) -> RemotePath:
    """An empty place."""
    assert store.endpoint
    return RemotePath.of_url(f"s3://{BUCKET}/claims/{next(_numbers)}")


@pytest.fixture
def put(store: Store, target: RemotePath) -> Callable[..., None]:
    """Return what writes a claim of another process."""

    def write(**fields: object) -> None:
        key, claim = f"{target.key}/{CLAIM_NAME}", json.dumps({"id": "theirs", **fields})
        store.s3.put_object(Bucket=BUCKET, Key=key, Body=claim.encode())

    return write


@pytest.fixture
def beat(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets how often claims are rewritten, seconds."""
    return lambda seconds: monkeypatch.setattr(claims, "BEAT_S", seconds)


def claim_at(store: Store, target: RemotePath) -> dict[str, Any]:
    """Return the claim that the store has; nothing without one."""
    parsed: dict[str, Any] = json.loads(store.files(target.key).get(CLAIM_NAME, b"{}"))
    return parsed


def beating() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "unshard-claim"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not beating()


def test_a_claim_is_rewritten_as_long_as_its_stage_lasts(
    store: Store, target: RemotePath, beat: Callable[[float], None]
) -> None:
    beat(0.01)
    with pytest.raises(KeyboardInterrupt), BucketStage(target):
        first = claim_at(store, target)
        wait_until(lambda: claim_at(store, target)["count"] > first["count"] + 2, "beats")
        last = claim_at(store, target)
        assert last == first | {"count": last["count"], "beats": 0.01}
        raise KeyboardInterrupt
    assert not beating()
    assert store.files(target.key) == {}


def test_a_short_merge_writes_its_claim_once(store: Store, target: RemotePath) -> None:
    with BucketStage(target) as stage:
        stage.commit(RECORD)
    assert [one.key for one in store.requests if one.method == "PUT"] == [
        f"{target.key}/{CLAIM_NAME}",
        f"{target.key}/unshard.json",
    ]


@pytest.mark.parametrize("ends", ["committed", "failed"])
def test_no_beat_writes_the_claim_that_was_removed(
    store: Store, target: RemotePath, beat: Callable[[float], None], ends: str
) -> None:
    """Also in a store that ignores the condition of a beat."""
    beat(0.001)
    store.fault = lambda request: "any" if request.if_match else None
    expected = {"unshard.json"} if ends == "committed" else set()
    for number in range(20):
        place = target / str(number)
        with suppress(OutputError), BucketStage(place) as stage:
            stage.upload("model.safetensors", iter([bytearray(b"x")]), **LIMITS)
            if ends == "failed":
                raise OutputError("no")
            stage.commit(b'{"output": {"files": {"model.safetensors": 1}}}')
        assert set(store.files(place.key)) - {"model.safetensors"} == expected, number
    beats = [one for one in store.requests if one.method == "PUT" and one.if_match]
    assert beats  # some were under way


def test_a_beat_that_fails_is_made_up_for_by_the_next(
    store: Store,
    target: RemotePath,
    beat: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    beat(0.01)
    caplog.set_level(logging.INFO)

    def fault(request: Request) -> str | None:
        return "400" if request.method == "PUT" and request.if_match else None

    with BucketStage(target):
        store.fault = fault
        wait_until(lambda: "cannot be rewritten now" in caplog.text, "a failing beat")
        store.forget_requests()
        before = claim_at(store, target)
        wait_until(lambda: claim_at(store, target) != before, "a beat")
    assert store.files(target.key) == {}


def test_a_beat_whose_answer_was_lost_is_not_taken_for_anothers(
    store: Store, target: RemotePath, beat: Callable[[float], None]
) -> None:
    beat(0.01)
    lost: list[int] = []

    def fault(request: Request) -> str | None:
        if request.method != "PUT" or not request.if_match or len(lost) > 2:
            return None
        lost.append(request.number)
        return "cut after"

    with BucketStage(target) as stage:
        store.fault = fault
        wait_until(lambda: len(lost) > 2, "lost answers")
        before = claim_at(store, target)
        wait_until(lambda: claim_at(store, target) != before, "a beat")
        stage.commit(RECORD)


def test_a_claim_of_another_process_is_not_rewritten(
    store: Store, target: RemotePath, beat: Callable[[float], None], put: Callable[..., None]
) -> None:
    beat(0.01)
    with pytest.raises(BusyError, match=CLAIM_NAME), BucketStage(target) as stage:
        put(beats=20)
        wait_until(lambda: not beating(), "the last beat")
        stage.commit(RECORD)
    assert claim_at(store, target) == {"id": "theirs", "beats": 20}


def test_a_claim_that_was_removed_is_not_written_again(
    store: Store, target: RemotePath, beat: Callable[[float], None]
) -> None:
    beat(0.01)
    with BucketStage(target):
        store.s3.delete_object(Bucket=BUCKET, Key=f"{target.key}/{CLAIM_NAME}")
        wait_until(lambda: not beating(), "the last beat")
    assert store.files(target.key) == {}


def waited(target: RemotePath, is_made: Callable[[], bool] = lambda: False) -> list[Event]:
    """Wait for a turn; return what was told."""
    events: list[Event] = []
    with BucketStage(target, resume=True).turn(is_made, events.append):
        pass
    return events


def test_an_empty_place_is_not_waited_for(store: Store, target: RemotePath) -> None:
    assert waited(target) == []
    assert [(one.method, one.key) for one in store.requests] == [
        ("GET", f"{target.key}/{CLAIM_NAME}")
    ]


def test_a_merge_that_runs_is_waited_for_until_its_claim_is_gone(
    store: Store, target: RemotePath, beat: Callable[[float], None]
) -> None:
    beat(0.3)
    with ThreadPoolExecutor(1) as pool:
        with BucketStage(target) as stage:
            begun = claim_at(store, target)["begun"]
            waits = pool.submit(waited, target)
            wait_until(lambda: claim_at(store, target)["count"] > 9, "more beats than death needs")
            assert not waits.done()
            stage.commit(RECORD)
        assert waits.result() == [
            Chosen(f"waiting for a merge into {target} that began at {begun}")
        ]


def test_the_wait_ends_when_the_output_is_made(
    store: Store, target: RemotePath, beat: Callable[[float], None]
) -> None:
    beat(0.05)
    answers = iter([False, False, True])
    with BucketStage(target):
        assert len(waited(target, lambda: next(answers))) == 1
        assert claim_at(store, target)
    assert not list(answers)


def test_a_claim_that_does_not_change_any_more_is_taken_over(
    store: Store, target: RemotePath, beat: Callable[[float], None], put: Callable[..., None]
) -> None:
    """By one of those who waited for it; another one must wait for that one."""
    beat(0.05)
    put(beats=0.05, begun="2026-01-01")
    stages = [BucketStage(target, resume=True) for _ in range(2)]
    for one in stages:
        with one.turn(lambda: False, ignore):
            pass
    first, second = stages
    with first:
        before = claim_at(store, target)
        assert before["id"] != "theirs"
        with pytest.raises(BusyError, match="and is not complete"):
            second.__enter__()
        first.commit(RECORD)
    assert set(store.files(target.key)) == {"unshard.json"}


def test_a_claim_that_changes_again_is_not_taken_over(
    store: Store, target: RemotePath, beat: Callable[[float], None], put: Callable[..., None]
) -> None:
    """That process was suspended, or cut off from the store."""
    beat(0.05)
    put(beats=0.05)
    stage = BucketStage(target, resume=True)
    with stage.turn(lambda: False, ignore):
        put(beats=0.05, count=1)
        with pytest.raises(BusyError):
            stage.__enter__()
    assert claim_at(store, target)["id"] == "theirs"


def test_a_claim_that_was_not_waited_for_is_not_taken_over(
    store: Store, target: RemotePath, put: Callable[..., None]
) -> None:
    stage = BucketStage(target, resume=True)
    with stage.turn(lambda: False, ignore):
        put(beats=0)
        with pytest.raises(BusyError):
            stage.__enter__()
    assert claim_at(store, target)["id"] == "theirs"


def test_the_claim_of_a_merge_that_failed_is_taken_over_at_once(
    store: Store, target: RemotePath, beat: Callable[[float], None], put: Callable[..., None]
) -> None:
    """It has kept what was finished, and no process works on it."""
    beat(10_000)
    put(beats=0)
    stage = BucketStage(target, resume=True)
    with stage.turn(lambda: False, ignore), stage:
        assert claim_at(store, target)["beats"] == 10_000
        stage.commit(RECORD)


@pytest.mark.parametrize("claim", [{}, {"beats": "20"}, {"beats": None}, {"beats": [1]}])
def test_a_claim_without_beats_is_waited_for_until_it_is_removed(
    store: Store,
    target: RemotePath,
    beat: Callable[[float], None],
    put: Callable[..., None],
    claim: dict[str, object],
) -> None:
    """It is that of an older version, which may still run; the message has what to do."""
    beat(0.01)
    put(begun="2026-01-01T00:00:00+00:00", **claim)
    asked = count()

    def is_made() -> bool:
        if next(asked) == 40:  # 0.1 seconds, more than six beats
            store.s3.delete_object(Bucket=BUCKET, Key=f"{target.key}/{CLAIM_NAME}")
        return False

    told = waited(target, is_made)
    assert told[0] == Chosen(
        f"waiting for a merge into {target} that began at 2026-01-01T00:00:00+00:00"
    )
    if "beats" not in claim:
        (warned,) = told[1:]
        assert isinstance(warned, Warned)
        assert f"{target}/{CLAIM_NAME}: its claim does not show" in warned.message
        assert "resume=True" in warned.message


def test_a_file_of_the_merge_that_took_over_is_not_replaced(
    store: Store, target: RemotePath
) -> None:
    """The upload of the first one was under way while that was suspended."""
    name, goes_on = "model.safetensors", threading.Event()

    def blocks() -> Iterator[bytearray]:
        yield bytearray(b"first")
        goes_on.wait()

    first, second = (BucketStage(target, resume=True) for _ in range(2))
    with ThreadPoolExecutor(1) as pool, pytest.raises(BusyError, match=CLAIM_NAME), first:
        upload = pool.submit(first.upload, name, blocks(), **LIMITS)
        wait_until(store.begun_uploads, "the upload")
        with second:
            second.upload(name, iter([bytearray(b"second")]), **LIMITS)
            goes_on.set()
            assert isinstance(upload.exception(), BusyError)
            assert store.files(target.key)[name] == b"second"
            assert store.begun_uploads() == []
            second.commit(b'{"output": {"files": {"model.safetensors": 6}}}')
        upload.result()
    assert store.files(target.key)[name] == b"second"
