"""Hundreds of clients at a real server that is killed all the time: nothing may be lost.

    make torture-eval STORMS="--jobs 10000 --clients 300 --restarts 200"

Each client submits its share of the jobs, lists and follows them, and cancels some and retries
them. Meanwhile the server gets SIGKILL and SIGTERM in turn, its database is locked for seconds, it
cannot write for seconds, as on a full disk, some follow the events and some ask and never read.
In the end each job must be completed once, with its number and without a failure, each follower
must have seen every event in order, every GPU be free, and nothing be left over.

The evaluator is a shell that refuses to share a GPU, or to run twice at the same time for one job.
"""

import argparse
import asyncio
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from evaluation.running import whole_model
from evaluation.servers import Fields, Live, free_port
from evaluation.victims import Watch, children, state_of
from waiting import wait_until

GPUS = 4
BURST = 4  # kills
PROBE_STEP = 10**6
DEADLINE_S = 4 * 3600.0  # of everything; a job that is never done would not end
ENDED = ("completed", "failed", "cancelled", "expired", "superseded")

EVALUATOR = """
set -e
job=$(basename "$(dirname "$(dirname "$1")")")
exec 9>"$2/job-$job"
flock -n 9 || { echo "$job runs already"; exit 3; }
fd=3
for gpu in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
    eval "exec $fd>'$2/gpu-$gpu'"
    flock -n $fd || { echo "GPU $gpu is taken"; exit 4; }
    fd=$((fd + 1))
done
echo "{\\"task\\": {\\"step\\": $3}}" > "$1/results.json"
"""


@dataclass(frozen=True)
class Storm:
    """How much of everything there is."""

    jobs: int
    clients: int
    restarts: int
    followers: int
    silent: int
    locks: int
    seed: int


@dataclass
class Sea:
    """A server, the clients of which do not know when it is there."""

    directory: Path
    storm: Storm
    server: Live = field(init=False)
    model: Path = field(init=False)
    watch: Watch = field(init=False)
    refused: Counter[str] = field(default_factory=Counter)
    done: threading.Event = field(default_factory=threading.Event)
    troubles: list[BaseException] = field(default_factory=list)  # of the thread that kills it

    def __post_init__(self) -> None:
        self.server = Live(self.directory)
        script = self.directory / "evaluator.sh"
        script.write_text(EVALUATOR)
        command = ["/bin/sh", str(script), "{output}", str(self.server.control), "{step}"]
        profile = {"kind": "command", "command": command, "retries": 0, "gpus": 1}
        self.port = free_port()
        self.server.configure(gpus=GPUS, port=self.port, profiles={"script": profile})
        self.server.url = f"http://127.0.0.1:{self.port}"
        self.model = whole_model(self.server.root / "model")
        self.watch = Watch(self.server.work)

    def rows(self, query: str) -> list[tuple[object, ...]]:
        database = f"file:{self.server.work / 'jobs.sqlite'}?mode=ro"
        with closing(sqlite3.connect(database, uri=True, timeout=60)) as connection:
            return connection.execute(query).fetchall()

    def submission(self, step: int, **more: object) -> Fields:
        body: Fields = {"checkpoint": str(self.model), "profile": "script", "tasks": ["task"]}
        return {**body, "run": f"run-{step % 7}", "step": step, **more}


# Clients.


async def ask(
    sea: Sea, client: httpx.AsyncClient, method: str, path: str, **more: object
) -> httpx.Response:
    """Ask until there is an answer: the server may be away, or say that it cannot answer now."""
    while True:
        try:
            answer = await client.request(method, f"/api/v1{path}", **more)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            if sea.troubles:  # nobody starts it again
                raise sea.troubles[0] from error
            sea.refused[type(error).__name__] += 1
            await asyncio.sleep(random.uniform(0.05, 0.5))
            continue
        if answer.status_code != 503:
            return answer
        assert "Retry-After" in answer.headers
        sea.refused["503"] += 1
        await asyncio.sleep(random.uniform(0.05, 0.5))


async def get(
    sea: Sea, client: httpx.AsyncClient, method: str, path: str, **more: object
) -> Fields:
    """Ask for what must be there."""
    answer = await ask(sea, client, method, path, **more)
    assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
    found: Fields = answer.json()
    return found


async def share(sea: Sea, number: int, limits: asyncio.Semaphore) -> None:
    """Submit the jobs of one client; cancel some, and retry what was cancelled."""
    drawn = random.Random(f"{sea.storm.seed} {number}")
    async with httpx.AsyncClient(base_url=sea.server.url, timeout=60) as client:
        for step in range(number, sea.storm.jobs, sea.storm.clients):
            async with limits:
                more = {"num_gpus": 2} if drawn.random() < 0.1 else {}
                body = sea.submission(step, **more)
                job = await get(sea, client, "POST", "/jobs", json=body)
                what = drawn.random()
                if what < 0.1:
                    await get(sea, client, "DELETE", f"/jobs/{job['id']}")
                    await retried(sea, client, job)
                elif what < 0.2:
                    await get(sea, client, "GET", "/jobs?status=running&limit=50")
                elif what < 0.3:
                    await get(sea, client, "GET", "/results?limit=50")
            await asyncio.sleep(drawn.uniform(0, 0.05))


async def retried(sea: Sea, client: httpx.AsyncClient, job: Fields) -> None:
    """Retry a job that was cancelled as soon as it has ended; it may have been completed before."""
    while True:
        found = await get(sea, client, "GET", f"/jobs/{job['id']}")
        if found["status"] in ENDED:
            break
        await asyncio.sleep(0.2)
    if found["status"] == "cancelled":
        answer = await ask(sea, client, "POST", f"/jobs/{job['id']}/retry")
        # A server that was killed may have done it without an answer: the second is a refusal.
        assert answer.is_success or "cannot be retried" in answer.text, answer.text


async def follow(sea: Sea) -> list[int]:
    """Follow the events until all is done, from server to server; return their numbers."""
    seen: list[int] = []
    timeout = httpx.Timeout(10)  # a heartbeat comes every five seconds
    async with httpx.AsyncClient(base_url=sea.server.url, timeout=timeout) as client:
        while not (sea.done.is_set() and seen and seen[-1] >= last_event(sea)):
            with suppress(httpx.TransportError):
                path = f"/api/v1/events?since={seen[-1] if seen else 0}"
                async with client.stream("GET", path) as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("id: "):
                            seen.append(int(line.removeprefix("id: ")))
                        elif sea.done.is_set():
                            break
            await asyncio.sleep(0.2)
    return seen


def last_event(sea: Sea) -> int:
    return int(str(sea.rows("SELECT MAX(number) FROM events")[0][0]))


@contextmanager
def silent(sea: Sea) -> Iterator[None]:
    """Ask for everything in turn, again whenever the server is new, and never read an answer."""
    held: list[socket.socket] = []

    def hold() -> None:
        paths = ("/api/v1/events", "/api/v1/jobs?limit=1000", "/", "/metrics")
        asked: object = None
        while not sea.done.wait(0.2):
            if sea.server.process is asked or not sea.server.is_listening():
                continue
            for one in held:
                one.close()
            held.clear()
            asked = sea.server.process
            for number in range(sea.storm.silent):
                path = paths[number % len(paths)]
                with suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", sea.port), timeout=1)
                    held.append(one)
                    one.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 5)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        sea.done.set()
        thread.join()
        for one in held:
            one.close()


# What happens to the server.


def disturb(sea: Sea) -> Counter[str]:
    """Kill the server so many times; now and then lock its database, or let it not write.

    The kills come in bursts, one for each part of the jobs: not all at once while most are queued.
    """
    drawn, found = random.Random(sea.storm.seed), Counter[str]()
    for number in range(sea.storm.restarts):
        sea.server.wait()
        if number % BURST == 0:
            while completed(sea) * sea.storm.restarts < number * sea.storm.jobs:
                if sea.done.wait(0.5):
                    break
        time.sleep(drawn.choice([drawn.uniform(0, 0.3), drawn.uniform(0, 4)]))
        if (number + 1) * sea.storm.locks // sea.storm.restarts > found["locked"]:
            found["locked"] += 1
            found["full"] += 1
            locked(sea, drawn.uniform(0.5, 7))
            full(sea, drawn.uniform(0.5, 3))
        kind = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        process = sea.server.process
        assert process is not None
        process.send_signal(kind)
        code = process.wait(120)
        assert code in {-kind, 0, 128 + kind}, sea.server.told()[-2000:]
        found[kind.name] += 1
        sea.server.launch()
    sea.server.wait()
    return found


def completed(sea: Sea) -> int:
    return int(str(sea.rows("SELECT COUNT(*) FROM jobs WHERE status = 'completed'")[0][0]))


def locked(sea: Sea, seconds: float) -> None:
    with closing(sqlite3.connect(sea.server.work / "jobs.sqlite", isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout = 60000")
        other.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        other.execute("ROLLBACK")


def full(sea: Sea, seconds: float) -> None:
    """Let the server's process write no byte to any file, as on a full disk."""
    assert sea.server.process is not None
    pid = sea.server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    time.sleep(seconds)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


# The whole, and its judgement.


async def clients(sea: Sea) -> list[list[int]]:
    """Run all clients until each job has ended; return what each follower saw."""
    followers = [asyncio.create_task(follow(sea)) for _ in range(sea.storm.followers)]
    limits = asyncio.Semaphore(64)  # requests in flight: connections, and our own descriptors
    shares = [share(sea, number, limits) for number in range(sea.storm.clients)]
    try:
        await asyncio.gather(*shares)
    except BaseException:
        for one in followers:
            one.cancel()
        raise
    end = time.monotonic() + DEADLINE_S
    while open_jobs(sea):
        assert time.monotonic() < end, f"still open: {open_jobs(sea)}"
        await asyncio.sleep(0.5)
    sea.done.set()
    return await asyncio.gather(*followers)


def open_jobs(sea: Sea) -> int:
    ended = ", ".join(f"'{one}'" for one in ENDED)
    query = f"SELECT COUNT(*) FROM jobs WHERE status NOT IN ({ended})"  # noqa: S608 (ours)
    return int(str(sea.rows(query)[0][0]))


def judge(sea: Sea, seen: list[list[int]]) -> None:
    """Compare what is recorded with what was submitted, and look for what is left over."""
    server, storm = sea.server, sea.storm
    probe = server.v1("POST", "/jobs", json=sea.submission(PROBE_STEP, num_gpus=GPUS))
    server.ended(probe)  # all GPUs are free
    wanted = [*range(storm.jobs), PROBE_STEP]
    found = sea.rows(
        "SELECT step, status, failures, value, (SELECT COUNT(*) FROM attempts WHERE job_id = id"
        " AND outcome = 'completed') FROM jobs LEFT JOIN results ON job_id = id ORDER BY step"
    )
    assert [row[0] for row in found] == wanted, "jobs were lost, or made twice"
    wrong = [row for row in found if row[1:] != ("completed", 0, float(str(row[0])), 1)]
    assert wrong == [], (
        len(wrong),
        wrong[:5],
        sea.rows("SELECT error FROM jobs WHERE error > ''")[:3],
    )
    outcomes = Counter(str(row[0]) for row in sea.rows("SELECT outcome FROM attempts"))
    assert outcomes["failed"] == 0, outcomes
    events = [row[0] for row in sea.rows("SELECT number FROM events ORDER BY number")]
    for one in seen:  # the probe came later
        assert one == events[: len(one)], "a follower missed events, or saw them twice"
    wait_until(lambda: left(sea) == [], "an end without leftovers")


def left(sea: Sea) -> list[str]:
    """Return what should not be there any more."""
    server = sea.server
    assert server.process is not None
    pins = [path for path in server.root.rglob("_unshard/pins/*") if path.is_dir()]
    places = [*pins, *server.work.rglob("*.partial")]
    merged = server.work / "merged"
    places += list(merged.iterdir()) if merged.exists() else []
    found = [str(path) for path in places]
    found += [f"{one.kind} {one.pid}" for one in sea.watch.look()]
    found += [f"zombie {pid}" for pid in children(server.process.pid) if state_of(pid) == "Z"]
    query = "SELECT job_id, number FROM attempts WHERE ended_at IS NULL"
    return found + [f"open attempt {row}" for row in sea.rows(query)]


def rage(directory: Path, storm: Storm) -> str:
    """Let a storm rage; return what happened, in one line."""
    sea = Sea(directory, storm)
    happened = Counter[str]()

    def disturbing() -> None:
        try:
            happened.update(disturb(sea))
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            sea.troubles.append(error)

    sea.server.start()
    thread = threading.Thread(target=disturbing)
    thread.start()
    try:
        with silent(sea):
            seen = asyncio.run(clients(sea))
            thread.join()
        if sea.troubles:
            raise sea.troubles[0]
        judge(sea, seen)
    finally:
        thread.join()
        sea.server.stop()
    attempts = Counter(str(outcome) for (outcome,) in sea.rows("SELECT outcome FROM attempts"))
    told = (
        f"{storm.jobs} jobs of {storm.clients} clients and a probe",
        f"attempts: {counted(attempts)}",
        f"the server: {counted(happened)}",
        f"refusals: {counted(sea.refused)}",
    )
    return "; ".join(told)


def counted(what: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(what.items())) or "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "jobs": 10_000,
        "clients": 300,
        "restarts": 200,
        "followers": 20,
        "silent": 20,
        "locks": 20,
        "seed": random.randrange(1_000_000),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    storm = Storm(**vars(parser.parse_args()))
    print(storm, flush=True)
    directory = Path(tempfile.mkdtemp(prefix="unshard-storms-"))
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    try:
        print(rage(directory, storm))
    except BaseException:
        print(f"all files are in {directory}")
        raise
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
