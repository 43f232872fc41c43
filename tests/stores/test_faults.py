"""A store that fails now and then is asked again; one that always fails is an error, not a hang."""

import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import unshard
from bucket_server import BUCKET, SECRETS, Request, Store
from command import unshard as command
from ranks import save_ranks
from unshard import CorruptError, StoreError, UsageError
from unshard.stores.pool import Ongoing, all_at_once
from unshard.stores.remote_path import RemotePath, look_again, path_of

pytestmark = [
    pytest.mark.xdist_group("a bucket"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

WEIGHTS = "model.safetensors"
MEMORY = 256_000_000


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(3)
    tensors = {f"w{n}": torch.randn(1500, 1024, generator=generator) for n in range(4)}
    return save_ranks(tmp_path_factory.mktemp("faults") / "ckpt", tensors, 2)


@pytest.fixture(scope="module")
def address(served: Store, local: Path) -> str:
    return served.upload(local, "faults")


FAULTS: dict[str, Callable[[Request], str | None]] = {
    "503s": lambda one: "503" if one.number % 3 == 0 else None,
    "cut connections": lambda one: "cut" if one.number % 4 == 1 else None,
    "half bodies": lambda one: "half" if one.range and one.number % 3 == 0 else None,
    "all of them": lambda one: ("503", "cut", "half", None, None, None)[one.number % 6],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["copied", "cast"])
def test_faults_now_and_then_change_nothing(  # noqa: PLR0917
    store: Store,
    address: str,
    local: Path,
    truth: bytes,
    tmp_path: Path,
    fault: Callable[[Request], str | None],
    options: dict[str, str],
) -> None:
    if options:
        unshard.merge(local, tmp_path / "local", config="none", **options)  # type: ignore[arg-type]
        truth = (tmp_path / "local" / WEIGHTS).read_bytes()
    store.fault = fault
    unshard.merge(address, tmp_path / "out", config="none", **options)  # type: ignore[arg-type]
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == truth


@pytest.mark.slow
def test_bodies_that_always_end_early_are_an_error(
    store: Store, address: str, tmp_path: Path
) -> None:
    store.fault = lambda one: "half" if one.range and one.key.endswith("rank_1.pt") else None
    with pytest.raises(StoreError, match=r"rank_1\.pt: (the connection was cut|every answer ends)"):
        unshard.merge(address, tmp_path / "out", config="none")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_not_there_is_an_error_without_secrets(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("unshard.stores.buckets._REQUEST_RETRIES", 1)
    with pytest.raises(StoreError, match="the connection was refused") as caught:
        unshard.merge(f"s3://{BUCKET}/faults", tmp_path / "out")
    assert not [word for word in SECRETS if word in str(caught.value)]
    assert caught.value.__cause__ is None
    assert store.requests == []


def test_an_object_replaced_in_the_middle_is_an_error(
    store: Store, local: Path, tmp_path: Path
) -> None:
    address = store.upload(local, "changing")
    changed = threading.Event()

    def replace(one: Request) -> None:
        if one.range and one.range[1] - one.range[0] > 1_000_000 and not changed.is_set():
            changed.set()
            for path in sorted(local.iterdir()):
                key = f"changing/{path.name}"
                store.s3.put_object(Bucket=BUCKET, Key=key, Body=b"x" * path.stat().st_size)

    store.fault = replace
    with pytest.raises(CorruptError, match="has changed while it was being read"):
        unshard.merge(address, tmp_path / "out", config="none")
    assert changed.is_set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["a disk", "the store"])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_checkpoint_saved_over_at_any_request_gives_one_step_or_an_error(
    store: Store, tmp_path: Path, output: str, *, ignores: bool
) -> None:
    """Also by a store that ignores If-Match."""
    steps = [
        save_ranks(tmp_path / str(step), {"w": torch.full((64, 8), float(step))}, 2)
        for step in range(2)
    ]
    seen = set()
    for number in range(100):
        address, target = store.upload(steps[0], "latest"), str(tmp_path / "out")
        target = target if output == "a disk" else f"s3://{BUCKET}/made-{ignores}-{number}"
        store.requests.clear()

        def fault(request: Request, number: int = number) -> str | None:
            if request.number == number:
                store.upload(steps[1], "latest")
            return "any" if ignores and request.method == "GET" else None

        store.fault = fault
        try:
            unshard.merge(address, target, verify="full", config="none")
        except CorruptError as error:
            seen.add(str(error).splitlines()[0].rpartition(": ")[2])
        else:
            store.fault = lambda _: None
            with unshard.open_checkpoint(target) as made:
                values = set(made["w"].reshape(-1).tolist())
            assert values in ({0.0}, {1.0})
            seen.add(values.pop())
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert not (tmp_path / "out").exists()
        if number >= len(store.requests):
            break
    assert seen - {1.0} == {0.0, "has changed while it was being read"}
    assert number > 5


def test_without_obstore_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UsageError, match="needs obstore") as caught:
        unshard.merge(f"s3://{BUCKET}/faults", tmp_path / "out")
    assert "remote" in caught.value.hint


READING = """
import sys, unshard
with unshard.virtual(sys.argv[1], config="none") as files:
    for name, file in files.items():
        while data := file.read(1 << 20):
            pass
"""


@pytest.mark.usefixtures("store")
def test_nothing_is_written_to_disk(address: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READING, address],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_the_memory_stays_bounded(served: Store, tmp_path: Path, dtype: str) -> None:
    tensor = torch.zeros(8192, 4096)
    place = save_ranks(tmp_path / "ckpt", {f"w{n}": tensor for n in range(3)}, 2)
    large = served.upload(place, "large")
    done = command("merge", large, tmp_path / "out", "--dtype", dtype, "--config", "none", "--json")
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split('"peak_memory_bytes":')[1].split(",")[0])
    assert 0 < peak < MEMORY


def test_a_path_that_was_opened_means_the_same_object_in_another_process(store: Store) -> None:
    """Pickled and back, as on the way to another process."""
    store.s3.put_object(Bucket=BUCKET, Key="travelling/one", Body=b"before")
    path, fresh = (path_of(f"s3://{BUCKET}/travelling/one") for _ in range(2))
    assert path.read_bytes() == b"before"
    store.s3.put_object(Bucket=BUCKET, Key="travelling/one", Body=b"afterw")
    look_again(fresh)
    for one in (path, fresh):
        assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(fresh)).read_bytes() == b"afterw"
    with pytest.raises(CorruptError, match="has changed while it was being read"):
        pickle.loads(pickle.dumps(path)).read_bytes()


@pytest.mark.usefixtures("store")
def test_paths_in_a_bucket_are_those_of_pathlib(address: str) -> None:
    path = path_of(address)
    assert isinstance(path, RemotePath)
    assert (str(path), path.name, str(path.parent)) == (address, "faults", f"s3://{BUCKET}")
    assert path.is_dir()
    assert not path.is_file()
    assert not (path / "nothing").exists()
    names = [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    assert sorted(one.name for one in path.glob("*_rank_*.pt")) == names
    assert sorted(one.name for one in path.parent.rglob("*_rank_1.pt"))[:1] == names[1:]
    one = path / names[0]
    assert str(one.relative_to(path)) == names[0]
    assert type(one.relative_to(path)) is type(Path())
    with one.open("rb") as file:
        head = file.read(4)
        file.seek(-2, os.SEEK_END)
        assert one.read_bytes() == head + one.read_bytes()[4:-2] + file.read()
    assert one.stat().st_size == len(one.read_bytes())
    with pytest.raises(FileNotFoundError):
        (path / "nothing").stat()
    with pytest.raises(PermissionError):
        one.open("wb")
    again = path_of(Path(address))
    assert again == path
    assert hash(again) == hash(path)


def test_the_first_error_of_several_tasks_is_raised_when_all_are_over() -> None:
    done: list[int] = []

    def task(number: int) -> None:
        if number == 3:
            raise ValueError("the third")
        done.append(number)

    ongoing = Ongoing(2)
    with pytest.raises(ValueError, match="the third"):
        all_at_once([partial(task, n) for n in range(20)])
    ongoing.add(lambda: task(100))
    ongoing.finish()
    assert done[-1] == 100
    inner = [partial(task, 200), partial(task, 201)]
    all_at_once([partial(all_at_once, inner)] * 40)
    assert done.count(200) == done.count(201) == 40
