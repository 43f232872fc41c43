"""`--engine ray` on a real Ray cluster of two nodes: the bytes of one process, or none at all."""

import os
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from adapters import adapted
from bucket_server import BUCKET, Store, serving
from command import unshard as unshard_alone
from evaluation.ray_nodes import PYTHON, Nodes, needs_ray, nodes
from evaluation.running import all_gone, child_environment
from held_on_nodes import begin, begun, ended, ran, wait_for_nodes
from ranks import contents, rank_path, save_ranks, snapshot
from unshard.write.bucket.claim import CLAIM_NAME
from unshard.write.bucket.ledger import FINISHED_NAME
from waiting import wait_until

pytestmark = [
    needs_ray,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

FILES = 7
OPTIONS = (
    *("--engine", "ray", "--dtype", "float16", "--max-shard-size", "60KB", "--workers", "2"),
    *("--config", "none"),
)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(store: Store) -> Iterator[Nodes]:  # noqa: ARG001 (it sets the nodes' environment)
    with nodes(0, 0) as made:
        yield made


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"l.{number}.w": torch.randn(160, 160, generator=generator) for number in range(FILES)}
    return found | {"huge": torch.full((5, 3), 1e6), "zero": torch.zeros(0, 4)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_ranks(tmp_path / "ckpt", tensors(), 3)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint that becomes two files, each of which is uploaded in several parts."""
    generator = torch.Generator().manual_seed(1)
    weights = {f"l.{number}.w": torch.randn(1600, 2000, generator=generator) for number in range(2)}
    return save_ranks(tmp_path / "large", weights, 2)


UPLOADED = (
    *("--engine", "ray", "--max-shard-size", "13MB", "--memory", "40MB", "--workers", "2"),
    *("--config", "none"),
)


@pytest.fixture
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


def alone(checkpoint: Path, out: Path) -> dict[str, bytes]:
    unshard.merge(checkpoint, out, dtype="float16", max_shard_size="60KB", config="none")
    return contents(out)


def test_the_nodes_make_the_same_files(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    relative = os.path.relpath(checkpoint, control)
    command = ("merge", relative, tmp_path / "out", *OPTIONS, "--json", "--verify", "full")
    process = begin(cluster, control, *command, HOLD="middle")
    wait_for_nodes(process, control, 2)
    (control / "go").touch()
    code, said = ended(process)
    assert code == 0, said
    assert contents(tmp_path / "out") == alone(checkpoint, tmp_path / "alone")
    assert "too large for float16" in said
    assert "Traceback" not in said
    assert process.pid not in verified(control)
    assert verified(control)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ckpt", "out"]


@pytest.mark.parametrize("place", ["a disk", "a store"])
def test_an_adapter_by_itself_is_made_by_the_nodes_too(
    cluster: Nodes, control: Path, tmp_path: Path, store: Store, place: str
) -> None:
    source = tmp_path / "adapted"
    adapted(source)
    out = str(tmp_path / "out") if place == "a disk" else f"s3://{BUCKET}/adapted"
    command = ("merge", source, out, "--engine", "ray", "--lora", "both", "--verify", "full")
    process = begin(cluster, control, *command, **({"HOLD": "middle"} if place == "a disk" else {}))
    if place == "a disk":
        wait_for_nodes(process, control, 2)  # each has one of the two files
        (control / "go").touch()
    code, said = ended(process)
    assert code == 0, said
    unshard.merge(source, tmp_path / "alone", lora="both")
    expected = contents(tmp_path / "alone")
    assert "lora_adapter/adapter_model.safetensors" in expected
    assert expected == (contents(tmp_path / "out") if place == "a disk" else store.files("adapted"))


def verified(control: Path) -> set[int]:
    """Return the processes that have read the output and its sources again."""
    return {int(note.name.partition("-")[2]) for note in control.glob("verified-*")}


DAMAGING = """
verify = jobs.OverRay.verify
def damage(self, plan, catalogs, directory, *rest):
    path = directory / plan.layout.files[3].filename
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    verify(self, plan, catalogs, directory, *rest)
jobs.OverRay.verify = damage
"""


@pytest.mark.parametrize("damaged", ["source", "output"])
def test_the_nodes_find_what_is_damaged_and_nothing_is_left(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path, damaged: str
) -> None:
    rank = rank_path(checkpoint, 3, 1)
    if damaged == "source":
        data = bytearray(rank.read_bytes())
        data[data.index(tensors()["l.5.w"].chunk(3)[1].numpy().tobytes())] ^= 1
        rank.write_bytes(data)
    command = ("merge", checkpoint, tmp_path / "out", *OPTIONS, "--verify", "full")
    patch = DAMAGING if damaged == "output" else ""
    code, said = ran(cluster, control, *command, PATCH=patch)
    assert "Traceback" not in said
    if damaged == "source":
        assert code == 3, said
        assert f"{rank}: storage " in said
        assert "(tensor l.5.w of rank 1) does not match its checksum" in said
    else:
        assert code == 5, said
        assert ": differs from its source" in said
    assert verified(control)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_a_dcp_checkpoint_and_an_average_have_the_same_files(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(tensors(1)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    given = (checkpoint, tmp_path / "dcp")
    script = f"""
told = []
options = dict(engine="ray", max_shard_size="60KB", config="none", listener=told.append)
unshard.merge({str(given[1])!r}, {str(tmp_path / "merged")!r}, **options)
(total,) = (one.total_bytes for one in told if getattr(one, "name", "") == "writing")
assert sum(one.written_bytes for one in told if isinstance(one, Advanced)) == total > 0
mean = dict(engine="ray", workers=1, config="none")
unshard.average({[*map(str, given)]!r}, {str(tmp_path / "mean")!r}, **mean)
raise SystemExit
"""
    code, said = ran(cluster, control, PATCH=script)
    assert code == 0, said
    unshard.merge(given[1], tmp_path / "merged alone", max_shard_size="60KB", config="none")
    unshard.average(given, tmp_path / "mean alone", config="none")
    for name in ("merged", "mean"):
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} alone")


def lose_a_node(cluster: Nodes, control: Path, process: "subprocess.Popen[str]") -> None:
    """Kill a node when both are held at their work, and let the other one go on."""
    wait_for_nodes(process, control, 2)
    before = begun(control)
    cluster.kill(0)
    wait_until(lambda: any(map(all_gone, before.values())), "the end of what ran there")
    (control / "go").touch()


@pytest.mark.parametrize("command", ["merge", "average"])
def test_the_files_of_a_lost_node_are_made_on_another_one(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path, command: str
) -> None:
    given = [checkpoint, checkpoint] if command == "average" else [checkpoint]
    process = begin(cluster, control, command, *given, tmp_path / "out", *OPTIONS, HOLD="middle")
    lose_a_node(cluster, control, process)
    code, said = ended(process)
    cluster.add(0)
    assert code == 0, said
    assert "of the work are done again" in said
    unshard.merge(
        checkpoint, tmp_path / "alone", dtype="float16", max_shard_size="60KB", config="none"
    )
    made, expected = contents(tmp_path / "out"), contents(tmp_path / "alone")
    if command == "average":
        del made["unshard.json"], expected["unshard.json"]
    assert made == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ckpt", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_work_on_all_nodes_and_nothing_is_left(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path, number: int
) -> None:
    before = snapshot(tmp_path)
    command = ("merge", checkpoint, tmp_path / "deep" / "out", *OPTIONS)
    process = begin(cluster, control, *command, HOLD="middle")
    wait_for_nodes(process, control, 2)
    process.send_signal(number)
    found, said = ended(process)
    assert found == 128 + number, said
    assert "Traceback" not in said
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "deep").exists()
    wait_until(lambda: all(map(all_gone, begun(control).values())), "the end of the actors")


def test_an_error_on_a_node_is_ours_and_names_file_and_node(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    command = ("merge", checkpoint, tmp_path / "out", *OPTIONS, "--json")
    process = begin(cluster, control, *command, HOLD="before")
    wait_for_nodes(process, control, 1)
    rank_path(checkpoint, 3, 1).rename(tmp_path / "elsewhere")
    (control / "go").touch()
    code, said = ended(process)
    assert code == 3, said
    assert f"error: {rank_path(checkpoint, 3, 1)}: no longer exists" in said
    assert f"(on node {os.uname().nodename})" in said
    assert "Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "elsewhere"]


def test_what_is_finished_is_resumed(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The driver is killed when some files are finished, and others are in their middle."""
    patch = """
write = jobs._move
def moved(*paths):
    write(*paths)
    (Path(os.environ["CONTROL"]) / "moved").touch()
jobs._move = moved
going = Held.do
Held.do = lambda self, number, *rest: self.task.do(number, *rest) if number == 0 else (
    going(self, number, *rest))
"""
    command = ("merge", checkpoint, tmp_path / "out", *OPTIONS, "--resume")
    process = begin(cluster, control, *command, HOLD="middle", PATCH=patch)
    wait_until((control / "moved").exists, "a finished file")
    wait_until(lambda: list(tmp_path.glob("_unshard-partial-*/finished.jsonl")), "its record")
    process.kill()
    ended(process)
    (control / "go").touch()
    code, said = ran(cluster, control, *command)
    assert code == 0, said
    assert "resuming: 1 of " in said
    assert contents(tmp_path / "out") == alone(checkpoint, tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "ckpt", "out"]


def test_another_version_on_the_nodes_is_refused(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    patch = "from unshard.stores.nodes import connection; connection.__version__ = '99.1'"
    code, said = ran(cluster, control, "merge", checkpoint, tmp_path / "o", *OPTIONS, PATCH=patch)
    assert code == 2, said
    assert f"has unshard {unshard.__version__}, this process has 99.1" in said
    assert not (tmp_path / "o").exists()


def test_a_cluster_that_does_not_see_the_checkpoint_is_an_error(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    patch = """
cluster._VISIBLE_S = 0
needed = jobs._by_directory
jobs._by_directory = lambda paths: needed([*paths, Path("/nowhere/rank_7.pt")])
"""
    code, said = ran(cluster, control, "merge", checkpoint, tmp_path / "o", *OPTIONS, PATCH=patch)
    assert code == 5, said
    assert "does not see /nowhere" in said
    assert not (tmp_path / "o").exists()


def test_without_a_cluster_none_is_started(checkpoint: Path, tmp_path: Path) -> None:
    command = [PYTHON, "-m", "unshard", "merge", str(checkpoint), str(tmp_path / "out"), *OPTIONS]
    variables = child_environment() | {"RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 2, done
    assert "error: --engine ray: no Ray cluster can be used: RAY_ADDRESS=127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_ray_the_error_says_how_to_install_it(checkpoint: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['ray'] = None; from unshard.__main__ import main; main()"
    command = [PYTHON, "-c", hidden, "merge", str(checkpoint), str(tmp_path / "out"), *OPTIONS]
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(), check=False
    )
    assert done.returncode == 2, done
    assert "Ray is not installed" in done.stderr
    assert "pip install ray" in done.stderr


def damage_last_byte(checkpoint: Path, merged: Path) -> Path:
    """Merge a checkpoint, and damage a value of the output."""
    unshard.merge(checkpoint, merged, dtype="bfloat16", max_shard_size="60KB", config="none")
    first = next(iter(sorted(merged.glob("*.safetensors"))))
    data = bytearray(first.read_bytes())
    data[-1] ^= 0x10
    first.write_bytes(data)
    return merged


def test_the_nodes_compare_what_one_process_compares(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path
) -> None:
    merged = damage_last_byte(checkpoint, tmp_path / "merged")
    command = ("verify", merged, "--against", checkpoint, "--json")
    code, said = ran(cluster, control, *command, "--engine", "ray")
    here = unshard_alone(*command)
    assert code == here.returncode == 1, said
    assert said.splitlines()[0] == here.stdout.strip()


@pytest.mark.parametrize("verifying", ["verify", "merge --verify full"])
def test_what_a_lost_node_was_verifying_is_read_by_another_one(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path, verifying: str
) -> None:
    if verifying == "verify":
        damage_last_byte(checkpoint, tmp_path / "out")
        command = ("verify", tmp_path / "out", "--against", checkpoint, "--json")
        process = begin(cluster, control, *command, "--engine", "ray", HOLD="middle")
    else:
        merge = ("merge", checkpoint, tmp_path / "out", *OPTIONS, "--verify", "full")
        process = begin(cluster, control, *merge, HOLD="verify")
    lose_a_node(cluster, control, process)
    code, said = ended(process)
    cluster.add(0)
    assert "of the work are done again" in said
    assert "Traceback" not in said
    if verifying == "verify":
        here = unshard_alone(*command)
        assert code == here.returncode == 1, said
        assert said.splitlines()[0] == here.stdout.strip()
    else:
        assert code == 0, said
        assert contents(tmp_path / "out") == alone(checkpoint, tmp_path / "alone")


def test_the_nodes_read_from_a_store_and_upload_into_it(
    cluster: Nodes, control: Path, checkpoint: Path, tmp_path: Path, store: Store
) -> None:
    source, out = store.upload(checkpoint, "ckpt"), f"s3://{BUCKET}/out"
    code, said = ran(cluster, control, "merge", source, out, *OPTIONS, "--verify", "full")
    assert code == 0, said
    assert "Traceback" not in said
    made, expected = store.files("out"), alone(checkpoint, tmp_path / "alone")
    assert made.keys() == expected.keys()
    for name in expected.keys() - {"unshard.json"}:
        assert made[name] == expected[name]
    assert store.abort_uploads() == 0
    assert verified(control)


def test_what_a_lost_node_was_uploading_is_aborted_and_uploaded_by_another_one(
    cluster: Nodes, control: Path, large: Path, tmp_path: Path, store: Store
) -> None:
    command = ("merge", large, f"s3://{BUCKET}/lost", *UPLOADED)
    process = begin(cluster, control, *command, HOLD="middle")
    wait_for_nodes(process, control, 2)
    wait_until(lambda: len(store.begun_uploads()) == 2, "an upload by each node")
    before = begun(control)
    cluster.kill(0)
    wait_until(lambda: any(map(all_gone, before.values())), "the end of what ran there")
    assert store.files("lost").keys() == {CLAIM_NAME}
    (control / "go").touch()
    code, said = ended(process)
    cluster.add(0)
    assert code == 0, said
    assert "of the work are done again" in said
    assert "Traceback" not in said
    assert store.begun_uploads() == []
    unshard.merge(large, tmp_path / "alone", max_shard_size="13MB", config="none")
    assert store.files("lost") == contents(tmp_path / "alone")


def test_a_killed_merge_into_a_store_goes_on_with_what_is_finished(
    cluster: Nodes, control: Path, large: Path, tmp_path: Path, store: Store
) -> None:
    """The driver is killed when one file is finished, and the other is in its middle."""
    patch = """
going = HeldUpload.do
HeldUpload.do = lambda self, number, *rest: self.task.do(number, *rest) if number == 0 else (
    going(self, number, *rest))
"""
    command = ("merge", large, f"s3://{BUCKET}/resumed", *UPLOADED, "--resume")
    process = begin(cluster, control, *command, HOLD="middle", PATCH=patch)
    wait_for_nodes(process, control, 1)
    wait_until(lambda: FINISHED_NAME in store.files("resumed"), "a finished file")
    process.kill()
    ended(process)
    wait_until(lambda: all(map(all_gone, begun(control).values())), "the end of the actors")
    (finished,) = store.files("resumed").keys() - {CLAIM_NAME, FINISHED_NAME}
    assert len(store.begun_uploads()) == 1
    store.forget_requests()
    (control / "go").touch()
    code, said = ran(cluster, control, *command)
    assert code == 0, said
    assert "resuming: 1 of 2 files" in said
    written = {one.key for one in store.requests if one.method in ("PUT", "POST")}
    assert not {key for key in written if key.endswith(finished)}
    assert store.begun_uploads() == []
    unshard.merge(large, tmp_path / "alone", max_shard_size="13MB", config="none")
    assert store.files("resumed") == contents(tmp_path / "alone")


def test_a_failed_merge_into_a_store_leaves_nothing_there(
    cluster: Nodes, control: Path, checkpoint: Path, store: Store
) -> None:
    patch = """
Uploading = jobs._Uploading
class Failing:
    def __init__(self, *given):
        self.uploading = Uploading(*given)
    def do(self, number, attempt, listener):
        if number == 3:
            raise unshard.CorruptError("tensor l.3.w: rank 1 is damaged")
        return self.uploading.do(number, attempt, listener)
jobs._Uploading = Failing
"""
    code, said = ran(
        cluster, control, "merge", checkpoint, f"s3://{BUCKET}/failed", *OPTIONS, PATCH=patch
    )
    assert code == 3, said
    assert "error: tensor l.3.w: rank 1 is damaged" in said
    assert store.files("failed") == {}
    assert store.abort_uploads() == 0
