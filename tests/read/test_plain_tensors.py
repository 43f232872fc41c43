"""Plain tensors in rank files: copies, shards, or unknown."""

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import unshard
from ranks import assert_same, merged, rank_path, save_ranks, snapshot, some_tensors
from unshard import NotMergeableError

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Parts = list[dict[str, torch.Tensor]]


def save(directory: Path, parts: Parts) -> Path:
    return save_ranks(directory, some_tensors(), len(parts), plain=parts)


def test_equal_plain_tensors_are_one_copy(tmp_path: Path) -> None:
    buffers = {"inv_freq": torch.rand(7), "count": torch.tensor(3), "a_mask": torch.ones(2, 2) > 0}
    unshard.merge(save(tmp_path / "ckpt", [buffers] * 3), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors() | buffers)


def test_nan_buffers_with_equal_bits_are_equal(tmp_path: Path) -> None:
    buffers = {"inv_freq": torch.full((4,), float("nan"))}
    unshard.merge(save(tmp_path / "ckpt", [buffers] * 2), tmp_path / "out", config="none")
    assert merged(tmp_path / "out")["inv_freq"].isnan().all()


def test_plain_tensors_of_one_rank_are_whole(tmp_path: Path) -> None:
    plain = {"w": torch.rand(5, 3), "norm": torch.ones(5)}
    unshard.merge(save(tmp_path / "ckpt", [plain]), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors() | plain)


def test_differing_plain_tensors_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    parts: Parts = [{"w": torch.full((2, 3), float(rank))} for rank in range(2)]
    checkpoint = save(tmp_path / "ckpt", parts)
    before = snapshot(checkpoint)
    with pytest.raises(
        NotMergeableError, match=r"tensor w: [\s\S]*ranks 0, 1[\s\S]*assume_dim0=True"
    ):
        unshard.merge(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert snapshot(checkpoint) == before


def test_a_difference_far_into_a_large_tensor_is_seen(tmp_path: Path) -> None:
    first = torch.zeros(700_000)
    second = first.clone()
    second[-1] = 1
    with pytest.raises(NotMergeableError, match="tensor w"):
        unshard.merge(save(tmp_path / "ckpt", [{"w": first}, {"w": second}]), tmp_path / "out")


def test_shards_are_joined_along_dimension_0_when_told_so(tmp_path: Path) -> None:
    whole = torch.rand(5, 3)
    parts: Parts = [{"w": whole[:2]}, {"w": whole[2:4]}, {"w": whole[4:]}]
    report = unshard.merge(
        save(tmp_path / "ckpt", parts), tmp_path / "out", assume_dim0=True, config="none"
    )
    assert_same(merged(tmp_path / "out"), some_tensors() | {"w": whole})
    assert any(
        "shards along dimension 0 (assume_dim0=True): w" in warning for warning in report.warnings
    )


def ambiguous() -> Parts:
    return [
        {"w": torch.full((2,), float(rank)), "norm": torch.ones(2), "steps": torch.tensor(4)}
        for rank in range(2)
    ]


def test_an_equal_tensor_among_differing_ones_is_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(NotMergeableError) as error:
        unshard.merge(save(tmp_path / "ckpt", ambiguous()), tmp_path / "out")
    assert "tensor norm: a plain tensor that may be a copy or a shard" in str(error.value)
    assert "tensor steps" not in str(error.value)  # no dimension: it cannot be a shard


def test_an_ambiguous_tensor_is_taken_as_a_copy_and_listed_under_assume_dim0(
    tmp_path: Path,
) -> None:
    checkpoint = save(tmp_path / "ckpt", ambiguous())
    report = unshard.merge(checkpoint, tmp_path / "out", assume_dim0=True, config="none")
    assert merged(tmp_path / "out")["norm"].shape == (2,)
    assert any("as copies (assume_dim0=True): norm" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    "parts",
    [
        [{"experts.n": torch.tensor(1)}, {"experts.n": torch.tensor(2)}],
        [{"n": torch.ones(2, 3)}, {"n": torch.ones(2, 4)}],
    ],
    ids=["0-d", "other dimension"],
)
def test_what_cannot_be_joined_is_refused_even_then(tmp_path: Path, parts: Parts) -> None:
    with pytest.raises(NotMergeableError, match=r"n: a plain[\s\S]*cannot be joined"):
        unshard.merge(save(tmp_path / "ckpt", parts), tmp_path / "out", assume_dim0=True)


def test_transposed_copies_are_compared_by_value(tmp_path: Path) -> None:
    tensor = torch.rand(300, 20)
    parts: Parts = [{"w": tensor}, {"w": tensor.t().contiguous().t()}]
    unshard.merge(save(tmp_path / "ckpt", parts), tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors() | {"w": tensor})


class Scaled:
    """A weight that its library pickles by a function of its own, as TransformerEngine does."""

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data, self.scale = data, scale

    def __reduce__(self) -> tuple[object, ...]:
        return Scaled, (self.data, self.scale)


class Attributes:
    """An object that pickle rebuilds by its attributes."""

    def __init__(self, data: torch.Tensor) -> None:
        self.inner = {"parts": [data]}


def packed() -> dict[str, object]:
    """Return what torch's own quantised Linear has: a tuple of a quantised weight and a bias."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        linear = torch.ao.nn.quantized.Linear(4, 2)  # type: ignore[no-untyped-call]
        return dict(linear.state_dict())


@pytest.mark.parametrize("name", ["model.safe.pt", "rank"])
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda: {"w": Scaled(torch.ones(2, 3), torch.ones(1))}, "Scaled"),
        (lambda: {"w": Attributes(torch.ones(2, 3))}, "reconstruct|Attributes"),
        (packed, "tuple"),
    ],
)
def test_a_weight_of_another_form_is_an_error(
    tmp_path: Path, name: str, made: Callable[[], dict[str, object]], found: str
) -> None:
    saved = {**some_tensors(), **made()}
    path = tmp_path / "ckpt" / (rank_path(Path(), 1, 0).name if name == "rank" else name)
    path.parent.mkdir()
    torch.save(saved, path)
    with pytest.raises(NotMergeableError, match=rf"cannot be read: .*({found})"):
        unshard.merge(path if name != "rank" else path.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_are_no_weights_are_left_out(tmp_path: Path) -> None:
    others = {
        "layer._extra_state": Scaled(torch.ones(3), torch.ones(1)),
        "rng": [torch.get_rng_state()],
        "options": Namespace(lr=1.0),
        "sizes": (1, "two"),
    }
    (tmp_path / "ckpt").mkdir()
    torch.save({**some_tensors(), **others}, tmp_path / "ckpt" / "pytorch_model.bin")
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), some_tensors())
    assert [one.fqn for one in report.skipped] == list(others)
