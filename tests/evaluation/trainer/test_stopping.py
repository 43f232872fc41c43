"""The stop file of a run, looked for by one process and by two."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation.running import child_environment
from unshard.evaluate.run_folder import STOP
from unshard.evaluate.trainer.stopping import StopFile
from waiting import LIMIT_S

RANK = """
import sys
from pathlib import Path
from torch import distributed
from unshard.evaluate.trainer.stopping import StopFile, count_ranks
meeting, rank, run = sys.argv[1:]
distributed.init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=2)
stop = StopFile(Path(run), is_first=rank == "0")
ended = [step for step in range(1, 31) if stop.ends_training(step, count_ranks())]
print(ended)
distributed.barrier()
distributed.destroy_process_group()
"""


def made(run: Path, text: str = "") -> Path:
    (run / "_unshard").mkdir(parents=True, exist_ok=True)
    file = run / "_unshard" / STOP
    file.write_text(text)
    return file


def test_one_process_looks_at_every_step_and_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = StopFile(tmp_path / "run", is_first=True)
    assert not stop.ends_training(1, 1)  # there is not even a run
    file = made(tmp_path / "run", "worse\x1b three times\nmore")
    with caplog.at_level(logging.WARNING):
        assert stop.ends_training(2, 1)
        assert stop.ends_training(3, 1)
    said = f"training ends: {file} is there (worse\\x1b three times); remove it to train further"
    assert [record.getMessage() for record in caplog.records] == [said]
    file.unlink()
    assert not stop.ends_training(4, 1)


def test_a_stop_file_that_is_none_of_ours_ends_the_training_and_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = made(tmp_path / "link")
    file.unlink()
    file.symlink_to("/etc/passwd")
    os.mkfifo(made(tmp_path / "pipe").with_name("pipe"))
    (tmp_path / "pipe" / "_unshard" / "pipe").replace(tmp_path / "pipe" / "_unshard" / STOP)
    for run in ("link", "pipe"):
        assert StopFile(tmp_path / run, is_first=True).ends_training(1, 1)
    assert "x:0:0" not in caplog.text
    assert caplog.text.count("remove it to train further") == 2


@pytest.mark.slow
def test_all_ranks_end_at_the_same_step_although_one_alone_sees_the_file(tmp_path: Path) -> None:
    made(tmp_path / "0")
    (tmp_path / "1").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), rank, str(tmp_path / rank)],
            env=child_environment(),
            stdout=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]
    try:
        ended = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ended == [b"[10, 20, 30]\n"] * 2
