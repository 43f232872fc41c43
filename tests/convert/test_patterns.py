"""Patterns of an adapter's config: matched as PEFT matches them, in bounded time, or refused."""

import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from unshard import ConversionError
from unshard.convert.lora.patterns import ends_like

NAMES = st.text("abq0._\n-é٣", max_size=12)
ONE = st.sampled_from(
    ["a", "q", "0", ".", r"\.", "_", r"\d", r"\w", r"\S", "é", "[ab]", "[^a.]", "[0-9_]", "[]a]"]
)
TIMES = st.sampled_from(["", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{,1}", "{1,}", "{,}"])
ITEM = st.builds("".join, st.tuples(ONE, TIMES)) | st.sampled_from(["^", "$"])
PATTERNS = st.recursive(
    st.lists(ITEM, max_size=4).map("".join),
    lambda inside: st.one_of(
        st.builds("({}){}".format, inside, st.sampled_from(["", "?"])),
        st.builds("(?:{})".format, inside),
        st.builds("{}|{}".format, inside, inside),
        st.builds("{}{}".format, inside, inside),
    ),
    max_leaves=5,
)


def as_peft(pattern: str, name: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets inside sets, which Python may read otherwise one day
        return get_pattern_key([pattern], name) is pattern


@given(PATTERNS, NAMES)
def test_what_is_known_matches_as_in_peft(pattern: str, name: str) -> None:
    assume(pattern != name)
    assert ends_like(pattern, name) == as_peft(pattern, name)


@given(st.text("ab.*+?{}[]()|^$\\d12,-:\n", max_size=10), NAMES)
def test_anything_else_matches_as_in_peft_or_is_refused(pattern: str, name: str) -> None:
    assume(pattern != name)
    try:
        found = ends_like(pattern, name)
    except ConversionError:
        return
    assert found == as_peft(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.xq_proj", False),
        ("^model.decoder.layers.0.k", "model.decoder.layers.0.k", True),
        ("^decoder.layers.0.k", "model.decoder.layers.0.k", False),
        (r"layers\.(?:1[0-9]|2[0-3])\.mlp\..*_proj", "model.layers.21.mlp.up_proj", True),
        (r"layers\.(?:1[0-9]|2[0-3])\.mlp\..*_proj", "model.layers.9.mlp.up_proj", False),
        (r".*\.layers\.\d+\.(q|v)_proj(\.base_layer)?", "m.layers.3.v_proj.base_layer", True),
    ],
)
def test_patterns_that_adapters_have(pattern: str, name: str, *, expected: bool) -> None:
    assert ends_like(pattern, name) is expected
    assert as_peft(pattern, name) is expected


@pytest.mark.parametrize(
    "pattern", ["q*q*q*q*x", ".*.*.*.*.*.*x", "(q*)?" * 40 + "x", "q{,64}" * 30]
)
def test_a_pattern_with_endless_ways_to_match_is_followed(pattern: str) -> None:
    assert not ends_like(pattern, "q" * 4000)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(ab)*", "(a+)+", "a*+", "(?>a)", "(?i)a", "(?=a)", r"(a)\1", r"\ba", "a{65}", "a{2,1}"),
        *("a" * 257, "(" * 17 + ")" * 17),
        *("*", "a**", "[z-a]", "[[a]", "[a", "(a", "a)", "a{x}", "\\"),
    ],
)
def test_what_is_not_known_is_refused(pattern: str) -> None:
    with pytest.raises(ConversionError, match="cannot be matched safely"):
        ends_like(pattern, "a")
