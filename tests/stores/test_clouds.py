"""Merges from, into and within Azure's and Google's stores: the files of a merge on disk."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import unshard
from cloud_server import SECRET, Cloud, serving_cloud
from ranks import contents, save_ranks
from unshard import CorruptError, OutputError, StoreError
from unshard.progress import Chosen, Event, ignore

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")]

TWO_FILES: dict[str, Any] = {"max_shard_size": "14MB", "memory": "40MB"}


@pytest.fixture(params=["az", "gs"])
def cloud(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cloud]:
    with serving_cloud(request.param, tmp_path_factory.mktemp("account")) as made:
        yield made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose weights are uploaded in several parts, in two files."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"w{n}": torch.randn(1000, 1100, generator=generator) for n in range(5)}
    place = save_ranks(tmp_path / "ckpt", tensors, 2)
    (place / "config.json").write_text(json.dumps({"model_type": "x", "dtype": "float32"}))
    (place / "tokenizer.json").write_text("{}")
    return place


@pytest.fixture
def truth(checkpoint: Path, tmp_path: Path) -> dict[str, bytes]:
    unshard.merge(checkpoint, tmp_path / "truth", **TWO_FILES)
    return contents(tmp_path / "truth")


def test_the_files_are_those_of_a_merge_on_disk(
    cloud: Cloud, checkpoint: Path, truth: dict[str, bytes], tmp_path: Path
) -> None:
    run = cloud.upload(checkpoint.rename(tmp_path / "global_step_3"), "a run/global_step_3")
    ways: dict[str, tuple[str | Path, str | Path]] = {
        "from": (cloud.url("a run"), tmp_path / "from"),
        "into": (tmp_path / "global_step_3", cloud.url("into")),
        "within": (run, cloud.url("with/in")),
    }
    for source, output in ways.values():
        unshard.merge(source, output, verify="full", **TWO_FILES)
    for made in (contents(tmp_path / "from"), cloud.files("into"), cloud.files("with/in")):
        assert made.keys() == truth.keys()
        assert [name for name in made if made[name] != truth[name]] in ([], ["unshard.json"])
    assert cloud.parts == {}
    assert cloud.written[-1] == "with/in/unshard.json"
    assert unshard.verify(cloud.url("into"), against=cloud.url("with/in")).equal


def test_an_existing_output_is_refused_and_stays(cloud: Cloud, checkpoint: Path) -> None:
    cloud.put("taken/notes.txt", b"theirs")
    with pytest.raises(OutputError, match="exists already"):
        unshard.merge(checkpoint, cloud.url("taken"))
    assert cloud.files("taken") == {"notes.txt": b"theirs"}
    assert cloud.written == []


def refuse(cloud: Cloud, name: str) -> None:
    """Let the store forbid to write a file."""
    cloud.fault = lambda method, key: 403 if method != "GET" and key.endswith(name) else None


SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("resume", [False, True])
def test_a_merge_that_fails_leaves_nothing_or_what_is_resumed(
    cloud: Cloud, checkpoint: Path, truth: dict[str, bytes], *, resume: bool
) -> None:
    out = cloud.url("out")
    refuse(cloud, SECOND)
    with pytest.raises(StoreError, match="403") as caught:
        unshard.merge(checkpoint, out, resume=resume, **TWO_FILES)
    assert SECRET not in str(caught.value)
    assert "AWS" not in caught.value.hint
    cloud.fault = lambda _method, _key: None
    if not resume:
        assert cloud.objects == {}
        return
    cloud.written.clear()
    events: list[Event] = []
    unshard.merge(checkpoint, out, resume=True, listener=events.append, **TWO_FILES)
    assert Chosen("resuming: 1 of 2 files were finished by an earlier merge") in events
    assert not [key for key in cloud.written if key.endswith("1-of-00002.safetensors")]
    assert cloud.files("out") == truth


def test_an_object_that_is_replaced_is_noticed(cloud: Cloud, checkpoint: Path) -> None:
    with unshard.open_checkpoint(cloud.upload(checkpoint, "ckpt")) as opened:
        cloud.upload(save_ranks(checkpoint, {"w0": torch.zeros(1000, 1100)}, 2), "ckpt")
        with pytest.raises(CorruptError, match="has changed while it was being read"):
            opened["w0"]


def test_without_rights_the_message_names_what_is_missing(
    cloud: Cloud, checkpoint: Path, tmp_path: Path
) -> None:
    cloud.fault = lambda _method, _key: 403
    for source, output in ((cloud.url("ckpt"), tmp_path / "out"), (checkpoint, cloud.url("out"))):
        with pytest.raises(StoreError, match="answers 403 Forbidden") as caught:
            unshard.merge(source, output, listener=ignore)
        assert {"az": "AZURE_STORAGE_ACCOUNT_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}[
            cloud.scheme
        ] in caught.value.hint
        assert SECRET not in str(caught.value)
