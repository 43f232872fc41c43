"""Random bytes never end a parser in anything but its own errors."""

from pathlib import Path
from random import Random

import pytest

from hostile.fuzzing import TARGETS, mutated, try_input
from hostile.seeds import seeds_of

pytestmark = pytest.mark.slow

INPUTS = 300  # of every parser; `make torture-fuzz` tries as many as it is told


@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_are_read_or_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "seeds").mkdir()
    seeds, random = seeds_of(target, tmp_path / "seeds"), Random(target)
    for _ in range(INPUTS):
        data = mutated(seeds, random)
        try:
            try_input(target, data, tmp_path)
        except Exception as error:
            error.add_note(f"input: {data.hex()}")
            raise
