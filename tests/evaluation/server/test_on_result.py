"""`on_result`: the operator's command, run once for each job that is completed or has failed."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evaluation.running import all_gone, request, whole_model
from evaluation.servers import SCRIPT, live
from unshard.errors import UsageError
from unshard.evaluate.server.config.keys import OnResult
from unshard.evaluate.server.queue.on_result import running_on_result
from unshard.evaluate.server.server_yaml import read_server_yaml
from unshard.evaluate.server.store.store import Store
from waiting import LIMIT_S, wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "stop_when_worse.py"

TELLS = """
import json, os, pathlib, subprocess, sys, time
body, place = json.load(sys.stdin), pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
names = ("A_TOKEN", "OWN_TOKEN", "CUDA_VISIBLE_DEVICES")
known = {name: os.environ.get(name) for name in names}
number = len(list(place.glob("*.json")))
note = [body, known, os.getcwd(), [os.getpid(), child.pid]]
(place / "draft").write_text(json.dumps(note))
(place / "draft").rename(place / f"{number}.json")
for action in sys.argv[2:]:
    exec(action)
"""


def ended(store: Store, step: int, error: str | None = None) -> str:
    job, _ = store.submit(request(Path("/run/checkpoint-1"), step), pin=None)
    assert store.claim(0.0, job.id) is not None
    if error is None:
        store.complete(job.id, {"task/acc": 0.5}, None, {"task/acc": 0.25})
    else:
        store.fail(job.id, error, None)
    return job.id


@contextmanager
def told_store(directory: Path, told: OnResult | None) -> Iterator[Store]:
    with (
        closing(Store(directory / "jobs.sqlite")) as store,
        running_on_result(store, told, directory),
    ):
        yield store


def notes(place: Path) -> list[list[object]]:
    files = sorted(place.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in files]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "told").mkdir()
    return tmp_path / "told"


def telling(place: Path, *actions: str, **keys: object) -> OnResult:
    """Return the command that takes notes, and then does this."""
    command = [sys.executable, "-c", TELLS, str(place), *actions]
    return OnResult.model_validate({"command": command, **keys})


def test_a_command_gets_each_end_once_in_order(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of jobs that completed or failed for good; not of those that are tried again, or ended."""
    monkeypatch.setenv("A_TOKEN", "of-the-server")
    told = telling(place, environment={"OWN_TOKEN": "own"})
    work = tmp_path / "work"
    with closing(Store(work / "jobs.sqlite")) as store:
        ended(store, 99)  # before this server
    with told_store(work, told) as store:
        waits, _ = store.submit(request(Path("/run/checkpoint-1"), 50), pin=None)
        store.cancel(waits.id)
        again, _ = store.submit(request(Path("/run/checkpoint-1"), 51), pin=None)
        store.claim(0.0, again.id)
        store.fail(again.id, "not yet", time.time() + 600)
        ids = [ended(store, 1), ended(store, 2, "no\x1b memory")]
        store.hiding.hide(ids[0], "no end of it")
        store.hiding.show(ids[0])
        ids.append(ended(store, 3))
        wait_until(lambda: len(notes(place)) == 3, "three ends")
        found = [store.get(job_id) for job_id in ids]
    assert len(notes(place)) == 3
    bodies = [body for body, *_ in notes(place)]
    assert [list(body) for body in bodies] == [  # type: ignore[call-overload]  # a mapping
        [
            *("delivery", "job", "status", "run", "step", "weights", "profile", "tasks"),
            *("checkpoint", "completed_at", "error", "metrics", "stderr"),
        ]
    ] * 3
    for body, job in zip(bodies, found, strict=True):
        assert isinstance(body, dict)
        assert job is not None
        assert (body["job"], body["status"], body["step"]) == (job.id, job.status, job.request.step)
        assert (body["completed_at"], body["error"]) == (job.completed_at, job.error)
        assert (body["metrics"], body["stderr"]) == (job.metrics, job.stderr)
    assert len({body["delivery"] for body in bodies if isinstance(body, dict)}) == 3
    known = {"A_TOKEN": None, "OWN_TOKEN": "own", "CUDA_VISIBLE_DEVICES": ""}
    assert [note[1:3] for note in notes(place)] == [[known, str(work)]] * 3
    assert all(all_gone(note[3]) for note in notes(place))


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("print('x' * 1_000_000, 'cannot reach the chat'); sys.exit(3)", "exit code 3"),
        ("print('cannot reach the chat', flush=True); time.sleep(600)", "took more than 2 s"),
        ("print('cannot reach the chat', flush=True); os.abort()", "exit code -6"),
    ],
    ids=["exit code", "timeout", "signal"],
)
def test_a_command_that_fails_is_logged_and_not_run_again(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture, action: str, why: str
) -> None:
    with told_store(tmp_path, telling(place, action, timeout=2.0)) as store:
        job_id = ended(store, 1)
        wait_until(lambda: "on_result failed" in caplog.text, "the failure")
        ended(store, 2)
        wait_until(lambda: caplog.text.count("on_result failed") == 2, "another")
        job = store.get(job_id)
    assert job is not None
    assert job.status == "completed"
    assert [note[0]["step"] for note in notes(place)] == [1, 2]  # type: ignore[index]
    assert why in caplog.text
    assert "cannot reach the chat" in caplog.text
    assert len(caplog.text) < 5_000
    assert all(all_gone(note[3]) for note in notes(place))


def test_a_program_that_is_not_there_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with told_store(tmp_path, OnResult(command=("/no/such/program",))) as store:
        ended(store, 1)
        wait_until(lambda: "on_result failed: /no/such/program: " in caplog.text, "the failure")


def test_a_stop_waits_for_the_commands_of_what_has_ended(tmp_path: Path, place: Path) -> None:
    told = telling(place, "time.sleep(1)", "place.joinpath(f'whole-{number}').touch()")
    with told_store(tmp_path, told) as store:
        ended(store, 1)
        ended(store, 2)
    assert {path.name for path in place.glob("whole-*")} == {"whole-0", "whole-1"}
    assert len(notes(place)) == 2
    with told_store(tmp_path, told) as store:  # the next server begins with what ends then
        ended(store, 3)
    assert notes(place)[2][0]["step"] == 3  # type: ignore[index]
    assert len(notes(place)) == 3


def test_a_stop_takes_no_longer_than_one_command_may(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = telling(place, "time.sleep(2)", "place.joinpath('whole').touch()", timeout=3.0)
    with told_store(tmp_path, told) as store:
        ids = [ended(store, step) for step in (1, 2, 3)]
        wait_until(lambda: len(notes(place)) == 1, "the first")
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert (place / "whole").exists()
    assert f"job {ids[1][:8]}: on_result failed: {sys.executable}: took more than " in caplog.text
    assert f"job {ids[2][:8]}: on_result is not run: the server stops" in caplog.text
    assert all(all_gone(note[3]) for note in notes(place))


@pytest.mark.slow
def test_a_real_server_runs_it_and_ends_when_it_has_ended(tmp_path: Path, place: Path) -> None:
    """A SIGTERM while it runs; the server's own end is what waits."""
    told = telling(place, "time.sleep(2)", "place.joinpath('whole').touch()")
    checkpoint = tmp_path / "root" / "run" / "checkpoint-1"
    with live(tmp_path, on_result=list(told.command)) as server:
        whole_model(checkpoint)
        server.submit(checkpoint, step=1)
        wait_until(lambda: len(notes(place)) == 1, "the command")
        assert not (place / "whole").exists()
    assert (place / "whole").exists()


@pytest.mark.slow
def test_a_server_that_is_drained_runs_it_for_the_last_job(tmp_path: Path, place: Path) -> None:
    """systemd's unit in examples/ stops a server so: it ends as soon as the last job has ended."""
    script = SCRIPT.replace("import ", "import time; time.sleep(1)\nimport ", 1)
    told = list(telling(place).command)
    with live(tmp_path, script=script, on_result=told) as server:
        assert server.process is not None
        server.submit(whole_model(tmp_path / "root" / "run" / "checkpoint-1"), step=1)
        wait_until(lambda: ": started: " in server.told(), "the job")
        server.process.send_signal(signal.SIGUSR1)
        assert server.process.wait(LIMIT_S) == 0
    assert [note[0]["status"] for note in notes(place)] == ["completed"]  # type: ignore[index]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_script_of_the_docs_posts_the_json_also_after_an_error(tmp_path: Path) -> None:
    text = (EXAMPLE.parents[1] / "docs" / "guides" / "eval-operating.md").read_text()
    script = tmp_path / "post.sh"
    script.write_text("#!/bin/sh\n" + text.partition("```sh\n#!/bin/sh\n")[2].partition("```")[0])
    script.chmod(0o755)
    got: list[tuple[object, str | None]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((body, self.headers["Authorization"]))
            self.send_response(500 if len(got) == 1 else 204)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{receiver.server_port}/hook"
        told = OnResult(command=(str(script), url), environment={"CHAT_TOKEN": "own"})
        with told_store(tmp_path, told) as store:
            job_id = ended(store, 1)
            wait_until(lambda: len(got) == 2, "the second try of curl")
        receiver.shutdown()
    assert got[0] == got[1]
    assert isinstance(got[1][0], dict)
    assert (got[1][0]["job"], got[1][1]) == (job_id, "Bearer own")


@pytest.mark.parametrize("form", ["{command: [rules/tell, %s]}", "[rules/tell, %s]"])
def test_a_program_next_to_the_configuration_is_run(tmp_path: Path, form: str) -> None:
    program, told = tmp_path / "rules" / "tell", tmp_path / "told"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncat > "$1.draft" && mv "$1.draft" "$1"\n')
    program.chmod(0o755)
    file = tmp_path / "server.yaml"
    file.write_text(f"on_result: {form % told}\n")
    with told_store(tmp_path / "work", read_server_yaml(file).on_result) as store:
        ended(store, 7)
        wait_until(told.exists, "the note")
    assert json.loads(told.read_text())["step"] == 7


@pytest.mark.parametrize(
    ("text", "whys"),
    [
        ("{}", ["expected: a command: a list of arguments"]),
        ("[]", ["expected: a command: a list of arguments"]),
        ("{command: [a, {}]}", ["on_result: command"]),
        ("notify.sh", ["a mapping"]),
        ("{command: [a], timeout: 0}", ["seconds, up to 3600"]),
        ("{command: [a], retries: 3}", ["unknown key 'retries'"]),
        ("{command: [a], secret: b}", ["unknown key 'secret'"]),
        ("{command: [a], backoff: 5}", ["'backoff' no longer exists", "is not run again"]),
        ("{url: 'http://b'}", ["'url' no longer exists", "[curl, ...]", "/api/v1/events"]),
        ("{url: 'http://b', command: [a]}", ["'url' no longer exists"]),
        (
            "{url: 'http://b', backoff: 1}",
            ["'url' no longer exists", "'backoff' no longer exists"],
        ),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, text: str, whys: list[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"on_result: {text}\n")
    with pytest.raises(UsageError, match="on_result") as error:
        read_server_yaml(file)
    for why in whys:
        assert why in str(error.value)
    assert ("a list of arguments" in str(error.value)) == (
        text in {"{}", "[]", "{command: [a, {}]}"}
    )


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
