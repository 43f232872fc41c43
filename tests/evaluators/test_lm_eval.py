"""lm-eval 0.4.13 itself: offline, on the CPU, a random model and tasks on local data."""

import json
from pathlib import Path

import pytest
import yaml

from evaluation.local_tasks import lm_eval_tasks, run_evaluator, save_tiny_model, work_at
from unshard.evaluate.jobs import Arguments, EvaluationError, Request
from unshard.evaluate.server.evaluators.installed import UnknownTasksError
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.work import EvalInput, Profile
from unshard.evaluate.server.processes.supervise import LOG_NAME

LM_EVAL = LmEvalProfile()


def attempt(tmp_path: Path, *tasks: str, profile: Profile = LM_EVAL, **asked: object) -> EvalInput:
    request = Request("/runs/a", "lm", tasks, arguments=Arguments.model_validate(asked))
    return work_at(tmp_path / "attempt", tmp_path / "model", request, profile)


def write_results(work: EvalInput, document: object) -> None:
    (work.output / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps(document))


def test_what_lm_eval_measures_is_read(tmp_path: Path) -> None:
    """A group, and a tag next to it; the directory's name is longer than lm-eval could bear."""
    deep = tmp_path / ("d" * 120) / ("e" * 120)
    model = save_tiny_model(deep / "model")
    paths = (lm_eval_tasks(tmp_path / "tasks"),)
    profile = LmEvalProfile(include_paths=paths, model_args={"dtype": "float32"})
    chosen = Arguments(limit=2, batch_size=2, num_fewshot=0, seed=7)
    request = Request("/a", "lm", ("sights", "dim"), arguments=chosen)
    work = work_at(tmp_path / "attempt", model, request, profile)
    done = run_evaluator(profile.command_line(work), work.directory)
    measured = profile.read_scores(work, done.returncode)
    metrics = measured.metrics
    assert metrics.keys() == {
        "sights/acc",
        *(f"colours_of_{when}/{name}" for when in ("day", "night") for name in ("acc", "acc_norm")),
        *(f"colours_of_dusk/{name}" for name in ("acc", "acc_norm")),
    }
    assert all(0 <= value <= 1 for value in metrics.values())
    assert measured.errors.keys() == metrics.keys()
    assert all(0 <= value <= 1 for value in measured.errors.values())
    assert metrics["colours_of_day/acc"] == metrics["colours_of_night/acc"] == metrics["sights/acc"]
    results = measured.file
    assert results is not None
    document = json.loads(results.read_bytes())
    assert document["n-samples"]["colours_of_day"]["effective"] == 2
    seeds = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
    assert [document["config"][name] for name in seeds] == [7] * 4


def test_an_unknown_task_is_an_error(tmp_path: Path) -> None:
    work = attempt(tmp_path, "nothing_of_that_name")
    evaluator = work.profile
    done = run_evaluator(evaluator.command_line(work), work.directory)
    assert "Tasks not found: nothing_of_that_name" in done.stdout
    with pytest.raises(EvaluationError, match="exit code 1"):
        evaluator.read_scores(work, done.returncode)
    (work.directory / LOG_NAME).write_text(done.stdout)
    with pytest.raises(UnknownTasksError, match="not know the task nothing_of_that_name") as caught:
        evaluator.read_scores(work, done.returncode)
    assert caught.value.tasks == ("nothing_of_that_name",)


def test_the_configuration_holds_values_as_they_are(tmp_path: Path) -> None:
    """Nothing in a value can become another argument."""
    profile = LmEvalProfile(model_args={"dtype": "a,trust_remote_code=true"}, gpus=1)
    work = attempt(tmp_path, "a", "b", profile=profile, gen_kwargs="temperature=0.5,do_sample=true",
                   model_args={"revision": "yes"}, limit=0.5, batch_size="auto:4")  # fmt: skip
    command = profile.command_line(work)
    assert command[1:4] == ["-m", "lm_eval", "run"]
    assert yaml.safe_load((work.directory / "job.yaml").read_text()) == {
        "model": "hf",
        "model_args": {
            "revision": "yes",
            "dtype": "a,trust_remote_code=true",
            "pretrained": str(work.model),
        },
        "tasks": ["a", "b"],
        "output_path": str(work.output / "results.json"),
        "log_samples": True,
        "batch_size": "auto:4",
        "limit": 0.5,
        "gen_kwargs": {"temperature": 0.5, "do_sample": True},
    }


def test_without_gpus_it_runs_on_the_cpu_and_with_several_under_accelerate(tmp_path: Path) -> None:
    alone = attempt(tmp_path / "alone", "a")
    assert LM_EVAL.command_line(alone)[2] == "lm_eval"
    assert yaml.safe_load((alone.directory / "job.yaml").read_text())["device"] == "cpu"
    several = attempt(tmp_path / "several", "a", num_gpus=2)
    command = LM_EVAL.command_line(several)
    assert command[2:] == [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--main_process_port=0",
        "-m",
        "lm_eval",
        "run",
        f"--config={several.directory / 'job.yaml'}",
    ]
    assert "device" not in yaml.safe_load((several.directory / "job.yaml").read_text())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"results": {"other": {"acc,none": 1.0}}}, None),  # as a tag would look
        ({"results": {"other": {"alias": "other"}}}, "no finite number for"),
        ({"results": {"a": {"acc,none": float("nan")}}}, "no finite number for: a"),
        ({"results": {"a": {"acc_stderr,none": 0.1}}}, "no finite number for: a"),
        ({"results": []}, "no finite number for: a"),
        ({"results": {"a": {"alias": "a"}}, "group_subtasks": {"a": ["a"]}}, "for"),
        ([1], "expected: an object"),
    ],
)
def test_results_without_what_was_asked_for(
    tmp_path: Path, document: object, message: str | None
) -> None:
    work = attempt(tmp_path, "a")
    write_results(work, document)
    evaluator = work.profile
    if message is None:
        assert evaluator.read_scores(work, 0).metrics == {"other/acc": 1.0}
        return
    with pytest.raises(EvaluationError, match=message):
        evaluator.read_scores(work, 0)


def test_results_that_end_in_the_middle_are_an_error(tmp_path: Path) -> None:
    work = attempt(tmp_path, "a")
    (work.output / "results_now.json").write_text('{"results": {"a": {"acc,none": 0.')
    with pytest.raises(EvaluationError, match="cannot be read"):
        work.profile.read_scores(work, 0)


def test_no_results_after_a_good_end_are_an_error(tmp_path: Path) -> None:
    """It says "Could not save results aggregated" in its log and ends with 0."""
    work = attempt(tmp_path, "a")
    with pytest.raises(EvaluationError, match="wrote no results"):
        work.profile.read_scores(work, 0)


def test_a_signal_is_named(tmp_path: Path) -> None:
    work = attempt(tmp_path, "a")
    with pytest.raises(EvaluationError, match="SIGKILL"):
        work.profile.read_scores(work, -9)
