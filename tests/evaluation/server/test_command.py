"""Any program as an evaluator: what it gets, and what it may write."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from evaluation.local_tasks import run_evaluator, work_at
from unshard.evaluate.jobs import Arguments, EvaluationError, Request
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.work import EvalInput, TaskFacts

PROGRAM = """
import json, pathlib, sys
*rest, output = sys.argv[1:]
pathlib.Path(output, "seen.json").write_text(json.dumps(rest))
pathlib.Path(output, "results.json").write_text('{{"gsm8k": {{"exact_match": 0.5}}}}')
"""


def attempt(tmp_path: Path, *tasks: str, command: tuple[str, ...] = ("true",)) -> EvalInput:
    profile = CommandProfile(command=command)
    request = Request("/a", "own", tasks, step=300, run="a run; rm -rf $HOME", weights="ema")
    return work_at(tmp_path / "attempt", tmp_path / "a model", request, profile)


def measured(work: EvalInput, document: object) -> dict[str, float]:
    (work.output / "results.json").write_text(json.dumps(document))
    return dict(work.profile.read_scores(work, 0).metrics)


def test_the_program_gets_each_value_in_the_argument_that_names_it(tmp_path: Path) -> None:
    arguments = ("--model={checkpoint}", "{tasks}", "{step}", "{weights}", "{run}", '{{"a": {{}}}}')
    command = (sys.executable, "-c", PROGRAM, *arguments, "{output}")
    work = attempt(tmp_path, "gsm8k", command=command)
    evaluator = work.profile
    done = run_evaluator(evaluator.command_line(work), work.directory)
    assert done.returncode == 0, done.stdout
    seen = json.loads((work.output / "seen.json").read_text())
    model = f"--model={tmp_path}/a model"
    assert seen == [model, "gsm8k", "300", "ema", "a run; rm -rf $HOME", '{"a": {}}']
    assert evaluator.read_scores(work, 0).metrics == {"gsm8k/exact_match": 0.5}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("awk '{{print}}'", "awk '{print}'"),
        ("{{run}} {run}", "{run} {run}"),
        ("{{{weights}}}", "{ema}"),
        ('{{"a": {{"b": 1}}}}', '{"a": {"b": 1}}'),
        ("${{HOME}}", "${HOME}"),
    ],
)
def test_braces_that_stay_are_doubled(tmp_path: Path, part: str, expected: str) -> None:
    profile = CommandProfile(command=("x", part))
    request = Request("/a", "own", ("t",), run="{run}", weights="ema")
    work = work_at(tmp_path, tmp_path, request, profile)
    assert profile.command_line(work) == ["x", expected]


@pytest.mark.parametrize(
    "part",
    ['{"a": 1}', '{"a": {"b": 1}}', "{A}", "{}", "{ run }", "a}", "${HOME}", "{run}}", "{{run}"],
)
def test_a_brace_that_means_nothing_is_refused(part: str) -> None:
    """A dictionary with another in it lost one brace of two, and nothing said so."""
    with pytest.raises(ValidationError, match=r"doubled braces.*where braces stay, in"):
        CommandProfile(command=("x", part))


@pytest.mark.parametrize("part", ["{system_instruction}", "--system={system_instruction}"])
def test_free_text_is_an_argument_of_its_own(tmp_path: Path, part: str) -> None:
    profile = CommandProfile(command=("x", part))
    chosen = Arguments(system_instruction="$(touch x)", apply_chat_template=True)
    work = work_at(tmp_path, tmp_path, Request("/a", "own", ("t",), arguments=chosen), profile)
    assert profile.command_line(work)[1].endswith("$(touch x)")


def test_free_text_is_not_put_into_a_script() -> None:
    with pytest.raises(ValidationError, match="an argument of its own"):
        CommandProfile(command=("sh", "-c", "evaluate --system {system_instruction}"))


def test_options_that_the_client_chose_are_filled_in_and_others_are_empty(tmp_path: Path) -> None:
    profile = CommandProfile(command=("x", "{limit}", "{num_fewshot}", "{seed}"))
    request = Request("/a", "own", ("t",), arguments=Arguments(limit=0.5, seed=0))
    work = work_at(tmp_path, tmp_path, request, profile)
    assert profile.command_line(work) == ["x", "0.5", "", "0"]


def test_what_is_filled_in_is_not_filled_in_again(tmp_path: Path) -> None:
    profile = CommandProfile(command=("x", "{run}"))
    work = work_at(tmp_path, tmp_path, Request("/a", "own", ("t",), run="{output}"), profile)
    assert profile.command_line(work) == ["x", "{output}"]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"a": {"acc": 1, "f1,macro": 0.5}}, {"a/acc": 1.0, "a/f1,macro": 0.5}),
        ({"acc": 0.5, "loss": 2}, {"a/acc": 0.5, "a/loss": 2.0}),
        ({"a": 0.5}, {"a/score": 0.5}),
        ({"a/acc": 0.5, "b/acc": 1}, {"a/acc": 0.5, "b/acc": 1.0}),
        ({"a": {"acc": 0.5}, "a/f1": 1, "note": "x"}, {"a/acc": 0.5, "a/f1": 1.0}),
    ],
)
def test_forms_of_results(
    tmp_path: Path, document: dict[str, object], expected: dict[str, float]
) -> None:
    assert measured(attempt(tmp_path, "a"), document) == expected


INSPECT = {"results": {"scores": [{"name": "match", "metrics": {"accuracy": {"value": 0.5},
    "mean": {"value": 1}}}]}}  # fmt: skip
LIGHTEVAL = {"results": {"lighteval|a|0": {"em": 0.5, "em_stderr": 0.1}, "all": {"em": 0.7}}}


@pytest.mark.parametrize(
    ("tasks", "paths", "document", "expected"),
    [
        (
            "a",
            ("scores.*",),
            {"scores": {"acc": 0.5, "f1": 1, "n": "x"}},
            {"a/acc": 0.5, "a/f1": 1.0},
        ),
        ("ab", ("scores.*",), {"scores": {"a": 0.5, "b": 1}}, {"a/score": 0.5, "b/score": 1.0}),
        ("a", ("scores.*",), {"scores": {"a": 0.5}}, {"a/score": 0.5}),
        (
            "ab",
            ("results.*.acc",),
            {"results": {"a": {"acc": 1, "f1": 2}, "b": {"acc": 0}}},
            {"a/acc": 1.0, "b/acc": 0.0},
        ),
        (
            "a",
            ("results.*.*",),
            {"results": {"a": {"acc": 1}, "b": {"f1": 2}}},
            {"a/acc": 1.0, "b/f1": 2.0},
        ),
        (
            "a",
            ("accuracy", "loss"),
            {"accuracy": 1, "loss": 2, "other": 3},
            {"a/accuracy": 1.0, "a/loss": 2.0},
        ),
        ("a", ("out.0.f1",), {"out": [{"f1": 1}, {"f1": 2}]}, {"a/f1": 1.0}),
        ("a", ("results.scores.*.metrics.{metric}.value",), INSPECT, None),
        (
            "a",
            ("results.scores.0.metrics.{metric}.value",),
            INSPECT,
            {"a/accuracy": 0.5, "a/mean": 1.0},
        ),
        ("a", ("results.lighteval|*|0.*",), LIGHTEVAL, {"a/em": 0.5}),
        (
            "ab",
            ("scores.{task}:{metric}",),
            {"scores": {"a:acc": 1, "b:acc": 2}},
            {"a/acc": 1.0, "b/acc": 2.0},
        ),
        ("a", ("scores.*",), {"score": {"acc": 1}}, None),
        ("a", ("scores.*",), {"scores": [True, "1", None]}, None),
        ("ab", ("scores.*",), {"scores": {"acc": 0.5}}, None),
    ],
)
def test_numbers_of_any_document(
    tmp_path: Path,
    tasks: str,
    paths: tuple[str, ...],
    document: object,
    expected: dict[str, float] | None,
) -> None:
    profile = CommandProfile(command=("x",), results="out/*.json", metrics=paths)
    work = work_at(tmp_path / "one", tmp_path, Request("/a", "own", tuple(tasks)), profile)
    (work.output / "out").mkdir()
    (work.output / "out" / "2026.json").write_text(json.dumps(document))
    if expected is None:
        with pytest.raises(EvaluationError, match=r"no number where|no finite number for"):
            profile.read_scores(work, 0)
        return
    read = profile.read_scores(work, 0)
    assert read.metrics == expected
    assert read.errors == ({"a/em": 0.1} if document is LIGHTEVAL else {})


@pytest.mark.parametrize("path", ["", "a..b", ".a", "a.", "*.*.*", "{task}.*.x", "*.{metric}.*"])
def test_paths_that_mean_nothing(path: str) -> None:
    with pytest.raises(ValidationError):
        CommandProfile(command=("x",), metrics=(path,))


@pytest.mark.parametrize("name", ["", "/a.json", "../a.json", "out/**.json/..", "**.json"])
def test_results_that_are_not_below_the_output(name: str) -> None:
    with pytest.raises(ValidationError):
        CommandProfile(command=("x",), results=name)


def test_the_newest_of_several_files_is_read(tmp_path: Path) -> None:
    profile = CommandProfile(command=("x",), results="*.json", metrics=("*",))
    work = work_at(tmp_path / "one", tmp_path, Request("/a", "own", ("t",)), profile)
    for age, name in enumerate(["b", "a", "c"]):
        (work.output / f"{name}.json").write_text(f'{{"acc": {age}}}')
        os.utime(work.output / f"{name}.json", (100 - age, 100 - age))
    assert profile.read_scores(work, 0).metrics == {"t/acc": 0.0}


def test_what_a_program_says_about_its_tasks(tmp_path: Path) -> None:
    """In lm-eval's words; these keys are no tasks, unless one is called so."""
    document = {"a": {"acc": 1}, "versions": {"a": 2}, "n-shot": {"a": 5, "b": True},
                "n-samples": {"a": {"original": 10, "effective": 4}}}  # fmt: skip
    work = attempt(tmp_path, "a")
    (work.output / "results.json").write_text(json.dumps(document))
    read = work.profile.read_scores(work, 0)
    assert read.metrics == {"a/acc": 1.0}
    assert read.tasks == {"a": TaskFacts(version="2", n_shot=5, n_samples=4)}
    assert read.evaluator is None


@pytest.mark.parametrize(
    "document", [{"acc": 0.5}, {"a": 0.5}, {"a": {"acc": True}, "b": {"acc": 1}}, {"a/x": 1}, {}]
)
def test_every_task_needs_a_number(tmp_path: Path, document: dict[str, object]) -> None:
    with pytest.raises(EvaluationError, match="own's results have no finite number for"):
        measured(attempt(tmp_path, "a", "b"), document)


def test_results_that_are_too_large_are_not_read(tmp_path: Path) -> None:
    work = attempt(tmp_path, "a")
    small = replace(work, profile=work.profile.model_copy(update={"results_bytes": 100}))
    with pytest.raises(EvaluationError, match=r"too large.*\n.*at most 100 bytes\n.*found: +1009"):
        measured(small, {"a": "x" * 1000})
    assert measured(small, {"a": 1}) == {"a/score": 1.0}
    with (small.output / "results.json").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(EvaluationError, match=f"at most {64 << 20} bytes"):
        work.profile.read_scores(work, 0)


@pytest.mark.parametrize(
    ("count", "length", "found"), [(10_001, 6, "10001 numbers"), (2, 600_000, "1200004 bytes")]
)
def test_there_are_not_too_many_numbers(
    tmp_path: Path, count: int, length: int, found: str
) -> None:
    many = {f"{number:0{length}d}": number for number in range(count)}
    with pytest.raises(EvaluationError, match=f"too many numbers.*\n.*at most 10000.*\n.*{found}"):
        measured(attempt(tmp_path, "a"), {"a": many})


def test_a_program_that_fails_or_writes_nothing(tmp_path: Path) -> None:
    work = attempt(tmp_path, "a")
    with pytest.raises(EvaluationError, match=r"own wrote no results\n.*results\.json"):
        work.profile.read_scores(work, 0)
    (work.output / "results.json").write_text('{"a": 1}')
    with pytest.raises(EvaluationError, match="exit code 3"):
        work.profile.read_scores(work, 3)
