"""Reader for DeepSpeed's ZeRO checkpoints: the float32 weights of stages 1 to 3.

ZeRO's optimizer has the weights in float32, flattened and cut into parts of ranks. The model's file
has their names, shapes and order, and also the buffers, the parameters that are not trained and, up
to stage 2, all weights in the dtype of training (`--weights module`). Stage 0 has only these. The
result equals that of `zero_to_fp32.py`, and also has what the script loses: parameters that are not
trained at stage 1, and the dtypes of integer buffers.

Sources: see `states`.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from unshard.read.format import Format, Location, ReadOptions, by_name, has_file
from unshard.read.zero.files import is_zero_file
from unshard.tensors.catalog import Catalog

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.zero.partitions import read_weights

    return read_weights(location, options)


def _read_optimizer(location: Location, _: int, options: ReadOptions) -> "SavedState | None":
    from unshard.read.zero.moments import read_optimizer

    return read_optimizer(location, options)


def _frozen(location: Location) -> Collection[str] | None:
    from unshard.read.zero.partitions import frozen_names

    return frozen_names(location)


ZERO = Format(
    "DeepSpeed ZeRO",
    has_file(is_zero_file),
    _read,
    by_name(is_zero_file),
    weights=("model", "ema", "module"),
    tagged=True,
    optimizer=_read_optimizer,
    frozen=_frozen,
)
