"""Memory for large tensors that is used again, and only when nothing has it any more."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from unshard.engines.into_torch import RecycledMemory, as_tensor
from unshard.tensors.dtypes import BY_NAME

SHAPE = (600, 1024)  # float32: more than a MiB
BITS = np.dtype(np.uint32)
FLOAT32 = BY_NAME["float32"]


def address(bits: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> int:
    return int(bits.ctypes.data)


def test_memory_is_used_again_once_no_tensor_or_view_has_it() -> None:
    memory = RecycledMemory()
    bits = memory(SHAPE, BITS)
    first = address(bits)
    tensor = as_tensor(bits, FLOAT32)
    view = tensor[3:].t()
    del bits, tensor
    assert address(memory(SHAPE, BITS)) != first  # the view has it
    del view
    smaller = memory((300, 1024), BITS)
    assert address(smaller) == first
    parameter = torch.nn.Parameter(as_tensor(smaller, FLOAT32))
    del smaller
    assert address(memory(SHAPE, BITS)) != first
    assert parameter.shape == (300, 1024)


def test_what_is_too_small_is_given_back() -> None:
    memory = RecycledMemory()
    for rows in range(300, 900, 10):
        memory((rows, 1024), BITS)
        assert len(memory._blocks) == 1


def test_threads_never_share_it() -> None:
    memory = RecycledMemory()

    def use(number: int) -> bool:
        tensor = as_tensor(memory(SHAPE, BITS), FLOAT32).fill_(number)
        return bool((tensor == number).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    assert len(memory._blocks) <= 8
