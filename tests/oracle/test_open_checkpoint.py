"""Every format opened lazily: whole tensors and slices against the unsharded tensors, bit for bit.

Also a model sharded by real ranks, into which every rank loads its own part.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unshard
from oracle.conftest import WriteCheckpoint
from oracle.writers import loading
from oracle.writers.contract import contract_tensors
from oracle.writers.contract_forms import FORMS
from oracle.writers.samples import Samples
from oracle.writers.saving import truth_file
from oracle.writers.workers import WorkerPool
from ranks import assert_same, bits, snapshot

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

CASES = [
    ("fsdp2", 3),
    ("fsdp2_hsdp", 4),
    ("fsdp2_tp", 4),
    ("fsdp2_tp_uneven", 4),
    ("fsdp1_mesh", 2),
    ("experts", 4),
    ("hsdp_tp", 8),
    ("lone_strided", 3),
    ("noncontiguous", 3),
    ("out_of_order", 4),
    ("dtensor_dtypes", 3),
    ("dcp_strides", 3),
    ("dcp_tensors", 3),
    ("dcp_tp", 4),
    ("dcp_zstd", 2),
    ("fsdp1_sharded", 3),
    ("fsdp2_bin", 2),
]
PARTS: list[Any] = [
    (..., slice(None, None, -2)),
    (slice(1, None, 3), ...),
    (slice(None, None, -1), None, ..., slice(0, 2)),
    (-1, ...),
]


@pytest.mark.parametrize(("scenario", "world"), CASES)
def test_tensors_and_their_parts_are_those_before_sharding(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, scenario: str, world: int
) -> None:
    truth = write_checkpoint(scenario, world, tmp_path / "ckpt")
    before = snapshot(tmp_path / "ckpt")
    with unshard.open_checkpoint(tmp_path / "ckpt", framework="pt") as opened:
        assert_same({name: opened.get_tensor(name) for name in opened}, truth)
        assert sum(same_parts(opened.get_slice(name), one) for name, one in truth.items()) > 0
    assert_same(unshard.load_state_dict(tmp_path / "ckpt"), truth)
    assert snapshot(tmp_path / "ckpt") == before


def same_parts(part: "unshard.LazyTensor[torch.Tensor]", whole: torch.Tensor) -> int:
    """Compare every part that numpy allows with numpy's; return how many there are."""
    raw: Any = np.frombuffer(bits(whole), f"V{whole.itemsize}").reshape(whole.shape)
    count = 0
    for index in PARTS:
        try:
            expected = np.ascontiguousarray(raw[index])
        except IndexError:
            with pytest.raises(IndexError):
                part[index]
            continue
        found = part[index]
        assert found.shape == raw[index].shape
        assert bits(found) == expected.tobytes()
        count += 1
    return count


@pytest.mark.parametrize("name", FORMS)
def test_every_format_that_is_merged_is_opened(samples: Samples, name: str) -> None:
    form, truth = FORMS[name], contract_tensors()
    with unshard.open_checkpoint(samples.form(name) / form.levels[0], framework="pt") as opened:
        assert_same({one: opened.get_tensor(one) for one in opened}, truth)
        assert (list(opened) == list(truth)) is form.ordered
        assert sum(same_parts(opened.get_slice(one), truth[one]) for one in truth) > 0
        said = opened.metadata()
    assert (said["format"], said["world_size"]) == (form.name, str(form.world))
    assert said.get("step") == (None if form.step is None else str(form.step))


@pytest.mark.slow
@pytest.mark.parametrize("load", loading.LOADS)
@pytest.mark.parametrize("saved", ["fsdp2_tp_uneven", "fsdp2_tp"])
def test_ranks_of_a_sharded_model_load_their_own_part(
    worker_pool: WorkerPool,
    write_checkpoint: WriteCheckpoint,
    tmp_path: Path,
    load: str,
    saved: str,
) -> None:
    """Whatever layout it was saved in: the checkpoint of one layout is loaded into another."""
    truth = write_checkpoint(saved, 4, tmp_path / "ckpt")
    torch.save(truth, truth_file(tmp_path / "ckpt"))
    worker_pool.run(loading.LOADS[load], 4, tmp_path / "ckpt")
