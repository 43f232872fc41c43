"""Tensors that are selected by their names."""

from pathlib import Path

import pytest

import unshard
from ranks import merged, save_ranks, some_tensors
from unshard import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("^model", None, ["model.embed_tokens.weight", "model.norm.weight"]),
        (None, "norm|head", ["model.embed_tokens.weight"]),
        ("weight", "embed", ["lm_head.weight", "model.norm.weight"]),
    ],
)
def test_tensors_are_selected_by_name(
    tmp_path: Path, include: str | None, exclude: str | None, expected: list[str]
) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    unshard.merge(
        tmp_path / "ckpt", tmp_path / "out", include=include, exclude=exclude, config="none"
    )
    assert sorted(merged(tmp_path / "out")) == expected


@pytest.mark.parametrize(
    ("include", "words"), [("nothing", "leaves no tensor"), ("(", "not a reg")]
)
def test_a_selection_of_nothing_is_refused(tmp_path: Path, include: str, words: str) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 1)
    with pytest.raises(UsageError, match=words):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out", include=include, config="none")
