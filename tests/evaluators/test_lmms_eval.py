"""lmms-eval 0.7.3 itself, where an interpreter that has it is named; its results, where not.

`make test-eval` makes such an environment and names its interpreter in UNSHARD_LMMS_EVAL_PYTHON.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.local_tasks import lmms_eval_tasks, run_evaluator, work_at
from unshard.errors import UsageError
from unshard.evaluate.jobs import Arguments, EvaluationError, Request
from unshard.evaluate.server.evaluators.installed import UnknownTasksError
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import EvalInput, Profile, TaskFacts
from unshard.evaluate.server.processes.supervise import LOG_NAME

PYTHON = os.environ.get("UNSHARD_LMMS_EVAL_PYTHON", "")
LMMS_EVAL = LmmsEvalProfile(interpreter=PYTHON or "python", model="dummy")
needs_lmms_eval = pytest.mark.skipif(
    not PYTHON, reason="UNSHARD_LMMS_EVAL_PYTHON names no interpreter with lmms_eval 0.7.3"
)


def attempt(
    tmp_path: Path, *tasks: str, profile: Profile = LMMS_EVAL, **asked: object
) -> EvalInput:
    request = Request("/a", "lmms", tasks, arguments=Arguments.model_validate(asked))
    return work_at(tmp_path / "attempt", tmp_path / "model", request, profile)


def write_results(work: EvalInput, document: object) -> None:
    directory = work.output / "run__model"
    directory.mkdir()
    (directory / "20260101_080000_results.json").write_text(json.dumps(document))


@needs_lmms_eval
def test_what_lmms_eval_measures_is_read(tmp_path: Path) -> None:
    """The dummy model says the same to every question; one of three answers is right."""
    tasks = lmms_eval_tasks(tmp_path / "tasks")
    profile = LMMS_EVAL.model_copy(
        update={"include_paths": (tasks,), "model_args": {"response": "blue"}}
    )
    work = attempt(tmp_path, "sights", profile=profile, seed=0, gen_kwargs="temperature=0",
                   system_instruction="Be brief.", max_batch_size=2)  # fmt: skip
    done = run_evaluator(profile.command_line(work), work.directory)
    assert done.returncode == 0, done.stdout
    expected = dict.fromkeys(["colours_of_day/exact_match", "colours_of_night/exact_match"], 1 / 3)
    assert profile.read_scores(work, 0).metrics == pytest.approx(expected)
    measured = profile.read_scores(work, 0)
    assert measured.evaluator == "lmms_eval 0.7.3"  # its own file names a commit of another tree
    assert measured.tasks["colours_of_day"] == TaskFacts(None, 0, 3)
    results = measured.file
    assert results is not None
    assert results.parent.name == f"{tmp_path.name}__model"
    config = json.loads(results.read_bytes())["config"]
    seeds = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
    assert [config[name] for name in seeds] == [0] * 4


@needs_lmms_eval
def test_lmms_eval_ends_with_0_when_it_fails_and_is_not_believed(tmp_path: Path) -> None:
    work = attempt(tmp_path, "nothing_of_that_name")
    evaluator = work.profile
    done = run_evaluator(evaluator.command_line(work), work.directory)
    assert done.returncode == 0
    assert "Tasks not found: nothing_of_that_name" in done.stdout
    with pytest.raises(EvaluationError, match="lmms-eval wrote no results"):
        evaluator.read_scores(work, done.returncode)
    (work.directory / LOG_NAME).write_text(done.stdout)
    with pytest.raises(UnknownTasksError, match="not know the task nothing_of_that_name"):
        evaluator.read_scores(work, done.returncode)
    write_results(work, {"results": {"another_task": {"acc,none": 0.5}}})
    with pytest.raises(EvaluationError, match="no finite number for: nothing_of_that_name"):
        evaluator.read_scores(work, done.returncode)


def test_the_results_of_a_group_are_those_of_its_tasks(tmp_path: Path) -> None:
    """The form is that of a file which lmms-eval 0.7.3 wrote."""
    work = attempt(tmp_path, "sights")
    values = {
        "exact_match,none": 0.25,
        "exact_match_stderr,none": 0.1,
        "exact_match_stderr_clt,none": 0.1,
        "exact_match_stderr_clustered,none": "N/A",
    }
    results: dict[str, dict[str, object]] = {
        "sights": {" ": " ", "alias": "sights"},
        "day": {"alias": " - day", **values},
        "night": {"alias": " - night", **values},
    }
    document = {"results": results, "group_subtasks": {"sights": ["day", "night"]}}
    write_results(work, document)
    evaluator = work.profile
    expected = {"day/exact_match": 0.25, "night/exact_match": 0.25}
    assert evaluator.read_scores(work, 0).metrics == expected
    del results["night"]
    (found,) = work.output.rglob("*_results.json")
    found.write_text(json.dumps(document))
    with pytest.raises(EvaluationError, match="no finite number for: night"):
        evaluator.read_scores(work, 0)


def test_a_group_of_itself_has_no_numbers(tmp_path: Path) -> None:
    work = attempt(tmp_path, "a")
    groups = {"a": ["b"], "b": ["a"]}
    write_results(work, {"results": {"a": {}, "b": {}}, "group_subtasks": groups})
    with pytest.raises(EvaluationError, match="no finite number for: a"):
        work.profile.read_scores(work, 0)


def test_the_command_has_one_argument_per_option(tmp_path: Path) -> None:
    changed = {"model": "qwen2_5_vl", "model_args": {"max_pixels": 100}, "gpus": 1}
    profile = LMMS_EVAL.model_copy(update=changed)
    work = attempt(tmp_path, "mme", "ai2d", profile=profile, limit=8, num_fewshot=0, batch_size=2)
    assert profile.command_line(work) == [
        profile.interpreter,
        "-m",
        "lmms_eval",
        "--model=qwen2_5_vl",
        f"--model_args=max_pixels=100,pretrained={work.model}",
        "--tasks=mme,ai2d",
        f"--output_path={work.output}",
        "--num_fewshot=0",
        "--batch_size=2",
        "--limit=8",
        "--log_samples",
    ]


@pytest.mark.parametrize(
    "value", ["a,trust_remote_code=True", "a=b", "a\nb", '"', "'", "[", "}", " a", "a\\"]
)
def test_a_value_that_would_be_more_than_one_is_refused(tmp_path: Path, value: str) -> None:
    work = attempt(tmp_path, "a", model_args={"dtype": value})
    with pytest.raises(UsageError, match="model_args: 'dtype' cannot be handed over"):
        work.profile.command_line(work)


def test_a_path_is_one_argument(tmp_path: Path) -> None:
    """Runs are often named after their settings; the server's own directory is not."""
    model = tmp_path / "lr=1e-5,seed=2" / "step"
    model.mkdir(parents=True)
    work, out = replace(attempt(tmp_path, "a"), model=model), Path("/out,token=x")
    command = work.profile.command_line(work)
    assert f"--model_args=pretrained={work.directory / 'model'}" in command
    assert (work.directory / "model").resolve() == model
    with pytest.raises(UsageError, match="'output_path' cannot be handed over"):
        work.profile.command_line(replace(attempt(tmp_path / "other", "a"), output=out))


@pytest.mark.parametrize("returncode", [1, -11])
def test_an_honest_failure_is_believed(tmp_path: Path, returncode: int) -> None:
    work = attempt(tmp_path, "a")
    write_results(work, {"results": {"a": {"acc,none": 1.0}}})
    with pytest.raises(EvaluationError, match="lmms-eval failed"):
        work.profile.read_scores(work, returncode)
