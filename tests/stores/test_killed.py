"""Merges into an object store, killed at every request: no config or index without its model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from moto.s3 import models

import unshard
from adapters import adapted
from bucket_server import BUCKET, Request, Store
from merging_child import OPTIONS
from ranks import save_ranks, snapshot
from unshard.progress import ignore
from unshard.write.bucket.claim import CLAIM_NAME
from unshard.write.bucket.ledger import FINISHED_NAME

pytestmark = pytest.mark.slow

MORE = (
    *("added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt"),
    *("preprocessor_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("tokenizer_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
INDEX = "model.safetensors.index.json"


LEAST = 16 << 10
"""The least size of parts, scaled as the tensors are."""


@pytest.fixture
def child(store: Store) -> Iterator["Popen[str]"]:
    assert store.endpoint  # the child inherits its address
    script = Path(__file__).parents[1] / "merging_child.py"
    pipe = subprocess.PIPE
    env = {**os.environ, "UNSHARD_TEST_LEAST_PART": str(LEAST)}
    with Popen([sys.executable, script], stdin=pipe, stdout=pipe, text=True, env=env) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def status_of(child: "Popen[str]", store: Store, line: str, number: int, when: str) -> int:
    """Let the child merge, kill that merge at a request, and return its exit status."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    pid = int(child.stdout.readline())

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    def fault(request: Request) -> str | None:
        if request.number != number:
            return None
        if when == "before":
            kill()
            return "cut"
        return "kill"

    store.kill = kill
    store.fault = fault
    return int(child.stdout.readline())


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_a_merge_killed_anywhere_leaves_no_config_without_its_model(
    store: Store, child: "Popen[str]", tmp_path: Path
) -> None:
    """Before every request, and after every request that the store has fulfilled."""
    checkpoint = tmp_path / "ckpt"
    adapted(checkpoint)
    for name in MORE:
        (checkpoint / name).write_text(name)
    unshard.merge(checkpoint, tmp_path / "out", listener=ignore, **OPTIONS)
    truth = {str(path): data for path, (_, _, data) in snapshot(tmp_path / "out").items()}
    adapter = {name for name in truth if name.startswith("lora_adapter/")}
    needs = {
        INDEX: {name for name in truth if "-of-" in name},
        "lora_adapter/adapter_config.json": adapter,
        "config.json": truth.keys() - {"unshard.json", *adapter} | {INDEX},
        "unshard.json": truth.keys(),
    }
    killed, left = 0, set[str]()
    for number in range(500):
        for when in ("before", "after"):
            folder = f"killed/{number}-{when}"
            store.forget_requests()
            status = status_of(child, store, f"{checkpoint} s3://{BUCKET}/{folder}", number, when)
            found = store.files(folder)  # by another client: what a reader would see
            for name in found.keys() - {CLAIM_NAME}:
                assert found[name] == truth[name], (name, number, when)
                assert needs.get(name, set()) <= found.keys(), (name, number, when)
            left |= found.keys()
            killed += status == signal.SIGKILL
        if status == 0:
            break
    assert found == truth
    assert killed >= 100, killed
    assert left == {*truth, CLAIM_NAME}
    store.abort_uploads()


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_a_merge_that_is_killed_twice_is_resumed_and_puts_nothing_finished_again(
    store: Store, child: "Popen[str]", tmp_path: Path
) -> None:
    """Before a request of the first merge, after one of the second; the third is not killed."""
    checkpoint = tmp_path / "ckpt"
    adapted(checkpoint)
    chosen = {"resume": True, "lora": "fuse", "max_shard_size": "300B", "verify": "light"}
    unshard.merge(checkpoint, tmp_path / "out", listener=ignore, **OPTIONS | chosen)
    truth = {str(path): data for path, (_, _, data) in snapshot(tmp_path / "out").items()}
    more = json.dumps(chosen, separators=(",", ":"))
    kills, gone_on = 0, 0
    for number in range(500):
        folder, statuses = f"resumed/{number}", []
        line = f"{checkpoint} s3://{BUCKET}/{folder} {more}"
        for at, when in ((number, "before"), (number, "after"), (-1, "before")):
            finished = finished_in(store.files(folder))
            store.forget_requests()
            statuses.append(status_of(child, store, line, at, when))
            put = {one.key for one in store.requests if one.method in ("PUT", "POST")}
            assert not {f"{folder}/{name}" for name in finished} & put, (number, when)
            found = store.files(folder)
            if "config.json" in found:
                assert truth.keys() - found.keys() <= {"unshard.json"}, (number, when)
            gone_on += bool(finished)
        kills += statuses.count(signal.SIGKILL)
        assert found == truth, (number, statuses)
        if signal.SIGKILL not in statuses:
            break
    assert kills >= 50, kills
    assert gone_on >= 20, gone_on
    assert store.begun_uploads() == []  # those of killed merges were aborted


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_a_merge_that_the_store_copies_is_killed_anywhere_and_goes_on(
    store: Store, child: "Popen[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before one request, after another; every second merge is not killed, and goes on.

    What a store has before a request it has after the one before: every second moment is new.
    """
    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", LEAST)
    tensors = {f"l.{number}.a": torch.randn(256, 256) for number in range(2)}
    checkpoint = save_ranks(tmp_path / "ckpt", tensors, 2)
    (checkpoint / "config.json").write_text('{"model_type": "x"}')
    chosen = {"resume": True, "max_shard_size": "300KB", "lora": "fuse", "verify": "light"}
    unshard.merge(checkpoint, tmp_path / "out", listener=ignore, **OPTIONS | chosen)
    truth = {str(path): data for path, (_, _, data) in snapshot(tmp_path / "out").items()}
    address = store.upload(checkpoint, "composed/ckpt")
    more = json.dumps(chosen, separators=(",", ":"))
    killed, copied = 0, 0
    for number in range(0, 500, 2):
        line = f"{address} s3://{BUCKET}/composed/{number} {more}"
        store.forget_requests()
        status = status_of(child, store, line, number, ("before", "after")[number // 2 % 2])
        copied += any(one.copied for one in store.requests)
        if status == 0:
            break
        killed += status == signal.SIGKILL
        found = store.files(f"composed/{number}")
        for name in found.keys() & truth.keys() - {"unshard.json"}:
            assert found[name] == truth[name], (name, number)
        if found.keys() & {INDEX, "config.json", "unshard.json"}:
            assert {name for name in truth if "-of-" in name} <= found.keys(), number
        if "unshard.json" not in found:
            store.forget_requests()
            assert status_of(child, store, line, -1, "before") == 0
            found = store.files(f"composed/{number}")
        found.pop(CLAIM_NAME, None)
        found.pop(FINISHED_NAME, None)
        assert found.keys() == truth.keys(), number
        assert store.begun_uploads() == [], number
    assert copied >= 10, copied
    assert killed >= 20, killed


def finished_in(files: dict[str, bytes]) -> set[str]:
    """Return the files that a record names as finished."""
    return set(json.loads(files.get(FINISHED_NAME, b'{"files": []}'))["files"])
