"""Finds buffers among plain tensors that differ between ranks; the model gets rank 0's.

FSDP shards parameters only, and nothing makes buffers equal on all ranks; a full state dict of
torch has rank 0's. But a parameter that FSDP ignores is plain, too, and experts that are kept out
of it differ by design. So only scalars and names of known modules count as buffers: those of
torch.nn, torch.ao.quantization, spectral norm, modelopt, vector-quantize-pytorch, codecs of
transformers.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from unshard.console import counted
from unshard.errors import NotMergeableError, UnshardError, raise_all
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import DTypeKind

# Ends of names, each with the names of which one must be next to it, if other modules use the end
# for a parameter: weight norm has a parameter weight_v, and a learned quantiser a parameter scale.
_BUFFERS = {
    r"running_\w+|num_batches_tracked|(?:\w*_)?amax(?:_\w+)?|parametrizations\.\w+\.\d+\._[uv]": "",
    r"(?:min|max)_vals?|histogram|fake_quant_enabled|observer_enabled": "",
    r"(?:\w*_)?inv_freq": "",
    r"\w*cluster_(?:size|usage)|embed_(?:avg|sum)|initt?ed|initialized": "",
    r"scale|zero_point": "observer_enabled",
    r"\w*codebook|embed|embedding|_?ema_w": "cluster_size ema_cluster_size _ema_cluster_size",
    r"(?P<of>\w+)_[uv]": "{of}_orig",
}
_EXPERTS = re.compile(r"(?:^|\.)(?!shared)\w*experts?_?\d*\.", re.IGNORECASE)


def find_buffers(
    differing: Collection[str],
    tensors: Mapping[str, TensorEntry],
    base: Mapping[str, tuple[int, ...]],
) -> dict[str, bool | None]:
    """Return the differing plain tensors that are buffers (True) or may be buffers (None).

    `base` has the shapes of the base model.
    """
    kinds = {name: _is_buffer(tensors[name], tensors, base.get(name)) for name in differing}
    return {name: kind for name, kind in kinds.items() if kind is not False}


def is_of_experts(name: str) -> bool:
    """Return whether a tensor is below experts, which ranks may divide between them."""
    return _EXPERTS.search(name) is not None


def _is_buffer(
    entry: TensorEntry, tensors: Mapping[str, TensorEntry], base: tuple[int, ...] | None
) -> bool | None:
    name, shape, sizes = entry.fqn, entry.shape, entry.chunks.sizes
    joined = (len(sizes) * shape[0], *shape[1:]) if shape else None
    if is_of_experts(name) or (sizes != sizes[0]).any() or (shape and joined == base):
        return False
    for ends, siblings in _BUFFERS.items():
        if match := re.fullmatch(rf"((?:.*\.)?)(?:{ends})", name):
            weight = tensors.get(f"{match[1]}weight")
            if weight is not None and weight.shape == joined:
                return False  # the statistics of the channels that the rank has
            needed = siblings.format(**match.groupdict()).split()
            if not needed or any(match[1] + sibling in tensors for sibling in needed):
                return True
    if prod(shape) == 1 and entry.dtype.kind is not DTypeKind.FLOAT:
        return True  # nothing trains it
    return False if shape or base is not None else None


def settle(
    tensors: Iterable[tuple[str, TensorEntry]],
    listed: Collection[str] = (),
    problems: Sequence[UnshardError] = (),
    summary: str = "plain tensors cannot be merged",
) -> tuple[str, ...]:
    """Return a note of the buffers among an output's tensors of doubtful kind, if there are any.

    A scalar that is `listed`, by the base model or the config, is not a buffer.

    Raises:
        NotMergeableError: others are not buffers; with further `problems`, after a summary.
    """
    others, buffers = [*problems], dict[str, None]()
    for name, entry in tensors:
        if entry.is_buffer or (entry.is_buffer is None and name not in listed):
            buffers[name] = None
        elif entry.doubt is not None:
            others.append(entry.doubt)
    raise_all(NotMergeableError, summary, others)
    note = (
        f"{counted(len(buffers), 'buffer')} with other values on other ranks: as in torch's full "
        f"state dict, the first rank's are taken: {', '.join(buffers)}"
    )
    return (note,) if buffers else ()
