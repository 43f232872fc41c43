"""A real server in a process of its own, with a small script as its evaluator."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from evaluation.running import child_environment, is_running, wait_until
from ranks import save_ranks, some_tensors
from waiting import LIMIT_S

Fields = dict[str, object]

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


@dataclass
class Live:
    """A server: where it listens, and where its things lie."""

    directory: Path
    options: tuple[str, ...] = ()
    url: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    headers: dict[str, str] = field(default_factory=dict)

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

    def configure(self, **changed: object) -> None:
        """Write a configuration whose one profile runs the script."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.control.mkdir(exist_ok=True)
        script = self.directory / "script.py"
        script.write_text(SCRIPT)
        places = ["{checkpoint}", "{output}", str(self.control)]
        command = [sys.executable, "-I", "-S", str(script), *places]
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

    def start(self, *options: str) -> "Live":
        """Start it, and wait until it says where it listens; with no options, as configured."""
        command = [sys.executable, "-m", "unshard", "eval", "serve"]
        configured = ("--config", str(self.directory / "server.yaml"), *self.options)
        command += options or configured
        begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.directory, env=child_environment(), stdout=log, stderr=log
            )

        def said() -> str:
            assert self.process is not None
            text = self.log.read_text()[begin:]
            assert self.process.poll() is None, text
            return text.partition("listening on ")[2].partition("\n")[0]

        wait_until(lambda: bool(said()), "a server that listens")
        self.url = said().replace("0.0.0.0", "127.0.0.1")  # noqa: S104  (where it was told to)
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

    def began(self, step: int) -> Fields:
        """Wait until the evaluator of a step runs; return its processes and GPUs."""
        note = self.control / f"began-{step}"
        wait_until(note.exists, f"step {step}: its evaluator")
        found: Fields = json.loads(note.read_text())
        return found

    def go(self) -> None:
        (self.control / "go").touch()


@contextmanager
def live(directory: Path, *options: str, **changed: object) -> Iterator[Live]:
    """Run a server as long as this lasts."""
    server = Live(directory, options)
    server.configure(**changed)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def checkpoint(run: Path, step: int, *, ema: bool = False) -> Path:
    """Write a checkpoint of two ranks with real torch, as lmms-engine lays it out."""
    place = run / f"checkpoint-{step}"
    save_ranks(place / "pytorch_model_fsdp_0", some_tensors(step), 2)
    if ema:
        save_ranks(place / "pytorch_ema_model_fsdp_0", some_tensors(step + 1000), 2)
    (place / "config.json").write_text('{"model_type": "qwen2"}')
    return place


def all_gone(pids: object) -> bool:
    assert isinstance(pids, list)
    return not any(is_running(pid) for pid in pids)


def until(holds: Callable[[], object], what: str) -> None:
    wait_until(lambda: bool(holds()), what)


def cli(server: str, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `unshard eval` against a server."""
    environment = child_environment() | {"UNSHARD_EVAL_SERVER": server, **variables}
    command: Sequence[str] = [sys.executable, "-m", "unshard", "eval", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
