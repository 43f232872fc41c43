"""Checkpoints on the nodes' own disks, on a real Ray cluster: node:///path is another one on each.

Each node has a mount namespace of its own, so that one path has other content there than elsewhere;
the process of the test, and the commands that it starts, see an empty directory.
"""

import json
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from bucket_server import BUCKET, Store, serving
from evaluation.ray_nodes import PYTHON, Nodes, needs_ray, nodes, with_mounts
from evaluation.running import all_gone, child_environment
from held_on_nodes import begin, begun, ended, wait_for_nodes
from ranks import contents, made, rank_path, save_ranks, snapshot
from waiting import wait_until

pytestmark = [
    needs_ray,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

WORLD = 4
OPTIONS = ("--engine", "ray", "--dtype", "float16", "--max-shard-size", "60KB", "--workers", "2")


@dataclass(frozen=True)
class Disks:
    """The disk of each node, and all that they have in one directory.

    `place` is where each node sees its own; nothing is there elsewhere.
    """

    whole: Path
    each: tuple[Path, Path]
    place: Path

    @property
    def url(self) -> str:
        return f"node://{self.place}"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Disks:
    if with_mounts() is None:
        assert "GITHUB_ACTIONS" not in os.environ, "the workflow allows them"
        pytest.skip("unshare cannot make mount namespaces here")
    base = tmp_path_factory.mktemp("disks")
    made = Disks(base / "whole", (base / "first", base / "second"), base / "place")
    made.place.mkdir()
    actor = Path("run", "global_step_3", "actor")
    save_ranks(made.whole / actor, tensors(), WORLD)
    (made.whole / actor / "config.json").write_text('{"hidden_size": 160}')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(made.whole / "dcp", thread_count=2, sync_files=False)
        save(dict(tensors(1)), storage_writer=writer, no_dist=True)
    both, dcp = actor / "config.json", Path("dcp")
    first = [rank_path(actor, WORLD, 0), rank_path(actor, WORLD, 1), both, dcp / ".metadata"]
    second = [rank_path(actor, WORLD, 2), rank_path(actor, WORLD, 3), both, dcp / "__0_1.distcp"]
    for disk, paths in zip(made.each, ([*first, dcp / "__0_0.distcp"], second), strict=True):
        for path in paths:
            (disk / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(made.whole / path, disk / path)
    return made


@pytest.fixture(scope="module")
def cluster(store: Store, disks: Disks) -> Iterator[Nodes]:  # noqa: ARG001 (it sets the nodes' environment)
    with nodes(0, 0, disks=disks.each, place=disks.place) as made:
        yield made


@dataclass(frozen=True)
class Driver:
    """A process that is connected with the cluster, and runs what it is given."""

    process: "subprocess.Popen[str]"

    def run(self, script: str) -> str:
        """Run Python; return what it printed."""
        said = self.ask(script)
        assert "Traceback" not in said, said
        return said

    def refused(self, script: str) -> Iterator[str]:
        """Run Python, each time anew; yield the errors that it ends with."""
        while True:
            yield self.ask(script).strip().splitlines()[-1].removeprefix("REFUSED ")

    def ask(self, script: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(script) + "\n")
        self.process.stdin.flush()
        said = ""
        for line in self.process.stdout:
            if line == "DONE\n":
                return said
            said += line
        raise AssertionError(f"the driver has ended: {said}")


RUNNING = """
import json, sys, traceback, warnings
from pathlib import Path
import ray, unshard
warnings.simplefilter("ignore")
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
known = {"unshard": unshard, "Path": Path}
for line in sys.stdin:
    try:
        exec(json.loads(line), known)
    except unshard.UnshardError as error:
        print(traceback.format_exc())
        print("REFUSED", type(error).__name__, error.subject, error.found)
    except Exception:
        print(traceback.format_exc())
    print("DONE", flush=True)
"""


@pytest.fixture(scope="module")
def driver(cluster: Nodes) -> Iterator[Driver]:
    environment = child_environment() | {"RAY_ADDRESS": cluster.address}
    command = [PYTHON, "-c", RUNNING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Driver(process)


@pytest.fixture
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"l.{number}.w": torch.randn(160, 160, generator=generator) for number in range(5)}
    return found | {"bias": torch.randn(7, generator=generator), "zero": torch.zeros(0, 4)}


def test_the_nodes_merge_what_each_has_alone(
    cluster: Nodes, control: Path, disks: Disks, tmp_path: Path
) -> None:
    before = [snapshot(disk) for disk in disks.each]
    command = ("merge", f"{disks.url}/run", tmp_path / "out", *OPTIONS, "--verify", "full")
    process = begin(cluster, control, *command, HOLD="middle")
    wait_for_nodes(process, control, 2)
    (control / "go").touch()
    code, said = ended(process)
    assert code == 0, said
    assert "Traceback" not in said
    assert list(disks.place.iterdir()) == []
    unshard.merge(disks.whole / "run", tmp_path / "alone", dtype="float16", max_shard_size="60KB")
    assert made(tmp_path / "out") == made(tmp_path / "alone")
    assert [snapshot(disk) for disk in disks.each] == before


def test_all_that_reads_checkpoints_reads_those_on_nodes(
    driver: Driver, disks: Disks, tmp_path: Path
) -> None:
    """DCP, an average, a description, a comparison; and a file system that all nodes share."""
    here = [str(disks.whole / "run"), str(disks.whole / "dcp")]
    there = [f"{disks.url}/run", f"{disks.url}/dcp"]
    driver.run(f"""
bare = dict(engine="ray", config="none")
unshard.merge({there[1]!r}, {str(tmp_path / "dcp")!r}, max_shard_size="60KB", **bare)
unshard.average({there!r}, {str(tmp_path / "mean")!r}, **bare)
unshard.merge({there[0]!r}, {str(tmp_path / "here")!r})
unshard.merge("node://" + {here[0]!r}, {str(tmp_path / "shared")!r}, engine="ray")
found = unshard.inspect({there[0]!r})
assert (found.world_size, found.step, found.companions) == (4, 3, ("config.json",)), found
assert unshard.verify({str(tmp_path / "here")!r}, {there[0]!r}, engine="ray").equal
""")
    unshard.merge(here[1], tmp_path / "dcp alone", max_shard_size="60KB", config="none")
    unshard.average(here, tmp_path / "mean alone", config="none")
    unshard.merge(here[0], tmp_path / "here alone")
    for name in ("dcp", "mean", "here"):
        assert made(tmp_path / name) == made(tmp_path / f"{name} alone")
    assert made(tmp_path / "shared") == made(tmp_path / "here alone")


def test_the_nodes_upload_what_each_has_alone(
    driver: Driver, disks: Disks, tmp_path: Path, store: Store
) -> None:
    out = f"s3://{BUCKET}/from-nodes"
    driver.run(f"unshard.merge('{disks.url}/run', {out!r}, engine='ray', max_shard_size='60KB')")
    unshard.merge(disks.whole / "run", tmp_path / "alone", max_shard_size="60KB")
    made, expected = store.files("from-nodes"), contents(tmp_path / "alone")
    assert made.keys() == expected.keys()
    for name in expected.keys() - {"unshard.json"}:
        assert made[name] == expected[name]


def test_a_file_that_differs_between_nodes_is_refused_if_it_is_read(
    driver: Driver, disks: Disks, tmp_path: Path
) -> None:
    """Of equal size or not; what a merge does not read may differ, such as a log."""
    for disk in disks.each:
        shutil.copytree(disk / "run", disk / "other")
        (disk / "other" / "global_step_3" / "actor" / "train.log").write_text(f"on {disk}")
    configs = [disk / "other" / "global_step_3" / "actor" / "config.json" for disk in disks.each]
    rank = rank_path(configs[1].parent, WORLD, 1)
    text = configs[0].read_text()
    refused = driver.refused(f"unshard.merge('{disks.url}/other', {str(tmp_path / 'out')!r})")
    said = []
    configs[1].write_text(text.replace("160", "161"))
    said.append(next(refused))
    configs[1].write_text(text + " ")
    said.append(next(refused))
    configs[1].write_text(text)
    rank.write_bytes(b"")
    said.append(next(refused))
    rank.unlink()
    rank.mkdir()
    said.append(next(refused))
    rank.rmdir()
    driver.run(f"unshard.merge('{disks.url}/other', {str(tmp_path / 'out')!r})")
    expected = ("digest ", "21 bytes on ", "0 bytes on ", "a directory on ")
    names = ["config.json", "config.json", rank.name, rank.name]
    for line, name, found in zip(said, names, expected, strict=True):
        assert line.startswith(f"CorruptError {disks.url}/other/global_step_3/actor/{name}: ")
        assert line.count(f" on {os.uname().nodename} (") == 2
        assert found in line
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_changes_is_noticed(driver: Driver, disks: Disks) -> None:
    for disk in disks.each:
        shutil.copytree(disk / "run", disk / "changing")
    driver.run(f"opened = unshard.open_checkpoint('{disks.url}/changing')")
    driver.run("assert opened['l.1.w'].shape == (160, 160)")
    refused = driver.refused("opened['l.1.w']")
    changed = rank_path(disks.each[1] / "changing" / "global_step_3" / "actor", WORLD, 2)
    os.utime(changed, ns=(1, 1))
    assert f"{changed.name}: has changed while it was being read" in next(refused)
    changed.unlink()
    assert f"{changed.name}: no longer exists" in next(refused)


def test_what_cannot_be_done_is_said(driver: Driver, disks: Disks, tmp_path: Path) -> None:
    given = [
        f"unshard.merge('{disks.url}/nothing', {str(tmp_path / 'out')!r})",
        "unshard.merge('node:///', 'out')",
        f"unshard.merge('{disks.url}/run')",
    ]
    assert [next(driver.refused(one)).partition(" None ")[0] for one in given] == [
        f"UnknownFormatError {disks.url}/nothing: no such file or directory",
        "UsageError node:///: has no directory",
        f"UsageError node:///{disks.place.parts[1]}: is read-only",
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_actor_that_reads_needs_little_memory(
    driver: Driver, disks: Disks, tmp_path: Path
) -> None:
    """All the bytes come from the second node, and many threads ask for them."""
    large = disks.each[1] / "large"
    large.mkdir()
    torch.save({f"w.{n}": torch.zeros(1 << 20) for n in range(64)}, large / "model.pt")
    said = driver.run(f"""
def peak():
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if b"NodeFiles" in (path / "cmdline").read_bytes():
                lines = (path / "status").read_text().splitlines()
                found += [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]

        except OSError:
            pass
    return max(found) >> 10

unshard.inspect("{disks.url}/large/model.pt")
before = peak()
unshard.merge("{disks.url}/large/model.pt", {str(tmp_path / "out")!r}, workers=8, config="none")
print(before, peak() - before)
""")
    before, more = map(int, said.split()[-2:])
    assert 20 < before < 200, said
    assert more < 150, said  # 256 MiB went through it


def test_a_lost_node_with_files_of_its_own_ends_the_merge_and_nothing_is_left(
    cluster: Nodes, control: Path, disks: Disks, tmp_path: Path
) -> None:
    command = ("merge", f"{disks.url}/run", tmp_path / "out", *OPTIONS)
    process = begin(cluster, control, *command, HOLD="middle")
    wait_for_nodes(process, control, 2)
    before = begun(control)
    cluster.kill(0)
    wait_until(lambda: any(map(all_gone, before.values())), "the end of what ran there")
    (control / "go").touch()
    code, said = ended(process)
    cluster.add(0, disks.each[1], disks.place)
    assert code == 6, said
    assert "Traceback" not in said
    assert f"error: node {os.uname().nodename}" in said
    start = f"{disks.url}/run/global_step_3/actor/model_world_size_4"
    assert f"is lost, and no other node has {start}_rank_2.pt, {start}_rank_3.pt\n" in said
    assert list(tmp_path.iterdir()) == []


def test_without_ray_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['ray'] = None; from unshard.__main__ import main; main()"
    command = [PYTHON, "-c", hidden, "merge", "node:///local/run", str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(), check=False
    )
    assert done.returncode == 2, done
    assert "error: node:///local/run: Ray is not installed" in done.stderr
    assert "pip install ray" in done.stderr
