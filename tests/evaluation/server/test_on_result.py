"""`on_result`: a command or a URL is told about each job that has ended, at least once."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evaluation.running import all_gone, request
from unshard.errors import UsageError
from unshard.evaluate.server.config.on_result import OnResult
from unshard.evaluate.server.http.on_result import HEADER, SECRET, SIGNATURE, telling_results
from unshard.evaluate.server.server_yaml import read_server_yaml
from unshard.evaluate.server.store import deliveries as kept
from unshard.evaluate.server.store.store import Store
from waiting import LIMIT_S, wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "stop_when_worse.py"


class Receiver:
    """A web server that answers with these statuses, then 200, and keeps what it got."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, object]] = []
        self.headers: list[str | None] = []
        self.signatures: list[str | None] = []
        self.raw: list[bytes] = []
        self.paths: list[str] = []
        waiting = list(statuses)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                receiver.raw.append(self.rfile.read(length))
                receiver.signatures.append(self.headers[SIGNATURE])
                receiver.bodies.append(json.loads(receiver.raw[-1]))
                receiver.headers.append(self.headers[HEADER])
                receiver.paths.append(self.path)
                self.send_response(waiting.pop(0) if waiting else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def ended(store: Store, step: int, error: str | None = None) -> str:
    job, _ = store.submit(request(Path("/run/checkpoint-1"), step), pin=None)
    assert store.claim(0.0, job.id) is not None
    if error is None:
        store.complete(job.id, {"task/acc": 0.5}, None, {"task/acc": 0.25})
    else:
        store.fail(job.id, error, None)
    return job.id


def waiting_in(store: Store) -> int:
    return int(store.connection.execute("SELECT COUNT(*) FROM deliveries").fetchone()[0])


@contextmanager
def told_store(directory: Path, told: OnResult | None) -> Iterator[Store]:
    with closing(Store(directory / "jobs.sqlite")) as store:
        store.deliveries.are_wanted = told is not None
        with telling_results(store, told, directory):
            yield store


def test_a_url_is_told_again_until_it_takes_it_and_is_not_led_elsewhere(tmp_path: Path) -> None:
    with (
        closing(Receiver(500, 307)) as receiver,
        told_store(tmp_path, OnResult(url=receiver.url, backoff=0.01)) as store,
    ):
        job_id = ended(store, 1)
        wait_until(lambda: len(receiver.bodies) == 3 and not waiting_in(store))
        failed = ended(store, 2, "no\x1b memory")
        wait_until(lambda: len(receiver.bodies) == 4 and not waiting_in(store))
    first, *again, last = receiver.bodies
    assert again == [first, first]
    assert set(receiver.paths) == {"/hook"}  # a redirect is a failure, and is not followed
    assert receiver.headers == [body["delivery"] for body in receiver.bodies]
    assert set(receiver.signatures) == {None}
    assert (first["job"], first["status"], first["step"]) == (job_id, "completed", 1)
    assert (first["metrics"], first["stderr"]) == ({"task/acc": 0.5}, {"task/acc": 0.25})
    assert (last["job"], last["status"], last["error"]) == (failed, "failed", "no\x1b memory")


def test_with_a_secret_every_try_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature is that of RFC 2104, of the body's bytes."""
    monkeypatch.setenv(SECRET, "k\u00e9y")
    with (
        closing(Receiver(500)) as receiver,
        told_store(tmp_path, OnResult(url=receiver.url, backoff=0.01)) as store,
    ):
        ended(store, 1)
        wait_until(lambda: len(receiver.bodies) == 2 and not waiting_in(store))
    key = "k\u00e9y".encode().ljust(64, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in key) for pad in (0x36, 0x5C))
    for raw, signature in zip(receiver.raw, receiver.signatures, strict=True):
        digest = sha256(outer + sha256(inner + raw).digest()).hexdigest()
        assert signature == f"sha256={digest}"


def test_what_was_not_delivered_is_delivered_by_the_next_server(tmp_path: Path) -> None:
    never = OnResult(command=(sys.executable, "-c", "import time; time.sleep(600)"), timeout=600.0)
    with told_store(tmp_path, never) as store:
        ended(store, 1)
        assert waiting_in(store) == 1
    with (
        closing(Receiver()) as receiver,
        told_store(tmp_path, OnResult(url=receiver.url)) as store,
    ):
        wait_until(lambda: not waiting_in(store))
    assert [body["step"] for body in receiver.bodies] == [1]


def test_a_server_that_tells_nobody_records_nothing(tmp_path: Path) -> None:
    with told_store(tmp_path, None) as store:
        ended(store, 1)
        assert waiting_in(store) == 0


SAYS = f"""
import json, os, pathlib, subprocess, sys
body = json.load(sys.stdin)
place = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
known = {{name: os.environ.get(name) for name in ("A_TOKEN", "OWN_TOKEN", "{SECRET}")}}
tries = len(list(place.iterdir()))
(place / f"draft-{{tries}}").write_text(json.dumps([body, known, [os.getpid(), child.pid]]))
(place / f"draft-{{tries}}").rename(place / f"{{tries}}.json")
print("x" * 1_000_000, "cannot reach the chat")
sys.exit(3 if tries == 0 else 0)
"""


def test_a_command_gets_json_and_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("A_TOKEN", "of-the-server")
    monkeypatch.setenv(SECRET, "of-the-server")
    place = tmp_path / "told"
    place.mkdir()
    command = (sys.executable, "-c", SAYS, str(place))
    told = OnResult(command=command, environment={"OWN_TOKEN": "own"}, backoff=0.01)
    with told_store(tmp_path, told) as store:
        ended(store, 7)
        wait_until(lambda: not waiting_in(store))
    first, second = [json.loads((place / f"{n}.json").read_text()) for n in (0, 1)]
    assert (first[0], first[0]["step"]) == (second[0], 7)
    assert first[1] == {"A_TOKEN": None, "OWN_TOKEN": "own", SECRET: None}
    wait_until(lambda: all_gone([*first[2], *second[2]]))
    assert "exit code 3" in caplog.text
    assert "cannot reach the chat" in caplog.text
    assert len(caplog.text) < 20_000


def test_a_program_next_to_the_configuration_is_run(tmp_path: Path) -> None:
    program, told = tmp_path / "rules" / "tell", tmp_path / "told"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncat > "$1"\n')
    program.chmod(0o755)
    file = tmp_path / "server.yaml"
    file.write_text(f"on_result: {{command: [rules/tell, {told}], backoff: 0.01}}\n")
    work = tmp_path / "work"
    with told_store(work, read_server_yaml(file).on_result) as store:
        ended(store, 7)
        wait_until(lambda: not waiting_in(store))
    assert json.loads(told.read_text())["step"] == 7


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "exit(1)")])
def test_tries_and_waiting_deliveries_are_bounded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: tuple[str, ...],
) -> None:
    monkeypatch.setattr("unshard.evaluate.server.http.on_result._MOST_TRIES", 3)
    with told_store(tmp_path, OnResult(command=command, backoff=0.001)) as store:
        job_id = ended(store, 1)
        wait_until(lambda: not waiting_in(store))
        job = store.get(job_id)
    assert job is not None
    assert (job.status, "failed 3 times, given up" in caplog.text) == ("completed", True)
    monkeypatch.setattr(kept, "MOST_WAITING", 2)
    with closing(Store(tmp_path / "jobs.sqlite")) as store:
        store.deliveries.are_wanted = True
        for step in range(2, 6):
            ended(store, step)
        assert waiting_in(store) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "either a command or a url"),
        ("{command: [a], url: 'http://b'}", "either a command or a url"),
        ("{url: 'file:///etc/passwd'}", "http or https"),
        ("{url: 'http://a', retries: 3}", "retries"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"on_result: {text}\n")
    with pytest.raises(UsageError, match="on_result") as error:
        read_server_yaml(file)
    assert why in str(error.value)


def judged(run: Path, metric: str, patience: int, step: int, value: float, **more: str) -> bool:
    """Tell the example of a result; return whether it has run the command that ends the run."""
    ended = run.with_name(f"{run.name}-ended")
    ended.unlink(missing_ok=True)
    body: dict[str, object] = {
        "run": run.name,
        "status": "completed",
        "step": step,
        "profile": "p",
        "weights": "model",
        "checkpoint": str(run / f"checkpoint-{step}"),
        "metrics": {"t/acc": value},
    }
    command = [sys.executable, "-I", "-S", str(EXAMPLE), metric, str(patience)]
    command += ["touch", str(ended.with_name("{run}-ended"))]
    subprocess.run(command, input=json.dumps(body | more).encode(), check=True, timeout=LIMIT_S)
    return ended.exists()


def test_the_rule_of_the_example_looks_at_steps_in_their_order(tmp_path: Path) -> None:
    up, down = tmp_path / "up", tmp_path / "down"
    assert not judged(up, "t/acc", 1, 1, 0.5)  # not a run: nothing is written
    assert list(tmp_path.iterdir()) == []
    for run in (up, down):
        (run / "_unshard").mkdir(parents=True)
    assert not judged(up, "t/acc", 2, 30, 0.4)  # the newest comes first
    assert not judged(up, "t/acc", 2, 10, 0.5)
    assert not judged(up, "t/acc", 2, 10, 0.5)  # a repeated delivery
    assert not judged(up, "t/acc", 2, 40, 0.1, weights="ema")
    assert not judged(up, "t/acc", 2, 40, 0.1, status="failed")
    assert not judged(up, "t/other", 2, 40, 0.1)
    assert judged(up, "t/acc", 2, 20, 0.4)
    assert not judged(down, "-t/acc", 1, 10, 0.5)
    assert not judged(down, "-t/acc", 1, 20, 0.4)
    assert judged(down, "-t/acc", 1, 30, 0.4)


def test_the_rule_of_the_example_writes_through_no_link(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "_unshard").mkdir(parents=True)
    other.write_text('{"5": 0.75}')
    seen = run / "_unshard" / "stop-rule-p-model-t-acc.json"
    seen.symlink_to(other)
    assert judged(run, "t/acc", 1, 10, 0.5)
    assert other.read_text() == '{"5": 0.75}'
    assert not seen.is_symlink()
