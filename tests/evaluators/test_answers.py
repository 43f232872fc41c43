"""An evaluation that was interrupted goes on with its answers; with lm-eval 0.4.13 itself."""

import json
import re
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from evaluation.local_tasks import OFFLINE, run_evaluator, save_tiny_model, work_at
from evaluation.running import child_environment, job_of, request, scheduler, wait_for, whole_model
from unshard.evaluate.jobs import Arguments, Job, Request, Status
from unshard.evaluate.server.evaluators.answers import forget_answers, place_of_answers
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import Work
from waiting import wait_until

QUESTIONS, CHOICES, STORIES = 10, 3, 120
TRIES = 10
TASKS = ("choices", "stories")


def tasks_in(directory: Path) -> Path:
    """Write a task of choices, and one of greedy generation, each question of another text."""
    directory.mkdir()
    words = ("the sky is", "the grass is", "the sun is")
    for name, count in (("choices", QUESTIONS), ("stories", STORIES)):
        rows = [{"text": f"{words[n % 3]} {n}", "label": n % 3} for n in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        task: dict[str, object] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(directory / f"{name}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
        }
        if name == "choices":
            task |= {"output_type": "multiple_choice", "doc_to_target": "{{label}}"}
            task |= {
                "doc_to_choice": ["blue", "green", "yellow"],
                "metric_list": [{"metric": "acc"}],
            }
        else:
            exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            task |= {"output_type": "generate_until", "doc_to_target": "blue"}
            task |= {"generation_kwargs": {"do_sample": False, "max_gen_toks": 4}}
            task |= {"metric_list": [exact]}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return directory


def count_answers(directory: Path) -> int:
    """Return how many answers are in the databases of a job."""
    count = 0
    for path in directory.glob("answers/*/answers_rank*.db"):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'unnamed'").fetchone():
                count += connection.execute("SELECT COUNT(*) FROM unnamed").fetchone()[0]
    return count


def killed_in_the_middle(
    command: Sequence[str], job: Path, environment: dict[str, str], answers: int
) -> int:
    """Run an attempt and kill it when it has so many answers; return how many it had in the end."""
    with (job / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=job / "1", env=environment, stdout=log, stderr=log)
        wait_until(
            lambda: count_answers(job) >= answers or running.poll() is not None,
            "some answers of the second task",
        )
        running.kill()
        running.wait()
    return count_answers(job)


def samples_of(work: Work) -> list[tuple[str, object, object]]:
    """Return task, question and answers of an attempt, in order."""
    found = []
    for path in work.output.glob("samples_*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.append((path.name.split("_2")[0], row["doc_id"], row["resps"]))
    return sorted(found, key=lambda one: (one[0], int(str(one[1]))))


def test_a_killed_lm_eval_goes_on_with_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the model is too small for more
    model = save_tiny_model(tmp_path / "model")
    profile = LmEvalProfile(
        include_paths=(tasks_in(tmp_path / "tasks"),), model_args={"dtype": "float32"}, resume=True
    )
    asked = Request("/a", "lm", TASKS, arguments=Arguments(batch_size=1))

    def attempt(job: str, number: int, chosen: LmEvalProfile = profile) -> Work:
        return work_at(tmp_path / job / str(number), model, asked, chosen)

    environment = child_environment() | OFFLINE
    choices, known, job = QUESTIONS * CHOICES, 0, ""
    for number in range(TRIES):  # on a busy machine one may end before it is killed
        job = f"job-{number}"
        known = killed_in_the_middle(
            profile.command_line(attempt(job, 1)), tmp_path / job, environment, choices + 5
        )
        if known < choices + STORIES:
            break
    assert choices + 5 <= known < choices + STORIES

    second = attempt(job, 2)
    done = run_evaluator(profile.command_line(second), second.directory)
    counts = re.findall(r"Cached requests: (\d+), Requests remaining: (\d+)", done.stdout)
    assert counts == [
        (str(choices), "0"),
        (str(known - choices), str(STORIES + choices - known)),
    ], done.stdout
    plain = profile.model_copy(update={"resume": False})
    whole = attempt("other", 1, plain)
    end = run_evaluator(plain.command_line(whole), whole.directory)
    assert "Cached requests" not in end.stdout
    measured = profile.measured(second, done.returncode)
    assert measured == replace(plain.measured(whole, end.returncode), file=measured.file)
    assert len(samples_of(whole)) == QUESTIONS + STORIES
    assert samples_of(second) == samples_of(whole)
    assert not (tmp_path / "other" / "answers").exists()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    profile = LmEvalProfile(resume=True)
    return work_at(tmp_path / "1", tmp_path / "model", Request("/a", "lm", TASKS), profile)


Change = Callable[[Work], Work]


def replaced(work: Work, **changed: object) -> Work:
    return Work(**{name: changed.get(name, getattr(work, name)) for name in Work.__slots__})  # type: ignore[arg-type]  # its own


@pytest.mark.parametrize(
    "change",
    [
        lambda work: replaced(work, request=Request("/a", "lm", TASKS, fingerprint="other")),
        lambda work: replaced(work, request=Request("/a", "lm", TASKS, weights="ema")),
        lambda work: replaced(work, profile=LmEvalProfile(resume=True, model_args={"dtype": "x"})),
        lambda work: replaced(work, profile=LmEvalProfile(resume=True, gpus=2)),
    ],
    ids=["files", "weights", "configuration", "processes"],
)
def test_answers_of_anything_else_are_removed(work: Work, change: Change) -> None:
    place = Path(place_of_answers(work))
    place.parent.mkdir(parents=True)
    place.with_name("answers_rank0.db").write_bytes(b"answers")
    assert place_of_answers(work) == str(place)
    assert place.with_name("answers_rank0.db").exists()
    assert place_of_answers(change(work)) != str(place)
    assert not place.parent.exists()


def test_too_many_answers_are_removed(work: Work) -> None:
    place = Path(place_of_answers(work))
    place.parent.mkdir(parents=True)
    with place.with_name("answers_rank0.db").open("wb") as file:
        file.truncate((1 << 30) + 1)
    assert place_of_answers(work) == str(place)
    assert not place.parent.exists()
    forget_answers(work.directory.parent)


WRITES = """
import signal
answers = output.parent.parent / "answers"
number = int(output.parent.name)
if number > 1:
    assert (answers / "own").exists() is (step == "1")
answers.mkdir(exist_ok=True)
(answers / "own").touch()
if number == 1:
    if step == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("failed")
while step == "3":
    time.sleep(0.02)
done(acc=1)
"""


def test_answers_stay_for_an_attempt_that_was_interrupted_and_no_longer(tmp_path: Path) -> None:
    """Step 1 is killed, step 2 fails; step 3 fails, and is cancelled in its second attempt."""
    from evaluation.running import script_profile

    profile = script_profile(retries=1)
    store, server = scheduler(tmp_path / "work", WRITES, profile=profile)
    model = whole_model(tmp_path / "model")
    jobs: list[Job] = [store.submit(request(model, n), pin=None)[0] for n in (1, 2, 3)]
    server.start()
    try:
        for job in jobs[:2]:
            done = wait_for(store, job.id, Status.COMPLETED)
            assert done.attempts == 2
        directories = [server.directory_of(job_of(store, job.id)).parent for job in jobs]
        wait_until((directories[2] / "2" / "log.txt").exists, "the third's second")
        wait_until((directories[2] / "answers").exists, "its answers")
        assert server.cancel(jobs[2].id)
        wait_until(lambda: not store.running(), "the end of all")
        wait_until(lambda: not any((one / "answers").exists() for one in directories), "no answers")
        # One that waits for its next attempt has no process that would remove them.
        waiting = store.submit(request(model, 4), pin=None)[0]
    finally:
        server.stop(end=True)
    kept = server.directory_of(waiting).parent / "answers"
    kept.mkdir(parents=True, exist_ok=True)
    assert server.cancel(waiting.id) is (job_of(store, waiting.id).status is Status.CANCELLED)
    assert not kept.exists()
