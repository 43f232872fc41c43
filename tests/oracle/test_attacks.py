"""Hostile checkpoints of every format: each ends in one error, and in nothing else."""

import os
from pathlib import Path

import pytest

from hostile.attacks import HOSTS, attacks
from hostile.guard import COMMANDS
from hostile.running import run_attacks
from oracle.writers.samples import Samples

pytestmark = pytest.mark.xdist_group("torch processes")

# 1 is all attacks (`make torture`); by default a part, of each kind in some places.
STRIDE = int(os.environ.get("UNSHARD_ATTACKS_STRIDE", "149"))


@pytest.mark.slow
def test_hostile_files_end_in_errors_and_do_nothing_else(samples: Samples, tmp_path: Path) -> None:
    chosen = {name: samples[name] for name in (*HOSTS, "one safetensors")}
    every = list(attacks({name: one.directory for name, one in chosen.items()}))
    on_code = [one for one in every if one.on_code]
    others = [one for one in every if not one.on_code]
    tried = on_code[::STRIDE] + others[:: max(1, STRIDE // 5)]
    ran, problems = 0, list[str]()
    for commands, found in run_attacks(tried, chosen, tmp_path):
        ran += commands
        problems += found
        if STRIDE == 1:  # hours: what has been found is there before the end
            print(f"{ran // len(COMMANDS)} of {len(tried)} attacks", *found, sep="\n")  # noqa: T201
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:200])
    assert ran == len(COMMANDS) * len(tried) > 200
