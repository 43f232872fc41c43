"""Values of options that are of another type than they should be."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unshard
from unshard import MergeOptions, UsageError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"also": "node1"}, "also: expected a list, got 'node1'"),
        ({"also": Path("node1")}, "also: expected a list, got 'node1'"),
        ({"allow_globals": "my.Tensor"}, "allow_globals: expected a list, got 'my.Tensor'"),
        ({"include": re.compile("a")}, "include: invalid value"),
        ({"keep_fp32": ["a"]}, "keep_fp32: invalid value"),
        ({"step": "10"}, "step: invalid value '10'"),
        ({"workers": 1.5}, "workers: invalid value 1.5"),
        ({"lora_alpha": "16"}, "lora_alpha: invalid value '16'"),
    ],
)
def test_values_of_another_type_are_refused(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):  # before the checkpoint is looked for
        unshard.merge(tmp_path, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_list_may_come_as_any_iterable() -> None:
    options = MergeOptions(also=(one for one in "ab"), allow_globals={"my.Tensor"})  # type: ignore[arg-type]
    assert (options.also, options.allow_globals) == (("a", "b"), ("my.Tensor",))
    assert MergeOptions(step=np.int64(3), lora_alpha=np.float32(2)).step == 3  # type: ignore[arg-type]


def test_an_unknown_value_of_overwrite_has_no_marks_in_its_message() -> None:
    with pytest.raises(UsageError) as error:
        MergeOptions(overwrite="foo")  # type: ignore[arg-type]
    assert error.value.subject == "overwrite='foo': unknown"
