"""A real merge, killed at every step that touches the disk, byte moving included."""

from pathlib import Path

import pytest

import unshard
from commits import age, survives
from ranks import bits, merged, save_ranks, some_tensors
from unshard.write.staging.recovery import recover

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")]


@pytest.mark.parametrize("place", ["out", "ckpt"])
def test_a_merge_killed_anywhere_leaves_the_old_or_the_new(tmp_path: Path, place: str) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    target = tmp_path / place
    seen: set[str] = set()
    for number in range(500):
        unshard.merge(checkpoint, target, overwrite=True)

        def merge() -> None:
            unshard.merge(checkpoint, target, overwrite=True, dtype="float16", workers=1)

        alive = survives(number, merge)
        age(tmp_path)
        recover(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"ckpt", place}
        found = merged(target)
        for state, cast in (("old", "float()"), ("new", "half()")):
            expected = {n: t.half() if cast == "half()" else t for n, t in some_tensors().items()}
            if all(bits(found[n]) == bits(t) for n, t in expected.items()):
                seen.add(state)
                break
        else:
            pytest.fail(f"neither the old nor the new, killed at step {number}")
        if alive:
            break
    assert number > 20
    assert seen == {"old", "new"}
