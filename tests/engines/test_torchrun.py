"""torchrun: any number of processes make the bytes that one makes, or nothing at all."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import unshard
from ranks import merged, rank_path, save_ranks, snapshot
from unshard.engines.crew import is_launcher, is_started_by_torchrun
from unshard.engines.several import sockets
from unshard.write.staging.recovery import recover
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}

# Starts processes as torchrun does, but lets each end by itself, and prints their exit codes.
LAUNCHER = """
import json, os, signal, subprocess, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup starts its children with it ignored
count, *command = sys.argv[1:]
told = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
children = [
    subprocess.Popen([sys.executable, *command], env=os.environ | told | {"RANK": str(rank)})
    for rank in range(int(count))
]
codes = [child.wait() for child in children]
print(json.dumps(codes))
"""

# The command `unshard`, in which every worker has a part of the work, however little there is.
TOGETHER = """
import os, signal, sys, threading
from unshard.__main__ import main
from unshard.engines.several import sockets, torchrun

torchrun._BATCH_BYTES = 1
accept = sockets.MeetingPlace.accept
sockets.MeetingPlace.accept = lambda self, *, wait: accept(self, wait=True)
all_work = threading.Barrier(int(sys.argv[sys.argv.index("--workers") + 1]))
at_work = set()
do_here, do_there = torchrun._Here.do, torchrun._There.do

def wait_for_all(worker):
    if os.environ["RANK"] == "0" and worker not in at_work:
        at_work.add(worker)
        all_work.wait()

def there(self, batch):
    wait_for_all(self)
    return do_there(self, batch)

def here(self, batch):
    wait_for_all(self)
    done = do_here(self, batch)
    if os.environ["RANK"] == os.environ.get("VICTIM"):
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    return done

torchrun._Here.do, torchrun._There.do = here, there
"""
RUN = "main()\n"

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
        timeout=LIMIT_S,
        env=os.environ | (variables or {}),
    )


def launched(
    directory: Path, count: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> tuple[list[int], str]:
    """Run processes as torchrun does; return their exit codes, and what they print."""
    launcher = directory / "torchrun"
    launcher.write_text(LAUNCHER)
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, str(launcher), str(count), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT_S,
            env=os.environ | {"TMPDIR": scratch, **(variables or {})},
        )
        assert list(Path(scratch).iterdir()) == []  # nothing is left where the processes met
    launcher.unlink()
    *shown, codes = done.stdout.splitlines()
    return json.loads(codes), "\n".join([*shown, done.stderr])


def tensors() -> dict[str, torch.Tensor]:
    """Long runs, short ones, a cast that overflows, a 0-d tensor, integers."""
    generator = torch.Generator().manual_seed(0)
    several = {f"l.{n}.w": torch.randn(257, 129, generator=generator) for n in range(6)}
    huge = torch.full((5, 3), 1e6)
    return several | {"huge": huge, "count": torch.tensor(3), "zero": torch.zeros(0, 4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 3)


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "together.py"
    path.write_text(TOGETHER + RUN)
    return path


def test_any_number_of_processes_makes_the_same_files(
    checkpoint: Path, tmp_path: Path, script: Path
) -> None:
    options = ["--dtype", "float16", "--max-shard-size", "200KB", "--memory", "600KB"]
    report = unshard.merge(
        checkpoint, tmp_path / "alone", dtype="float16", max_shard_size="200KB", memory="600KB"
    )
    for count in (1, 2, 3):
        out = tmp_path / f"out_{count}"
        command = ["merge", str(checkpoint), str(out), *options, "--workers", "3"]
        done = torchrun(count, *([str(script)] if count > 1 else ["-m", "unshard"]), *command)
        assert done.returncode == 0, done.stderr
        alone, together = snapshot(tmp_path / "alone"), snapshot(out)
        assert {name: one[2] for name, one in together.items()} == {
            name: one[2] for name, one in alone.items()
        }
        assert done.stdout.count("saved to") == 1  # one process speaks for all
        (overflow,) = [one for one in report.warnings if "too large for float16" in one]
        assert overflow in done.stderr


def test_an_average_is_made_together_too(tmp_path: Path, script: Path) -> None:
    paths = []
    for seed in range(3):
        torch.manual_seed(seed)
        paths.append(save_ranks(tmp_path / f"ckpt_{seed}", {"w": torch.randn(300, 301)}, 2))
    unshard.average(paths, tmp_path / "alone")
    command = ["average", *map(str, paths), "-o", str(tmp_path / "out"), "--workers", "2"]
    codes, said = launched(tmp_path, 2, str(script), *command, "--memory", "300KB")
    assert codes == [0, 0], said
    assert torch.equal(merged(tmp_path / "out")["w"], merged(tmp_path / "alone")["w"])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_process_killed_in_the_middle_leaves_nothing(
    checkpoint: Path, tmp_path: Path, script: Path, victim: int
) -> None:
    before = snapshot(tmp_path)
    command = ["merge", str(checkpoint), str(tmp_path / "deep" / "er" / "out"), "--workers", "3"]
    variables = {"VICTIM": str(victim), "SIGNAL": "SIGKILL"}
    done = torchrun(3, str(script), *command, variables=variables)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(script) not in done.stderr
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("death", "expected"),
    [
        ("0 SIGKILL", [-9, 143, 143]),
        ("1 SIGKILL", [143, -9, 143]),
        ("0 SIGTERM", [143, 143, 143]),
        ("1 SIGTERM", [143, 143, 143]),
        ("0 SIGINT", [130, 130, 130]),
        ("0 SIGHUP", [129, 129, 129]),
    ],
)
def test_those_that_survive_a_death_end_alike(
    checkpoint: Path, tmp_path: Path, script: Path, death: str, expected: list[int]
) -> None:
    victim, number = death.split()
    before = snapshot(tmp_path)
    command = ["merge", str(checkpoint), str(tmp_path / "deep" / "out"), "--workers", "3"]
    variables = {"VICTIM": victim, "SIGNAL": number}
    codes, said = launched(tmp_path, 3, str(script), *command, variables=variables)
    assert codes == expected, said
    assert "Traceback" not in said
    assert snapshot(tmp_path) == before


CONVERT = ("-m", "unshard.compat.convert_fsdp_to_hf", "--checkpoint_path")


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["-m", "unshard", "merge", "CKPT", "OUT"], 3, "missing"),
        (["-m", "unshard", "merge", "NONE", "OUT"], 3, "NONE"),
        (["-m", "unshard", "merge", "CKPT", "OUT", "--no-such-option"], 2, "--no-such-option"),
        (["-m", "unshard", "merge", "CKPT", "OUT", "--workers", "0"], 2, "workers"),
        ([*CONVERT, "CKPT", "--actor_subdir", ".", "--output_path", "OUT"], 1, "missing"),
        ([*CONVERT, "NONE"], 1, "does not exist"),
        ([*CONVERT, "CKPT", "--no_such_option"], 2, "--no_such_option"),
    ],
)
def test_all_processes_end_with_one_code_and_one_says_why(
    checkpoint: Path, tmp_path: Path, command: list[str], code: int, message: str
) -> None:
    rank_path(checkpoint, 3, 1).unlink()
    before = snapshot(tmp_path)
    paths = {"CKPT": str(checkpoint), "OUT": str(tmp_path / "out"), "NONE": str(tmp_path / "NONE")}
    codes, said = launched(tmp_path, 3, *(paths.get(word, word) for word in command))
    assert codes == [code, code, code], said
    assert message in said
    assert said.count("rror: ") == 1
    assert snapshot(tmp_path) == before


def test_a_failing_merge_ends_torchrun_with_its_code(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    before = snapshot(tmp_path)
    done = torchrun(2, "-m", "unshard", "merge", str(checkpoint), str(tmp_path / "out"))
    assert done.returncode != 0
    assert done.stderr.count("exists already") == 1
    assert "exitcode  : 5" in done.stderr
    assert snapshot(tmp_path) == before


def test_a_damaged_shard_fails_all_of_them(checkpoint: Path, tmp_path: Path, script: Path) -> None:
    """Truncated between reading and moving: the process that finds it says so, and all end."""
    script.write_text(
        TOGETHER + "create = torchrun.create_files\n"
        "def damage(plan, directory):\n"
        f"    for path in {[str(path) for path in checkpoint.iterdir()]!r}:\n"
        "        os.truncate(path, 3000)\n"
        "    return create(plan, directory)\n"
        "torchrun.create_files = damage\n" + RUN
    )
    command = ["merge", str(checkpoint), str(tmp_path / "new" / "out"), "--workers", "2"]
    codes, said = launched(tmp_path, 2, str(script), *command)
    assert codes == [3, 3], said
    assert said.count("error: ") == 1
    assert "ends at byte" in said or "truncated" in said
    assert "has died" not in said
    assert not (tmp_path / "new").exists()


def test_what_a_training_process_starts_works_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    outs = str(tmp_path / "out")
    codes, said = launched(tmp_path, 1, str(tmp_path / "train.py"), str(checkpoint), outs)
    assert codes == [0], said
    assert merged(tmp_path / "out").keys() == tensors().keys()


def test_a_process_that_dies_after_its_share_changes_nothing(
    checkpoint: Path, tmp_path: Path, script: Path
) -> None:
    script.write_text(
        TOGETHER + "def leave(self):\n"
        "    if os.environ['RANK'] == '0':\n"
        "        close(self)\n"
        "    else:\n"
        "        leaving.append(self)\n"
        "close, leaving = torchrun._Here.close, []\n"
        "torchrun._Here.close = leave\n"
        "send = sockets.Connection.send\n"
        "def send_and_leave(self, message):\n"
        "    send(self, message)\n"
        "    if leaving:\n"
        "        os._exit(0)\n"
        "sockets.Connection.send = send_and_leave\n" + RUN
    )
    command = ["merge", str(checkpoint), str(tmp_path / "out"), "--workers", "2"]
    codes, said = launched(tmp_path, 2, str(script), *command)
    assert codes == [0, 0], said
    assert "saved to" in said
    assert merged(tmp_path / "out").keys() == tensors().keys()


def test_no_process_imports_torch_and_an_idle_one_not_even_numpy(
    checkpoint: Path, tmp_path: Path
) -> None:
    script = tmp_path / "modules.py"
    script.write_text(
        "import sys\n"
        "from unshard.__main__ import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(sorted({'numpy', 'torch', 'typer'} & set(sys.modules)), file=sys.stderr)\n"
    )
    command = ["merge", str(checkpoint), str(tmp_path / "out"), "--workers", "1"]
    codes, said = launched(tmp_path, 2, str(script), *command)
    assert codes == [0, 0], said
    assert "['numpy', 'typer']" in said.splitlines()  # the leader
    assert "[]" in said.splitlines()


@pytest.mark.parametrize("stranger", ["open", "link", "file"])
def test_processes_meet_where_no_other_user_can_come_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """A place that others can enter is refused by both sides: they could put a socket there."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(sockets, "_LONGEST", 1000)
    place = sockets._meeting_place()
    if stranger == "open":
        place.mkdir()
        place.chmod(0o755)
    elif stranger == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch(mode=0o600)
    for side in (lambda: sockets.MeetingPlace(1), sockets.connect):
        with pytest.raises(unshard.OutputError, match="not a directory of this user alone"):
            side()


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


def test_what_a_dead_owner_made_above_is_removed_if_it_is_empty(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from unshard.write.staging.stage import Staging\n"
        "with Staging(Path(sys.argv[1]), 0): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=False)
    assert [path.name[:17] for path in target.parent.iterdir()] == ["_unshard-partial-"]
    recover(target.parent)
    assert list(tmp_path.iterdir()) == []
