"""Ten thousand random reads of virtual files: they are what a merge writes there."""

import random
from pathlib import Path

import pytest

import unshard
from merged_layouts import LAYOUTS, make_layout
from oracle.conftest import WriteCheckpoint
from ranks import snapshot

pytestmark = [
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

READS = 10_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_thousand_random_reads_are_what_a_merge_writes(
    write_checkpoint: WriteCheckpoint, tmp_path: Path, layout: str
) -> None:
    checkpoint, output = tmp_path / "ckpt", tmp_path / "out"
    options = make_layout(layout, checkpoint, write_checkpoint)
    unshard.merge(checkpoint, output, **options)
    before = snapshot(checkpoint)
    truth = {path: data for path, (_, _, data) in snapshot(output).items()}
    with unshard.virtual(checkpoint, **options) as files:
        assert files.sizes == {name: len(data) for name, data in truth.items()}
        assert {name: file.read() for name, file in files.items()} == truth
        dice = random.Random(layout)
        heavy = [name for name in truth if name.endswith(".safetensors")]
        for number in range(-(-READS // len(LAYOUTS))):
            name = dice.choice(heavy if number % 4 else list(truth))
            data = truth[name]
            at, length = dice.randrange(len(data)), int(10 ** dice.uniform(0, 5))
            file = files[name]
            file.seek(at)
            assert file.read(length) == data[at : at + length]
        files.check_sources()
    assert snapshot(checkpoint) == before
