"""The arithmetic of block FP8: a matrix of 8-bit floats, and a float32 scale for each block.

A block has up to 128 x 128 elements, fewer at the edges. Its scale is its largest absolute value,
at least 1e-12, divided by 448; its elements are value / scale, clamped to 448 and rounded to
nearest even. Source: slime's tools/convert_hf_to_fp8.py, which uses the format of DeepSeek's
published models; prime-rl's differs in the scale of blocks of zeros.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from unshard.containers.strided import Elements
from unshard.convert.recipes import BLOCK
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME, numpy_dtype

_LARGEST = 448.0
_PART = 64 * 1024  # elements per table lookup, which needs 8 bytes of index for each

Float32s = NDArray[np.float32]


def block_scales(values: Float32s, least: float) -> Float32s:
    """Return the scale of every block of a matrix; it is not finite if a value of the block is not.

    `least` is the lower bound of a block's largest absolute value.
    """
    starts = [range(0, size, BLOCK) for size in values.shape]
    largest = np.empty(tuple(map(len, starts)), np.float32)
    for row, start in enumerate(starts[0]):
        strip = values[start : start + BLOCK]
        sizes = np.maximum(strip.max(axis=0), -strip.min(axis=0))  # NaN propagates
        np.maximum.reduceat(sizes, starts[1], out=largest[row])
    np.maximum(largest, np.float32(least), out=largest)
    largest /= np.float32(_LARGEST)
    return largest


def quantized(values: Float32s, scales: Float32s) -> Elements:
    """Return finite values as 8-bit floats, raw bits; overwrites `values`."""
    for row, factors in enumerate(scales):
        strip = values[row * BLOCK : (row + 1) * BLOCK]
        strip /= np.repeat(factors, BLOCK)[: strip.shape[1]]
    np.clip(values, -_LARGEST, _LARGEST, out=values)
    return _rounded(values.reshape(-1)).reshape(values.shape)


def _rounded(values: Float32s) -> Elements:
    """Round values of at most 448 to float8_e4m3fn, to nearest even; return raw bits.

    A table has the result for the upper 16 bits of a float32, whose lowest bit is set if any of the
    other 16 bits is: rounding depends on nothing else. ml_dtypes returns the same, but takes five
    times as long.
    """
    table, out = _rounding_table(), np.empty(len(values), np.uint8)
    for start in range(0, len(values), _PART):
        bits = values[start : start + _PART].view(np.uint32)
        low = bits & np.uint32(0xFFFF)
        low += np.uint32(0xFFFF)  # carries into bit 16 if any bit is set
        low |= bits
        low >>= np.uint32(16)
        table.take(low, mode="clip", out=out[start : start + _PART])
    return out


@cache
def _rounding_table() -> NDArray[np.uint8]:
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values.astype(numpy_dtype(BY_NAME["float8_e4m3fn"])).view(np.uint8)


def dequantized(
    elements: Elements, scales: Float32s, box: Box, blocks: Box, block: tuple[int, int]
) -> Float32s:
    """Return element * scale of its block, in float32.

    Args:
        elements: a box of a matrix, 8-bit floats.
        scales: the scales of the blocks that overlap the box.
        box: the location of `elements` in the matrix.
        blocks: the numbers of these blocks; see `meeting`.
        block: rows and columns of a block.
    """
    table = np.arange(1 << 8, dtype=np.uint8).view(elements.dtype).astype(np.float32)
    out, flat = np.empty(elements.size, np.float32), elements.reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _PART):
        table.take(flat[start : start + _PART], mode="clip", out=out[start : start + _PART])
    values = out.reshape(elements.shape)
    first, end = box.offsets[1] - blocks.offsets[1] * block[1], box.sizes[1]
    for number, factors in enumerate(scales, start=blocks.offsets[0]):
        top = max(0, number * block[0] - box.offsets[0])
        bottom = (number + 1) * block[0] - box.offsets[0]
        values[top:bottom] *= np.repeat(factors, block[1])[first : first + end]
    return values


def meeting(box: Box, block: tuple[int, int]) -> Box:
    """Return the numbers of the blocks that overlap a box of a matrix."""
    first = tuple(at // size for at, size in zip(box.offsets, block, strict=True))
    ends = (-(-end // size) for end, size in zip(box.ends, block, strict=True))
    return Box(first, tuple(end - at for end, at in zip(ends, first, strict=True)))


def of_blocks(box: Box, shape: tuple[int, ...]) -> Box:
    """Return the box that some blocks cover in a matrix; `box` has their numbers."""
    first = tuple(at * BLOCK for at in box.offsets)
    ends = (min(end * BLOCK, size) for end, size in zip(box.ends, shape, strict=True))
    return Box(first, tuple(end - at for end, at in zip(ends, first, strict=True)))
