"""Several checkpoints become one output: their mean. A single one stays what it is."""

import os
from collections.abc import Sequence

from unshard.api.converting import Outcome
from unshard.containers.open_files import OpenFiles
from unshard.convert.averaging import averaged
from unshard.convert.outputs import Converted
from unshard.convert.recipes import stored_dtype
from unshard.errors import ConversionError, raise_all
from unshard.plan.pairs import make_pair
from unshard.read.dcp.inflate import inflated_bytes
from unshard.read.open import Checkpoint
from unshard.tensors.dtypes import BY_NAME, Kind
from unshard.write.unchanged import are_equal

__all__ = ["combine"]


def combine(
    checkpoints: Sequence[Checkpoint], outcomes: Sequence[Outcome], weights: Sequence[float]
) -> Outcome:
    """Return the mean of several outcomes, with config and companions of the last.

    Integers and booleans that differ, counters for example, are the last source's, and named.

    Raises:
        ConversionError: names, shapes or dtypes differ, or tensors that have no mean.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    names = [str(one.location.weights_dir) for one in checkpoints]
    mean = averaged([one.tensors for one in outcomes], names, weights)
    notes = dict.fromkeys(note for one in outcomes for note in one.notes)
    if any(_is_wide(one) for one in mean.tensors if one.name not in mean.fixed):
        notes["float64 values are averaged in float32, and lose digits"] = None
    if not any(inflated_bytes(one.catalog) for one in checkpoints):  # else: after that
        notes |= dict.fromkeys(_differing(list(mean.fixed.values()), names))
    return Outcome(mean.tensors, outcomes[-1].config, tuple(notes))


def _is_wide(tensor: Converted) -> bool:
    return stored_dtype(tensor.recipe).itemsize > BY_NAME["float32"].itemsize


def _differing(fixed: Sequence[tuple[Converted, ...]], names: Sequence[str]) -> list[str]:
    """Compare tensors that have no mean; return what to say of those that differ."""
    problems, taken = [], []
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        for first, *others in fixed:
            if all(are_equal(make_pair(first, other), files) for other in others):
                continue
            dtype = stored_dtype(first.recipe)
            if dtype.kind in {Kind.INTEGER, Kind.BOOL}:
                taken.append(first.name)
            else:
                problems.append(
                    ConversionError(
                        f"tensor {first.name}: differs, and there is no mean of {dtype}",
                        hint="average the model before it is quantised",
                    )
                )
    raise_all(ConversionError, "tensors that cannot be averaged", problems)
    if not taken:
        return []
    listed = ", ".join(taken[:5]) + (f" and {len(taken) - 5} more" if len(taken) > 5 else "")
    return [f"integers are not averaged: {listed} differ, and are those of {names[-1]}"]
