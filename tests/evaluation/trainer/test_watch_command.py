"""`unshard eval watch` on checkpoints of verl and lmms-engine, with a real server, or without."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from evaluation.running import child_environment, largest_file, whole_model
from evaluation.servers import FAIL, SCORE, Live, Stub, free_port, live, scores, serving, unshard
from ranks import save_ranks
from unshard.errors import UsageError
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.pins.files import read_stamps
from unshard.evaluate.pins.pin import list_pins
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.trainer import courier
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.submitter import Submitter
from unshard.evaluate.trainer.watcher import Decision, Watching
from unshard.read.finding.versions import fingerprint
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = pytest.mark.slow

WEIGHTS = {"layer.weight": torch.arange(24.0).reshape(8, 3)}
LATEST = "latest_checkpointed_iteration.txt"


def verl_step(run: Path, step: int, *roles: str) -> Path:
    """Save as verl does; the run's own mark comes last."""
    for role in roles or ("actor",):
        place = run / f"global_step_{step}" / role
        save_ranks(place, WEIGHTS, 2)
        (place / "config.json").write_text('{"model_type": "qwen2"}')
    (run / f"global_step_{step}" / "data.pt").write_bytes(b"")
    (run / LATEST).write_text(str(step))
    return run / f"global_step_{step}"


def lmms_step(run: Path, step: int, *folders: str) -> Path:
    place = run / f"checkpoint-{step}"
    for folder in folders:
        save_ranks(place / folder, WEIGHTS, 2)
    (place / "config.json").write_text('{"model_type": "qwen2"}')
    return place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    return tmp_path / "runs" / "my-run"


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Live]:
    with scoring(tmp_path) as running:
        yield running


def scoring(place: Path, script: str = SCORE, **changed: object) -> AbstractContextManager[Live]:
    """Return a server of the directory of runs."""
    return live(place / "server", script=script, roots=[str(place / "runs")], **changed)


def watch_once(run: Path, url: str, *more: object) -> str:
    arguments = (run, "--tasks=t", "--profile=script", "--once", "--interval=0.2")
    return unshard("eval", "watch", *arguments, f"--server={url}", *more).stdout


@contextmanager
def watching(run: Path, url: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "unshard", "eval", "watch", str(run), "--tasks=t"]
    command += ["--profile=script", f"--server={url}", "--interval=0.1"]
    process = subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def results_in(run: Path) -> dict[int, dict[str, float]]:
    file = run / "_unshard" / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {line["step"]: line["metrics"] for line in lines}
    assert len(found) == len(lines)
    return found


def test_checkpoints_of_verl_are_evaluated_as_they_come(run: Path, real: Live) -> None:
    """The actor's weights, where there is a critic too; rotation takes them while they wait."""
    verl_step(run, 10, "actor", "critic")
    half = run / "global_step_20" / "actor"
    save_ranks(half, WEIGHTS, 2)
    with watching(run, real.url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step 10: submitted (model)\n"
        shutil.rmtree(run / "global_step_10")
        assert [job["step"] for job in real.all_ended(1)] == [10]
        verl_step(run, 20, "actor", "critic")
        assert real.all_ended(2)[1]["status"] == "completed"
        last = "step 20: unshard_eval/t/acc = 0.02\n"
        while (said := process.stdout.readline()) != last:  # what comes before depends on timing
            assert said
        until(lambda: not list_pins(run))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    # A line that was being printed when the signal came may be printed once more.
    assert out.splitlines()[-3:] == [
        "evaluations of my-run:",
        "task  metric  run     weights  profile  base  best      last  last - best  in stderrs",
        "t     acc     my-run  model    script      -     -  20: 0.02            -           -",
    ]
    assert results_in(run) == {10: {"unshard_eval/t/acc": 0.01}, 20: {"unshard_eval/t/acc": 0.02}}


def test_a_restart_submits_nothing_again(run: Path, tmp_path: Path) -> None:
    """Not even what has failed, which the server itself would queue anew."""
    with scoring(tmp_path, FAIL) as failing:
        verl_step(run, 10)
        assert watch_once(run, failing.url) == "step 10: submitted (model)\n"
        (job,) = failing.all_ended(1)
        assert job["status"] == "failed"
        for forgotten in (False, True):
            if forgotten:  # only the server knows
                (run / "_unshard" / "watched.txt").unlink()
            assert watch_once(run, failing.url) == ""
        assert [(one["id"], one["attempts"]) for one in failing.all_ended(1)] == [(job["id"], 1)]
        while Spool(run).pending():  # followed until its result is known
            assert watch_once(run, failing.url) == ""
    absent = f"http://127.0.0.1:{free_port()}"
    arguments = (run, "--tasks=t", "--profile=script", "--once", "--interval=0.1")
    assert unshard("eval", "watch", *arguments, f"--server={failing.url}").stdout == ""
    assert list_pins(run) == []
    assert "submitted" in watch_away(run, absent)  # another server is another matter


def watch_away(run: Path, url: str) -> str:
    """Watch with a server that is away: what cannot be sent is reported."""
    given = EvalConfig.from_dict({"server_url": url, "profile": "script", "tasks": ["t"]})
    with Watching(run, given) as one:
        one.look()
        found = one.look()
        assert not one.wait_until_sent(0.1)
    return " ".join(f"submitted {step}" for step, _ in found)


def test_what_is_submitted_while_the_server_is_away_is_sent_later(
    run: Path, tmp_path: Path
) -> None:
    port = free_port()
    verl_step(run, 10)
    assert watch_away(run, f"http://127.0.0.1:{port}") == "submitted 10"
    shutil.rmtree(run / "global_step_10")
    assert watch_away(run, f"http://127.0.0.1:{port}") == ""
    assert len(list_pins(run)) == 1
    with scoring(tmp_path, port=port) as running:
        watch_once(run, running.url)
        assert [job["status"] for job in running.all_ended(1)] == ["completed"]
        watch_once(run, running.url)
    assert results_in(run) == {10: {"unshard_eval/t/acc": 0.01}}


def test_the_exit_code_of_once_says_that_nothing_was_sent(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unshard.cli.evaluate import runs as evaluate_runs
    from unshard.cli.main import main

    monkeypatch.setattr(evaluate_runs, "_SEND_S", 0.1)
    verl_step(run, 10)
    absent = f"--server=http://127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit) as ended:
        main(["eval", "watch", str(run), "--tasks=t", "--once", "--interval=0.1", absent])
    assert ended.value.code == 1
    assert "not submitted: the server does not accept jobs now" in capsys.readouterr().err


def once(run: Path, url: str, *more: str) -> int:
    from unshard.cli.main import main

    options = ["--tasks=t", "--profile=script", "--once", "--interval=0.05", f"--server={url}"]
    try:
        main(["eval", "watch", str(run), *options, *more])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_once_says_what_was_refused(
    run: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    verl_step(run, 10)
    stub.refuses = (400, "no such profile")
    for _ in range(2):
        assert once(run, stub.url) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert "step 10: refused (model): POST /api/v1/jobs: no such profile" in said.err
        assert said.err.count("no such profile") == 1
    assert [pin.step for pin in list_pins(run)] == [10]
    stub.refuses = None
    assert once(run, stub.url) == 0
    assert capsys.readouterr().out.startswith("step 10: submitted (model)\n")
    assert [body["step"] for body in stub.submissions] == [10]


def test_once_says_how_many_wait_for_room(
    run: Path, tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.finishes = lambda body: None  # noqa: ARG005
    for step in (1, 2, 3):
        verl_step(run, step)
    file = tmp_path / "eval.yaml"
    file.write_text(
        f"server_url: {stub.url}\nprofile: script\ntasks: [t]\nquota: {{count: 1, bytes: null}}\n"
    )
    assert once(run, stub.url, f"--config={file}") == 1
    assert "2 more waiting for room in the pin quota" in capsys.readouterr().err


def test_once_says_why_it_selected_nothing(
    run: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    """No step; steps that are not complete, not selected, submitted before, or several of these."""
    stub.finishes = scores
    assert once(run, stub.url) == 0
    assert capsys.readouterr().err.endswith(f"nothing to submit in {run}\n  it has no steps\n")
    verl_step(run, 100)
    assert once(run, stub.url, "--every=500") == 0
    every = "not the first at or after a multiple of 500 (eval_steps)"
    assert capsys.readouterr().err == f"nothing to submit in {run}\n  step 100: {every}\n"
    assert once(run, stub.url) == 0
    assert capsys.readouterr().err == ""
    for step in (200, 300):
        verl_step(run, step)
    (run / LATEST).write_text("200")
    assert once(run, stub.url) == 0
    assert capsys.readouterr().err == ""
    assert once(run, stub.url) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"nothing to submit in {run}",
        "  steps 100, 200: submitted before",
        f"  step 300: not complete yet: {LATEST} has 200",
    ]


def test_once_wants_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, found in (("none", "nothing"), ("file", "a file")):
        assert once(tmp_path / name, "http://127.0.0.1:9") == 2
        assert found in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf"])
def test_once_wants_an_interval_that_ends(
    run: Path, capsys: pytest.CaptureFixture[str], interval: str
) -> None:
    assert once(run, "http://127.0.0.1:9", f"--interval={interval}") == 2
    assert "--interval" in capsys.readouterr().err


def config_for(url: str, **more: object) -> EvalConfig:
    given = {"server_url": url, "profile": "script", "tasks": ["t"], "poll_interval": 0.02}
    return EvalConfig.from_dict({**given, **more})


def looked(run: Path, config: EvalConfig) -> list[tuple[int, tuple[str, ...]]]:
    with Watching(run, config) as one:
        assert one.look() == []  # sizes may still change
        found = one.look()
        assert one.wait_until_sent(20)
        return found


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub(finishes=scores)) as running:
        yield running


def finished(stub: Stub) -> bool:
    for job in list(stub.jobs):
        stub.finish(job, **{"t/acc": 1.0})
    return True


def test_more_checkpoints_than_pins_lose_none(run: Path, stub: Stub) -> None:
    """A late start on a long run: they are submitted as room among the pins allows."""
    stub.finishes = lambda body: None  # noqa: ARG005
    for step in range(1, 6):
        verl_step(run, step)
    with Watching(run, config_for(stub.url, quota={"count": 2, "bytes": None})) as one:
        one.look()
        assert [step for step, _ in one.look()] == [1, 2]
        assert (one.held_back, one.look()) == (3, [])
        submitted = [1, 2]
        while one.held_back:
            until(lambda: finished(stub) and not list_pins(run))
            submitted += [step for step, _ in one.look()]
    assert submitted == [1, 2, 3, 4, 5]
    assert all("checkpoint" in body for body in stub.submissions)


def saved_again(step: Path) -> None:
    for path in step.rglob("*.pt"):
        before, data = path.stat().st_mtime_ns, path.read_bytes()
        path.unlink()  # else its pin would be written to
        path.write_bytes(data)
        os.utime(path, ns=(before + 10**9,) * 2)


def test_a_step_that_is_saved_again_is_submitted_again_once(run: Path, stub: Stub) -> None:
    """With all its weights: those that are saved first wait for the others."""
    weights = ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0")
    for step in (1, 2):
        lmms_step(run, step, *weights)
    with Watching(run, config_for(stub.url, weights=["model", "ema"])) as one:
        assert [one.look() for _ in range(3)] == [
            [],
            [(1, ("model", "ema")), (2, ("model", "ema"))],
            [],
        ]
        first, second = (run / "checkpoint-1" / name for name in weights)
        (first / "notes.txt").write_text("of a user")
        assert [one.look() for _ in range(3)] == [[], [], []]
        saved_again(first)
        assert [one.look() for _ in range(3)] == [[], [], []]
        saved_again(second)
        assert [one.look() for _ in range(3)] == [[], [(1, ("model", "ema"))], []]
        assert one.wait_until_sent(LIMIT_S)
    version = fingerprint(read_stamps(run / "checkpoint-1"))
    jobs = zip(stub.submissions, stub.jobs.values(), strict=True)
    now = [str(body["weights"]) for body, job in jobs if job["fingerprint"] == version]
    assert sorted(now) == ["ema", "model"]  # what was not sent before is superseded
    assert looked(run, config_for(stub.url, weights=["model", "ema"])) == []


def test_a_server_that_is_mended_gets_what_it_refused_and_what_waited(
    run: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_RETRY_REFUSED", 0.05)
    stub.refuses = (400, "not below a root")
    for step in range(1, 5):
        verl_step(run, step)
    with Watching(run, config_for(stub.url, quota={"count": 2, "bytes": None})) as one:
        one.look()
        assert [step for step, _ in one.look()] == [1, 2]
        until(lambda: stub.paths.count("POST /api/v1/jobs") > 6)  # each again, and again
        assert (one.look(), one.held_back) == ([], 2)
        stub.refuses = None
        until(lambda: (one.look(), len(stub.submissions) == 4)[1])
    assert sorted(str(body["step"]) for body in stub.submissions) == ["1", "2", "3", "4"]


def test_each_answer_is_reported_once_and_an_acceptance_after_a_refusal_too(
    run: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_RETRY_REFUSED", 0.05)
    stub.refuses = (400, "not below a root")
    verl_step(run, 10)
    with Watching(run, config_for(stub.url)) as one:
        one.look()
        assert one.decisions() == []
        assert one.look() == [(10, ("model",))]
        answers: list[Decision] = []

        def told() -> int:
            answers.extend(one.decisions())
            return len(answers)

        until(told)
        until(lambda: stub.paths.count("POST /api/v1/jobs") > 4)
        stub.refuses = None
        until(lambda: told() > 1)
        assert one.decisions() == []
    refused, accepted = answers
    assert (refused.step, refused.weights, accepted) == (
        10,
        ("model",),
        Decision(10, ("model",), None),
    )
    assert "not below a root" in str(refused.refused)


def test_what_a_trainer_could_not_send_is_sent(run: Path, stub: Stub) -> None:
    """The server was away for longer than the training waited; the trainer kept one checkpoint."""
    trainer = Submitter(config_for(f"http://127.0.0.1:{free_port()}"), run)
    for step in (10, 20):
        trainer.submit(lmms_step(run, step, "pytorch_model_fsdp_0"), step)
    assert not trainer.close(0.05)
    shutil.rmtree(run / "checkpoint-10")
    with Watching(run, config_for(stub.url)) as one:
        found: set[int] = set()

        def steps() -> set[int]:
            one.look()
            found.update(step for step, _ in one.completed())
            return found

        until(lambda: steps() == {10, 20})
    assert sorted(str(body["step"]) for body in stub.submissions) == ["10", "20"]
    assert list_pins(run) == []


def test_what_finds_a_full_disk_is_submitted_later(run: Path, stub: Stub) -> None:
    verl_step(run, 10)
    with Watching(run, config_for(stub.url)) as one:
        one.look()
        with largest_file(0):
            assert one.look() == []
        assert list_pins(run) == []
        assert one.look() == [(10, ("model",))]
        until(lambda: one.completed() == [(10, {"unshard_eval/t/acc": 0.1})])


def test_what_another_client_submitted_comes_too(run: Path, stub: Stub) -> None:
    place = verl_step(run, 10)
    config = config_for(stub.url)
    body = {"checkpoint": str(place / "actor"), "step": 10, "profile": "script", "tasks": ["t"]}
    with EvalClient(stub.url) as client:
        client.submit_body({**body, "weights": "model", "run": RunFolder(run).name})
    with Watching(run, config) as one:
        one.look()
        assert one.look() == []
        until((run / "_unshard" / "results.jsonl").exists)
        until(lambda: one.completed() == [(10, {"unshard_eval/t/acc": 0.1})])
    assert looked(run, config) == []
    assert len(stub.submissions) == 1


@pytest.mark.parametrize(("strategy", "steps"), [("no", []), ("epoch", [100, 600])])
def test_other_strategies_than_steps(
    run: Path, stub: Stub, strategy: str, steps: list[int]
) -> None:
    for step in (100, 600):
        verl_step(run, step)
    config = config_for(stub.url, eval_strategy=strategy, eval_steps=500)
    assert [step for step, _ in looked(run, config)] == steps


def test_of_a_policy_and_its_critic_the_policy_is_submitted(run: Path, stub: Stub) -> None:
    """SkyRL's names; a step with a critic alone has nothing to evaluate."""
    verl_step(run, 5, "policy", "critic")
    verl_step(run, 10, "critic")
    assert looked(run, config_for(stub.url)) == [(5, ("model",))]
    (body,) = stub.submissions
    assert str(body["checkpoint"]).endswith("global_step_5/policy")


def test_room_is_counted_in_bytes_too(run: Path, stub: Stub) -> None:
    stub.finishes = lambda body: None  # noqa: ARG005
    size = sum(path.stat().st_size for path in verl_step(run, 1).rglob("*.pt"))
    verl_step(run, 2)
    with Watching(run, config_for(stub.url, quota={"count": 8, "bytes": int(size * 1.5)})) as one:
        one.look()
        assert [step for step, _ in one.look()] == [1]
        assert one.held_back == 1


def test_other_arguments_are_another_evaluation(run: Path, stub: Stub) -> None:
    verl_step(run, 10)
    for limit, is_new in ((8, True), (8, False), (None, True), (None, False), (8, False)):
        config = config_for(stub.url, limit=limit)
        assert looked(run, config) == ([(10, ("model",))] if is_new else [])
    assert [body.get("limit") for body in stub.submissions] == [8, None]


def test_a_seed_is_submitted_with_the_checkpoint(run: Path, stub: Stub) -> None:
    """By both commands; another seed is another evaluation."""
    place = verl_step(run, 10)
    watch_once(run, stub.url, "--seed=7")
    submit = (place, "--tasks=t", "--profile=score", "--step=10", "--json", f"--server={stub.url}")
    unshard("eval", "submit", *submit, "--seed=0")
    unshard("eval", "submit", *submit)
    assert [body.get("seed") for body in stub.submissions] == [7, 0, None]


def test_a_type_of_lmms_evals_model_is_known_by_its_name(run: Path, stub: Stub) -> None:
    stub.finishes = lambda body: {**(scores(body) or {}), "profile": f"lmms:{body['profile']}"}
    verl_step(run, 10)
    assert [len(looked(run, config_for(stub.url))) for _ in range(2)] == [1, 0]
    (run / "_unshard" / "watched.txt").unlink()
    assert looked(run, config_for(stub.url)) == []


def test_both_sets_of_weights_are_awaited(run: Path, stub: Stub) -> None:
    config = config_for(stub.url, weights=["model", "ema"])
    place = lmms_step(run, 10, "pytorch_model_fsdp_0")
    assert looked(run, config) == []
    save_ranks(place / "pytorch_ema_model_fsdp_0", WEIGHTS, 2)
    assert looked(run, config) == [(10, ("model", "ema"))]
    assert [body["weights"] for body in stub.submissions] == ["model", "ema"]
    assert len({body["pin"] for body in stub.submissions}) == 1


def test_the_first_checkpoint_after_every_nth_step(run: Path, stub: Stub) -> None:
    for step in (200, 400, 600, 800, 1000, 1200):
        verl_step(run, step)
    config = config_for(stub.url, eval_steps=500)
    assert [step for step, _ in looked(run, config)] == [600, 1000]
    shutil.rmtree(run / "global_step_600")
    verl_step(run, 1500)
    assert [step for step, _ in looked(run, config)] == [1500]


def test_a_file_says_what_the_options_do_not(run: Path, tmp_path: Path, stub: Stub) -> None:
    verl_step(run, 10)
    file = tmp_path / "eval.yaml"
    file.write_text(
        "server_url: http://127.0.0.1:9\nprofile: other\ntasks: [a, b]\nlimit: 8\n"
        "quota: {count: 3, bytes: null}\n"
    )
    out = watch_once(run, stub.url, f"--config={file}", "--run=named")
    assert out.splitlines()[0] == "step 10: submitted (model)"
    (body,) = stub.submissions
    assert (body["tasks"], body["profile"]) == (["t"], "script")
    assert (body["limit"], body["run"]) == (8, "named")


def test_one_process_watches_a_run_and_a_checkpoint_is_none(run: Path, stub: Stub) -> None:
    verl_step(run, 10)
    with Watching(run, config_for(stub.url)), pytest.raises(UsageError, match="another process"):
        Watching(run, config_for(stub.url))
    for inside in ("global_step_10", "global_step_10/actor"):
        with pytest.raises(UsageError, match="is a checkpoint"):
            Watching(run / inside, config_for(stub.url))
    done = unshard("eval", "watch", run / "global_step_10", "--tasks=t", check=False)
    assert done.returncode == 2


def test_a_run_that_comes_later_is_awaited(tmp_path: Path, stub: Stub) -> None:
    with Watching(tmp_path / "later", config_for(stub.url)) as one:
        assert one.look() == []
        verl_step(tmp_path / "later", 10)
        one.look()
        assert one.look() == [(10, ("model",))]


def test_the_final_model_in_the_directory_of_a_run_makes_it_no_checkpoint(
    run: Path, stub: Stub
) -> None:
    place = whole_model(run / "checkpoint-7")
    (place / "trainer_state.json").write_text('{"global_step": 7}')
    whole_model(run)
    assert looked(run, config_for(stub.url)) == [(7, ("model",))]


def test_a_directory_that_does_not_exist_is_awaited_and_left_to_its_trainer(
    tmp_path: Path, stub: Stub
) -> None:
    run = tmp_path / "runs" / "later"
    with watching(run, stub.url) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        said = process.stderr.readline()
        assert said == f"waiting for {run}, which does not exist yet\n"
        assert not run.parent.exists()
        verl_step(run, 10)
        assert process.stdout.readline() == "step 10: submitted (model)\n"
