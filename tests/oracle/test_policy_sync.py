"""lmms-engine's trainer syncs its policy 20 times, through the merger that is installed."""

import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import unshard
from oracle.writers.rotating import KEPT, STEPS, lmms_engine_syncing
from oracle.writers.workers import WorkerPool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.skipif(find_spec("lmms_engine") is None, reason="pip install lmms_engine"),
    pytest.mark.skipif(find_spec("wandb") is None, reason="lmms-engine's trainer imports wandb"),
]


def test_every_sync_gives_the_engine_the_weights_that_were_trained(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    worker_pool.run(lmms_engine_syncing, 2, tmp_path / "run")
    syncs = torch.load(tmp_path / "syncs.pt")
    assert [step for step, _, _ in syncs] == [*range(1, STEPS + 1), STEPS]  # the last one twice
    for step, trained, loaded in syncs:
        assert torch.equal(trained, loaded), step
    changed = [not torch.equal(one[1], other[1]) for one, other in pairwise(syncs)]
    assert changed == [True] * (STEPS - 1) + [False]
    root = tmp_path / "run" / "policy-sync"
    versions = [f"weight_v{step:06d}" for step in range(STEPS + 1 - KEPT, STEPS + 1)]
    kept = {name for version in versions for name in (version, f"{version}-fsdp")}
    assert {path.name for path in root.iterdir()} == kept
    for step, version in enumerate(versions, STEPS + 1 - KEPT):
        record = json.loads((root / version / "unshard.json").read_text())
        assert record["source"]["step"] == step
        assert record["source"]["name"] == f"{version}-fsdp"
        assert (root / version / ".lmms_weight_sync_ready").is_file()
    newest = unshard.merge(root, tmp_path / "newest", dtype="bfloat16")
    assert newest.step == STEPS
