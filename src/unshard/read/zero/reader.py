"""Reader for DeepSpeed's ZeRO checkpoints: the float32 weights of stages 1 to 3.

The optimizer of ZeRO has the weights in float32, flattened and cut into parts of ranks. Names,
shapes and their order are in the model's file, which also has the buffers, the parameters that are
not trained and, up to stage 2, all weights in the dtype of training (`--weights module`). Stage 0
has only these. What is read is what `zero_to_fp32.py` computes, but for what that loses: parameters
that are not trained at stage 1, and the dtypes of integer buffers.

Sources: see `states`.
"""

from unshard.read.format import Format, by_name, has_file
from unshard.read.zero.files import is_zero_file
from unshard.read.zero.moments import read_optimizer
from unshard.read.zero.partitions import frozen_names, read_weights

ZERO = Format(
    "DeepSpeed ZeRO",
    has_file(is_zero_file),
    read_weights,
    by_name(is_zero_file),
    weights=("model", "ema", "module"),
    tagged=True,
    optimizer=lambda at, _, options: read_optimizer(at, options),
    frozen=frozen_names,
)
