"""Merges within S3: the store copies long runs itself; the bytes are those of a merge on disk."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moto.s3 import models

import unshard
from bucket_server import BUCKET, SECRETS, Request, Store
from command import unshard as command
from ranks import save_ranks
from unshard import CorruptError, StoreError
from unshard.engines import uploads
from unshard.progress import Advanced, Event, ignore
from unshard.stores import remote_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("a bucket"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

WEIGHTS = "model.safetensors"
# Of both sides of every matrix of a model of 7 B parameters; 1 needs 6 GB of memory, and minutes.
SCALE = int(os.environ.get("UNSHARD_COPY_SCALE", "8"))
LEAST = (5 << 20) // SCALE**2
WIDTH, INNER, WORDS = 4096 // SCALE, 11008 // SCALE, 32000 // SCALE


@pytest.fixture(autouse=True)
def _smaller_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let parts have a least size that is scaled as the model is; the server enforces it, too."""
    monkeypatch.setattr(uploads, "LEAST_PART", LEAST)
    monkeypatch.setattr(models, "S3_UPLOAD_PART_MIN_SIZE", LEAST)
    monkeypatch.setattr(remote_file, "_WEIGHTS_GAP", (1 << 20) // SCALE**2)
    yield
    assert not store.abort_uploads()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight ranks of a layer in float32, whose names and shapes are those of Llama's."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (WORDS, WIDTH),
        "model.norm": (WIDTH,),
    }
    for layer in range(1):
        inside: dict[str, tuple[int, ...]] = {
            f"self_attn.{one}_proj": (WIDTH, WIDTH) for one in "qkvo"
        }
        inside |= {f"mlp.{one}_proj": (INNER, WIDTH) for one in ("gate", "up")}
        inside |= {"mlp.down_proj": (WIDTH, INNER), "input_layernorm": (WIDTH,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    generator = torch.Generator().manual_seed(9)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    return save_ranks(tmp_path_factory.mktemp("llama") / "ckpt", tensors, 8)


@pytest.fixture(scope="module")
def address(served: Store, local: Path) -> str:
    return served.upload(local, "llama of 7 B+")


def url(folder: str) -> str:
    return f"s3://{BUCKET}/{folder}"


def sizes(spans: list[tuple[int, int]]) -> int:
    return sum(last - first + 1 for first, last in spans)


def test_the_store_copies_nearly_everything(store: Store, address: str, truth: bytes) -> None:
    report = unshard.merge(address, url("copied"), verify="off", config="none")
    assert store.files("copied")[WEIGHTS] == truth
    copied = [one.copied[1] for one in store.requests if one.copied]
    assert sizes(copied) == report.bytes_copied
    assert report.bytes_copied >= 0.95 * report.bytes_written
    # What is downloaded are norms, what pads them, and as much as planning alone downloads.
    read = sizes([one.range for one in store.requests if one.range])
    store.forget_requests()
    unshard.merge(address, url("planned"), dry_run=True, config="none")
    planned = sizes([one.range for one in store.requests if one.range])
    output = sum(len(data) for data in store.files("copied").values())
    assert read - planned <= 2 * (output - report.bytes_copied)
    assert not store.abort_uploads()


def test_the_report_says_how_much_was_copied(address: str) -> None:
    done = command("merge", address, url("printed"), "--config", "none")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    assert not [word for word in SECRETS if word in done.stdout + done.stderr]


def test_every_copy_asks_for_the_object_that_was_listed(store: Store, address: str) -> None:
    tags = {
        one["ETag"] for one in store.s3.list_objects_v2(Bucket=BUCKET, Prefix="llama")["Contents"]
    }
    unshard.merge(address, url("tags"), config="none")
    assert {one.copied[0] for one in store.requests if one.copied} <= tags
    store.fault = lambda one: "412" if one.copied and one.number % 5 == 0 else None
    with pytest.raises(CorruptError, match=r"rank_\d\.pt: has changed while it was being read"):
        unshard.merge(address, url("changed"), config="none")
    assert store.files("changed") == {}


@pytest.mark.parametrize("status", ["403", "501"])
def test_a_store_that_does_not_copy_gets_the_bytes(
    store: Store, address: str, truth: bytes, status: str
) -> None:
    store.fault = lambda one: status if one.copied and "partNumber=7" in one.query else None
    events: list[Event] = []
    report = unshard.merge(address, url(f"sent-{status}"), listener=events.append, config="none")
    assert store.files(f"sent-{status}")[WEIGHTS] == truth
    assert report.bytes_copied == 0
    assert f"the store answers {status}" in report.notes[-1]
    sent = sum(event.written_bytes for event in events if isinstance(event, Advanced))
    assert sent == report.bytes_written


def test_without_boto3_the_bytes_are_sent(
    store: Store, address: str, truth: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    report = unshard.merge(address, url("sent"), config="none")
    assert store.files("sent")[WEIGHTS] == truth
    assert report.bytes_copied == 0
    assert not [one for one in store.requests if one.copied]


def test_what_is_cast_is_sent_and_what_is_on_disk_too(
    store: Store, address: str, local: Path, truth: bytes
) -> None:
    assert unshard.merge(address, url("cast"), dtype="bfloat16", config="none").bytes_copied == 0
    assert unshard.merge(local, url("disk"), config="none").bytes_copied == 0
    assert store.files("disk")[WEIGHTS] == truth
    assert not [one for one in store.requests if one.copied]


@pytest.mark.parametrize("fault", ["503", "cut", "cut after"])
@pytest.mark.parametrize("part", ["partNumber=1&", "partNumber=4&", "?uploadId="])
def test_a_fault_that_passes_is_not_noticed(
    store: Store, address: str, truth: bytes, part: str, fault: str
) -> None:
    left = [1]

    def once(one: Request) -> str | None:
        is_meant = one.method != "GET" and part in f"{one.target}&"
        return fault if is_meant and left and left.pop() else None

    store.fault = once
    folder = f"passing-{part.strip('&?=')}-{fault}".replace(" ", "-")
    report = unshard.merge(address, url(folder), config="none")
    assert not left
    assert store.files(folder)[WEIGHTS] == truth
    assert report.bytes_copied


def test_a_store_that_fails_for_good_is_an_error_and_nothing_is_left(
    store: Store, address: str
) -> None:
    store.fault = lambda one: "400" if "partNumber=2" in one.query else None
    with pytest.raises(StoreError, match="400") as caught:
        unshard.merge(address, url("failed"), config="none")
    assert not [secret for secret in SECRETS if secret in f"{caught.value!r} {caught.value}"]
    assert store.files("failed") == {}


def test_an_interrupted_merge_leaves_nothing(store: Store, address: str) -> None:
    def fault(one: Request) -> None:
        if one.copied and "partNumber=9" in one.query:
            os.kill(os.getpid(), signal.SIGINT)

    store.fault = fault
    with pytest.raises(KeyboardInterrupt):
        unshard.merge(address, url("interrupted"), listener=ignore, config="none")
    assert store.files("interrupted") == {}
