"""A small HTTP server that speaks the few endpoints which clients need, for their tests."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from unshard.evaluate.pins.files import fingerprint, stamps_of
from waiting import wait_until

Fields = dict[str, object]


@dataclass
class Stub:
    """What the server was asked, and what it answers.

    Attributes:
        submissions: bodies of POST /api/v1/jobs, in order.
        jobs: views by id; a test changes them.
        finishes: what a job becomes as soon as it is submitted, by the body; None leaves it queued.
        refuses: status and message for every submission, if set.
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


def make_app(stub: Stub) -> FastAPI:
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
        for known in stub.jobs.values():
            if known["request"] == {**body, "checkpoint": None, "pin": None}:
                return JSONResponse(known, status_code=200)
        stub.submissions.append(body)
        job_id = f"job{len(stub.submissions)}"
        key = {**body, "checkpoint": None, "pin": None}
        view = {"id": job_id, "status": "queued", "metrics": {}, "error": None, "request": key}
        view |= {"tasks": body.get("tasks"), "profile": body.get("profile")}
        view["fingerprint"] = fingerprint(stamps_of(Path(body.get("pin") or body["checkpoint"])))
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
def serving(stub: Stub, port: int | None = None) -> Iterator[Stub]:
    """Serve in a thread, on a port that may be given: to be away first, and back later."""
    stub.port = port or free_port()
    config = uvicorn.Config(
        make_app(stub), host="127.0.0.1", port=stub.port, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="stub-server", daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield stub
    finally:
        server.should_exit = True
        thread.join()


until = wait_until
