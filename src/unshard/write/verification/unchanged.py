"""Which output tensors are those of the base model: a merge that changes nothing is a mistake.

A trained tensor differs from its base within the first tiles, so this reads little of what training
has changed, and all of what it has not.
"""

import os
from collections.abc import Mapping, Sequence

from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of, take
from unshard.plan.pairs import Pair, make_pair, pair_tiles
from unshard.tensors.catalog import TensorEntry
from unshard.write.execute import make_tile

__all__ = ["are_equal", "unchanged"]


def unchanged(outputs: Sequence[Converted], base: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of the output tensors that equal the base's, as the base's dtype has them.

    Args:
        outputs: what is written.
        base: the base model's tensors, by the same names.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        return [
            output.name
            for output in outputs
            if output.name in base and _is_unchanged(output, base[output.name], files)
        ]


def _is_unchanged(output: Converted, entry: TensorEntry, files: OpenFiles) -> bool:
    if shape_of(output.recipe) != entry.shape:
        return False
    pair = make_pair(Converted(output.name, entry.dtype, take(entry)), output)
    if pair.ours.to is not pair.theirs.to:
        return False
    return are_equal(pair, files)


def are_equal(pair: Pair, files: OpenFiles) -> bool:
    """Tell whether both tensors of a pair have the same bits; stops at the first difference."""
    return all(
        make_tile(ours, files).tobytes() == make_tile(theirs, files).tobytes()
        for ours, theirs in pair_tiles(pair)
    )
