"""Measure the weights of a model without running it.

A server without a configuration runs it as its profile `command`, with
`python -m unshard.evaluate.server.evaluators.weights`. It needs neither an evaluator nor a GPU nor
data, and shows when training has diverged. Its tasks:

    size    parameters, bytes: of all tensors
    values  of the floating-point tensors: nonfinite, the number of non-finite elements; rms, the
            root mean square of the finite elements; largest, their largest absolute value
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from math import ceil, prod, sqrt
from pathlib import Path

import numpy as np

from unshard.api.unmerged.opening import LazyTensor, OpenCheckpoint, open_checkpoint
from unshard.containers.strided import Elements
from unshard.errors import UnshardError, UsageError
from unshard.fronts import Command
from unshard.tensors.dtypes import BY_CODE, DTypeKind

_PIECE = 4_000_000  # elements that are in memory at a time


def main() -> None:
    """Measure the model argv[1] for the tasks argv[3], "a,b"; write to the file argv[2]."""
    model, output, names = sys.argv[1:]
    tasks = names.split(",")
    try:
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise UsageError(f"tasks {', '.join(unknown)}: unknown", expected=", ".join(TASKS))
        with open_checkpoint(model) as checkpoint:
            results = {task: TASKS[task](checkpoint) for task in tasks}
    except UnshardError as error:
        error.front = Command({})
        sys.exit(str(error))
    Path(output).write_text(json.dumps(results), encoding="utf-8")


def _size(checkpoint: OpenCheckpoint[Elements]) -> dict[str, float]:
    tensors = [checkpoint.get_slice(name) for name in checkpoint]
    counts = [prod(tensor.shape) for tensor in tensors]
    sizes = [BY_CODE[tensor.get_dtype()].itemsize for tensor in tensors]
    return {
        "parameters": sum(counts),
        "bytes": sum(count * size for count, size in zip(counts, sizes, strict=True)),
    }


def _values(checkpoint: OpenCheckpoint[Elements]) -> dict[str, float]:
    nonfinite, count, squares, largest = 0, 0, 0.0, 0.0
    for name in checkpoint:
        tensor = checkpoint.get_slice(name)
        if BY_CODE[tensor.get_dtype()].kind is not DTypeKind.FLOAT:
            continue
        for piece in _pieces(tensor):
            finite = piece[np.isfinite(piece)]
            nonfinite += piece.size - finite.size
            count += finite.size
            squares += float(np.sum(np.square(finite)))
            largest = max(largest, float(np.max(np.abs(finite), initial=0.0)))
    return {"nonfinite": nonfinite, "rms": sqrt(squares / max(count, 1)), "largest": largest}


def _pieces(
    tensor: LazyTensor[Elements],
) -> Iterator["np.ndarray[tuple[int, ...], np.dtype[np.float64]]"]:
    """Yield the elements of a tensor, some rows at a time."""
    if not tensor.shape:
        yield np.asarray(tensor[...], dtype=np.float64)
        return
    rows = tensor.shape[0]
    step = max(1, rows // max(1, ceil(prod(tensor.shape) / _PIECE)))
    for start in range(0, rows, step):
        yield np.asarray(tensor[start : start + step], dtype=np.float64)


TASKS: Mapping[str, Callable[[OpenCheckpoint[Elements]], dict[str, float]]] = {
    "size": _size,
    "values": _values,
}


if __name__ == "__main__":
    main()
