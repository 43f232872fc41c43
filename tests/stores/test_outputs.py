"""Outputs in an object store: the bytes of a local merge, whole or not at all, and nothing lost."""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from bucket_server import BUCKET, SECRETS, Request, Store
from merged_layouts import LAYOUTS, make_layout
from oracle.conftest import WriteCheckpoint
from ranks import save_ranks, snapshot
from unshard import OutputError, UsageError
from unshard.errors import StoreError, UnshardError
from unshard.keywords import Cast, Verify
from unshard.progress import Advanced, Event, Stage, ignore
from unshard.stores.objects import Stored
from unshard.write.bucket.claim import CLAIM_NAME

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

MEMORY = 256_000_000
LAST = ("config.json", "unshard.json")


@pytest.fixture(autouse=True)
def _nothing_unfinished(store: Store) -> Iterator[None]:
    yield
    assert not store.abort_uploads()


def url(folder: str) -> str:
    return f"s3://{BUCKET}/{folder}"


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path): data for path, (_, _, data) in snapshot(directory).items()}


def made(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files without the fingerprint of sources, which are on a disk or in a store."""
    found = re.compile(rb'(?<="fingerprint": ")\w+')
    return {name: found.sub(b"", data) for name, data in files.items()}


def large(directory: Path) -> Path:
    """Write a checkpoint whose weights are uploaded in several parts, in two files."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"w{n}": torch.randn(1000, 1100, generator=generator) for n in range(5)}
    save_ranks(directory, tensors, 2)
    (directory / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("source", ["disk", "bucket"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_objects_are_the_files_of_a_merge_on_disk(
    store: Store, write_checkpoint: WriteCheckpoint, tmp_path: Path, layout: str, source: str
) -> None:
    checkpoint, folder = tmp_path / "ckpt", f"{layout.replace(' ', '_')}/{source}"
    options = make_layout(layout, checkpoint, write_checkpoint)
    merged = unshard.merge(checkpoint, tmp_path / "out", **options)
    before = snapshot(tmp_path)
    place = checkpoint if source == "disk" else store.upload(checkpoint, f"{folder}/ckpt")
    report = unshard.merge(place, url(f"{folder}/out"), **options)
    assert snapshot(tmp_path) == before
    objects, files = made(store.files(f"{folder}/out")), made(files_in(tmp_path / "out"))
    if source == "bucket":  # the record names the files of what was decompressed on one side
        records = [json.loads(one.pop("unshard.json")) for one in (objects, files)]
        assert records[0]["output"] == records[1]["output"]
    assert objects == files
    assert report.files == merged.files
    assert report.output == url(f"{folder}/out")


TWO_FILES: dict[str, Any] = {"max_shard_size": "14MB"}


def test_an_existing_output_is_refused_and_stays(store: Store, tmp_path: Path) -> None:
    checkpoint = large(tmp_path / "ckpt")
    store.s3.put_object(Bucket=BUCKET, Key="taken/model/notes.txt", Body=b"theirs")
    for overwrite, hint in ((False, "give another output"), (True, "atomically")):
        with pytest.raises(OutputError, match="exists already") as caught:
            unshard.merge(checkpoint, url("taken/model"), overwrite=overwrite)
        assert hint in caught.value.hint
    with pytest.raises(OutputError, match="exists already"):
        unshard.merge(checkpoint, url("taken/model"), dry_run=True)
    assert store.files("taken") == {"model/notes.txt": b"theirs"}
    assert not [one for one in store.requests if one.method in ("PUT", "POST", "DELETE")]


def test_small_tensors_are_read_together(store: Store, tmp_path: Path) -> None:
    """Neighbours in a rank file by one request, whichever tensors of the output they belong to."""
    generator = torch.Generator().manual_seed(4)
    tensors = {f"w{n}": torch.randn(40, 30 + n, generator=generator) for n in range(100)}
    local = save_ranks(tmp_path / "ckpt", tensors, 2)
    source = store.upload(local, "small/ckpt")
    unshard.merge(source, url("small/out"), dry_run=True, config="none")
    planning = len([one for one in store.requests if one.range])
    store.forget_requests()
    unshard.merge(source, url("small/out"), verify="off", config="none")
    assert len([one for one in store.requests if one.range]) <= planning + 4
    unshard.merge(local, tmp_path / "out", config="none")
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert store.files("small/out")["model.safetensors"] == weights


def test_objects_are_compared_by_size_and_tag() -> None:
    ours = Stored(3, '"0x8D"')
    assert ours.is_same(Stored(3, "0x8D"))  # Azure: the answer to a put, and its listing
    assert ours.is_same(Stored(3, None))
    assert Stored(3, None).is_same(Stored(3, None))
    assert not ours.is_same(Stored(3, '"0x8E"'))
    assert not ours.is_same(Stored(4, '"0x8D"'))


def test_a_dry_run_writes_nothing(store: Store, tmp_path: Path) -> None:
    report = unshard.merge(large(tmp_path / "ckpt"), url("dry"), dry_run=True)
    assert report.dry_run
    assert report.output == url("dry")
    assert {one.method for one in store.requests} == {"GET"}


@pytest.mark.parametrize("verify", ["light", "full", "off"])
def test_the_record_is_written_last_and_the_claim_is_removed(
    store: Store, tmp_path: Path, verify: Verify
) -> None:
    checkpoint, folder = large(tmp_path / "ckpt"), f"order-{verify}"
    events: list[Event] = []
    report = unshard.merge(
        checkpoint, url(folder), listener=events.append, verify=verify, **TWO_FILES
    )
    unshard.merge(checkpoint, tmp_path / "out", **TWO_FILES)
    assert store.files(folder) == files_in(tmp_path / "out")
    written: list[str] = []
    for one in store.requests:
        is_whole = one.method == "PUT" and not one.query
        if is_whole or (one.method == "POST" and "uploadId=" in one.query):
            written.append(one.key.removeprefix(f"{folder}/"))
    weights = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert written[:3] == [CLAIM_NAME, *weights]
    assert written[-2:] == list(LAST)
    assert set(written) == {*files_in(tmp_path / "out"), CLAIM_NAME}
    sent = sum(event.written_bytes for event in events if isinstance(event, Advanced))
    stages = {one.name: one.total_bytes for one in events if isinstance(one, Stage)}
    assert stages["uploading"] == report.bytes_written
    if verify != "full":  # which counts what it compares, too
        assert sent == report.bytes_written


def refusing(method: str, part: str, what: str, times: int = 1) -> Callable[[Request], str | None]:
    """Return a fault of the first requests of a method whose path contains something."""
    left = [times]

    def fault(request: Request) -> str | None:
        if request.method == method and part in request.target and left[0]:
            left[0] -= 1
            return what
        return None

    return fault


@pytest.mark.parametrize("what", ["503", "cut before", "cut after"])
@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("PUT", CLAIM_NAME),
        ("POST", "uploads"),
        ("PUT", "partNumber=2"),
        ("POST", "uploadId="),
        ("PUT", "index.json"),
        ("PUT", "config.json"),
        ("PUT", "unshard.json"),
        ("POST", "?delete"),
        ("GET", "list-type"),
    ],
)
def test_a_fault_that_passes_is_not_noticed(
    store: Store, tmp_path: Path, method: str, part: str, what: str
) -> None:
    checkpoint = large(tmp_path / "ckpt")
    unshard.merge(checkpoint, tmp_path / "out", **TWO_FILES)
    store.fault = refusing(method, part, what)
    folder = f"fault-{method}-{part.strip('=?')}-{what}".replace(" ", "-")
    unshard.merge(checkpoint, url(folder), **TWO_FILES)
    assert store.files(folder) == files_in(tmp_path / "out")
    if (part, what) == ("uploads", "cut after"):  # the store began one whose number never came
        assert store.abort_uploads() == 1


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("PUT", CLAIM_NAME),
        ("POST", "uploads"),
        ("PUT", "partNumber=2"),
        ("POST", "uploadId="),
        ("PUT", "tokenizer.json"),
        ("GET", "00001-of-00002"),
        ("PUT", "config.json"),
        ("PUT", "unshard.json"),
    ],
)
def test_a_fault_that_stays_leaves_nothing(
    store: Store, tmp_path: Path, method: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, folder = large(tmp_path / "ckpt"), f"lasting-{method}-{part.strip('=?')}"
    store.fault = refusing(method, f"{part}", "400", times=1_000_000)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StoreError, match="400") as caught:
        unshard.merge(checkpoint, url(folder), **TWO_FILES)
    said = f"{caught.value!r} {caught.value} {caplog.text}"
    assert not [secret for secret in SECRETS if secret in said]
    assert store.files(folder) == {}


def test_what_cannot_be_removed_is_named(store: Store, tmp_path: Path) -> None:
    def fault(request: Request) -> str | None:
        failing = "config.json" in request.target or "?delete" in request.target
        return "400" if failing and request.method in ("PUT", "POST") else None

    checkpoint = large(tmp_path / "ckpt")
    store.fault = fault
    with pytest.raises(OutputError, match="5 objects of the unfinished output are left") as caught:
        unshard.merge(checkpoint, url("left"), **TWO_FILES)
    assert isinstance(caught.value.__cause__, StoreError)
    store.forget_requests()
    with pytest.raises(OutputError, match=r"began at 20.*and is not complete") as caught:
        unshard.merge(checkpoint, url("left"), **TWO_FILES)
    assert "remove everything there" in caught.value.hint
    assert not set(store.files("left")) & set(LAST)


@pytest.mark.parametrize("number", range(4))
def test_of_two_merges_at_once_one_wins(store: Store, tmp_path: Path, number: int) -> None:
    checkpoint, target = large(tmp_path / "ckpt"), url(f"race{number}")
    ended: dict[Cast, UnshardError | None] = {}
    start = threading.Barrier(2)

    def merge(dtype: Cast) -> None:
        start.wait()
        try:
            unshard.merge(checkpoint, target, dtype=dtype, listener=ignore)
            ended[dtype] = None
        except UnshardError as error:
            ended[dtype] = error

    threads = [threading.Thread(target=merge, args=(one,)) for one in ("float32", "bfloat16")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    (won,) = (dtype for dtype, error in ended.items() if error is None)
    assert all(isinstance(error, OutputError | None) for error in ended.values())
    unshard.merge(checkpoint, tmp_path / "out", dtype=won)
    assert store.files(f"race{number}") == files_in(tmp_path / "out")


def test_an_object_that_another_writes_is_not_replaced(store: Store, tmp_path: Path) -> None:
    """One under a name of ours, one under another, and the claim itself."""
    checkpoint = large(tmp_path / "ckpt")
    for name in ("tokenizer.json", "theirs.txt", CLAIM_NAME, "unshard.json"):

        def fault(request: Request, name: str = name) -> str | None:
            if request.method == "POST" and "uploadId=" in request.target:
                store.s3.put_object(Bucket=BUCKET, Key=f"shared/{name}", Body=b"theirs")
            return None

        store.fault = fault
        with pytest.raises(OutputError, match=name):
            unshard.merge(checkpoint, url("shared"))
        left = store.files("shared")
        if name == CLAIM_NAME:  # it is their output now
            assert left.keys() >= {CLAIM_NAME, "model.safetensors"}
            assert "config.json" not in left
        else:
            assert left == {name: b"theirs"}, name
        for key in left:
            store.s3.delete_object(Bucket=BUCKET, Key=f"shared/{key}")


def test_a_source_that_changes_is_not_committed(store: Store, tmp_path: Path) -> None:
    checkpoint = large(tmp_path / "ckpt")
    touched = next(checkpoint.glob("*rank_0.pt"))

    def listener(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "uploading":
            os.utime(touched, ns=(1, 1))

    with pytest.raises(unshard.CorruptError, match="has changed while it was being read"):
        unshard.merge(checkpoint, url("changed"), listener=listener)
    assert store.files("changed") == {}


@pytest.mark.parametrize("stage", ["uploading", "verifying", "committing"])
def test_an_interrupted_merge_leaves_nothing(store: Store, tmp_path: Path, stage: str) -> None:
    """Ctrl-C, while the second part of a file is under way, or at the beginning of a stage."""
    checkpoint, folder = large(tmp_path / "ckpt"), f"interrupted-{stage}"

    def fault(request: Request) -> str | None:
        if stage == "uploading" and "partNumber=2" in request.target:
            os.kill(os.getpid(), signal.SIGINT)
        return None

    def listener(event: Event) -> None:
        if isinstance(event, Stage) and event.name == stage != "uploading":
            os.kill(os.getpid(), signal.SIGINT)

    store.fault = fault
    with pytest.raises(KeyboardInterrupt):
        unshard.merge(checkpoint, url(folder), listener=listener, **TWO_FILES)
    assert store.files(folder) == {}


def test_a_push_to_the_hub_needs_a_disk(store: Store, tmp_path: Path) -> None:
    checkpoint = large(tmp_path / "ckpt")
    with pytest.raises(UsageError, match="needs an output on a disk") as caught:
        unshard.merge(checkpoint, url("refused"), dry_run=True, push_to_hub="someone/model")
    assert caught.value.hint.endswith(f": unshard push {checkpoint} someone/model")
    assert not store.files("refused")


MERGE = """
import json, sys, unshard
report = unshard.merge(*sys.argv[1:], config="none", listener=lambda event: None)
print(json.dumps([report.bytes_written, report.peak_memory_bytes]))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("memory")
def test_nothing_is_written_to_disk_in_little_memory(store: Store, tmp_path: Path) -> None:
    """A process that may write no byte to any file merges more than it may have in memory."""
    state = {"large": torch.zeros(80_000, 1000), "small": torch.ones(3)}  # 320 MB
    source = store.upload(save_ranks(tmp_path / "ckpt", state, 2), "memory/ckpt")
    (tmp_path / "home").mkdir()
    before = sorted(tmp_path.rglob("*"))
    homes = dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, "-c", MERGE, source, url("memory/out")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | homes | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    written, peak = json.loads(done.stdout)
    assert written > 320_000_000 > MEMORY > peak
    with unshard.virtual(tmp_path / "ckpt", config="none", listener=ignore) as files:
        truth = files["model.safetensors"].read()
    assert store.files("memory/out")["model.safetensors"] == truth
    assert not [secret for secret in SECRETS if secret in done.stdout + done.stderr]


@pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")
def test_all_steps_and_averages_go_into_a_bucket(store: Store, tmp_path: Path) -> None:
    for step in (1, 2):
        state = {"w": torch.full((70, 30), float(step))}
        save_ranks(tmp_path / "run" / f"global_step_{step}" / "actor", state, 2)
    run = store.upload(tmp_path / "run", "run")
    for _ in range(2):
        unshard.merge_all(run, url("all"), reuse=True, config="none")
    unshard.merge_all(tmp_path / "run", tmp_path / "all", config="none")
    assert made(store.files("all")) == made(files_in(tmp_path / "all"))
    unshard.average(run, url("mean"), config="none")
    unshard.average(tmp_path / "run", tmp_path / "mean", config="none")
    assert made(store.files("mean")) == made(files_in(tmp_path / "mean"))
    unshard.merge(run, config="none")
    expected = files_in(tmp_path / "all" / "global_step_2")
    assert made(store.files("run/merged/global_step_2")) == made(expected)
