"""`key=value` lists: what is joined is read back, and what could not be is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.errors import UsageError
from unshard.evaluate.server.config.arguments import has_separator, join_arguments, parse_arguments

KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
PLAIN = st.text().filter(lambda text: not has_separator(text))


@given(st.dictionaries(KEYS, PLAIN | st.integers() | st.booleans(), max_size=5))
def test_what_is_joined_is_read_back(arguments: dict[str, str | int | bool]) -> None:
    read = parse_arguments(join_arguments(arguments, what="x"), what="x")
    assert read.keys() == arguments.keys()
    for key, value in arguments.items():
        if not isinstance(value, str) or isinstance(read[key], str):
            assert read[key] == value


def test_numbers_and_booleans_are_read() -> None:
    read = parse_arguments("a=1, b=0.5,c=True,d=text,e=nan,f=,g=" + "9" * 400, what="x")
    assert read == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": "text",
        "e": "nan",
        "f": "",
        "g": int("9" * 400),
    }
    assert parse_arguments("", what="x") == {}


@pytest.mark.parametrize("text", ["a", "=1", "a=1,a=2", "a=1,b"])
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="gen_kwargs cannot be read"):
        parse_arguments(text, what="gen_kwargs")


@pytest.mark.parametrize(
    "text", ["a,b", "a=b", "a\nb", "a\r", '"', "'", "{", "]", "\\", " a", "a "]
)
def test_what_cannot_be_joined(text: str) -> None:
    for arguments in ({"key": text}, {text: "value"}):
        with pytest.raises(UsageError, match=r"x: .* cannot be handed over"):
            join_arguments(arguments, what="x")
