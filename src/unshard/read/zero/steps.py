"""How many steps the ranks' parts of the optimizer were trained, to notice files of two saves.

A run that always saves under one tag overwrites its files; if that is interrupted, some ranks have
files of the new save, and the others of the old one.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from unshard.containers.open_files import opened, pread_many
from unshard.containers.pickles.records import Value
from unshard.containers.torch_files.reader import TorchFile
from unshard.errors import CorruptError
from unshard.read.torch_save.state_dict import ShortStorageError, start_of
from unshard.read.torch_save.values import TensorFormError, is_tensor, items_of, read_view
from unshard.showing import plain
from unshard.tensors.dtypes import numpy_dtype

_MOST = 1 << 53  # larger numbers are slips, or attacks


def stated_steps(
    file: TorchFile, base: Value, flat: Sequence[Value], paddings: Value
) -> Mapping[int, float]:
    """Return the steps that a rank states, by the number of its flat tensor.

    Those of a flat tensor that is all padding do not count: a rank that resumes from a universal
    checkpoint finds none for it. What is of another form states nothing.

    Args:
        file: of the rank.
        base: the state of torch's optimizer.
        flat: the rank's flat tensors.
        paddings: how many elements at the ends of those are padding, if they still have it.
    """
    state = (items_of(base) or {}).get("state")
    found = state.items() if isinstance(state, dict) else ()
    numbered = {int(key): items_of(one) or {} for key, one in found if isinstance(key, int)}
    ends = (
        paddings if isinstance(paddings, list) and len(paddings) == len(flat) else [0] * len(flat)
    )
    steps: dict[int, float] = {}
    for number, (value, padding) in enumerate(zip(flat, ends, strict=True)):
        step = number_in(file, numbered.get(number, {}).get("step"))
        if step is not None and isinstance(padding, int) and _elements(value) > padding:
            steps[number] = step
    return steps


def check_steps(ranks: Iterable[tuple[Path, Mapping[int, float]]]) -> None:
    """Raise if ranks state different steps of a flat tensor.

    Raises:
        CorruptError: they do.
    """
    known: dict[int, tuple[Path, float]] = {}
    for path, steps in ranks:
        for number, step in steps.items():
            first, expected = known.setdefault(number, (path, step))
            if step != expected:
                raise CorruptError(
                    f"{path}: was not saved together with {first.name}: its optimizer is at "
                    "another step",
                    expected=f"step {plain(expected)}",
                    found=f"step {plain(step)}",
                    hint="a save was interrupted after some files of an older one were "
                    "overwritten: take another checkpoint",
                )


def _elements(value: Value) -> int:
    try:
        return prod(read_view(value).sizes)
    except TensorFormError:
        return 0


def number_in(file: TorchFile, value: Value) -> float | None:
    """Return a number, or that of a tensor of one element; None for anything else."""
    found = _read(file, value) if is_tensor(value) else value
    return found if isinstance(found, int | float) and abs(found) < _MOST else None


def _read(file: TorchFile, value: Value) -> object:
    try:
        view = read_view(value)
        start = start_of(file, view)
    except (TensorFormError, ShortStorageError):
        return None
    if prod(view.sizes) != 1:
        return None
    with opened(file.path) as stream:
        (data,) = pread_many(stream, [(view.dtype.itemsize, start)])
    if len(data) < view.dtype.itemsize:
        return None
    return np.frombuffer(data, numpy_dtype(view.dtype))[0].item()
