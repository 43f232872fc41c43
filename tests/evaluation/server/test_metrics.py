"""Only finite numbers are metrics, under the key of their task, metric and filter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.evaluate.server.evaluators.documents import (
    as_finite,
    collect_directions,
    collect_errors,
    collect_metrics,
    metric_key,
    tasks_without,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_characters=",/"), min_size=1, max_size=8)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf, 10**400])
OTHERS = st.none() | st.booleans() | st.text() | NOT_FINITE | st.lists(st.integers())
NOT_METRICS = st.sampled_from(
    "alias name sample_len acc_stderr,none acc_stderr_clt,none acc_stderr,strict-match".split()
)


def test_results_of_lm_eval() -> None:
    results = {
        "gsm8k": {
            "name": "gsm8k",
            "alias": "gsm8k",
            "sample_len": 3,
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 1,
        },
        "lambada": {"perplexity,none": 3.5, "perplexity_stderr,none": "N/A", "acc,none": math.nan},
    }
    assert collect_metrics(results) == {
        "gsm8k/exact_match,strict-match": 0.25,
        "gsm8k/exact_match,flexible-extract": 1.0,
        "lambada/perplexity": 3.5,
    }
    assert collect_errors(results, collect_metrics(results)) == {
        "gsm8k/exact_match,strict-match": 0.1
    }


@pytest.mark.parametrize("value", [-0.1, "N/A", None, True, math.nan, math.inf])
def test_what_cannot_be_a_standard_error_is_left_out(value: object) -> None:
    results = {"task": {"acc,none": 0.5, "acc_stderr,none": value, "f1_stderr,none": 0.1}}
    assert collect_errors(results, collect_metrics(results)) == {}


@given(NAMES, NAMES, st.sampled_from(["", ",none"]), NUMBERS)
def test_a_finite_number_is_a_metric(task: str, name: str, ending: str, value: float) -> None:
    metrics = collect_metrics({task: {f"{name}{ending}": value}})
    if not name.strip() or "_stderr" in name or metric_key(task, name) is None:
        assert metrics == {}
    elif as_finite(value) is not None:
        assert metrics == {f"{task}/{name}": float(value)}


@given(NAMES, NAMES, OTHERS)
def test_nothing_else_is(task: str, name: str, value: object) -> None:
    assert collect_metrics({task: {name: value}}) == {}
    assert collect_metrics({task: value}) == {}


@given(NAMES, NOT_METRICS, NUMBERS)
def test_other_values_next_to_the_metrics_are_not_metrics(
    task: str, name: str, value: float
) -> None:
    assert collect_metrics({task: {name: value}}) == {}


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, NUMBERS | OTHERS)))
def test_all_values_are_finite_floats_and_all_keys_have_their_task(
    results: dict[str, dict[str, object]],
) -> None:
    for key, value in collect_metrics(results).items():
        task, _, name = key.partition("/")
        assert as_finite(results[task][name]) == value
        assert isinstance(value, float)
        assert math.isfinite(value)


def test_a_task_is_not_another_that_begins_alike() -> None:
    assert tasks_without(["a", "ab", "b"], {"ab/acc": 1.0}) == ["a", "b"]


def test_directions_are_those_of_metrics_whatever_their_filter() -> None:
    stated = {"gsm8k": {"exact_match": True, "ppl": None}, "lambada": {"ppl": False}, "x": 1}
    named = ["gsm8k/exact_match,strict", "gsm8k/exact_match", "gsm8k/ppl", "lambada/ppl", "x/y"]
    assert collect_directions(stated, named) == {
        "gsm8k/exact_match,strict": True,
        "gsm8k/exact_match": True,
        "lambada/ppl": False,
    }
