"""Block FP8 made by plans: torch's arithmetic is the oracle, block by block, bit for bit."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from block_fp8 import dequantised, quantised
from properties import examples
from ranks import bits
from sources import (
    Chunk,
    Sources,
    Tensor,
    chunks_of,
    merged,
    tensors_in,
    tilings,
)
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import (
    BlockScales,
    Dequantized,
    Quantized,
    Recipe,
    WeightedSum,
    dtype_of,
    take,
)
from unshard.engines.files import PieceReader
from unshard.engines.threads import MIN_BUFFER, Resources
from unshard.errors import ConversionError
from unshard.plan.layout import lay_out
from unshard.plan.pieces import contents_of
from unshard.plan.planner import make_plan
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME

SMALL = Resources(workers=2, memory_bytes=2 * MIN_BUFFER)
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SIZES = st.integers(1, 300) | st.sampled_from([128, 256])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Return a tensor's bits as unsigned integers."""
    flat = np.frombuffer(bits(tensor), f"u{tensor.itemsize}")
    return flat.reshape(tuple(tensor.shape))


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Matrices whose blocks have very different sizes; some are zero."""
    rows, columns, dtype = draw(SIZES), draw(SIZES), draw(DTYPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    blocks = -(-rows // 128), -(-columns // 128)
    # 1e-12 and 2 ** -133 are about the least size of a block, and the least bfloat16.
    choices = torch.tensor([0.0, 1e-38, 3e-13, 1e-12, 1e-3, 1.0, 448.0, 1e30])
    sizes = choices[torch.randint(len(choices), blocks, generator=generator)]
    factors = sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    spread = torch.exp(3 * torch.randn(rows, columns, generator=generator))
    values = torch.randn(rows, columns, generator=generator) * spread * factors
    return values.to(dtype)


def add(sources: Sources, name: str, matrix: torch.Tensor, chunks: tuple[Chunk, ...]) -> Recipe:
    """Store a matrix in chunks, and return the recipe for all of it."""
    dtype = BY_NAME[name_of(matrix.dtype)]
    sources.add(name, Tensor(dtype, tuple(matrix.shape), chunks), raw(matrix))
    return take(sources.entries[name])


def whole(matrix: torch.Tensor) -> tuple[Chunk, ...]:
    sizes = tuple(matrix.shape)
    return (Chunk(Box.whole(sizes), (sizes[1], 1)),)


def made(sources: Sources, recipes: dict[str, Recipe], resources: Resources) -> dict[str, bytes]:
    """Return what a merge writes, and check that virtual files have the same bytes."""
    sources.plan()
    tensors = [ConvertedTensor(name, dtype_of(one), one) for name, one in recipes.items()]
    plan = make_plan(lay_out(tensors, 10**9))
    files = merged(plan, resources)
    contents = dict(contents_of(plan))
    reader = PieceReader(Path("checkpoint"))
    for name, one in contents.items():
        out = bytearray(one.size)
        reader.read(one, 0, memoryview(out))
        assert bytes(out) == files[name]
    reader.close()
    return tensors_in(files)


@settings(max_examples=examples(40))  # each has up to 90,000 elements
@given(matrices(), st.data())
def test_a_matrix_in_any_chunks_is_quantised_as_torch_does_it(
    matrix: torch.Tensor, data: st.DataObject
) -> None:
    boxes = data.draw(tilings(tuple(matrix.shape)))
    odd = data.draw(st.booleans())
    resources = data.draw(st.sampled_from([SMALL, Resources(1, 10**7)]))
    with tempfile.TemporaryDirectory() as directory:
        sources = Sources(Path(directory))
        chunks = tuple(data.draw(chunks_of(box, odd=odd)) for box in boxes)
        matrix_recipe = add(sources, "w", matrix, chunks)
        recipes: dict[str, Recipe] = {}
        recipes |= {"w": Quantized(matrix_recipe, "w"), "s": BlockScales(matrix_recipe, "w")}
        found = made(sources, recipes, resources)
    elements, scales = quantised(matrix)
    assert found["s"] == bits(scales)
    assert found["w"] == bits(elements)


def test_every_bfloat16_is_rounded_as_torch_does_it(tmp_path: Path) -> None:
    # 448 in every block: its scale is 1.
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fit = every[every.abs() <= 448]
    near = torch.cat([torch.nextafter(fit.float(), torch.tensor(to)) for to in (-1e9, 1e9)])
    values = torch.cat([fit.float(), near.clamp(-448, 448)])
    matrix = torch.full((len(values), 2), 448.0)
    matrix[:, 0] = values
    sources = Sources(tmp_path)
    recipe = add(sources, "w", matrix, whole(matrix))
    found = made(sources, {"w": Quantized(recipe, "w"), "s": BlockScales(recipe, "w")}, SMALL)
    assert set(np.frombuffer(found["s"], np.float32)) == {1.0}
    assert found["w"] == bits(matrix.to(torch.float8_e4m3fn))


@settings(max_examples=examples(30))  # as above
@given(matrices(), st.sampled_from([(128, 128), (64, 32), (1, 7)]), st.data())
def test_block_fp8_becomes_values_as_torch_multiplies(
    matrix: torch.Tensor, block: tuple[int, int], data: st.DataObject
) -> None:
    elements = quantised(matrix)[0]
    shape = tuple(-(-size // of) for size, of in zip(matrix.shape, block, strict=True))
    dtype = data.draw(DTYPES)  # Qwen's models have scales in bfloat16
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    to = data.draw(DTYPES)
    with tempfile.TemporaryDirectory() as directory:
        sources = Sources(Path(directory))
        boxes = data.draw(tilings(tuple(matrix.shape)))
        chunks = tuple(data.draw(chunks_of(box, odd=False)) for box in boxes)
        parts = add(sources, "w", elements, chunks), add(sources, "s", scales, whole(scales))
        recipe = Dequantized(*parts, block)  # type: ignore[arg-type]  # both are of whole tensors
        sources.plan()
        tensors = [ConvertedTensor("w", BY_NAME[name_of(to)], recipe)]
        found = tensors_in(merged(make_plan(lay_out(tensors, 10**9)), SMALL))
    assert found["w"] == bits(dequantised(elements, scales, block).to(to))


def test_a_mean_is_quantised_without_a_rounding_before(tmp_path: Path) -> None:
    first, second = torch.randn(2, 200, 150, generator=torch.Generator().manual_seed(0)).bfloat16()
    sources = Sources(tmp_path)
    parts = (add(sources, name, one, whole(one)) for name, one in (("a", first), ("b", second)))
    mean = WeightedSum(tuple((1.0, part) for part in parts))
    found = made(sources, {"w": Quantized(mean, "w"), "s": BlockScales(mean, "w")}, SMALL)
    elements, scales = quantised((first.float() + second.float()) / 2)
    assert found == {"w": bits(elements), "s": bits(scales)}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_block(tmp_path: Path, wrong: float) -> None:
    matrix = torch.ones(300, 300)
    matrix[299, 130] = wrong
    sources = Sources(tmp_path)
    recipe = add(sources, "w", matrix, whole(matrix))
    place = r"tensor model\.w: cannot be quantised: some values in \[256:300, 128:256\] are not"
    for one in (Quantized(recipe, "model.w"), BlockScales(recipe, "model.w")):
        with pytest.raises(ConversionError, match=place):
            made(sources, {"w": one}, SMALL)
