"""An open checkpoint: names, whole tensors, parts of them, and what it says of itself."""

import gc
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import unshard
from ranks import assert_same, bits, rank_path, save_ranks, snapshot, some_tensors
from unshard import CorruptError, NoSuchTensorError, UsageError

MIXED = {
    "weight": torch.randn(7, 5),
    "half": torch.randn(9, 4).to(torch.bfloat16),
    "quantised": torch.randn(6, 3).to(torch.float8_e4m3fn),
    "ids": torch.arange(12).reshape(4, 3),
    "wide": torch.arange(6).to(torch.uint16),
    "mask": torch.tensor([True, False, True]),
    "waves": torch.randn(3, 2, dtype=torch.complex64),
    "counter": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tmp_path_factory.mktemp("lazy") / "run" / "global_step_7"
    save_ranks(step / "actor", MIXED, 3)
    return step


@pytest.fixture
def opened(checkpoint: Path) -> Iterator["unshard.OpenCheckpoint[Any]"]:
    with unshard.open_checkpoint(checkpoint) as one:
        yield one


@pytest.fixture
def in_torch(checkpoint: Path) -> Iterator["unshard.OpenCheckpoint[torch.Tensor]"]:
    with unshard.open_checkpoint(checkpoint, framework="pt") as one:
        yield one


def test_it_is_a_collection_of_names(opened: "unshard.OpenCheckpoint[Any]") -> None:
    assert list(opened.keys()) == list(opened) == list(MIXED)
    assert len(opened) == len(MIXED)
    assert "half" in opened
    assert "other" not in opened
    assert 7 not in opened  # type: ignore[comparison-overlap]  # that is tested


def test_it_is_a_mapping_of_names_to_tensors(
    opened: "unshard.OpenCheckpoint[Any]", in_torch: "unshard.OpenCheckpoint[torch.Tensor]"
) -> None:
    assert isinstance(opened, Mapping)
    assert_same(dict(in_torch), MIXED)
    assert {name: array.tobytes() for name, array in opened.items()} == {
        name: bits(tensor) for name, tensor in MIXED.items()
    }
    assert opened.get("other") is None
    assert opened.keys() == MIXED.keys()
    assert opened.keys() - {"half"} == MIXED.keys() - {"half"}
    assert opened.keys()[:2] == list(MIXED)[:2]
    assert opened.keys()[-1] == list(MIXED)[-1]
    with pytest.raises(KeyError):
        opened["other"]
    assert opened == opened  # noqa: PLR0124 (that it does not read everything)
    assert opened != in_torch
    assert len({opened, in_torch}) == 2


def test_a_model_of_torch_takes_it_as_a_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 5)
    save_ranks(tmp_path / "ckpt", dict(model.state_dict()), 2)
    other = torch.nn.Linear(3, 5)
    with unshard.open_checkpoint(tmp_path / "ckpt", framework="pt") as one:
        other.load_state_dict(one)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_it_says_in_one_line_what_it_is(checkpoint: Path) -> None:
    opened = unshard.open_checkpoint(checkpoint)
    shown = f"{checkpoint / 'actor'}': {len(MIXED)} tensors, FSDP rank files, step 7"
    assert repr(opened) == f"<OpenCheckpoint '{shown}>"
    assert repr(opened.get_slice("half")) == "<LazyTensor 'half': BF16 [9, 4]>"
    assert repr(opened.keys()) == repr(list(MIXED))
    opened.close()
    assert repr(opened) == f"<OpenCheckpoint '{shown}, closed>"


def test_every_dtype_is_read_as_it_is_stored(
    in_torch: "unshard.OpenCheckpoint[torch.Tensor]",
) -> None:
    assert_same({name: in_torch.get_tensor(name) for name in in_torch}, MIXED)
    for name in in_torch:
        in_torch.get_tensor(name).zero_()  # memory of its own, to be written
    assert_same({name: in_torch.get_tensor(name) for name in in_torch}, MIXED)


def test_arrays_of_numpy_hold_the_same_bits(opened: "unshard.OpenCheckpoint[Any]") -> None:
    for name, tensor in MIXED.items():
        array = opened.get_tensor(name)
        assert array.tobytes() == bits(tensor)
        assert array.shape == tuple(tensor.shape)
        assert array.flags.writeable
    assert opened.get_tensor("weight").dtype == np.float32
    assert opened.get_tensor("half").dtype == ml_dtypes.bfloat16
    assert opened.get_tensor("quantised").dtype == ml_dtypes.float8_e4m3fn
    assert opened.get_tensor("mask").dtype == np.bool_


INDICES: list[Any] = [
    0,
    -1,
    slice(2, 5),
    slice(None, None, -2),
    ...,
    None,
    (slice(None), 1),
    (..., -1),
    (1, 2),
    (slice(5, 1, -1), slice(0, 3, 2)),
    (None, 3, ..., None),
    slice(4, 4),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices_are_those_of_the_whole_tensor(
    checkpoint: Path, opened: "unshard.OpenCheckpoint[Any]", index: Any
) -> None:
    whole = MIXED["weight"].numpy()
    found = opened.get_slice("weight")[index]
    assert isinstance(found, np.ndarray)
    assert found.shape == np.asarray(whole[index]).shape
    assert found.tobytes() == np.ascontiguousarray(whole[index]).tobytes()
    with unshard.open_checkpoint(checkpoint, framework="pt") as one:
        tensor = one.get_slice("weight")[index]
    assert tensor.dtype == torch.float32
    assert tuple(tensor.shape) == found.shape
    assert bits(tensor) == found.tobytes()


def test_a_part_without_dimensions_is_an_array(opened: "unshard.OpenCheckpoint[Any]") -> None:
    assert opened.get_slice("weight")[2, 3].shape == ()
    assert opened.get_slice("counter")[()].shape == ()
    assert int(opened.get_tensor("counter")) == 7


def test_names_of_dtypes_and_shapes_are_those_of_safetensors(
    opened: "unshard.OpenCheckpoint[Any]", tmp_path: Path
) -> None:
    save_file(MIXED, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as theirs:
        for name, tensor in MIXED.items():
            ours, other = opened.get_slice(name), theirs.get_slice(name)
            assert ours.get_shape() == other.get_shape()
            assert ours.get_dtype() == other.get_dtype()
            assert ours.shape == tuple(tensor.shape)


def test_indices_are_refused_as_numpy_refuses_them(opened: "unshard.OpenCheckpoint[Any]") -> None:
    with pytest.raises(IndexError, match="index 7 is out of range"):
        opened.get_slice("weight")[7]
    with pytest.raises(IndexError, match="too many indices"):
        opened.get_slice("weight")[0, 0, 0]


def test_an_unknown_name_is_an_error_that_names_the_nearest(
    opened: "unshard.OpenCheckpoint[Any]",
) -> None:
    with pytest.raises(NoSuchTensorError, match="has no tensor weigth") as caught:
        opened.get_tensor("weigth")
    assert caught.value.hint.startswith("the nearest names are weight")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, UsageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(KeyError):
        opened.get_slice("")
    assert opened.get(None, 5) == opened.get(7, 5) == 5  # type: ignore[call-overload]


def test_what_it_says_of_itself(opened: "unshard.OpenCheckpoint[Any]", checkpoint: Path) -> None:
    assert opened.metadata() == {
        "path": str(checkpoint / "actor"),
        "format": "FSDP rank files",
        "writer": "verl",
        "step": "7",
        "world_size": "3",
        "role": "actor",
        "weights": "model",
    }


def test_the_config_is_named_where_there_is_one(tmp_path: Path) -> None:
    save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    config = tmp_path / "ckpt" / "config.json"
    config.write_text("{}")
    with unshard.open_checkpoint(tmp_path / "ckpt") as one:
        assert one.metadata()["config"] == str(config)
        assert "step" not in one.metadata()


def test_nothing_can_be_read_after_it_was_closed(checkpoint: Path) -> None:
    before = snapshot(checkpoint)
    one = unshard.open_checkpoint(checkpoint)
    part = one.get_slice("weight")
    assert part[0].shape == (5,)
    one.close()
    one.close()
    for index in (..., 0, slice(0, 0)):
        with pytest.raises(UsageError, match="was closed"):
            part[index]
    with pytest.raises(UsageError, match="was closed"):
        one.get_tensor("weight")
    assert snapshot(checkpoint) == before


def test_a_slice_keeps_its_checkpoint_open(checkpoint: Path) -> None:
    part = unshard.open_checkpoint(checkpoint).get_slice("weight")
    gc.collect()
    assert part[...].tobytes() == bits(MIXED["weight"])


def test_a_checkpoint_that_is_forgotten_is_closed(checkpoint: Path) -> None:
    one = unshard.open_checkpoint(checkpoint)
    one.get_tensor("weight")
    reader = one._opened.reader
    del one
    gc.collect()
    with pytest.raises(UsageError, match="was closed"):
        reader.read(None, None)  # type: ignore[arg-type]  # it is refused before


def test_only_files_that_are_met_are_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_ranks(tmp_path / "ckpt", tensors, 3)
    with unshard.open_checkpoint(tmp_path / "ckpt", framework="pt") as one:
        rank_path(tmp_path / "ckpt", 3, 1).unlink()
        part = one.get_slice("lm_head.weight")
        assert torch.equal(part[:5], tensors["lm_head.weight"][:5])
        assert torch.equal(part[-3:, ::2], tensors["lm_head.weight"][-3:, ::2])
        with pytest.raises(CorruptError, match=r"rank_1\.pt: no longer exists"):
            part[4:6]


def test_threads_read_from_one_checkpoint(opened: "unshard.OpenCheckpoint[Any]") -> None:
    def same(name: str) -> bool:
        return bool(opened.get_tensor(name).tobytes() == bits(MIXED[name]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, list(MIXED) * 30))


def test_a_loader_with_worker_processes_reads_its_own(checkpoint: Path) -> None:
    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        """Every worker opens the checkpoint for itself, when it first reads."""

        def __init__(self) -> None:
            self.rows: Any = None

        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> torch.Tensor:
            if self.rows is None:
                one = unshard.open_checkpoint(checkpoint, framework="pt")
                self.rows = one.get_slice("weight")
            return self.rows[index]  # type: ignore[no-any-return]  # a tensor

    loader = torch.utils.data.DataLoader(Rows(), batch_size=7, num_workers=1)
    assert torch.equal(next(iter(loader)), MIXED["weight"])
