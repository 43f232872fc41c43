"""torchrun: any number of processes make the bytes that one makes, or nothing at all."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import unshard
from ranks import merged, save_ranks, snapshot
from unshard.engines.crew import is_launcher, is_started_by_torchrun
from unshard.engines.torchrun import joined
from unshard.plan.operations import CopyRange
from unshard.plan.work import share_of, unit_bytes
from unshard.write.stage import recover

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}

# Runs what torchrun should run, but kills the process of one rank in the middle of its share.
KILLER = """
import os, signal, sys
from unshard.engines import pool
from unshard.cli.main import main

real = pool.Pool.run

def run(self, count, make_worker):
    if os.environ["RANK"] == os.environ["VICTIM"]:
        taken = next(self._jobs)
        make_worker().do(taken)
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, count, make_worker)

pool.Pool.run = run
main(sys.argv[1:])
"""

# What a training script might do: start a merge as a child of one of torchrun's processes.
CHILD = """
import subprocess, sys
sys.exit(subprocess.call([sys.executable, "-m", "unshard", "merge", *sys.argv[1:]]))
"""


def torchrun(
    count: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TORCHRUN, "--standalone", f"--nproc_per_node={count}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | (variables or {}),
    )


def tensors() -> dict[str, torch.Tensor]:
    """Long runs, short ones, a cast that overflows, a 0-d tensor, integers."""
    generator = torch.Generator().manual_seed(0)
    several = {f"l.{n}.w": torch.randn(257, 129, generator=generator) for n in range(6)}
    huge = torch.full((5, 3), 1e6)
    return several | {"huge": huge, "count": torch.tensor(3), "zero": torch.zeros(0, 4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 3)


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_processes_makes_the_same_files(
    checkpoint: Path, tmp_path: Path, count: int
) -> None:
    options = ["--dtype", "float16", "--max-shard-size", "200KB", "--memory", "300KB"]
    report = unshard.merge(
        checkpoint, tmp_path / "alone", dtype="float16", max_shard_size="200KB", memory="300KB"
    )
    done = torchrun(count, "-m", "unshard", "merge", str(checkpoint), str(tmp_path / "o"), *options)
    assert done.returncode == 0, done.stderr
    alone, together = snapshot(tmp_path / "alone"), snapshot(tmp_path / "o")
    assert {name: one[2] for name, one in together.items()} == {
        name: one[2] for name, one in alone.items()
    }
    assert done.stdout.count("saved to") == 1  # one process speaks for all
    (overflow,) = [warning for warning in report.warnings if "too large for float16" in warning]
    assert overflow in done.stderr


def test_an_average_is_made_together_too(tmp_path: Path) -> None:
    paths = []
    for seed in range(3):
        torch.manual_seed(seed)
        paths.append(save_ranks(tmp_path / f"ckpt_{seed}", {"w": torch.randn(300, 301)}, 2))
    unshard.average(paths, tmp_path / "alone")
    done = torchrun(2, "-m", "unshard", "average", *map(str, paths), "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert torch.equal(merged(tmp_path / "out")["w"], merged(tmp_path / "alone")["w"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_in_the_middle_leaves_nothing(
    checkpoint: Path, tmp_path: Path, victim: int
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    before = snapshot(tmp_path)
    command = ["merge", str(checkpoint), str(tmp_path / "deep" / "er" / "out")]
    done = torchrun(2, str(tmp_path / "killer.py"), *command, variables={"VICTIM": str(victim)})
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(tmp_path) not in done.stderr
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()


def test_an_error_of_one_is_said_once_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    before = snapshot(tmp_path)
    done = torchrun(2, "-m", "unshard", "merge", str(checkpoint), str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stderr.count("exists already") == 1
    assert snapshot(tmp_path) == before


def test_a_damaged_shard_fails_all_of_them(checkpoint: Path, tmp_path: Path) -> None:
    """Truncated between reading and moving: whoever meets it says so, and all leave."""
    script = tmp_path / "damage.py"
    script.write_text(
        "import os, sys\n"
        "from unshard.api import making\n"
        "from unshard.cli.main import main\n"
        "real = making.write_companions\n"
        "from unshard.engines import torchrun\n"
        "create = torchrun.create_files\n"
        "def damage(plan, directory):\n"
        f"    for path in {[str(path) for path in checkpoint.iterdir()]!r}:\n"
        "        os.truncate(path, 3000)\n"
        "    return create(plan, directory)\n"
        "torchrun.create_files = damage\n"
        "main(sys.argv[1:])\n"
    )
    done = torchrun(2, str(script), "merge", str(checkpoint), str(tmp_path / "new" / "out"))
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert "ends at byte" in done.stderr or "truncated" in done.stderr, done.stderr
    assert "has died" not in done.stderr
    assert re.search(r"exitcode  : 3", done.stderr)
    assert not (tmp_path / "new").exists()


def test_what_a_training_process_starts_works_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    outs = str(tmp_path / "out")
    done = torchrun(1, str(tmp_path / "train.py"), str(checkpoint), outs)
    assert done.returncode == 0, done.stderr
    assert merged(tmp_path / "out").keys() == tensors().keys()


def test_a_process_that_dies_after_its_share_changes_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys\n"
        "from unshard.engines import torchrun\n"
        "from unshard.cli.main import main\n"
        "part = torchrun._take_part\n"
        "def late(group, work, listener):\n"
        "    results = part(group, work, listener)\n"
        "    if group.rank:\n"
        "        os._exit(0)\n"
        "    return results\n"
        "torchrun._take_part = late\n"
        "main(sys.argv[1:])\n"
    )
    done = torchrun(2, str(script), "merge", str(checkpoint), str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "saved to" in done.stdout
    assert merged(tmp_path / "out").keys() == tensors().keys()


def test_the_environment_alone_is_not_torchrun() -> None:
    assert not is_started_by_torchrun(ENVIRONMENT)
    assert not is_started_by_torchrun({})


@pytest.mark.parametrize(
    "command",
    [
        "python /usr/bin/torchrun --nproc_per_node=2 x.py",
        "python -u -m torch.distributed.run x.py",
        "python -X dev -W error -m torch.distributed.run x.py",
        "python3 /env/bin/accelerate launch x.py",
        "/env/bin/torchrun x.py",
    ],
)
def test_a_launcher_is_known(command: str) -> None:
    assert is_launcher(command.split())


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python -u accelerate_train.py",
        "python torchrun_sweep.py --launcher torchrun",
        "python -m unshard eval serve",
        "bash w.sh",
        "",
    ],
)
def test_whatever_else_has_its_name_somewhere_is_none(command: str) -> None:
    assert not is_launcher(command.split())


def test_several_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRONMENT | {"WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(unshard.UsageError, match="torchrun on several nodes"), joined():
        pass


def copies(sizes: list[int]) -> list[CopyRange]:
    return [CopyRange(0, 0, Path("f"), 0, size, 1, 0) for size in sizes]


@given(st.lists(st.integers(1, 1000)), st.integers(1, 9))
def test_shares_are_disjoint_complete_and_about_equal(sizes: list[int], count: int) -> None:
    work = copies(sizes)
    shares = [list(share_of(work, number, count)) for number in range(count)]
    assert sorted(map(id, work)) == sorted(id(unit) for share in shares for unit in share)
    loads = [sum(map(unit_bytes, share)) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_what_a_dead_owner_made_above_is_removed_if_it_is_empty(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    code = (
        "import os, sys; from pathlib import Path; from unshard.write.stage import Stage\n"
        "with Stage(Path(sys.argv[1]), 0): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert [path.name[:17] for path in target.parent.iterdir()] == ["_unshard-partial-"]
    recover(target.parent)
    assert list(tmp_path.iterdir()) == []
