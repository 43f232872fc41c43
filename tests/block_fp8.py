"""Block FP8 as it is defined, in torch: block by block. The rules of slime's converter."""

import torch

__all__ = ["dequantised", "quantised"]

_BLOCK = 128


def quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float8 elements of a matrix, and the float32 scale of each block."""
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // _BLOCK), -(-columns // _BLOCK))
    elements = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(0, rows, _BLOCK):
        for column in range(0, columns, _BLOCK):
            where = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
            block = matrix[where]
            scale = block.abs().max().clamp(min=1e-12).float() / 448.0
            exact = (block.float() / scale).clamp(-448.0, 448.0)
            elements[where] = exact.to(torch.float8_e4m3fn)
            scales[row // _BLOCK, column // _BLOCK] = scale
    return elements, scales


def dequantised(
    elements: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = (_BLOCK, _BLOCK)
) -> torch.Tensor:
    """Return the float32 values of a matrix in block FP8."""
    rows, columns = elements.shape
    factors = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return elements.float() * factors[:rows, :columns]
