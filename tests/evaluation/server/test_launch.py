"""`launch`: a cluster schedules the evaluator, by a stand-in for `srun`; driven over HTTP."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from evaluation.running import is_running, request, scheduler, script_profile, whole_model
from evaluation.running import wait_for as wait_for_job
from evaluation.servers import Fields, Live, started
from evaluation.slurm import Slurm, slurm
from unshard.errors import UsageError
from unshard.evaluate.jobs import Status
from unshard.evaluate.server.attempts import attempt
from unshard.evaluate.server.endings import Cause, Failed, Postponed, judge
from unshard.evaluate.server.evaluators.installed import versions_of, why_missing
from unshard.evaluate.server.evaluators.work import EvalInput
from unshard.evaluate.server.processes.launching import evaluator_environment
from unshard.evaluate.server.processes.supervise import Exit
from unshard.evaluate.server.server_yaml import ServerConfig, read_server_yaml
from waiting import wait_until

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with slurm(tmp_path / "slurm") as made:
        yield made


@pytest.fixture
def server(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Run a server without GPUs whose profile `script` has three slots of the cluster."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")  # the server is itself a job
    monkeypatch.setenv("RANK", "3")
    made = Live(tmp_path / "server")
    configure(made, cluster)
    with started(made):
        yield made
        made.go()
        cluster.is_free = True
        for number in range(len(cluster.tasks)):
            cluster.allocate(number)
        with made.client() as client:
            for job in client.jobs():
                client.cancel(str(job["id"]))


def configure(server: Live, cluster: Slurm, **changed: object) -> None:
    server.configure()
    path = server.directory / "server.yaml"
    config = yaml.safe_load(path.read_text())
    name = "--job-name={run}-{step}-{job}-{attempt}"
    launch = {"launch": [str(cluster.srun), "--gres=gpu:{gpus}", name], "slots": 3, "gpus": 2}
    config["profiles"]["script"] |= launch | changed
    path.write_text(yaml.safe_dump(config | {"gpus": 0}))


def submit(server: Live, *steps: int, task: str = "waits") -> dict[int, Fields]:
    model = server.root / "model"
    if not model.exists():
        whole_model(model)
    return {step: server.submit(model, task, step=step, run="run") for step in steps}


def log_of(server: Live, job: Fields) -> str:
    return str(server.v1("GET", f"/jobs/{job['id']}/log")["text"])


def pids(server: Live, step: int) -> list[int]:
    found = server.began(step)["pids"]
    assert isinstance(found, list)
    return found


def test_the_cluster_has_as_many_jobs_as_slots_in_their_order(server: Live, cluster: Slurm) -> None:
    jobs = submit(server, 1, 2, 3, 4, 5)
    wait_until(lambda: len(cluster.tasks) == 3, "three jobs on the cluster")
    notes = [server.began(step) for step in (1, 2, 3)]
    assert [note["gpus"] for note in notes] == ["0,1"] * 3
    job = jobs[1]["id"]
    first = next(task for task in cluster.tasks if str(job) in task.options[1])
    assert first.options == ["--gres=gpu:2", f"--job-name=run-1-{job}-1"]
    assert first.environment["SLURM_JOB_ID"] == "4711"
    assert "a-secret-of-the-profile" in first.environment.values()
    assert not {"RANK", "CUDA_VISIBLE_DEVICES"} & first.environment.keys()
    time.sleep(0.5)
    assert len(cluster.tasks) == 3
    asked = {"checkpoint": str(server.root / "model"), "profile": "script", "tasks": ["waits"]}
    large = server.v1("POST", "/jobs", json={**asked, "num_gpus": 16, "step": 6, "run": "run"})
    server.go()
    for step, job in jobs.items():
        done = server.ended(job)
        assert (done["attempts"], done["metrics"]["waits/acc"]) == (1, step / 100)  # type: ignore[index]
        log = log_of(server, job)
        assert "srun: job 7 has been allocated resources" in log
        assert f"evaluating step {step}" in log
    server.ended(large)
    # Not the last: its process and another job's start at the same time.
    (asking,) = (task for task in cluster.tasks if str(large["id"]) in task.options[1])
    assert asking.options[0] == "--gres=gpu:16"
    assert "on the cluster" in server.told()


def test_time_in_the_queue_of_the_cluster_is_not_counted(server: Live, cluster: Slurm) -> None:
    server.stop()
    configure(server, cluster, timeout=2)
    server.start()
    cluster.is_free = False
    jobs = submit(server, 1, 2)
    wait_until(lambda: len(cluster.tasks) == 2, "both in the queue")
    time.sleep(4)
    for job in jobs.values():
        assert "queued and waiting for resources" in log_of(server, job)
        assert server.job(job)["status"] == "running"
    for number in (0, 1):
        cluster.allocate(number)
    noted = pids(server, 1) + pids(server, 2)
    for job in jobs.values():
        assert "timed out after 2 s" in str(server.ended(job, "failed")["error"])
    wait_until(lambda: not any(map(is_running, noted[::2])), "the end of the evaluators")
    assert [task.signals[0] for task in cluster.tasks] == [signal.SIGTERM] * 2


def test_a_job_is_cancelled_in_the_queue_and_on_the_node(server: Live, cluster: Slurm) -> None:
    (running,) = submit(server, 1).values()
    (pid, _) = pids(server, 1)
    cluster.is_free = False
    (queued,) = submit(server, 2).values()
    wait_until(lambda: len(cluster.tasks) == 2, "the second in the queue")
    for job in (running, queued):
        server.v1("DELETE", f"/jobs/{job['id']}")
        server.ended(job, "cancelled")
    wait_until(lambda: not is_running(pid), "the end of the evaluator")
    wait_until(lambda: cluster.tasks[1].is_over, "the end of its place in the queue")
    assert cluster.tasks[1].process is None
    assert "has been revoked" in log_of(server, queued)
    assert "Job step aborted" in log_of(server, running)
    cluster.is_free = True
    later = submit(server, 3, 4, 5)
    wait_until(lambda: len(cluster.tasks) == 5, "all slots again")
    server.go()
    for job in later.values():
        server.ended(job)


def test_a_killed_servers_jobs_are_adopted_from_the_cluster(server: Live, cluster: Slurm) -> None:
    cluster.is_free = False
    jobs = submit(server, 1, 2, 3)
    wait_until(lambda: len(cluster.tasks) == 3, "all in the queue")
    number = next(
        number for number, task in enumerate(cluster.tasks) if "run-1-" in task.options[1]
    )
    cluster.allocate(number)
    before = pids(server, 1)
    server.kill()
    configure(server, cluster, slots=1)  # fewer than run
    server.start()
    assert server.told().count("adopted: attempt 1 on the cluster") == 3
    (behind,) = submit(server, 4).values()
    time.sleep(0.5)
    assert len(cluster.tasks) == 3
    for other in range(3):
        cluster.allocate(other)
    assert pids(server, 1) == before
    server.go()
    for job in jobs.values():
        assert server.ended(job)["attempts"] == 1
    wait_until(lambda: len(cluster.tasks) == 4, "its turn")
    cluster.allocate(3)
    server.ended(behind)


@pytest.mark.parametrize(("code", "shown"), [(3, "exit code 3"), (1, "exit code 1")])
def test_an_exit_code_of_the_launcher_is_that_of_the_evaluator(
    server: Live, cluster: Slurm, code: int, shown: str
) -> None:
    cluster.code = code
    (job,) = submit(server, 1, task="fails").values()
    assert shown in str(server.ended(job, "failed")["error"])
    assert f"task 0: Exited with exit code {code}" in log_of(server, job)


@pytest.mark.parametrize("code", [137, 143, 253])
def test_a_task_that_the_cluster_ended_has_not_failed(tmp_path: Path, code: int) -> None:
    own = script_profile(launch=("srun",))
    outcome = judge(
        EvalInput(tmp_path, tmp_path, tmp_path, request(tmp_path), own),
        Exit("exited", code, "", 1.0),
    )
    assert isinstance(outcome, Postponed)
    assert outcome.cause is Cause.KILLED
    plain = EvalInput(tmp_path, tmp_path, tmp_path, request(tmp_path), script_profile())
    is_slurms = code == 253
    assert isinstance(judge(plain, Exit("exited", code, "", 1.0)), Failed) == is_slurms


def test_results_that_this_machine_sees_later_are_waited_for(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system: the evaluator has ended, and its file is not there yet."""
    monkeypatch.setattr(attempt, "_LOOK_S", 0.05)
    monkeypatch.setattr(attempt, "_VISIBLE_S", 30)
    launch = (str(cluster.srun),)
    profile = script_profile("", launch=launch)
    work = tmp_path / "work"
    store, made = scheduler(work, "print('nothing yet')", profile=profile, launched={"script": 1})
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    place = work / "jobs" / job.id / "1" / "output"

    def write_later() -> None:
        wait_until(lambda: bool(cluster.tasks) and cluster.tasks[0].code == 0)
        time.sleep(0.5)
        (place / "metrics.json").write_text(json.dumps({"task/acc": 5}))

    writer = threading.Thread(target=write_later)
    writer.start()
    made.start()
    try:
        assert wait_for_job(store, job.id, Status.COMPLETED).metrics == {"task/acc": 5}
    finally:
        made.stop(end=True)
        writer.join()


def test_a_launcher_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    profile = script_profile(launch=(str(tmp_path / "srun"), "-n1"))
    store, made = scheduler(tmp_path / "work", "", profile=profile, launched={"script": 1})
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    made.start()
    try:
        wait_until(lambda: made.waits_for(job) is not None, "the reason")
        assert "cannot be started" in str(made.waits_for(job))
    finally:
        made.stop(end=True)
    why = why_missing(profile, tmp_path)
    assert why is not None
    assert "srun is not found; install it, or change `launch`" in why
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    assert versions_of(profile, tmp_path) == str(tmp_path / "srun")


def test_what_a_launcher_gets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURM_JOB_ID": "1", "SLURM_JWT": "x", "CUDA_VISIBLE_DEVICES": "0", "RANK": "0"}
    for name, value in (given | {"RAY_ADDRESS": "a", "RAY_AUTH_TOKEN": "x"}).items():
        monkeypatch.setenv(name, value)
    own = {"HF_TOKEN": "own"}
    found = evaluator_environment(own, program=sys.executable, gpus=None, directory="/attempt")
    assert not {"SLURM_JWT", "CUDA_VISIBLE_DEVICES", "RANK", "RAY_AUTH_TOKEN"} & found.keys()
    chosen = [found[name] for name in ("SLURM_JOB_ID", "RAY_ADDRESS", "HF_TOKEN")]
    assert chosen == ["1", "a", "own"]


def read(directory: Path, text: str) -> ServerConfig:
    path = directory / "server.yaml"
    path.write_text(text)
    return read_server_yaml(path)


def test_a_profile_that_is_launched_is_not_bound_by_this_machine(tmp_path: Path) -> None:
    text = "gpus: 0\nprofiles: {a: {kind: lm-eval, launch: [srun], interpreter: /nodes/python%s}}"
    profile = read(tmp_path, text % "").profiles["a"]
    assert (profile.gpus, profile.slots) == (1, 1)
    profile = read(tmp_path, text % ", gpus: 8, slots: 4").profiles["a"]
    assert (profile.gpus, profile.slots, profile.starter) == (8, 4, "srun")
    relative = tmp_path / "srun"
    relative.touch(mode=0o755)
    assert read(tmp_path, text.replace("[srun]", "./srun") % "").profiles["a"].launch == (
        str(relative),
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("launch: [srun, '--gres={gpu}']", r"launch cannot be read\n.*\{attempt\}, \{gpus\}"),
        ("launch: ['{run}']", "launch cannot be read"),
        ("launch: [./nowhere]", r"launch cannot be read\n  expected: a program"),
        ("slots: 2", "slots has no effect without `launch`"),
        ("launch: [srun], slots: 0", "slots cannot be read"),
        (
            "launch: [srun], weights: direct, model: vllm",
            "launch is not possible with a kept engine",
        ),
    ],
)
def test_what_cannot_be_launched(tmp_path: Path, keys: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, f"gpus: 1\nprofiles: {{a: {{kind: lm-eval, {keys}}}}}")


def test_the_script_for_ray_ends_the_job_with_itself(tmp_path: Path) -> None:
    """With a stand-in for `ray`: what is asked of it, and that the job is stopped."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ray").write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n[ "$2" = stop ] || exec sleep 600\n'
    )
    (programs / "ray").chmod(0o755)
    launch = (str(EXAMPLES / "ray-job.sh"), "{job}-{attempt}", "{gpus}")
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    profile = script_profile(launch=launch, environment=path, gpus=4)
    store, made = scheduler(tmp_path / "work", "", profile=profile, launched={"script": 1})
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    script = tmp_path / "work" / "jobs" / job.id / "1" / "launched.sh"
    made.start()
    try:
        asked = tmp_path / "asked"
        wait_until(asked.exists, "the submission")
        assert made.cancel(job.id)
        wait_until(lambda: not store.running(), "its end")
        own = f"--submission-id={job.id}-1 --entrypoint-num-gpus=4 -- /bin/sh {script}"
        assert asked.read_text().splitlines() == [f"job submit {own}", f"job stop {job.id}-1"]
    finally:
        made.stop(end=True)


def test_an_argument_with_blanks_and_quotes_reaches_the_evaluator(tmp_path: Path) -> None:
    """Some launchers join the arguments for a shell: what is launched has none that it changes."""
    joins = tmp_path / "joins"
    joins.write_text('#!/bin/sh\ncd /; exec sh -c "$*"\n')
    joins.chmod(0o755)
    script = """done(acc=1, at=int(os.getcwd() == os.path.dirname(str(output))), q=len("a  'b'"))"""
    profile = script_profile(launch=(str(joins),))
    store, made = scheduler(tmp_path / "work", script, profile=profile, launched={"script": 1})
    job = store.submit(request(whole_model(tmp_path / "model")), pin=None)[0]
    made.start()
    try:
        found = wait_for_job(store, job.id, Status.COMPLETED).metrics
        assert found == {"task/acc": 1, "task/at": 1, "task/q": 6}
    finally:
        made.stop(end=True)
    assert (tmp_path / "work" / "jobs" / job.id / "1" / "begun").exists()
