"""Everything at once, nothing mocked: FSDP2 trains, rotates and reports; the server is killed.

Two processes of torchrun train a tiny Qwen2 with transformers' Trainer, which saves shards and
keeps one checkpoint. The callback pins and submits; the server, a process of its own, merges and
runs the real lm-eval, offline, two jobs at once. While both are evaluated the server and the first
job's evaluator are killed with -9. The second job's evaluator goes on without a server, the trainer
saves its next checkpoint without one, and removes the others. Then the server is back: the second
result comes first. All of this happens with merges, and again without any.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation.fsdp_training import LOGGING_STEPS, WORLD, Order, gate, truth_of
from evaluation.local_tasks import OFFLINE, surprise_task
from evaluation.running import child_environment
from evaluation.servers import free_port
from evaluation.wandb_file import definitions, history
from unshard.errors import UnshardError
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.jobs import Filters, Job, Phase, Status
from unshard.evaluate.pins.pin import list_pins
from unshard.evaluate.server.processes.supervise import read_exit
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.spool import Spool

TASK = "colours_surprise"
METRICS = ("perplexity", "acc")
NAMES = tuple(f"unshard_eval/{TASK}/{name}" for name in METRICS)
STEPS = (4, 8, 12)  # those that are saved
LAST = 14
LOGGED = list(range(LOGGING_STEPS, LAST + 1, LOGGING_STEPS))
PATIENCE_S = 600.0  # for a machine that does other things, too

Values = dict[int, dict[str, float]]  # by step, by name


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    root: Path
    port: int
    is_direct: bool

    @property
    def run(self) -> Path:
        return self.root / "runs" / "tiny"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return child_environment() | {
            **OFFLINE,
            "HF_HOME": str(self.root / "hub"),
            "OMP_NUM_THREADS": "1",
            "TENSORBOARD_LOGGING_DIR": str(self.root / "tensorboard"),
            "TRACKIO_DIR": str(self.root / "trackio"),
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(self.root),
            "WANDB_SILENT": "true",
        }

    def logs(self) -> str:
        """Return how what every process wrote ends."""
        files = sorted(self.root.glob("*.log"))
        return "\n".join(f"{file}:\n{file.read_text(errors='replace')[-9000:]}" for file in files)


@pytest.fixture(params=["merged", "direct"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    (tmp_path / "runs").mkdir()
    tasks = surprise_task(tmp_path / "tasks")
    place = Place(tmp_path, free_port(), is_direct=request.param == "direct")
    profile = {
        "kind": "lm-eval",
        "interpreter": sys.executable,
        "include_paths": [str(tasks)],
        "environment": {**OFFLINE, "OMP_NUM_THREADS": "1"},
        "gpus": 1,
        "timeout": PATIENCE_S,
        "weights": request.param,
    }
    config = {
        "roots": [str(tmp_path / "runs")],
        "gpus": [98, 99],  # there are none: what matters are two jobs at once, on the CPU
        "port": place.port,
        "work_directory": str(tmp_path / "work"),
        "profiles": {"tiny": profile},
    }
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(config))
    return place


@contextmanager
def started(place: Place, log: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a module of Python in a group of its own, which is gone afterwards."""
    with (place.root / log).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=place.environment,
            cwd=place.root,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@contextmanager
def training(place: Place, log: str, order: Order) -> Iterator["subprocess.Popen[bytes]"]:
    path = place.root / f"{log}.json"
    path.write_text(order.as_json())
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}")
    with started(place, log, *launcher, "-m", "evaluation.fsdp_training", str(path)) as process:
        yield process


@contextmanager
def lm_eval_by_hand(place: Place) -> Iterator["subprocess.Popen[bytes]"]:
    truths = [str(truth_of(place.run, step)) for step in STEPS]
    paths = [str(place.root / "tasks"), TASK, str(place.root / "by-hand.json")]
    module = "evaluation.lm_eval_by_hand"
    with started(place, "by-hand.log", module, *paths, *truths) as process:
        yield process


@contextmanager
def server(place: Place, log: str) -> Iterator["subprocess.Popen[bytes]"]:
    config = str(place.root / "server.yaml")
    with started(place, log, "unshard", "eval", "serve", "--config", config) as process:
        wait_until(lambda: is_served(place), place, "the server answers")
        yield process


def is_served(place: Place) -> bool:
    with EvalClient(place.url, timeout=5.0) as client:
        try:
            client.jobs()
        except UnshardError:
            return False
        return True


def wait_until(condition: Callable[[], bool], place: Place, what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {PATIENCE_S} s: {what}\n{place.logs()}")
        time.sleep(0.1)


def jobs_of(place: Place) -> dict[int, Job]:
    """Return the server's jobs by step; its database can be read while it is gone."""
    path = place.root / "work" / "jobs.sqlite"
    if not path.exists():
        return {}
    store = Store(path)
    try:
        return {int(str(job.request.step)): job for job in store.jobs(Filters())}
    finally:
        store.close()


def are_evaluated(place: Place, steps: tuple[int, ...]) -> bool:
    jobs = jobs_of(place)
    found = [jobs.get(step) for step in steps]
    return all(job is not None and job.phase is Phase.EVALUATING and job.process for job in found)


def jsonl(place: Place) -> list[dict[str, object]]:
    path = place.run / "_unshard" / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_no_result_is_lost_and_each_is_at_its_own_step(place: Place) -> None:
    evaluation = {
        "server_url": place.url,
        "profile": "tiny",
        "tasks": [TASK],
        "poll_interval": 0.3,
        "flush_timeout": PATIENCE_S,
    }
    trackers = ["tensorboard", "wandb", "trackio"]
    order = Order(str(place.run), LAST, STEPS[0], evaluation, trackers, gates=[8, 12])
    with server(place, "first-server.log") as first, training(place, "train.log", order) as trainer:
        wait_until(lambda: are_evaluated(place, (4, 8)), place, "two jobs run")
        first.kill()
        kill_and_train_on(place)
        with server(place, "second-server.log"):
            wait_until(lambda: len(jsonl(place)) > 0, place, "a result")
            gate(place.run, 12).touch()
            with lm_eval_by_hand(place) as by_hand:
                for process in (trainer, by_hand):
                    wait_until(lambda one=process: one.poll() is not None, place, "the end")  # type: ignore[misc]  # mypy infers no default
                    assert process.returncode == 0, place.logs()
            check_end(place)
    check_results(place)


def kill_and_train_on(place: Place) -> None:
    """Kill the first job's evaluator; have a checkpoint saved while no server runs."""
    jobs = jobs_of(place)
    first, second = jobs[4].process, jobs[8].process
    assert first is not None
    assert second is not None
    kill_group(first.pid)
    gate(place.run, 8).touch()
    spool = Spool(place.run)
    wait_until(lambda: any(one.fields["step"] == 12 for one in spool.waiting()), place, "a spool")
    assert [path.name for path in place.run.glob("checkpoint-*")] == ["checkpoint-12"]
    assert [pin.step for pin in list_pins(place.run)] == [4, 8, 12]
    directory = Path(second.directory)
    wait_until(lambda: read_exit(directory) is not None, place, "an evaluator without a server")


def check_end(place: Place) -> None:
    """Nothing is left but what rotation leaves; every job ran as often as it had to."""
    jobs = jobs_of(place)
    assert {step: job.status for step, job in jobs.items()} == dict.fromkeys(
        STEPS, Status.COMPLETED
    )
    assert {step: job.attempts for step, job in jobs.items()} == {4: 2, 8: 1, 12: 1}
    assert [path.name for path in place.run.glob("checkpoint-*")] == ["checkpoint-12"]
    assert list_pins(place.run) == []
    spool = Spool(place.run)
    assert [*spool.waiting(), *spool.pending(), *spool.arrived()] == []
    merged = place.root / "work" / "merged"
    assert list(merged.iterdir()) == []
    # Its time is that of the last entry that was made or removed: with `direct` there was none.
    assert (merged.stat().st_mtime < jobs[4].created_at) is place.is_direct


def check_results(place: Place) -> None:
    """Every sink has every step once, with what lm-eval says of torch's own weights."""
    lines = jsonl(place)
    assert lines[0]["step"] == 8, "they did not come out of order"
    found = once((line["step"], line["metrics"]) for line in lines)
    expected = truth(place)
    assert found.keys() == expected.keys()
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-6)
    assert len({metrics[NAMES[0]] for metrics in found.values()}) == len(STEPS)
    assert in_wandb(place) == found
    assert in_trackio(place) == found
    logged = in_tensorboard(place)
    assert logged.keys() == found.keys()
    for step, metrics in found.items():
        assert logged[step] == pytest.approx(metrics, rel=1e-6)  # TensorBoard has float32


def once(pairs: "Iterator[tuple[object, object]]") -> Values:
    """Return results by step, none of which may come twice."""
    found: Values = {}
    for step, metrics in pairs:
        assert isinstance(metrics, dict)
        assert int(str(step)) not in found, f"step {step} is there twice"
        found[int(str(step))] = {name: float(metrics[name]) for name in NAMES}
    return found


def truth(place: Place) -> Values:
    found: list[Mapping[str, float]] = json.loads((place.root / "by-hand.json").read_bytes())
    return {
        step: {name: one[metric] for name, metric in zip(NAMES, METRICS, strict=True)}
        for step, one in zip(STEPS, found, strict=True)
    }


def in_tensorboard(place: Place) -> Values:
    events = EventAccumulator(
        str(place.root / "tensorboard" / "unshard_eval"), purge_orphaned_data=False
    )
    events.Reload()
    found: Values = {}
    for name in NAMES:
        scalars = events.Scalars(name)
        assert sorted(scalar.step for scalar in scalars) == list(STEPS)
        for scalar in scalars:
            found.setdefault(scalar.step, {})[name] = scalar.value
    return found


def in_wandb(place: Place) -> Values:
    (file,) = place.root.glob("wandb/offline-run-*/run-*.wandb")
    rows = history(file)
    losses = [int(row["train/global_step"]) for row in rows if "train/loss" in row]
    assert losses == LOGGED, "a row of the trainer's own is lost"
    assert {definitions(file)[name] for name in NAMES} == {"unshard_eval/step"}
    return once((row["unshard_eval/step"], row) for row in rows if NAMES[0] in row)


def in_trackio(place: Place) -> Values:
    (database,) = (place.root / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    connection.close()
    found = [(step, json.loads(text)) for step, text in rows]
    losses = [(step, row["train/global_step"]) for step, row in found if "train/loss" in row]
    assert losses == list(enumerate(LOGGED)), "the trainer's steps moved"
    return once((step, row) for step, row in found if NAMES[0] in row)
