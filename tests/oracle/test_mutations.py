"""With `--verify full` a damaged checkpoint is merged into the truth, or not at all."""

import os
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from damage import Findings, Spare, assert_same_bits, judge
from hostile.mutations import Mutator
from oracle.writers.samples import CHECKED, FORMATS, NAMES_UNGUARDED, Samples
from ranks import Tensors, assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

MUTATIONS = int(os.environ.get("UNSHARD_MUTATIONS", "10"))  # of every format; `make torture`: 600


def assert_same_bits_or_as_torch(path: Path, found: Tensors, truth: Tensors) -> None:
    """Same values, or what torch reads: a pickle without a checksum may state another shape."""
    try:
        assert_same_bits(found, truth)
    except AssertionError:
        assert_same(found, torch.load(path, weights_only=True))


@pytest.mark.parametrize("name", FORMATS)
def test_damage_of_any_kind_is_noticed_by_full_verification_or_does_not_matter(
    samples: Samples, tmp_path: Path, name: str
) -> None:
    sample, random, findings = samples[name], Random(f"{name} {MUTATIONS}"), Findings()
    spare, out = Spare(sample.directory, tmp_path / "copy"), tmp_path / "output" / "merged"
    guarded = name in CHECKED and not name.startswith(NAMES_UNGUARDED)
    mutator = Mutator(name, spare, random, checked=guarded)
    compare = assert_same if guarded else assert_same_bits
    if name == "legacy torch":
        compare = partial(assert_same_bits_or_as_torch, spare.directory / "pytorch_model.bin")
    for _ in range(MUTATIONS):
        with mutator.mutated() as what, findings.attempt(*what):
            judge(spare.directory, sample.truth, out, compare=compare, verify="full")
    findings.tell()
