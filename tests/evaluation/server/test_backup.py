"""The backup that the guide describes: its commands are run, beside a server that works."""

import re
import subprocess
from pathlib import Path

import pytest

from evaluation.runs import checkpoint
from evaluation.servers import Live, started
from waiting import wait_until

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "eval-operating.md"


def run_commands(number: int, directory: Path) -> None:
    """Run a block of commands of the guide; the tests' server has another work directory."""
    section = GUIDE.read_text().partition("## Backup")[2].partition("\n## ")[0]
    block = re.findall(r"```console\n(.*?)```", section, re.DOTALL)[number]
    for line in block.replace("unshard-eval", "work").splitlines():
        subprocess.run(["/bin/sh", "-c", line.removeprefix("$ ")], cwd=directory, check=True)


@pytest.mark.slow
def test_a_server_is_restored_from_a_backup_that_was_made_while_it_ran(tmp_path: Path) -> None:
    server = Live(tmp_path)
    server.configure()
    with started(server):
        done = server.submit(checkpoint(server.root / "run", 5), "samples", step=5)
        metrics = server.ended(done)["metrics"]
        running = server.submit(checkpoint(server.root / "run", 6), "waits", step=6)
        server.began(6)
        run_commands(0, tmp_path)
        server.go()
        server.ended(running)
        files = server.v1("GET", f"/jobs/{done['id']}/files")
        assert files["files"]
    run_commands(1, tmp_path)
    with started(server):
        assert server.job(done)["metrics"] == metrics
        assert server.v1("GET", f"/jobs/{done['id']}/files") == files
        wait_until(lambda: server.job(running)["status"] == "queued", "the job that was lost")
