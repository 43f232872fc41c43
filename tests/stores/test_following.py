"""A run is followed into an object store, and one that is in a store."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import unshard
from bucket_server import BUCKET, Request, Store
from evaluation.runs import checkpoint
from ranks import assert_same, merged, save_ranks, some_tensors
from unshard import OutputError, UnshardError, UsageError
from unshard.api.following.followed import FollowState, StepRecord
from unshard.errors import StoreError
from unshard.progress import Event, Warned
from unshard.stores.remote_path import path_of
from unshard.write.discarding import discard

pytestmark = [
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
    pytest.mark.xdist_group("a bucket"),
]


def follow(run: str | Path, out: str | Path, **options: Any) -> list[int | None]:
    options = {"idle": 0.3, "interval": 0.05, "config": "none", **options}
    return [one.step for one in unshard.follow(run, out, **options)]


def steps(store: Store, folder: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in store.files(folder)} - {"_unshard"})


def test_outputs_in_a_store_are_made_once_and_the_last_are_kept(
    store: Store, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", f"s3://{BUCKET}/following-followed"
    for step in (5, 10, 15):
        checkpoint(run, step)
    assert follow(run, out, keep=2) == [5, 10, 15]
    assert steps(store, "following-followed") == ["checkpoint-10", "checkpoint-15"]
    unshard.merge(run / "checkpoint-15", tmp_path / "out", config="none")
    truth = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert store.files("following-followed")["checkpoint-15/model.safetensors"] == truth
    before = store.files("following-followed")
    assert follow(run, out, keep=2) == []
    assert store.files("following-followed") == before


def test_a_run_in_a_store_is_followed_to_a_disk(store: Store, tmp_path: Path) -> None:
    for step in (5, 10):
        made = checkpoint(tmp_path / "run", step)
        store.upload(made, f"following-trained/{made.name}")
    run, out = f"s3://{BUCKET}/following-trained", tmp_path / "out"
    assert follow(run, out) == [5, 10]
    assert follow(run, out) == []
    assert (out / "checkpoint-10" / "model.safetensors").exists()


def test_an_object_that_others_wrote_keeps_an_output(store: Store, tmp_path: Path) -> None:
    run, out = tmp_path / "run", f"s3://{BUCKET}/following-strange"
    for step in (5, 10):
        checkpoint(run, step)
    follow(run, out)
    store.s3.put_object(
        Bucket=BUCKET, Key="following-strange/checkpoint-5/results.json", Body=b"{}"
    )
    before, heard = store.files("following-strange/checkpoint-5"), list[Event]()
    checkpoint(run, 15)
    assert follow(run, out, keep=1, listener=heard.append) == [15]
    assert store.files("following-strange/checkpoint-5") == before
    assert steps(store, "following-strange") == ["checkpoint-15", "checkpoint-5"]
    assert [one for one in heard if isinstance(one, Warned) and "results.json" in one.message]


def test_what_was_no_output_is_not_removed(store: Store) -> None:
    store.s3.put_object(Bucket=BUCKET, Key="following-other/file", Body=b"1")
    with pytest.raises(OutputError, match="is not removed"):
        discard(path_of(f"s3://{BUCKET}/following-other"))
    assert store.files("following-other") == {"file": b"1"}


def test_a_removal_takes_the_config_first_and_the_record_last(store: Store, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "run", 5)
    (made / "config.json").write_text(json.dumps({"model_type": "x"}))
    address = f"s3://{BUCKET}/following-removed/checkpoint-5"
    unshard.merge(made, address, allow_missing=True, allow_unexpected=True)
    whole = set(store.files("following-removed/checkpoint-5"))
    assert {"config.json", "model.safetensors", "unshard.json"} <= whole
    left = list[set[str]]()
    for _ in whole:
        asked = iter(range(99))

        def second_fails(request: Request, asked: Iterator[int] = asked) -> str | None:
            return "403" if request.method in {"POST", "DELETE"} and next(asked) else None

        store.fault = second_fails
        with suppress(StoreError):
            discard(path_of(address))
        store.fault = lambda _: None
        left.append(set(store.files("following-removed/checkpoint-5")))
    assert left[0] == whole - {"config.json"}
    assert left[-2:] == [{"unshard.json"}, set()]


def test_the_second_process_in_a_store_ends_before_it_forgets_a_step(store: Store) -> None:
    assert store.endpoint
    place = path_of(f"s3://{BUCKET}/following-shared")
    first, second = FollowState(place), FollowState(place)
    done = StepRecord(5, 0, "a", "{}", "run")
    first.put("checkpoint-5", done)
    for _ in range(2):  # what it writes is the same but for who writes it
        with pytest.raises(UsageError, match="another process follows a run into this directory"):
            second.put("checkpoint-5", done)
    assert list(FollowState(place).steps) == ["checkpoint-5"]


def test_of_two_followers_into_a_store_one_ends(store: Store, tmp_path: Path) -> None:
    run, out, ran = tmp_path / "run", f"s3://{BUCKET}/following-raced", tmp_path / "ran"
    for step in (5, 10):
        checkpoint(run, step)
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    command = [sys.executable, "-c", code, str(ran), "{step} "]
    options: dict[str, Any] = {"interval": 0.05, "config": "none", "exec": command}
    first, second = (unshard.follow(run, out, idle=0.3, **options) for _ in range(2))
    assert [next(first).step, next(second).step] == [5, 10]
    with pytest.raises(UsageError, match="another process follows a run into this directory"):
        next(first)
    assert list(second) == []
    assert ran.read_text() == "5 10 "
    assert store.files("following-raced")


def test_outputs_in_a_store_are_not_pushed(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", 5)
    with pytest.raises(UnshardError, match="needs outputs on a disk"):
        follow(tmp_path / "run", f"s3://{BUCKET}/following-pushed", push_to_hub="someone/model")


def test_a_step_that_is_saved_again_while_it_waits_is_merged_as_it_is_then(
    store: Store, tmp_path: Path
) -> None:
    for step in (5, 10):
        made = checkpoint(tmp_path / "run", step)
        store.upload(made, f"following-waiting/{made.name}")
    run, out = f"s3://{BUCKET}/following-waiting", tmp_path / "out"
    following = unshard.follow(run, out, interval=0.05, idle=1.0, config="none")
    assert next(following).step == 5
    again = save_ranks(tmp_path / "again" / "pytorch_model_fsdp_0", some_tensors(1010), 2)
    store.upload(again.parent, "following-waiting/checkpoint-10")
    assert [one.step for one in following] == [10]
    assert_same(merged(out / "checkpoint-10"), some_tensors(1010))
