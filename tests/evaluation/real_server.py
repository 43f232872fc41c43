"""A server as its command starts it, in a process of its own, with a profile that runs a script."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from evaluation.running import child_environment
from evaluation.server_stub import free_port, until
from unshard.evaluate.client.lmms import EvalClient
from waiting import LIMIT_S

SCORE = """
import json, os, sys
model, output, tasks, step = sys.argv[1:]
assert any(name.endswith(".safetensors") for name in os.listdir(model)), os.listdir(model)
with open(os.path.join(output, "results.json"), "w") as file:
    json.dump({task: {"acc": int(step or 0) / 1000} for task in tasks.split(",")}, file)
"""
FAIL = "raise SystemExit('no')"
CONFIG = """
roots: [{roots}]
gpus: 0
profiles:
  score:
    kind: command
    command: [{python}, -I, -S, {script}, "{{checkpoint}}", "{{output}}", "{{tasks}}", "{{step}}"]
    retries: 0
"""


@dataclass
class Server:
    """A running server."""

    url: str
    work: Path
    process: "subprocess.Popen[bytes]"

    def client(self) -> EvalClient:
        return EvalClient(self.url, timeout=LIMIT_S)

    def ended(self, count: int) -> list[dict[str, object]]:
        """Wait until so many jobs have ended, and return all, the lowest step first."""
        with self.client() as client:
            until(lambda: len([j for j in client.jobs() if j["completed_at"]]) >= count)
            return sorted(client.jobs(), key=lambda job: int(str(job["step"] or 0)))


def write_config(directory: Path, *roots: Path, script: str = SCORE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "score.py").write_text(script)
    names = ", ".join(map(str, roots))
    text = CONFIG.format(roots=names, python=sys.executable, script=directory / "score.py")
    (directory / "server.yaml").write_text(text)
    return directory / "server.yaml"


@contextmanager
def server(config: Path, *more: str, port: int | None = None) -> Iterator[Server]:
    """Run `unshard eval serve` until the block ends; its work directory lies beside the file."""
    port, work = port or free_port(), config.parent / "work"
    command = [sys.executable, "-m", "unshard", "eval", "serve", f"--config={config}"]
    command += [f"--port={port}", f"--work-dir={work}", *more]
    log = config.parent / "server.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(command, env=child_environment(), stdout=stream, stderr=stream)
    running = Server(f"http://127.0.0.1:{port}", work, process)
    try:
        until(lambda: process.poll() is not None or _answers(running.url))
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def unshard(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "unshard", *map(str, arguments)]
    done = subprocess.run(
        command,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert not check or done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
