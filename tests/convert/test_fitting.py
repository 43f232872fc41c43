"""Names, ties and shapes of a checkpoint and of a model, compared."""

from pathlib import Path

import pytest

from unshard.convert.expected.tensors import Matches, Slot, match_slots, wrong_shapes
from unshard.convert.recipes import Recipe, take
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME


def recipes(**shapes: tuple[int, ...]) -> dict[str, Recipe]:
    return {
        name: take(
            TensorEntry(name, BY_NAME["float32"], shape, ChunkRows(len(shape)).table((Path("f"),)))
        )
        for name, shape in shapes.items()
    }


A, B = Slot(("a",), (2, 3)), Slot(("b",), (4,))
TIED = Slot(("embed", "head"), (5, 2))


def test_equal_names_are_complete() -> None:
    found = match_slots(recipes(b=(4,), a=(2, 3)), [A, B])
    assert found == Matches((("a",), ("b",)), (), ())
    assert found.is_complete


def test_what_is_on_one_side_only_is_reported() -> None:
    found = match_slots(recipes(a=(2, 3), c=(1,), d=(1,)), [A, B])
    assert (found.sources, found.missing, found.unexpected) == ((("a",), ()), ("b",), ("c", "d"))
    assert not found.is_complete


@pytest.mark.parametrize("names", [("embed",), ("head",), ("head", "embed")])
def test_of_tied_weights_one_name_is_enough(names: tuple[str, ...]) -> None:
    found = match_slots(recipes(**dict.fromkeys(names, (5, 2))), [TIED])
    assert found.is_complete
    assert set(found.sources[0]) == set(names)


def test_tied_weights_without_a_tensor_miss_all_their_names() -> None:
    assert match_slots({}, [TIED]).missing == ("embed", "head")


def test_other_shapes_are_errors_that_name_them() -> None:
    tensors = recipes(a=(3, 2), head=(5, 2), embed=(6, 2))
    slots = [A, B, TIED]
    problems = wrong_shapes(tensors, slots, match_slots(tensors, slots))
    assert [problem.subject.split(" has")[0] for problem in problems] == [
        "tensor a",
        "tensor embed",
    ]
    assert problems[0].expected.startswith("[2, 3]")
    assert problems[0].found == "[3, 2]"
