"""Names of wrappers are taken out; what they hide must not differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from unshard.errors import CorruptError
from unshard.read import wrapper_names
from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

WRAPPERS = (
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_forward_module",
)


def unwrapped(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], list[str]]:
    found = wrapper_names.unwrapped(tensors)
    return found.value, list(found.notes)


class Store:
    """A file that tensors are put into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = b""

    def entry(
        self, name: str, value: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", cuts: int = 1
    ) -> TensorEntry:
        """Store a float32 tensor, cut along its first dimension."""
        rows = ChunkRows(value.ndim)
        at = 0
        for rank, part in enumerate(np.array_split(value, cuts) if value.ndim else [value]):
            rows.add(
                rank=rank,
                file=0,
                start=len(self.data),
                itemsize=4,
                offsets=(at,) + (0,) * (value.ndim - 1) if value.ndim else (),
                sizes=part.shape,
                strides=row_major_strides(part.shape),
            )
            self.data += part.tobytes()
            at += len(part) if value.ndim else 0
        self.path.write_bytes(self.data)
        return TensorEntry(name, BY_NAME["float32"], value.shape, rows.table((self.path,)))

    def entries(self, names: Sequence[str]) -> dict[str, TensorEntry]:
        """Store a different tensor under each name."""
        return {
            name: self.entry(name, np.full((3, 2), number, dtype=np.float32))
            for number, name in enumerate(names)
        }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


VALUES = np.arange(15, dtype=np.float32).reshape(5, 3)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("form", ["{}.layers.0.weight", "layers.{}.0.weight", "layers.0.{}.weight"])
def test_a_wrapper_is_taken_out_wherever_it_stands(store: Store, wrapper: str, form: str) -> None:
    kept, notes = unwrapped(store.entries([form.format(wrapper), "norm.bias"]))
    assert list(kept) == ["layers.0.weight", "norm.bias"]
    assert [entry.fqn for entry in kept.values()] == list(kept)
    assert notes == ["names of wrappers were removed from 1 tensor names"]


def test_several_wrappers_and_doubled_ones_are_taken_out(store: Store) -> None:
    name = "_fsdp_wrapped_module._orig_mod.layers.0._checkpoint_wrapped_module._orig_mod.weight"
    kept, _ = unwrapped(store.entries([name]))
    assert list(kept) == ["layers.0.weight"]


@pytest.mark.parametrize(
    "name", ["my_orig_mod.weight", "_orig_module.weight", "x._forward_modules.y", "_orig_mod"]
)
def test_a_name_that_only_resembles_a_wrapper_stays(store: Store, name: str) -> None:
    kept, notes = unwrapped(store.entries([name]))
    assert (list(kept), notes) == ([name], [])


def test_module_in_front_of_every_name_is_ddp(store: Store) -> None:
    kept, _ = unwrapped(store.entries(["module.a.weight", "module.b.weight"]))
    assert list(kept) == ["a.weight", "b.weight"]


def test_module_may_be_in_front_several_times_and_behind_a_wrapper(store: Store) -> None:
    kept, _ = unwrapped(store.entries(["_orig_mod.module.module.a", "module._orig_mod.module.b"]))
    assert list(kept) == ["a", "b"]


@pytest.mark.parametrize(
    "names",
    [
        ["module.a.weight", "b.weight"],
        ["layers.module.weight", "layers.module.bias"],
        ["modules.a", "modules.b"],
        ["module", "module.a"],
    ],
)
def test_module_elsewhere_is_the_models_own_word(store: Store, names: list[str]) -> None:
    kept, notes = unwrapped(store.entries(names))
    assert (list(kept), notes) == (names, [])


def test_without_tensors_there_is_nothing_to_do() -> None:
    assert unwrapped({}) == ({}, [])


@pytest.mark.parametrize("cuts", [(1, 1), (1, 2), (3, 2), (5, 1)])
def test_equal_tensors_are_one_however_they_are_cut(store: Store, cuts: tuple[int, int]) -> None:
    tensors = {
        "a.weight": store.entry("a.weight", VALUES, cuts[0]),
        "_orig_mod.a.weight": store.entry("_orig_mod.a.weight", VALUES, cuts[1]),
    }
    kept, notes = unwrapped(tensors)
    assert list(kept) == ["a.weight"]
    assert len(kept["a.weight"].chunks) == cuts[0]
    assert "_orig_mod.a.weight is the same tensor as a.weight" in notes[1]


@pytest.mark.parametrize("cuts", [(1, 1), (3, 2)])
@pytest.mark.parametrize("at", [0, 7, 14])
def test_tensors_that_differ_anywhere_are_refused(
    store: Store, cuts: tuple[int, int], at: int
) -> None:
    other = VALUES.copy()
    other.reshape(-1)[at] += 1
    tensors = {
        "a.weight": store.entry("a.weight", VALUES, cuts[0]),
        "a._fsdp_wrapped_module.weight": store.entry("x", other, cuts[1]),
    }
    with pytest.raises(CorruptError, match=r"tensor a\.weight: .*_fsdp_wrapped_module.* other val"):
        unwrapped(tensors)


@pytest.mark.parametrize("other", [VALUES[:4], VALUES.reshape(3, 5), VALUES.reshape(-1)])
def test_tensors_of_other_shapes_are_refused(
    store: Store, other: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
) -> None:
    tensors = {"a": store.entry("a", VALUES), "_orig_mod.a": store.entry("_orig_mod.a", other)}
    with pytest.raises(CorruptError, match=r"\[5, 3\]"):
        unwrapped(tensors)


def test_negative_zero_is_another_value_and_nan_the_same(store: Store) -> None:
    zero = np.zeros(2, dtype=np.float32)
    nan = np.full(2, np.nan, dtype=np.float32)
    kept, _ = unwrapped({"a": store.entry("a", nan), "_orig_mod.a": store.entry("b", nan)})
    assert list(kept) == ["a"]
    with pytest.raises(CorruptError):
        unwrapped({"a": store.entry("a", zero), "_orig_mod.a": store.entry("b", -zero)})


def test_all_collisions_are_reported_at_once(store: Store) -> None:
    names = ["a", "_orig_mod.a", "b", "b._orig_mod"]
    with pytest.raises(CorruptError, match=r"2 problems[\s\S]*tensor a: [\s\S]*tensor b: "):
        unwrapped(store.entries(names))


def test_tensors_without_dimensions_or_elements_are_compared(store: Store) -> None:
    scalar, empty = np.array(2.0, dtype=np.float32), np.empty((0, 4), dtype=np.float32)
    for value in (scalar, empty):
        tensors = {"a": store.entry("a", value), "_orig_mod.a": store.entry("b", value)}
        assert list(unwrapped(tensors)[0]) == ["a"]


def test_module_behind_another_wrapper_is_one_too(store: Store) -> None:
    names = ["_forward_module.module.lm_head.weight", "model.layers.0.weight"]
    kept, _ = unwrapped(store.entries(names))
    assert list(kept) == ["lm_head.weight", "model.layers.0.weight"]


def test_the_counter_of_an_averaged_model_does_not_keep_its_wrapper(store: Store) -> None:
    kept, notes = unwrapped(store.entries(["n_averaged", "module.a", "module.b"]))
    assert list(kept) == ["a", "b"]
    assert any("n_averaged" in note for note in notes)
