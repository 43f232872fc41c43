"""Numbers of an optimizer become names if exactly one assignment fits: against trying all."""

import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard import NotMergeableError
from unshard.read.optimizer.matching import Form, Parameter, match_by_order
from unshard.read.optimizer_state import united_kinds

SHAPES = [(2, 3), (3,), (1,)]
Groups = list[list[int]]


def model_of(shapes: Sequence[tuple[int, ...]]) -> list[Parameter]:
    return [Parameter(f"p{at}", (shape, None)) for at, shape in enumerate(shapes)]


def assignments(
    groups: Groups, forms: dict[int, Form], model: list[Parameter], free: list[int]
) -> Iterator[dict[int, str]]:
    """Yield every assignment that keeps the order of each group, by trying all."""
    if not groups:
        yield {}
        return
    for places in combinations(free, len(groups[0])):
        pairs = list(zip(groups[0], places, strict=True))
        if all(forms.get(number, model[at].form) == model[at].form for number, at in pairs):
            rest = [at for at in free if at not in places]
            for others in assignments(groups[1:], forms, model, rest):
                yield {number: model[at].name for number, at in pairs} | others


@st.composite
def problems(draw: st.DrawFn) -> tuple[Groups, dict[int, Form], list[Parameter]]:
    """A model, and groups of some of its parameters, of which some have no state."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=7))
    owners = draw(st.lists(st.integers(-1, 2), min_size=len(shapes), max_size=len(shapes)))
    groups: Groups = []
    forms: dict[int, Form] = {}
    number = 0
    for group in range(3):
        members = [at for at, owner in enumerate(owners) if owner == group]
        if members:
            groups.append([])
        for at in members:
            groups[-1].append(number)
            if draw(st.booleans()) or draw(st.booleans()):
                forms[number] = (draw(st.sampled_from([shapes[at]] * 9 + SHAPES)), None)
            number += 1
    return groups or [[]], forms, model_of(shapes)


@given(problems())
def test_names_are_given_exactly_where_there_is_one_assignment(
    problem: tuple[Groups, dict[int, Form], list[Parameter]],
) -> None:
    groups, forms, model = problem
    every = list(assignments(groups, forms, model, list(range(len(model)))))
    if len(every) == 1:
        assert match_by_order("a file", groups, forms, model) == every[0]
    else:
        what = "may be" if every else "does not fit"
        with pytest.raises(NotMergeableError, match=what):
            match_by_order("a file", groups, forms, model)


def test_a_long_model_of_equal_layers_is_matched_at_once() -> None:
    model = model_of([(2, 3), (3,), (3,)] * 2000)
    matrices, vectors = list(range(2000)), list(range(2000, 6000))
    forms: dict[int, Form] = dict.fromkeys(matrices, ((2, 3), None))
    forms |= dict.fromkeys(vectors, ((3,), None))
    found = match_by_order("a file", [matrices, vectors], forms, model)
    assert (found[1], found[2001], found[5999]) == ("p3", "p2", "p5999")
    found = match_by_order("a file", [list(range(6000))], {}, model)
    assert found[4321] == "p4321"


def test_too_many_ways_are_refused_before_they_fill_the_memory() -> None:
    model = model_of([(3,)] * 3000)
    groups = [list(range(1000)), list(range(1000, 2000)), list(range(2000, 3000))]
    with pytest.raises(NotMergeableError, match="too many ways"):
        match_by_order("a file", groups, {}, model)


def bounded(groups: Groups, forms: dict[int, Form], model: list[Parameter]) -> dict[int, str]:
    """Match with at most 64 MB of memory."""
    tracemalloc.start()
    try:
        return match_by_order("a file", groups, forms, model)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20


@pytest.mark.parametrize("state", ["with state", "without state"])
@pytest.mark.parametrize(
    ("count", "shapes"),
    [
        (100, [(4, 4)]),
        (3000, [(4, 4)]),
        (64, [(4, 4), (4,)]),  # two groups a layer, as of layerwise learning rates
        (3000, [(4, 4), (4, 4), (4,)]),
    ],
)
def test_many_groups_of_equal_shapes_are_refused_at_once(
    count: int, shapes: list[tuple[int, ...]], state: str
) -> None:
    every = [shape for _ in range(count) for shape in shapes]
    groups = [[number] for number in range(len(every))]
    having = every if state == "with state" else []
    forms: dict[int, Form] = {at: (shape, None) for at, shape in enumerate(having)}
    with pytest.raises(NotMergeableError, match="of its groups fit the model in too many ways"):
        bounded(groups, forms, model_of(every))


def test_groups_of_many_layers_of_equal_shapes_are_refused_at_once() -> None:
    shapes = [(4, 4), (4,), (4, 4), (4,)]
    groups: Groups = []
    forms: dict[int, Form] = {}
    for layer in range(500):
        for own in ([0, 2], [1, 3]):
            groups.append([4 * layer + at for at in own])
            forms |= {4 * layer + at: (shapes[at], None) for at in own}
    with pytest.raises(NotMergeableError, match="too many ways"):
        bounded(groups, forms, model_of(shapes * 500))


@pytest.mark.parametrize(("kinds", "each"), [(40, 200), (10, 400)])
def test_shapes_that_each_have_several_groups_share_one_bound(kinds: int, each: int) -> None:
    """They are matched apart, but not each with the time of all."""
    shapes = [(4, 1 + at // each) for at in range(each * kinds)]
    forms: dict[int, Form] = {at: (shape, None) for at, shape in enumerate(shapes)}
    starts = [each * kind + own for kind in range(kinds) for own in (0, 1)]
    groups = [list(range(one, one // each * each + each, 2)) for one in starts]
    with pytest.raises(NotMergeableError, match="too many ways"):
        match_by_order("a file", groups, forms, model_of(shapes))


def test_many_groups_are_matched_where_shapes_tell_them_apart() -> None:
    shapes = [(4, 1 + at // 2 * 2) if at % 2 else (1 + at,) for at in range(3000)]
    forms: dict[int, Form] = {at: (shape, None) for at, shape in enumerate(shapes)}
    found = bounded([[at] for at in reversed(range(3000))], forms, model_of(shapes))
    assert found == {at: f"p{at}" for at in range(3000)}
    # Here neighbours have a shape in common, and only the order of each tells them apart.
    chain = [shape for at in reversed(range(20)) for shape in ((at,), (at + 1,))]
    forms = {at: (shape, None) for at, shape in enumerate(chain)}
    found = bounded([[2 * at, 2 * at + 1] for at in range(20)], forms, model_of(chain))
    assert found == {at: f"p{at}" for at in range(40)}


def test_frozen_parameters_of_other_shapes_do_not_multiply_the_ways() -> None:
    model = model_of([(7,), (2, 3), (3,), (5, 5)] * 400)
    matrices, vectors = list(range(400)), list(range(400, 800))
    forms: dict[int, Form] = dict.fromkeys(matrices, ((2, 3), None))
    forms |= dict.fromkeys(vectors, ((3,), None))
    found = bounded([matrices, vectors], forms, model)
    assert (found[399], found[400]) == ("p1597", "p2")


def test_groups_of_equal_settings_have_the_kinds_of_all_of_them() -> None:
    settings = [{"lr": at, "betas": [0.9, at % 2]} for at in range(3000)]
    kinds = [["exp_avg"], [], *([["exp_avg", "exp_avg_sq"], ["momentum_buffer"]] * 1499)]
    both = [["exp_avg", "exp_avg_sq"], ["momentum_buffer"]]
    assert united_kinds(settings, kinds) == both * 1500
