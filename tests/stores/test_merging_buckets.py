"""A merge of a checkpoint in a bucket: the bytes of a merge of the same files on disk."""

from pathlib import Path

import pytest
import torch

import unshard
from bucket_server import Store
from merged_layouts import LAYOUTS, contents, make_layout
from oracle.conftest import WriteCheckpoint
from ranks import save_ranks

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_of_a_merge_from_disk(
    store: Store, write_checkpoint: WriteCheckpoint, tmp_path: Path, layout: str
) -> None:
    checkpoint = tmp_path / "ckpt"
    options = make_layout(layout, checkpoint, write_checkpoint)
    address = store.upload(checkpoint, f"layouts/{layout.replace(' ', '_')}/ckpt")
    unshard.merge(checkpoint, tmp_path / "local", **options)
    unshard.merge(address, tmp_path / "remote", **options)
    local, remote = contents(tmp_path / "local"), contents(tmp_path / "remote")
    assert local.keys() == remote.keys()
    different = [name for name in local if local[name] != remote[name]]
    assert different in ([], ["unshard.json"])
    assert [one.method for one in store.requests if one.method not in ("GET", "HEAD")] == []


def test_a_folder_that_was_listed_is_not_asked_for_what_it_does_not_have(
    store: Store, tmp_path: Path
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"l.0.a": torch.ones(8, 8)}, 2)
    address = store.upload(checkpoint, "listed/ckpt")
    store.forget_requests()
    unshard.merge(address, tmp_path / "out")
    listings = [one.query for one in store.requests if "list-type" in one.query]
    assert 1 <= len(listings) <= 4, listings
