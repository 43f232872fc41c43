"""torchrun: the process of rank 0 does what the plain command does; the others do nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from ranks import contents, rank_path, save_ranks, snapshot
from unshard.cli.torchrun import is_launcher, is_started_by_torchrun
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OPTIONS = (
    *("--dtype", "float16", "--max-shard-size", "200KB", "--memory", "600KB"),
    *("--lora-alpha", "16", "--config", "none"),
)
ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}

ADAPTER = {"lora_A.default": (16, 1024), "lora_B.default": (512, 16)}

# Starts processes as torchrun does, which imports torch for that; prints their exit codes.
LAUNCHER = """
import json, os, subprocess, sys

count, world, *command = sys.argv[1:]
told = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "here", "MASTER_PORT": "1"}
children = [
    subprocess.Popen([sys.executable, *command], env=os.environ | told | {"RANK": str(rank)})
    for rank in range(int(count))
]
print(json.dumps([child.wait() for child in children]))
"""

# The command `unshard`, whose work is interrupted by MOMENT when it has begun, at the first start.
MOMENT = """
import os, signal, sys, time
from pathlib import Path
from unshard import signals
from unshard.__main__ import main
from unshard.cli import torchrun

torchrun.begin()  # as main does, before numpy is imported
from unshard.write.execute import Executor

do, received, came = Executor.do, signals._raise, []

def noted(*given):
    came.append(given)
    received(*given)

def interrupted(self, unit):
    done = do(self, unit)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        exec(os.environ["MOMENT"])
    return done

Executor.do, signals._raise = interrupted, noted
main()
"""

# Runs a module as `python -m` does, and notes by rank which modules were imported for that.
NOTING = """
import json, os, runpy, sys
from pathlib import Path

notes, module, *sys.argv[1:] = sys.argv[1:]
before = set(sys.modules)
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    imported = sorted(set(sys.modules) - before)
    Path(notes, os.environ["RANK"]).write_text(json.dumps(imported))
"""

# What a training script might do: start a merge as a child of each of torchrun's processes.
CHILD = """
import os, subprocess, sys
checkpoint, out, *options = sys.argv[1:]
command = [sys.executable, "-m", "unshard", "merge", checkpoint, out + os.environ["RANK"], *options]
sys.exit(subprocess.call(command))
"""


def torchrun(*arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*TORCHRUN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a torchrun."""
    out, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, errors


def here(count: int, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Run a torchrun of one node."""
    return ended(torchrun("--standalone", f"--nproc_per_node={count}", *arguments, **variables))


def on_two_nodes(*arguments: str) -> list[tuple[int, str, str]]:
    """Run a torchrun for each of two nodes, with two processes each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = ("--nnodes=2", "--master-addr=localhost", f"--master-port={port}")
    nodes = [
        torchrun(*meeting, f"--node-rank={node}", "--nproc-per-node=2", *arguments)
        for node in range(2)
    ]
    return [ended(node) for node in nodes]


def launched(
    directory: Path, *arguments: str, count: int = 3, world: int = 3
) -> tuple[list[int], str]:
    """Run processes as torchrun does; return their exit codes, and what they print."""
    launcher = directory / "torchrun"
    launcher.write_text(LAUNCHER)
    done = subprocess.run(
        [sys.executable, str(launcher), str(count), str(world), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    launcher.unlink()
    *shown, codes = done.stdout.splitlines()
    return json.loads(codes), "\n".join([*shown, done.stderr])


def plain(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)


def tensors() -> dict[str, torch.Tensor]:
    """Long runs, short ones, a cast that overflows, a 0-d tensor, integers, a LoRA adapter."""
    generator = torch.Generator().manual_seed(0)
    several = {f"l.{n}.w": torch.randn(257, 129, generator=generator) for n in range(6)}
    huge = torch.full((5, 3), 1e6)
    for name, shape in {"base_layer": (512, 1024), **ADAPTER}.items():
        several[f"lin.{name}.weight"] = torch.randn(shape, generator=generator)
    return several | {"huge": huge, "count": torch.tensor(3), "zero": torch.zeros(0, 4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 3)


@pytest.fixture
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The files that the plain command makes."""
    out = tmp_path_factory.mktemp("plain") / "out"
    plain("unshard", "merge", str(checkpoint), str(out), *OPTIONS)
    return contents(out)


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "moment.py"
    path.write_text(MOMENT)
    return path


def merge_into(out: Path, checkpoint: Path) -> Sequence[str]:
    return ("merge", str(checkpoint), str(out), *OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_any_number_of_processes_makes_the_same_files(
    checkpoint: Path, tmp_path: Path, expected: Mapping[str, bytes], count: int
) -> None:
    command = merge_into(tmp_path / "out", checkpoint)
    code, out, errors = here(count, "-m", "unshard", *command)
    assert code == 0, errors
    assert contents(tmp_path / "out") == expected
    assert out.count("saved to") == 1
    assert errors.count("too large for float16") == 1


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_reports_the_exit_code_of_rank_0(
    checkpoint: Path, tmp_path: Path, restarts: int
) -> None:
    rank_path(checkpoint, 3, 1).unlink()
    before = snapshot(tmp_path)
    command = ("-m", "unshard", *merge_into(tmp_path / "out", checkpoint))
    code, out, errors = here(2, f"--max-restarts={restarts}", *command)
    assert code == 1
    assert "exitcode  : 3" in errors
    assert not out
    assert errors.count("error: ") == errors.count("Missing checkpoint for rank 1") == 1 + restarts
    assert "node://" not in errors  # nobody else could have the file
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_the_next_merge_removes_what_a_killed_rank_0_left(
    checkpoint: Path, tmp_path: Path, expected: Mapping[str, bytes], script: Path
) -> None:
    command = merge_into(tmp_path / "out", checkpoint)
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    code, _, errors = here(2, str(script), *command, MOMENT=killed)
    assert code == 1
    assert "SIGKILL" in errors
    assert len(list(tmp_path.glob("_unshard-partial-*"))) == 1
    plain("unshard", *command)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
def test_a_restart_of_torchrun_begins_anew(
    checkpoint: Path, tmp_path: Path, expected: Mapping[str, bytes], script: Path
) -> None:
    command = merge_into(tmp_path / "out", checkpoint)
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    code, _, errors = here(2, "--max-restarts=1", str(script), *command, MOMENT=killed)
    assert code == 0, errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_rank_0_when_the_others_are_gone(
    checkpoint: Path, tmp_path: Path, script: Path, sent: signal.Signals
) -> None:
    """A terminal sends SIGINT to all processes; SIGTERM is sent to torchrun, which passes it on."""
    before = snapshot(tmp_path)
    note = script.with_name("working")
    moment = f"Path({str(note)!r}).touch()\nwhile not came: time.sleep(0.01)"
    command = merge_into(tmp_path / "deep" / "out", checkpoint)
    started = ("--standalone", "--nproc_per_node=3", str(script), *command)
    process = torchrun(*started, MOMENT=moment)
    wait_until(note.exists, "work")
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    code, _, errors = ended(process)
    assert code != 0
    assert errors.count("no partial output left") == 1
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_of_two_nodes_the_first_process_makes_the_same_files(
    checkpoint: Path, tmp_path: Path, expected: Mapping[str, bytes]
) -> None:
    done = on_two_nodes("-m", "unshard", *merge_into(tmp_path / "out", checkpoint))
    assert [code for code, _, _ in done] == [0, 0], done
    assert contents(tmp_path / "out") == expected
    assert [out.count("saved to") for _, out, _ in done] == [1, 0]


@pytest.mark.slow
def test_where_files_may_be_on_the_other_node_the_message_names_ray(
    checkpoint: Path, tmp_path: Path
) -> None:
    rank_path(checkpoint, 3, 1).unlink()
    first, other = on_two_nodes("-m", "unshard", *merge_into(tmp_path / "out", checkpoint))
    code, _, errors = first
    assert code == 1
    assert "exitcode  : 3" in errors
    (hint,) = [line for line in errors.splitlines() if "hint: " in line]
    assert hint.endswith(
        "start the command once, without torchrun, with --engine ray and node:///PATH"
    )
    assert "error: " not in other[2]
    assert not (tmp_path / "out").exists()


# as torchrun starts processes, without the time that it takes

CONVERT = ("-m", "unshard.compat.convert_fsdp_to_hf", "--checkpoint_path")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (["-m", "unshard", "merge", "CKPT", "OUT"], 3, "missing"),
        (["-m", "unshard", "merge", "NONE", "OUT"], 3, "NONE"),
        (["-m", "unshard", "inspect", "NONE"], 3, "NONE"),
        (["-m", "unshard", "merge", "CKPT", "OUT", "--no-such-option"], 2, "--no-such-option"),
        (["-m", "unshard", "merge", "CKPT", "OUT", "--workers", "0"], 2, "workers"),
        ([*CONVERT, "CKPT", "--actor_subdir", ".", "--output_path", "OUT"], 1, "missing"),
        ([*CONVERT, "NONE"], 1, "does not exist"),
        ([*CONVERT, "CKPT", "--no_such_option"], 2, "--no_such_option"),
        (["-m", "unshard.merger", "--checkpoint_path", "NONE"], 1, "does not exist"),
    ],
)
def test_rank_0_fails_and_the_others_exit_with_0(
    checkpoint: Path, tmp_path: Path, command: list[str], code: int, message: str
) -> None:
    rank_path(checkpoint, 3, 1).unlink()
    before = snapshot(tmp_path)
    paths = {"CKPT": str(checkpoint), "OUT": str(tmp_path / "out"), "NONE": str(tmp_path / "NONE")}
    codes, said = launched(tmp_path, *(paths.get(word, word) for word in command))
    assert codes == [code, 0, 0], said
    assert message in said
    assert said.count("rror: ") == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "unshard", "merge", "CKPT", "OUT"],
        ["-m", "unshard", "average", "CKPT", "CKPT", "-o", "OUT"],
        [*CONVERT, "CKPT", "--actor_subdir", ".", "--output_path", "OUT"],
    ],
)
def test_each_command_names_ray_under_a_torchrun_of_several_nodes(
    checkpoint: Path, tmp_path: Path, command: list[str]
) -> None:
    rank_path(checkpoint, 3, 1).unlink()
    (checkpoint / "config.json").write_text('{"model_type": "none"}')
    paths = {"CKPT": str(checkpoint), "OUT": str(tmp_path / "out")}
    _, said = launched(tmp_path, *(paths.get(word, word) for word in command), count=1, world=2)
    assert "--engine ray and node:///PATH" in said


MODULES = ["unshard", "unshard.merger"] + [
    f"unshard.compat.{name}"
    for name in ("convert_checkpoint_simple", "convert_fsdp_to_hf", "merge_fsdp", "verl")
]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_the_other_ranks_print_nothing_and_import_little(tmp_path: Path, module: str) -> None:
    script = tmp_path / "noting.py"
    script.write_text(NOTING)
    codes, said = launched(tmp_path, str(script), str(tmp_path), module, "--help", count=2, world=2)
    assert codes == [0, 0], said
    assert said.strip() == plain(module, "--help").stdout.strip()  # what rank 0 prints
    imported = json.loads((tmp_path / "1").read_text())
    assert not {"numpy", "torch", "click", "rich"} & set(imported)
    assert len(imported) < 100


def test_what_training_processes_start_is_a_command_of_its_own(
    checkpoint: Path, tmp_path: Path, expected: Mapping[str, bytes]
) -> None:
    (tmp_path / "train.py").write_text(CHILD)
    arguments = (str(tmp_path / "train.py"), str(checkpoint), str(tmp_path / "out_"), *OPTIONS)
    codes, said = launched(tmp_path, *arguments, count=2, world=2)
    assert codes == [0, 0], said
    for rank in range(2):
        assert contents(tmp_path / f"out_{rank}") == expected


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
