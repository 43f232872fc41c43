"""torchrun on several nodes: the bytes that one process makes, or nothing at all."""

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import unshard
from ranks import contents, save_ranks, snapshot
from unshard.engines.several import links
from unshard.engines.several.links import Office, connect_to_office
from unshard.engines.several.nodes import divided
from unshard.write.dirfd import names_in
from unshard.write.staging.finished import FINISHED_NAME
from unshard.write.staging.owners import state_folder
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
FILES = 7
OPTIONS = ("--dtype", "float16", "--max-shard-size", "60KB", "--workers", "2")

# The processes of one node, as torchrun starts them; each ends by itself. Prints their exit codes.
NODE = """
import json, os, signal, subprocess, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)
node, count, port, *command = sys.argv[1:]
told = {"WORLD_SIZE": str(2 * int(count)), "LOCAL_WORLD_SIZE": count, "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
children = []
for rank in range(int(count)):
    own = {"LOCAL_RANK": str(rank), "RANK": str(int(node) * int(count) + rank)}
    children.append(subprocess.Popen([sys.executable, *command], env=os.environ | told | own))
print(json.dumps([child.wait() for child in children]))
"""

# The command `unshard`; the process VICTIM ends by SIGNAL when it has done MOMENT units of work.
# Every process of a node has a part of the work, however little there is.
DYING = """
import os, signal, threading
from unshard.__main__ import main
from unshard.engines.several import sockets, torchrun
from unshard.write.execute import Executor

torchrun._BATCH_BYTES = 1
accept = sockets.MeetingPlace.accept
sockets.MeetingPlace.accept = lambda self, *, wait: accept(self, wait=True)
do, left = Executor.do, [int(os.environ.get("MOMENT", "0"))]

def counted(self, unit):
    done = do(self, unit)
    left[0] -= 1
    if not left[0] and os.environ["RANK"] == os.environ["VICTIM"]:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    return done

Executor.do = counted
of_node = threading.Barrier(int(os.environ["LOCAL_WORLD_SIZE"]))
at_work = set()

def waiting(do):
    def wait_for_all(self, batch):
        if os.environ["LOCAL_RANK"] == "0" and of_node.parties > 1 and self not in at_work:
            at_work.add(self)
            of_node.wait()
        return do(self, batch)

    return wait_for_all

torchrun._Here.do, torchrun._There.do = waiting(torchrun._Here.do), waiting(torchrun._There.do)
"""
RUN = "main()\n"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"l.{number}.w": torch.randn(160, 160, generator=generator) for number in range(FILES)}
    return found | {"huge": torch.full((5, 3), 1e6), "zero": torch.zeros(0, 4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 3)


@pytest.fixture
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the same merge by one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    unshard.merge(checkpoint, out, dtype="float16", max_shard_size="60KB")
    return contents(out)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def on_two_nodes(
    commands: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Run the launcher of each node; return exit code, stdout and stderr of each."""
    nodes = [
        subprocess.Popen(
            [*command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (variables or {}),
        )
        for command in commands
    ]
    said = [node.communicate(timeout=LIMIT_S) for node in nodes]
    return [(node.returncode, *one) for node, one in zip(nodes, said, strict=True)]


def launched(
    scripts: Path, each: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> tuple[list[list[int]], str]:
    """Run processes of two nodes; return the exit codes by node, and everything that is printed."""
    launcher, script, port = scripts / "torchrun", scripts / "dying.py", free_port()
    launcher.write_text(NODE)
    script.write_text(DYING + RUN)
    commands = [
        [sys.executable, str(launcher), str(node), str(each), port, str(script), *arguments]
        for node in range(2)
    ]
    done = on_two_nodes(commands, variables)
    codes = [json.loads(out.splitlines()[-1]) for _, out, _ in done]
    with state_folder() as folder:
        assert not [name for name in names_in(folder) if name.startswith(f"torchrun-{port}")]
    return codes, "\n".join(out + errors for _, out, errors in done)


@pytest.fixture
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


def test_torchrun_on_two_nodes_makes_the_same_files(
    checkpoint: Path, tmp_path: Path, alone: dict[str, bytes]
) -> None:
    port = free_port()
    command = ["-m", "unshard", "merge", str(checkpoint), str(tmp_path / "out"), *OPTIONS]
    nodes = [
        [
            *(TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
            *command,
        ]
        for node in range(2)
    ]
    done = on_two_nodes(nodes)
    assert [code for code, _, _ in done] == [0, 0], done
    assert contents(tmp_path / "out") == alone
    assert [out.count("saved to") for _, out, _ in done] == [1, 0]  # one process speaks for all
    assert "too large for float16" in done[0][2]


@pytest.mark.parametrize("each", [1, 2])
def test_each_node_makes_whole_files(
    checkpoint: Path, tmp_path: Path, scripts: Path, alone: dict[str, bytes], each: int
) -> None:
    codes, said = launched(scripts, each, "merge", str(checkpoint), str(tmp_path / "o"), *OPTIONS)
    assert codes == [[0] * each] * 2, said
    assert contents(tmp_path / "o") == alone


def test_a_plan_is_divided_into_files_of_about_as_many_bytes(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", tensors(), 2)
    with unshard.virtual(checkpoint, max_shard_size="60KB") as files:
        plan = files._plan
    for count in (1, 2, 3, 20):
        parts = divided(plan, count)
        numbers = sorted(number for part in parts for number in part.numbers)
        assert numbers == list(range(len(plan.layout.files)))
        assert sum(len(part) for part in parts) == len(plan)
        sizes = [sum(plan.layout.files[n].size for n in part.numbers) for part in parts]
        assert max(sizes) - min(sizes) <= max(file.size for file in plan.layout.files)


@pytest.mark.parametrize(
    ("death", "expected"),
    [
        ("0 SIGKILL 1", [[-9, 143], [143, 143]]),
        ("1 SIGKILL 1", [[143, -9], [143, 143]]),
        ("2 SIGKILL 1", [[143, 143], [-9, 143]]),
        ("3 SIGKILL 1", [[143, 143], [143, -9]]),
        ("2 SIGTERM 1", [[143, 143], [143, 143]]),
        ("0 SIGINT 1", [[130, 130], [130, 130]]),
    ],
)
def test_when_a_process_of_either_node_dies_all_end_and_nothing_is_left(
    checkpoint: Path, tmp_path: Path, scripts: Path, death: str, expected: list[list[int]]
) -> None:
    before = snapshot(tmp_path)
    variables = dict(zip(("VICTIM", "SIGNAL", "MOMENT"), death.split(), strict=True))
    out = str(tmp_path / "deep" / "out")
    command = ("merge", str(checkpoint), out, *OPTIONS)
    codes, said = launched(scripts, 2, *command, variables=variables)
    assert codes == expected, said
    assert said.count("error: ") == (0 if death.startswith("0") else 1), said
    assert "Traceback" not in said
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("moment", ["1", "3"])
@pytest.mark.parametrize("victim", ["0", "1"])
def test_of_nodes_with_one_process_each_nothing_is_left_either(
    checkpoint: Path, tmp_path: Path, scripts: Path, victim: str, moment: str
) -> None:
    variables = {"VICTIM": victim, "SIGNAL": "SIGKILL", "MOMENT": moment}
    command = ("merge", str(checkpoint), str(tmp_path / "deep" / "out"), *OPTIONS)
    codes, said = launched(scripts, 1, *command, variables=variables)
    assert codes == ([[-9], [143]] if victim == "0" else [[143], [-9]]), said
    assert not (tmp_path / "deep").exists()


def test_what_several_nodes_have_finished_is_resumed(
    checkpoint: Path, tmp_path: Path, scripts: Path, alone: dict[str, bytes]
) -> None:
    command = ("merge", str(checkpoint), str(tmp_path / "out"), *OPTIONS, "--resume")
    variables = {"VICTIM": "1", "SIGNAL": "SIGKILL", "MOMENT": "3"}
    codes, said = launched(scripts, 1, *command, variables=variables)
    assert codes == [[143], [-9]], said
    (staging,) = tmp_path.glob("_unshard-partial-*")
    assert (staging / FINISHED_NAME).exists()
    codes, said = launched(scripts, 1, *command)
    assert codes == [[0], [0]], said
    assert "resuming: " in said
    assert contents(tmp_path / "out") == alone
    assert list(tmp_path.glob("_unshard-partial-*")) == []


def test_an_error_before_there_is_a_plan_ends_all_alike(tmp_path: Path, scripts: Path) -> None:
    codes, said = launched(scripts, 2, "merge", str(tmp_path / "none"), str(tmp_path / "out"))
    assert codes == [[3, 3], [3, 3]], said
    assert said.count("error: ") == 1


# who may connect


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> Office:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    return Office(1)


def test_nothing_is_unpickled_from_who_does_not_have_the_secret(
    office: Office, tmp_path: Path
) -> None:
    """A stranger that connects first is sent away, and the node that comes later is let in."""
    marker = tmp_path / "run"
    address = office._socket.getsockname()

    class Harmful:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(marker),)

    stranger = socket.create_connection(address)
    stranger.sendall(os.urandom(64) + pickle.dumps(Harmful()))
    found: list[links.Link] = []
    node = threading.Thread(target=lambda: found.append(connect_to_office()))
    node.start()
    (ours,) = office.accept()
    node.join()
    found[0].send({"answer": 42})
    assert ours.receive() == {"answer": 42}
    ours.send([1, 2])
    assert found[0].receive() == [1, 2]
    assert not marker.exists()
    for one in (ours, found[0], stranger):
        one.close()


def test_a_message_that_another_puts_between_is_refused(office: Office) -> None:
    found: list[links.Link] = []
    node = threading.Thread(target=lambda: found.append(connect_to_office()))
    node.start()
    (ours,) = office.accept()
    node.join()
    found[0].send("first")
    assert ours.receive() == "first"
    found[0]._sent = 0  # as who repeats what was sent before
    found[0].send("first")
    with pytest.raises(ConnectionAbortedError):
        ours.receive()
    for one in (ours, found[0]):
        one.close()


def test_an_announcement_of_a_process_that_was_killed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    with state_folder() as folder:
        fd = os.open(links._name(), os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
        os.write(fd, json.dumps({"port": int(free_port()), "secret": "00"}).encode())
        os.close(fd)
    found: list[links.Link] = []
    node = threading.Thread(target=lambda: found.append(connect_to_office()))
    node.start()
    office = Office(1)
    (ours,) = office.accept()
    node.join()
    for one in (ours, found[0]):
        one.close()


def test_nodes_that_do_not_share_a_directory_are_told_what_to_do(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_MEETING_S", 0)
    monkeypatch.setattr(office, "_until", 0)
    with pytest.raises(unshard.OutputError, match=r"only 1 of 2 nodes[\s\S]*XDG_STATE_HOME"):
        list(office.accept())
    office.close()
    with pytest.raises(unshard.OutputError, match=r"no announcement[\s\S]*XDG_STATE_HOME"):
        connect_to_office()
