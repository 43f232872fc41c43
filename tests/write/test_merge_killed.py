"""A real merge, killed at every step that touches the disk, byte moving included."""

from pathlib import Path

import pytest

import unshard
from commits import age, survives
from ranks import assert_same, bits, merged, save_ranks, some_tensors
from unshard.write.staging.recovery import recover

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")]


@pytest.mark.parametrize("place", ["out", "ckpt"])
def test_a_merge_killed_anywhere_leaves_the_old_or_the_new(tmp_path: Path, place: str) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    target = tmp_path / place
    seen: set[str] = set()
    for number in range(500):
        unshard.merge(checkpoint, target, overwrite=True, config="none")

        def merge() -> None:
            unshard.merge(
                checkpoint, target, overwrite=True, dtype="float16", workers=1, config="none"
            )

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


def test_a_merge_into_the_checkpoint_goes_on_after_a_kill_at_once(tmp_path: Path) -> None:
    """What the killed one had begun to move is moved before the checkpoint is read again."""
    config = tmp_path / "other.json"
    config.write_text('{"model_type": "llama"}')
    for number in range(500):
        checkpoint = save_ranks(tmp_path / f"ckpt-{number}", some_tensors(), 2)
        (checkpoint / "config.json").write_text('{"model_type": "qwen2"}')

        def merge(checkpoint: Path = checkpoint) -> None:
            unshard.merge(checkpoint, checkpoint, overwrite=True, config=config, workers=1)

        alive = survives(number, merge)
        age(tmp_path)
        merge()
        assert_same(merged(checkpoint), some_tensors())
        if alive:
            break
    assert number > 20
