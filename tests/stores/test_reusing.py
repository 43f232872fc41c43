"""`--reuse` in an object store: several processes make one output once, also if one is killed."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from bucket_server import BUCKET, Request, Store
from ranks import save_ranks
from three_files import CHOSEN, FILES, name_of, save_three_files
from unshard import OutputError
from unshard.errors import StoreError
from unshard.progress import Event, Stage, ignore
from unshard.write.bucket import claim as claims
from unshard.write.bucket.claim import CLAIM_NAME
from waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

HEADER = 2 << 20
"""More than is read of a file for its header, bytes."""

PLACE = f"s3://{BUCKET}/reuse"

BEAT_S = 0.5
"""A claim that is not rewritten for six times as long is taken over: also on a busy machine."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of three output files."""
    return save_three_files(tmp_path / "ckpt")


@pytest.fixture
def truth(checkpoint: Path, tmp_path: Path) -> dict[str, bytes]:
    unshard.merge(checkpoint, tmp_path / "truth", listener=ignore, **CHOSEN)
    return {path.name: path.read_bytes() for path in (tmp_path / "truth").iterdir()}


def merge(
    checkpoint: Path, folder: str, told: Callable[[Event], None] = ignore, **more: object
) -> unshard.Report:
    options: dict[str, Any] = {**CHOSEN, "reuse": True, **more}
    return unshard.merge(checkpoint, f"{PLACE}/{folder}", listener=told, **options)


class Gate:
    """A fault that holds back one request until it is opened; that one is cut off then."""

    def __init__(self, store: Store, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._reached, self._opened = threading.Event(), threading.Event()
        store.fault = self._fault

    def _fault(self, request: Request) -> str | None:
        is_meant = request.method in ("PUT", "POST") and self._name in request.target
        with self._lock:
            if not is_meant or self._reached.is_set():
                return None
            self._reached.set()
        self._opened.wait()
        return "cut"

    def reach(self) -> None:
        wait_until(self._reached.is_set, f"a request for {self._name}")

    def open(self) -> None:
        self._opened.set()


class Child:
    """A process that merges, and the file that it writes to."""

    def __init__(self, log: Path, *arguments: object) -> None:
        script = Path(__file__).parents[1] / "reusing_in_store.py"
        self._log = log
        with log.open("wb") as out:
            command = [sys.executable, "-W", "ignore", str(script), *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def says(self) -> str:
        return self._log.read_text()

    def waits(self) -> bool:
        return "waiting for a merge into" in self.says()

    def end(self) -> str:
        """Wait until it ends; return the last line that it wrote."""
        wait_until(lambda: self.process.poll() is not None, self.says())
        return self.says().splitlines()[-1]


Start = Callable[..., Child]


@pytest.fixture
def start(store: Store, checkpoint: Path, tmp_path: Path) -> Iterator[Start]:
    """Return what starts a merge of the checkpoint into a folder; all have ended afterwards."""
    assert store.endpoint  # the children inherit its address
    children: list[Child] = []

    def run(folder: str, **more: object) -> Child:
        options = json.dumps({**CHOSEN, "reuse": True, **more})
        log = tmp_path / f"{len(children)}.log"
        child = Child(log, BEAT_S, checkpoint, f"{PLACE}/{folder}", options)
        children.append(child)
        return child

    yield run
    for one in children:
        one.process.kill()
        one.process.wait()


def files_in(store: Store, folder: str) -> dict[str, bytes]:
    return store.files(f"reuse/{folder}")


def put(store: Store) -> set[str]:
    keys = {one.key for one in store.requests if one.method in ("PUT", "POST")}
    return {key.rpartition("/")[2] for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize(("at", "finished"), [(name_of(2), 1), ("config.json", FILES)])
def test_if_the_process_that_merges_is_killed_another_goes_on(
    store: Store, truth: dict[str, bytes], start: Start, at: str, finished: int
) -> None:
    folder = f"killed-{finished}"
    gate = Gate(store, f"{folder}/{at}")
    children = [start(folder) for _ in range(5)]
    gate.reach()
    (merging,) = (one for one in children if "uploading" in one.says())
    others = [one for one in children if one is not merging]
    wait_until(lambda: all(one.waits() for one in others), "the others wait")
    merging.process.kill()
    merging.process.wait()
    store.requests.clear()
    gate.open()
    assert sorted(one.end() for one in others) == ["report False", *["report True"] * 3]
    assert [one.process.returncode for one in others] == [0] * 4
    assert not put(store) & {name_of(number + 1) for number in range(finished)}
    (made,) = (one for one in others if "uploading" in one.says())
    assert f"resuming: {finished} of {FILES} files were finished by an earlier merge" in made.says()
    assert files_in(store, folder) == truth
    assert store.begun_uploads() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"reuse": False, "dtype": "bfloat16"}], ids=["reuse", "plain"]
)
def test_a_process_that_was_only_suspended_finds_its_claim_taken(
    store: Store, truth: dict[str, bytes], start: Start, options: dict[str, object]
) -> None:
    """It removes and replaces nothing; with --reuse it uses what the other one made."""
    folder = f"suspended-{len(options)}"
    # of one of them all is read when its upload is aborted: it fails, and does not find out itself
    gate = Gate(store, f"{folder}/{name_of(2)}?{'' if options else 'partNumber'}")
    first = start(folder, **options)
    gate.reach()
    second = start(folder)
    wait_until(second.waits, "the second one waits")
    first.process.send_signal(signal.SIGSTOP)
    gate.open()
    assert second.end() == "report False"
    assert files_in(store, folder) == truth
    first.process.send_signal(signal.SIGCONT)
    last = first.end()
    assert first.process.returncode == bool(options)
    if options:
        changed = f"changed by another process since it was written: {CLAIM_NAME}"
        error = f"BusyError: {PLACE}/{folder}: {changed}"
        assert error in first.says()
    else:
        assert last == "report True"
    assert files_in(store, folder) == truth
    assert store.begun_uploads() == []


def test_a_merge_without_reuse_is_waited_for(
    store: Store, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", BEAT_S)
    told: list[Event] = []
    gate = Gate(store, f"plain/{name_of(2)}")
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(merge, checkpoint, "plain", reuse=False)
        gate.reach()
        reusing = pool.submit(merge, checkpoint, "plain", told.append)
        wait_until(lambda: any("waiting for" in str(one) for one in told), "the wait")
        gate.open()
        assert not plain.result().reused
        assert reusing.result().reused
    assert not any(isinstance(one, Stage) and one.name == "uploading" for one in told)


def test_what_was_made_is_used_and_only_its_headers_are_read(store: Store, tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(1000, 1100) for n in range(4)}
    checkpoint, url = save_ranks(tmp_path / "ckpt", tensors, 2), f"{PLACE}/used"
    chosen: dict[str, Any] = {"max_shard_size": "9MB", "config": "none", "listener": ignore}
    made = unshard.merge(checkpoint, url, **chosen)
    assert min(made.files.values()) > 4 * HEADER
    before = files_in(store, "used")
    store.forget_requests()
    report = unshard.merge(checkpoint, url, reuse=True, **chosen)
    assert report.reused
    assert (report.bytes_read, report.bytes_written) == (0, 0)
    assert {one.method for one in store.requests} == {"GET"}
    for name in made.files:
        ranges = [one.range for one in store.requests if one.key == f"reuse/used/{name}"]
        assert sum(end - start for start, end in filter(None, ranges)) <= HEADER
        assert None not in ranges
    assert files_in(store, "used") == before


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_config.json"])
def test_an_output_with_other_weights_next_to_it_is_not_used(
    store: Store, checkpoint: Path, name: str
) -> None:
    folder = f"next-to-{name.partition('.')[0]}"
    merge(checkpoint, folder)
    store.s3.put_object(Bucket=BUCKET, Key=f"reuse/{folder}/{name}", Body=b"{}")
    before = files_in(store, folder)
    with pytest.raises(OutputError, match="exists already") as caught:
        merge(checkpoint, folder)
    assert "other weights next to it" in caught.value.found
    assert files_in(store, folder) == before


def test_another_output_is_neither_used_nor_replaced(store: Store, checkpoint: Path) -> None:
    merge(checkpoint, "other", dtype="bfloat16")
    before = files_in(store, "other")
    with pytest.raises(OutputError, match="exists already") as caught:
        merge(checkpoint, "other")
    assert "made with other options" in caught.value.found
    assert files_in(store, "other") == before


def test_a_merge_that_failed_is_gone_on_with_at_once(
    store: Store, checkpoint: Path, truth: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim says that no process has it: no time passes, as the beat of this test shows."""
    monkeypatch.setattr(claims, "BEAT_S", 10_000.0)
    store.fault = lambda request: "403" if request.key.endswith(name_of(FILES)) else None
    with pytest.raises(StoreError, match="403"):
        merge(checkpoint, "failed")
    store.forget_requests()
    merge(checkpoint, "failed")
    assert not put(store) & {name_of(1), name_of(2)}
    assert files_in(store, "failed") == truth
