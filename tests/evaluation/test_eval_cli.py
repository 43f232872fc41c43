"""`unshard eval` on the command line, against a real server."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.running import child_environment, whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, Stub, cli, free_port, live, serving
from unshard.cli.main import main
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-cli")]  # one server for all


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    directory = tmp_path_factory.mktemp("server")
    file = directory / "token"
    file.write_text("correct-horse-battery-staple\n")
    file.chmod(0o600)
    with live(directory, "--token-file", str(file)) as started:
        started.headers = {"Authorization": "Bearer correct-horse-battery-staple"}
        checkpoint(started.root / "run", 5, ema=True)
        yield started


def call(server: Live, *arguments: str) -> tuple[int, str, str]:
    token = str(server.directory / "token")
    done = cli(server.url, *arguments, UNSHARD_EVAL_TOKEN_FILE=token)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def submitted(server: Live, *arguments: str) -> tuple[int, list[Fields]]:
    place = str(server.root / "run" / "checkpoint-5")
    code, out, _ = call(server, "submit", place, "--profile", "script", "--json", *arguments)
    jobs: list[Fields] = json.loads(out)["jobs"]
    return code, jobs


def test_a_checkpoint_is_submitted_waited_for_and_its_numbers_printed(server: Live) -> None:
    code, jobs = submitted(server, "--tasks", "score, other", "--weights", "model,ema", "--wait")
    assert (code, [job["weights"] for job in jobs]) == (0, ["model", "ema"])
    assert [job["status"] for job in jobs] == ["completed", "completed"]
    code, out, _ = call(server, "results", "--run", "run", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {(row["step"], row["weights"]) for row in rows} == {("5", "model"), ("5", "ema")}
    assert {row["value"] for row in rows if row["metric"] == "acc"} == {"0.05"}
    code, out, _ = call(server, "results", "--json")
    assert (code, len(json.loads(out)["results"])) == (0, len(rows))
    code, out, _ = call(server, "status", str(jobs[0]["id"])[:8])
    head, row, *rest = out.splitlines()
    assert (code, head.split()[:5]) == (0, ["job", "status", "run", "step", "weights"])
    assert row.split()[:5] == [str(jobs[0]["id"])[:8], "completed", "run", "5", "model"]
    assert "    score/acc = 0.05 \u00b1 9" in rest
    code, out, _ = call(server, "results", "--run", "run")
    lines = out.splitlines()
    assert (code, len(lines), lines[0].split()[:3]) == (
        0,
        len(rows) + 1,
        ["run", "step", "weights"],
    )
    assert {line.index(one["profile"]) for line, one in zip(lines[1:], rows, strict=True)} == {
        lines[0].index("profile")
    }
    code, out, _ = call(server, "results", "--run", "another")
    assert (code, out) == (0, "no results of run another\n")
    code, out, _ = call(server, "logs", str(jobs[1]["id"])[:8], "--follow")
    assert (code, out) == (0, "evaluating step 5 with ema\n")


def test_waiting_for_a_failed_evaluation_fails(server: Live) -> None:
    code, jobs = submitted(server, "--tasks", "fails", "--wait")
    assert (code, jobs[0]["status"]) == (1, "failed")
    assert "nothing was measured" in str(jobs[0]["error"])


def test_a_user_who_stops_waiting_is_told_that_the_job_goes_on(server: Live) -> None:
    place = str(server.root / "run" / "checkpoint-5")
    options = ["--profile", "script", "--tasks", "waits", "--step", "77", "--wait"]
    command = [sys.executable, "-m", "unshard", "eval", "submit", place, *options]
    environment = child_environment() | {
        "UNSHARD_EVAL_SERVER": server.url,
        "UNSHARD_EVAL_TOKEN_FILE": str(server.directory / "token"),
    }
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        job = process.stderr.readline().split()[-1]
        server.began(77)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert (process.returncode, f"continues with {job}" in said) == (130, True)
    code, out, _ = call(server, "cancel", job)
    assert (code, "cancelled" in out) == (0, True)


def test_a_token_that_is_missing_is_told_from_a_wrong_one(server: Live, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another-token-than-the-servers")
    for options, why in (
        ([], "a token is required"),
        (["--token-file", str(tmp_path / "token")], "wrong token"),
    ):
        done = cli(server.url, "status", *options)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr
        assert "--token-file" in done.stderr


def test_a_job_is_cancelled(server: Live) -> None:
    code, jobs = submitted(server, "--tasks", "waits", "--step", "6")
    assert code == 0
    server.began(6)
    code, out, _ = call(server, "cancel", str(jobs[0]["id"]))
    assert (code, "cancelled" in out) == (0, True)


@pytest.mark.parametrize("job", ["none", "../../health", "..", "a/b?c#d"])
def test_a_job_that_does_not_exist_is_reported(server: Live, job: str) -> None:
    code, _, error = call(server, "status", job)
    assert (code, error.startswith("error: GET /api/v1/jobs/")) == (2, True)


def test_a_refusal_names_what_is_allowed(server: Live, tmp_path: Path) -> None:
    place = str(checkpoint(tmp_path / "elsewhere", 1))
    code, out, error = call(server, "submit", place, "--tasks", "score", "--profile", "script")
    assert (code, out) == (2, "")
    assert str(server.root) in error
    done = cli(server.url, "status", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["type"]) == (2, "RefusedError")
    missing = cli(server.url, "status", "--token-file", str(tmp_path / "none"))
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


def test_a_job_has_the_arguments_of_its_options(tmp_path: Path) -> None:
    """As a configuration of YAML would have them: a whole number is one, not a float."""
    options = ["--limit=8", "--num-fewshot=0", "--batch-size=16", "--num-gpus=2", "--seed=3"]
    options += ["--gen-kwargs=temperature=0.5,top_p=1"]
    options += ["--model-args=dtype=float32,n=2,x=0.5,trust_remote_code=False"]
    expected: Fields = {"limit": 8, "num_fewshot": 0, "batch_size": 16, "num_gpus": 2, "seed": 3}
    expected["gen_kwargs"] = "temperature=0.5,top_p=1"
    args = {"dtype": "float32", "n": 2, "x": 0.5, "trust_remote_code": False}
    expected["model_args"] = args
    place = str(whole_model(tmp_path / "checkpoint-5"))
    with serving(Stub()) as stub:
        plain = (stub.url, "submit", place, "--tasks=t", "--profile=script", "--json")
        done = cli(*plain, "--model-args=dtype")
        assert (done.returncode, "--model-args cannot be read" in done.stderr) == (2, True)
        for more in (options, ["--limit=0.25", "--batch-size=auto:4"], []):
            assert cli(*plain, *more).returncode == 0
    body, shares, none = stub.submissions
    assert json.dumps({name: body[name] for name in expected}) == json.dumps(expected)
    assert (shares["limit"], shares["batch_size"]) == (0.25, "auto:4")
    assert not none.keys() & expected.keys()


@pytest.mark.parametrize(
    "option", ["--limit=inf", "--limit=-1", "--limit=true", "--batch-size=8.5", "--batch-size=x"]
)
def test_an_argument_that_is_none_is_refused(server: Live, option: str) -> None:
    place = str(server.root / "run" / "checkpoint-5")
    code, _, err = call(server, "submit", place, "--profile=script", "--tasks=score", option)
    assert code == 2
    assert option[2:].partition("=")[0].replace("-", "_") in err


def test_jobs_are_retried(server: Live) -> None:
    """Those before one that cannot be are printed, and queued."""
    ids = []
    for step in ("81", "82"):
        _, jobs = submitted(server, "--tasks", "fails", "--step", step, "--wait")
        ids.append(str(jobs[0]["id"]))
    _, done = submitted(server, "--tasks", "score", "--step", "83", "--wait")
    code, out, _ = call(server, "retry", ids[0][:8], ids[1], "--json")
    assert (code, [job["id"] for job in json.loads(out)["jobs"]]) == (0, ids)
    assert server.ended({"id": ids[1]}, "failed")["attempts"] == 2
    code, out, err = call(server, "retry", ids[1], "ffffffff", ids[0])
    assert (code, ids[1][:8] in out, ids[0][:8] in out) == (2, True, False)
    assert "ffffffff" in err
    code, out, _ = call(server, "retry", str(done[0]["id"]), "--json")
    (again,) = json.loads(out)["jobs"]
    assert (code, again["status"], again["step"]) == (0, "queued", 83)
    assert again["id"] != done[0]["id"]
    code, out, err = call(server, "retry", "ffffffff")
    assert (code, out) == (2, "")
    assert "does not exist" in err
    assert server.ended({"id": ids[1]}, "failed")["attempts"] == 3


def test_what_was_accepted_before_a_refusal_is_printed(server: Live) -> None:
    place = str(server.root / "run" / "checkpoint-5")
    given = ("submit", place, "--tasks", "score", "--profile", "script", "--weights", "model,none")
    code, out, error = call(server, *given)
    assert (code, error.startswith("error: POST /api/v1/jobs: weights")) == (2, True), error
    _, row = out.splitlines()
    code, out, _ = call(server, *given, "--json")
    said = json.loads(out)
    assert (code, said["error"]["type"], len(said["jobs"])) == (2, "RefusedError", 1)
    assert row.startswith(said["jobs"][0]["id"][:8])


def test_a_server_that_is_away_is_reported() -> None:
    done = cli(f"http://127.0.0.1:{free_port()}", "status")
    assert done.returncode == 1
    assert "no answer" in done.stderr
    assert "unshard eval serve" in done.stderr


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["eval", *arguments])
    return int(end.value.code or 0)


def test_waiting_goes_on_while_the_server_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.cli.evaluate import show
    from unshard.evaluate.client.v1 import EvalClient, ServerAwayError

    def job(client: EvalClient, job_id: str) -> dict[str, object]:
        del client
        answer = answers.pop(0)
        if answer is None:
            raise ServerAwayError("away")
        return {**answer, "id": job_id}

    waiting: Fields = {"completed_at": None, "status": "queued"}
    done: Fields = {"completed_at": 1.0, "status": "completed", "step": 1, "error": None}
    answers: list[Fields | None] = [waiting, None, None, done]
    monkeypatch.setattr(EvalClient, "job", job)
    monkeypatch.setattr(EvalClient, "submit", lambda *_, **__: {"id": "x"})
    monkeypatch.setattr(show, "_LOOK_S", 0.0)
    assert ended("submit", str(tmp_path), "--tasks=t", "--wait", "--json") == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["jobs"][0]["status"], answers) == ("completed", [])
    assert said.err.count("away") == 1


def test_a_superseded_job_is_listed_like_others_and_who_waits_for_it_gets_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient

    job: Fields = {"step": 5, "run": "run", "weights": "model", "profile": "script"}
    job |= {"completed_at": 1.0, "tasks": ["score"], "metrics": {}}
    first = job | {"id": "1", "status": "superseded", "error": "saved again since: see job 2"}
    first |= {"superseded_by": "2"}
    second = job | {"id": "2", "status": "completed", "error": None}
    monkeypatch.setattr(EvalClient, "submit", lambda *_, **__: first)
    monkeypatch.setattr(EvalClient, "job", lambda _, job_id: {"1": first, "2": second}[job_id])
    monkeypatch.setattr(EvalClient, "jobs", lambda *_, **__: [first, second])
    assert ended("submit", str(tmp_path), "--tasks=score", "--wait") == 0
    said = capsys.readouterr()
    assert "waiting for job 2" in said.err
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [["2", "completed"]]
    assert ended("status") == 0
    head, listed, why, other = capsys.readouterr().out.splitlines()
    assert (listed.split()[1], why.strip()) == ("superseded", first["error"])
    assert head.index("weights") == listed.index("model") == other.index("model")


def test_a_user_who_waits_is_told_what_a_job_does_and_why_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs are followed at once; the first is queued again, the second fails."""
    from unshard.cli.evaluate import show
    from unshard.evaluate.client.v1 import EvalClient

    same: Fields = {"run": "r", "step": 1, "weights": "model", "profile": "p", "tasks": ["t"]}
    same |= {"metrics": {}, "completed_at": None, "position": None, "phase": None, "error": None}
    queued = same | {"status": "queued", "position": 2, "attempts": 0}
    merging = same | {"status": "running", "phase": "merging", "attempts": 1}
    evaluating = merging | {"phase": "evaluating"}
    again = queued | {"position": 1, "attempts": 1, "error": "lm-eval failed\n  found: 1\x1b[2J"}
    second = evaluating | {"attempts": 2, "error": again["error"]}
    done = same | {"status": "completed", "completed_at": 5.0, "attempts": 2}
    answers = {
        "aaaabbbbccccdddd": [queued, queued, merging, evaluating, again, second, done],
        "0123456789abcdef": [merging, done | {"status": "failed", "error": "no config.json"}],
    }
    ids = iter(answers)
    monkeypatch.setattr(EvalClient, "submit", lambda *_, **__: {"id": next(ids)})
    monkeypatch.setattr(EvalClient, "job", lambda _, one: {"id": one, **answers[one].pop(0)})
    monkeypatch.setattr(show, "_LOOK_S", 0.0)
    assert ended("submit", str(tmp_path), "--tasks=t", "--weights=model,ema", "--wait") == 1
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert [line for line in lines if "0123" in line] == [
        "waiting for job 01234567",
        "job 01234567: merging",
        "job 01234567: failed",
    ]
    assert [line for line in lines if "0123" not in line] == [
        "waiting for job aaaabbbb",
        "job aaaabbbb: queued #2",
        "job aaaabbbb: merging",
        "job aaaabbbb: evaluating",
        "job aaaabbbb: attempt 1 did not complete, the job is tried again: lm-eval failed",
        *[line for line in lines if line.startswith("      found: 1")],
        "job aaaabbbb: queued #1",
        "job aaaabbbb: evaluating, attempt 2",
        "job aaaabbbb: completed",
    ]
    head, first, second_row, why = said.out.splitlines()
    assert (first.split()[:2], second_row.split()[:2]) == (
        ["aaaabbbb", "completed"],
        ["01234567", "failed"],
    )
    assert (head.split()[0], why) == ("job", "    no config.json")


def test_times_are_local_and_columns_are_aligned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient

    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    found: list[Fields] = [
        {"run": run, "step": step, "weights": "model", "profile": "p", "task": "t", "metric": "m",
         "value": value, "job_id": "0123456789abcdef", "completed_at": 0.0}
        for run, step, value in (("a", 5, 0.25), ("longer", None, 12.5), ("a", 1000, 3.0))
    ]  # fmt: skip
    monkeypatch.setattr(EvalClient, "results", lambda *_, **__: found)
    assert ended("results") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows] == ["5", "-", "1000"]
    at = head.index("completed (local)")
    assert {row[at : at + 19] for row in rows} == {"1970-01-01 03:00:00"}
    assert {row.index("model") for row in rows} == {head.index("weights")}
    end = head.index("value") + len("value")
    assert [row[:end].split()[-1] for row in rows] == ["0.25", "12.5", "3.0"]
    monkeypatch.undo()
    time.tzset()


def test_a_list_without_jobs_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient

    for name in ("jobs", "results"):
        monkeypatch.setattr(EvalClient, name, lambda *_, **__: [])
    said = {}
    for command in ("status", "results", "status --run=x", "status --json", "results --csv"):
        assert ended(*command.split()) == 0
        said[command] = capsys.readouterr().out
    assert said["status"] == "no jobs yet\n"
    assert said["results"] == "no results yet\n"
    assert said["status --run=x"] == "no jobs of run x\n"
    assert json.loads(said["status --json"]) == {"jobs": []}
    assert said["results --csv"].startswith("run,step,weights,")


EVIL = "\x1b[2J\x9b31m\u202e\u2028\b\x7f"
SHOWN = r"\x1b[2J\x9b31m\u202e\u2028\x08\x7f"


def test_nothing_that_others_wrote_controls_the_terminal() -> None:
    with serving(Stub()) as stub:
        log = cli(stub.url, "logs", f"a\r\n10%\r20%\tb{EVIL}").stdout
        view = {"id": "1", "run": "run", "step": 5, "weights": "model", "profile": "script"}
        view |= {"status": "failed", "tasks": ["score"], "phase": None, "position": None}
        view |= {"created_at": 1.0, "started_at": 1.0, "completed_at": 2.0, "attempts": 1}
        stub.jobs["1"] = view | {"metrics": {f"a{EVIL}": 1.0}, "error": f"this\n\tthat{EVIL}"}
        listed = cli(stub.url, "status").stdout
        exact = cli(stub.url, "status", "--json").stdout
        stub.refuses = 400, f"the reason{EVIL}"
        refused = cli(stub.url, "submit", "/c/checkpoint-1", "--tasks", "t").stderr
    assert log == f"log of a\n10%\n20%\tb{SHOWN}"
    assert f"a{SHOWN}" in listed
    assert f"\tthat{SHOWN}" in listed
    assert f"the reason{SHOWN}" in refused
    assert not set(EVIL) & set(log + listed + refused + exact) - set("[2J31m")
    assert json.loads(exact)["jobs"][0]["error"] == f"this\n\tthat{EVIL}"


def test_reasons_of_a_server_do_not_control_the_terminal_on_stderr_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient
    from unshard.evaluate.trainer.watcher import Decision, Watching

    monkeypatch.setattr(EvalClient, "problems", lambda _: [f"a{EVIL}"])
    monkeypatch.setattr(EvalClient, "jobs", lambda *_, **__: [])
    assert ended("status") == 0
    assert f"accepts no jobs now: a{SHOWN}\n" in capsys.readouterr().err
    answers = [Decision(1, ("model",), f"b{EVIL}")]
    monkeypatch.setattr(Watching, "decisions", lambda _: [answers.pop()] if answers else [])
    assert ended("watch", str(tmp_path), "--tasks=t", "--once", "--interval=0.05") == 0
    assert f"step 1: refused (model): b{SHOWN}\n" in capsys.readouterr().err


def test_a_line_break_in_a_name_makes_no_second_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient

    view: Fields = {"id": "1", "run": "r", "step": 5, "weights": "model", "profile": "p"}
    view |= {"status": "completed", "tasks": ["t\nu"], "metrics": {"t/a\nb": 1.0}, "error": None}
    row: Fields = {"run": "r", "step": 5, "weights": "model", "profile": "p", "task": "t"}
    row |= {"metric": "a\nb", "value": 1.0, "job_id": "1"}
    monkeypatch.setattr(EvalClient, "problems", lambda _: [])
    monkeypatch.setattr(EvalClient, "jobs", lambda *_, **__: [view])
    monkeypatch.setattr(EvalClient, "results", lambda *_, **__: [row])
    assert ended("status") == 0
    _, job, metric = capsys.readouterr().out.splitlines()
    assert (r"t\nu" in job, metric) == (True, r"    t/a\nb = 1")
    assert ended("results") == 0
    _, result = capsys.readouterr().out.splitlines()
    assert r"a\nb" in result


def test_what_cannot_be_sent_or_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.evaluate.client.v1 import EvalClient

    file = tmp_path / "token"
    file.write_text("\u00fcber-secret", encoding="utf-8")
    assert ended("status", "--token-file", str(file)) == 2
    assert ended("status", "--server=http://host:80x") == 2
    one = {"job_id": "1", "run": "a", "task": "t", "metric": "m", "weights": "model"}
    monkeypatch.setattr(EvalClient, "results", lambda *_, **__: [{**one, "value": 1.0, "step": 1}])
    assert ended("export", "--to=jsonl", f"--directory={file}/x") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_jobs_that_wait_for_the_configuration_say_why_and_are_cancelled_by_profile(
    tmp_path: Path,
) -> None:
    place = str(whole_model(tmp_path / "root" / "run" / "checkpoint-5"))
    store = Store(tmp_path / "work" / "jobs.sqlite")
    asked = ("renamed", "renamed:qwen", "renamed-too")
    jobs = [store.submit(Request(place, one, ("score",), 5, "run"), pin=None)[0] for one in asked]
    store.close()
    with live(tmp_path) as server:
        why = "waits for the server's configuration: unknown profile 'renamed'"
        out = cli(server.url, "status", jobs[0].id).stdout
        assert f"    {why}" in out  # it is not about an attempt
        with server.client() as client:
            listed = client.jobs(limit=3)[2]
        for one in (server.job({"id": jobs[0].id}), listed):
            assert f"waits for {one['waits_for']}".startswith(why)
            assert one["error"] is None
        theirs = server.call("GET", f"/jobs/{jobs[0].id}").json()
        assert (theirs["status"], theirs["error"].startswith(why)) == ("queued", True)
        for page in ("/view/queue", f"/view/jobs/{jobs[0].id}"):
            assert (
                "waits for the server&#39;s configuration: unknown" in server.call("GET", page).text
            )
        assert "Waiting for" in server.call("GET", f"/view/jobs/{jobs[0].id}").text
        assert (
            "profile script has no queued jobs"
            in cli(server.url, "cancel", "--profile", "script").stdout
        )
        done = cli(server.url, "cancel", "--profile", "renamed", "--json")
        ended = json.loads(done.stdout)["jobs"]
        assert {one["id"]: one["status"] for one in ended} == dict.fromkeys(
            [jobs[0].id, jobs[1].id], "cancelled"
        )
        assert server.job({"id": jobs[2].id})["status"] == "queued"
        for wrong in ((), (jobs[0].id, "--profile", "renamed")):
            refused = cli(server.url, "cancel", *wrong)
            assert (refused.returncode, "--profile NAME" in refused.stderr) == (2, True)
