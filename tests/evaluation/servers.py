"""The servers of these tests: the command in a process of its own, and two in this process.

`live` runs `unshard eval serve` with a small script as its evaluator. `still` is the application
without its scheduler: jobs stay in the queue. `serving` answers clients as the test says: it
refuses, forgets, finishes at once. `evaluation.running` has the scheduler without HTTP.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvicorn
import yaml
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from evaluation.running import child_environment
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.pins.files import read_stamps
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.http import app as application
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.service import Service
from unshard.read.finding.versions import fingerprint
from waiting import LIMIT_S, wait_until

Fields = dict[str, object]

# A server in a process of its own. Its scripts get six arguments: the model, the directory of the
# output, one for the notes between test and script, tasks, step and weights.

SCRIPT = """
import json, os, pathlib, subprocess, sys, time
model, output, control = map(pathlib.Path, sys.argv[1:4])
tasks, step, weights = sys.argv[4:]
print("evaluating step", step, "with", weights, flush=True)
if "talks" in tasks:
    print("\\u00e4" * 2_000_000, "the end", flush=True)
if "waits" in tasks:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    note = control / f"draft-{step}"
    pids = [os.getpid(), child.pid]
    note.write_text(json.dumps({"pids": pids, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}))
    note.rename(control / f"began-{step}")
    while not (control / "go").exists():
        time.sleep(0.02)
    child.kill()
if "samples" in tasks:
    (output / "model").mkdir()
    (output / "model" / "now_samples_samples.jsonl").write_text("{}")
if "fails" in tasks:
    sys.exit("nothing was measured")
size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
numbers = {"acc,none": int(step or 0) / 100, "acc,strict": 0.5, "size": size, "acc_stderr": 9}
(output / "results.json").write_text(json.dumps({task: numbers for task in tasks.split(",")}))
"""


SCORE = """
import json, os, sys
model, output, _, tasks, step, _ = sys.argv[1:]
assert any(name.endswith(".safetensors") for name in os.listdir(model)), os.listdir(model)
with open(os.path.join(output, "results.json"), "w") as file:
    json.dump({task: {"acc": int(step or 0) / 1000} for task in tasks.split(",")}, file)
"""
FAIL = "raise SystemExit('no')"


@dataclass
class Live:
    """A server: where it listens, and where its files are."""

    directory: Path
    options: tuple[str, ...] = ()
    url: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    headers: dict[str, str] = field(default_factory=dict)
    interpreter: str = sys.executable
    _begin: int = 0

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def work(self) -> Path:
        return self.directory / "work"

    @property
    def control(self) -> Path:
        return self.directory / "control"

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    def configure(self, script: str = SCRIPT, **changed: object) -> None:
        """Write a configuration whose profile `script` runs a script."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.control.mkdir(exist_ok=True)
        file = self.directory / "script.py"
        file.write_text(script)
        places = ["{checkpoint}", "{output}", str(self.control)]
        command = [sys.executable, "-I", "-S", str(file), *places]
        profile = {
            "kind": "command",
            "command": [*command, "{tasks}", "{step}", "{weights}"],
            "retries": 0,
            "gpus": 1,
            "environment": {"TEST_PASSWORD": "a-secret-of-the-profile"},
        }
        python = self.directory / "python"  # another than the server's own, as far as it knows
        python.unlink(missing_ok=True)
        python.symlink_to(sys.executable)
        lmms = {"kind": "lmms-eval", "interpreter": str(python), "gpus": 0}
        config = {
            "roots": [str(self.root)],
            "gpus": 4,
            "port": 0,
            "work_directory": str(self.work),
            "profiles": {"script": profile, "lmms-eval": lmms},
        }
        (self.directory / "server.yaml").write_text(yaml.safe_dump(config | changed))

    def launch(self, *options: str) -> None:
        """Start it; with no options, as configured."""
        command = [self.interpreter, "-m", "unshard", "eval", "serve"]
        configured = ("--config", str(self.directory / "server.yaml"), *self.options)
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *(options or configured)],
                cwd=self.directory,
                env=child_environment(),
                stdout=log,
                stderr=log,
            )

    def told(self, since: int | None = None) -> str:
        """Return what it logged from a byte on; None: since its last start."""
        begin = self._begin if since is None else since
        return self.log.read_bytes()[begin:].decode(errors="replace")

    def is_listening(self) -> bool:
        return "listening on" in self.told()

    def start(self, *options: str) -> "Live":
        """Start it, and wait until it says where it listens."""
        self.launch(*options)
        return self.wait()

    def wait(self) -> "Live":
        process = self.process
        assert process is not None
        wait_until(lambda: self.is_listening() or process.poll() is not None, "a server")
        assert process.poll() is None, self.told()
        wait_until(lambda: "\n" in self.told().partition("listening on ")[2], "its address")
        url = self.told().partition("listening on ")[2].partition("\n")[0]
        url = url.partition('"')[0]  # in a log of JSON it is in a string
        self.url = url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104  (as configured)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Ask it to end, and everything that it left running."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LIMIT_S)
        for note in self.control.glob("began-*"):
            for pid in json.loads(note.read_text())["pids"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return code

    def call(self, method: str, path: str, **more: object) -> httpx.Response:
        return httpx.request(
            method,
            f"{self.url}{path}",
            headers={**self.headers, **more.pop("headers", {})},  # type: ignore[dict-item]  # headers
            timeout=LIMIT_S,
            **more,  # type: ignore[arg-type]  # httpx's own
        )

    def v1(self, method: str, path: str, **more: object) -> Fields:
        answer = self.call(method, f"/api/v1{path}", **more)
        assert answer.is_success, answer.text
        found: Fields = answer.json()
        return found

    def submit(self, checkpoint: Path, *tasks: str, **more: object) -> Fields:
        body = {"checkpoint": str(checkpoint), "profile": "script", "tasks": tasks or ("score",)}
        return self.v1("POST", "/jobs", json={**body, **more})

    def job(self, job: Mapping[str, object]) -> Fields:
        return self.v1("GET", f"/jobs/{job['id']}")

    def ended(self, job: Mapping[str, object], status: str = "completed") -> Fields:
        """Wait until a job ends, and return it as it is then."""
        finals = {"completed", "failed", "cancelled", "expired", "superseded"}
        wait_until(lambda: self.job(job)["status"] in finals, f"{job['id']}: its end")
        found = self.job(job)
        assert found["status"] == status, found
        return found

    def client(self) -> EvalClient:
        return EvalClient(self.url, timeout=LIMIT_S)

    def all_ended(self, count: int) -> list[Fields]:
        """Wait until so many jobs have ended, and return all, the lowest step first."""
        with self.client() as client:
            wait_until(lambda: len([j for j in client.jobs() if j["completed_at"]]) >= count)
            return sorted(client.jobs(), key=lambda job: int(str(job["step"] or 0)))

    def began(self, step: int) -> Fields:
        """Wait until the evaluator of a step runs; return its processes and GPUs."""
        note = self.control / f"began-{step}"
        wait_until(note.exists, f"step {step}: its evaluator")
        found: Fields = json.loads(note.read_text())
        return found

    def go(self) -> None:
        (self.control / "go").touch()


@contextmanager
def started(server: Live, *options: str) -> Iterator[Live]:
    """Run a server as long as this lasts; with no options, as configured."""
    server.start(*options)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def live(directory: Path, *options: str, script: str = SCRIPT, **changed: object) -> Iterator[Live]:
    """Run a server that is configured like this as long as this lasts."""
    server = Live(directory, options)
    server.configure(script, **changed)
    with started(server):
        yield server


def unshard(
    *arguments: object, check: bool = True, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "unshard", *map(str, arguments)],
        env=child_environment() | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert not check or done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def cli(server: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `unshard eval` against a server, whatever its exit code."""
    known = {"UNSHARD_EVAL_SERVER": server, **variables}
    return unshard("eval", *arguments, check=False, **known)


# A server in this process, without its scheduler.


@dataclass(frozen=True)
class Still:
    """A server whose jobs stay in the queue, and a client of it."""

    service: Service
    app: FastAPI
    client: TestClient


@contextmanager
def still(
    root: Path,
    *,
    token_file: Path | None = None,
    root_path: str = "",
    **profiles: CommandProfile | LmEvalProfile,
) -> Iterator[Still]:
    """Make the application of a server of one root, whose work directory is below it."""
    config = ServerConfig(roots=(root,), work_directory=root / "work", profiles=profiles)
    service = make_service(config)
    app = application.make_app(service, rules_for("127.0.0.1", token_file, root=root_path))
    with closing(service.store), TestClient(app, base_url="http://127.0.0.1") as client:
        yield Still(service, app, client)


# A server in a thread, which answers as the test says.


@dataclass
class Stub:
    """What the server was asked, and what it answers.

    Attributes:
        submissions: bodies of POST /api/v1/jobs, in order.
        jobs: views by id; a test changes them.
        finishes: what a job becomes as soon as it is submitted, by the body; None leaves it queued.
        refuses: status and message for every submission, if set.
        profiles: what the server says of the profile that a name means.
        token: who submits without it is refused, if set.
        paths, headers: of all requests, in order.
    """

    port: int = 0
    submissions: list[Fields] = field(default_factory=list)
    evaluations: list[Fields] = field(default_factory=list)
    jobs: dict[str, Fields] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    finishes: Callable[[Fields], Fields | None] = lambda body: None  # noqa: ARG005
    refuses: tuple[int, str] | None = None
    token: str | None = None
    results_dir: Path | None = None
    profiles: list[Fields] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def finish(self, job_id: str, **metrics: float) -> None:
        self.jobs[job_id] |= {"status": "completed", "metrics": metrics}


def scores(body: Fields) -> Fields:
    """Finish a job at once; its score tells its step."""
    assert isinstance(body["tasks"], list)
    metrics = {f"{task}/acc": float(str(body["step"])) / 100 for task in body["tasks"]}
    return {"status": "completed", "metrics": metrics}


def scripted_app(stub: Stub) -> FastAPI:
    app = FastAPI()
    _record_requests(app, stub)
    _add_v1(app, stub)
    _add_lmms(app, stub)
    return app


def _record_requests(app: FastAPI, stub: Stub) -> None:
    @app.middleware("http")
    async def record(request: Request, call_next: Callable[..., object]) -> Response:
        stub.paths.append(f"{request.method} {request.url.path}")
        stub.headers.append(dict(request.headers))
        answer = await call_next(request)  # type: ignore[misc]  # starlette's type is private
        assert isinstance(answer, Response)
        return answer


def error(status: int, message: str) -> JSONResponse:
    fields = {"type": "X", "code": 2, "message": message}
    stated = {"expected": "this", "found": "that", "hint": "do so"}
    return JSONResponse({"error": fields | stated}, status_code=status)


def _add_v1(app: FastAPI, stub: Stub) -> None:  # noqa: C901  (a list of endpoints)
    @app.post("/api/v1/jobs")
    async def submit(request: Request) -> Response:
        body = await request.json()
        if stub.token not in (None, request.headers.get("authorization", "")[len("Bearer ") :]):
            return error(401, "who are you?")
        if stub.refuses is not None:
            return error(*stub.refuses)
        key = {**body, "checkpoint": None, "pin": None}
        version = fingerprint(read_stamps(Path(body.get("pin") or body["checkpoint"])))
        for known in stub.jobs.values():
            if known["request"] == key and known["fingerprint"] == version:
                return JSONResponse(known, status_code=200)
        stub.submissions.append(body)
        job_id = f"job{len(stub.submissions)}"
        view = {"id": job_id, "status": "queued", "metrics": {}, "error": None, "request": key}
        view |= {"tasks": body.get("tasks"), "profile": body.get("profile")}
        view["fingerprint"] = version
        stub.jobs[job_id] = {**view, "step": body.get("step"), **(stub.finishes(body) or {})}
        return JSONResponse(stub.jobs[job_id], status_code=201)

    @app.get("/api/v1/jobs")
    async def jobs(status: str | None = None, step: int | None = None) -> Fields:
        known = [job for job in stub.jobs.values() if step in (None, job["step"])]
        found = [job for job in known if status in (None, job["status"])]
        return {"jobs": found[::-1]}

    @app.get("/api/v1/jobs/{job_id}")
    async def job(job_id: str) -> Response:
        known = stub.jobs.get(job_id)
        return error(404, f"no job {job_id}") if known is None else JSONResponse(known)

    @app.delete("/api/v1/jobs/{job_id}")
    async def cancel(job_id: str) -> Fields:
        stub.jobs[job_id]["status"] = "cancelled"
        return stub.jobs[job_id]

    @app.get("/api/v1/jobs/{job_id}/log")
    async def log(job_id: str, offset: int = 0) -> Fields:
        text = f"log of {job_id}"
        return {"text": text[offset:], "offset": len(text), "ended": True}

    @app.get("/api/v1/profiles")
    async def profiles() -> Fields:
        return {"profiles": stub.profiles}

    @app.get("/api/v1/results")
    async def results(step: int | None = None) -> Fields:
        return {"results": [{"step": step, "metric": "acc", "value": 0.5}]}

    @app.get("/api/v1/events")
    async def events(since: int = 0) -> StreamingResponse:
        def lines() -> Iterator[str]:
            for number in range(since + 1, since + 4):
                yield f": comment\nid: {number}\ndata: {json.dumps({'number': number})}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


def _add_lmms(app: FastAPI, stub: Stub) -> None:  # noqa: C901  (a list of endpoints)
    @app.get("/health")
    async def health() -> Fields:
        return {"status": "healthy", "timestamp": "now", "queue_size": len(stub.evaluations)}

    @app.get("/tasks")
    async def tasks() -> Fields:
        return {"tasks": ["mmmu_val"]}

    @app.get("/models")
    async def models() -> Fields:
        return {"models": ["qwen_vl"]}

    @app.get("/queue")
    async def queue() -> Fields:
        return {"queue_size": 0, "running_job": None, "queued_jobs": []}

    @app.post("/evaluate")
    async def evaluate(request: Request) -> Fields:
        stub.evaluations.append(await request.json())
        job_id = f"lmms{len(stub.evaluations)}"
        result: Fields = {}
        if stub.results_dir is not None:
            file = stub.results_dir / f"{job_id}_results.json"
            file.write_text(json.dumps({"results": {"mmmu_val": {"acc,none": 0.25}}}))
            result = {"model": {"results": str(file), "samples": []}}
        stub.jobs[job_id] = {"job_id": job_id, "status": "completed", "result": result}
        return {"job_id": job_id, "status": "queued", "position_in_queue": 0, "message": ""}

    @app.get("/jobs/{job_id}")
    async def job(job_id: str) -> Fields:
        if job_id not in stub.jobs:
            raise HTTPException(404, "Job not found")
        return stub.jobs[job_id]

    @app.delete("/jobs/{job_id}")
    async def cancel(job_id: str) -> Fields:
        return {"message": f"cancelled {job_id}"}

    @app.post("/merge")
    async def merge(request: Request) -> Fields:
        return {
            "success": True,
            "message": "",
            "merged_path": (await request.json())["output_path"],
        }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def in_thread(
    app: ASGIApp,
    port: int = 0,
    prepare: Callable[[socket.socket], object] = lambda _: None,
    **settings: object,
) -> Iterator[int]:
    """Serve an application in a thread, on a socket that is prepared, and yield its port."""
    config = uvicorn.Config(app, log_level="error", lifespan="off", **settings)  # type: ignore[arg-type]  # uvicorn's own
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listening:
        prepare(listening)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started, "a server that listens")
        try:
            yield int(listening.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)


@contextmanager
def serving(stub: Stub, port: int = 0) -> Iterator[Stub]:
    """Serve in a thread, on a port that may be given: to be away first, and back later."""
    with in_thread(scripted_app(stub), port) as stub.port:
        yield stub
