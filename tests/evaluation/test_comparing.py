"""Which step is the best, and how results differ: the arithmetic, without a server."""

from math import hypot
from typing import Any

import pytest

from unshard.errors import UsageError
from unshard.evaluate.comparing import as_results, best_numbers, compare_runs, describe_settings
from unshard.evaluate.jobs import Result, Settings


def result(
    number: int, step: int | None, value: float, metric: str = "a/acc", **more: object
) -> Result:
    task, _, name = metric.partition("/")
    place: dict[str, object] = {"run": "r", "weights": "model", "profile": "p", **more}
    given = {"number": number, "step": step, "value": value, "task": task, "metric": name}
    return as_results([{**given, "job_id": str(number), "completed_at": float(number), **place}])[0]


def test_the_best_step_is_that_of_each_run_and_of_equals_the_lowest() -> None:
    found = [result(1, 30, 0.7), result(2, 20, 0.7), result(3, 10, 0.5)]
    found += [result(4, 10, 0.1, run="s"), result(5, None, 0.9, run="s", weights="ema")]
    assert best_numbers(found, ["a/acc"], higher_is_better=True) == {2, 4, 5}
    assert best_numbers(found, ["a/acc"], higher_is_better=False) == {3, 4, 5}


def test_a_step_that_was_measured_again_has_its_newest_value() -> None:
    found = [result(1, 10, 0.9), result(2, 20, 0.5), result(3, 10, 0.1)]
    assert best_numbers(found, ["a/acc"], higher_is_better=True) == {2}
    (compared,) = compare_runs(["r"], found, higher_is_better=True)
    assert (compared.best, compared.last) == (found[1], found[1])


def test_the_best_mean_counts_steps_that_have_all_metrics() -> None:
    found = [result(1, 10, 0.2), result(2, 10, 0.4, "b/acc,strict")]
    found += [result(3, 20, 0.9), result(4, 30, 0.5), result(5, 30, 0.0, "b/acc,strict")]
    names = ["a/acc", "b/acc,strict"]
    assert best_numbers(found, names, higher_is_better=True) == {1, 2}
    assert best_numbers(found, names, higher_is_better=False) == {4, 5}


def test_a_mean_of_the_largest_numbers_is_no_error() -> None:
    found = [result(1, 10, 1e308), result(2, 10, 1e308, "b/acc"), result(3, 20, 0.5)]
    found.append(result(4, 20, 0.5, "b/acc"))
    assert best_numbers(found, ["a/acc", "b/acc"], higher_is_better=True) == {1, 2}


@pytest.mark.parametrize(("says", "best"), [(True, {2}), (False, {1})])
def test_the_direction_is_the_evaluators(*, says: bool, best: set[int]) -> None:
    found = [result(number, number, number, higher_is_better=says) for number in (1, 2)]
    assert best_numbers(found, ["a/acc"], higher_is_better=None) == best
    (compared,) = compare_runs(["r"], found, higher_is_better=None)
    assert compared.best is not None
    assert {compared.best.number} == best


def test_a_direction_is_not_guessed() -> None:
    unknown = [result(1, 1, 0.5), result(2, 2, 0.6, "a/ppl")]
    with pytest.raises(UsageError, match="which direction") as error:
        best_numbers(unknown, ["a/acc"], higher_is_better=None)
    assert "--lower-is-better" in str(error.value.hint)
    assert all(one.best is None for one in compare_runs(["r"], unknown, higher_is_better=None))
    mixed = [result(1, 1, 0.5, higher_is_better=True)]
    mixed += [result(2, 1, 9.0, "a/ppl", higher_is_better=False)]
    with pytest.raises(UsageError, match="mean"):
        best_numbers(mixed, ["a/acc", "a/ppl"], higher_is_better=None)
    with pytest.raises(UsageError, match="no such result") as error:
        best_numbers(mixed, ["a/bleu"], higher_is_better=True)
    assert error.value.expected == "a/acc, a/ppl"


def test_differences_are_multiples_of_their_standard_error() -> None:
    found = [result(1, 0, 0.1, stderr=0.01), result(2, 10, 0.5, stderr=0.03)]
    found += [result(3, 20, 0.4, stderr=0.04), result(4, 20, 0.3, run="s", stderr=0.03)]
    found += [result(5, 30, 0.9, run="s"), result(6, 40, 1.0, run="s", profile="other")]
    apart, first, second = compare_runs(["r", "s"], found, higher_is_better=True)
    assert (first.base, first.best, first.last) == (found[0], found[1], found[2])
    assert first.since_best is not None
    assert first.since_best.value == pytest.approx(-0.1)
    assert first.since_best.stderrs == pytest.approx(-0.1 / hypot(0.03, 0.04))
    assert (first.common, first.to_first, second.common) == (None, None, found[3])
    assert second.to_first is not None
    assert second.to_first.value == pytest.approx(-0.1)
    assert second.to_first.stderrs == pytest.approx(-2.0)
    assert second.since_best is not None  # of one and the same step, which has no standard error
    assert (second.since_best.value, second.since_best.stderrs) == (0.0, None)
    assert (apart.last, apart.to_first) == (found[5], None)
    row = first.as_row()
    assert (row["best_step"], row["last_stderr"], row["common_step"]) == (10, 0.04, None)


def test_only_numbers_of_the_same_settings_are_compared() -> None:
    smoke: dict[str, Any] = {"settings": "s", "arguments": {"limit": 20}}
    found = [result(1, 10, 0.2), result(2, 20, 0.3), result(3, 20, 0.9, **smoke)]
    found += [result(4, 20, 0.1, run="other", **smoke)]
    assert best_numbers(found, ["a/acc"], higher_is_better=True) == {2, 3, 4}
    compared = compare_runs(["r", "other"], found, higher_is_better=True)
    assert [(one.last.number, one.to_first and one.to_first.value) for one in compared] == [
        (2, None),
        (3, None),
        (4, -0.8),
    ]


def test_settings_are_told_apart_by_what_differs_within_a_profile() -> None:
    def line(
        settings: str, revision: str = "r1", profile: str = "p", **arguments: object
    ) -> Result:
        more: dict[str, Any] = {"settings": settings, "revision": revision, "arguments": arguments}
        return result(1, 1, 0.5, profile=profile, **more)

    def told(*lines: Result) -> list[str]:
        named = describe_settings(lines)
        return [named[one.profile, one.settings] for one in lines]

    assert told(line("a", num_fewshot=5)) == [""]
    assert told(line("a", num_fewshot=5), line("b", num_fewshot=5, limit=20)) == ["", "limit=20"]
    assert told(line("a", seed=1), line("b", seed=2)) == ["seed=1", "seed=2"]
    assert told(line("a"), line("b", "r2"), line("c", "")) == [
        "revision r1",
        "revision r2",
        "revision not recorded",
    ]
    assert told(line("a", limit=5), line("b", "r2"), line("c", "r2", limit=5)) == [
        "limit=5, revision r1",
        "",
        "limit=5, revision r2",
    ]
    assert told(line("a"), line("b", "r2", "other")) == ["", ""]


def test_what_changes_no_number_is_no_setting() -> None:
    def of(**arguments: object) -> str:
        return Settings(arguments, "r").id

    assert of() == of(batch_size=8) == of(max_batch_size=64, num_gpus=2)
    assert of() == of(apply_chat_template=False)
    assert len({of(), of(limit=20), of(limit=0.2), of(num_fewshot=0), of(model_args={"x": 1})}) == 5
    assert Settings({}, "r").id != Settings({}, "s").id
    assert Settings({}, "r", "lm_eval 0.4.12").id == of()  # the revision has the version
