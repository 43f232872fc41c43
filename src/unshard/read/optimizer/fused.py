"""torchtitan's `FusedQKVLinear`: one parameter `wqkv`, whose weights are saved in three parts.

The optimizer saves the moments of `wqkv`, the model `wq`, `wk` and `wv`. The rows of `wqkv` are
ordered by key-value head: the queries of the head, its key, its value.
"""

from dataclasses import replace

from unshard.errors import NotMergeableError
from unshard.read.model_config import ModelConfig
from unshard.read.optimizer_state import Group, Key, SavedState, flat_name
from unshard.read.wrapper_names import names_without_wrappers
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.selection import joined_parts, of_box, sliced

_MOST_HEADS = 1 << 12


def without_fused(saved: SavedState, model: Catalog, config: ModelConfig | None) -> SavedState:
    """Return a state with `wq`, `wk` and `wv` in place of each `wqkv`, if the model has them.

    Raises:
        NotMergeableError: the config does not have the numbers of heads.
    """
    every = [*saved.keys, *(key for params, _ in saved.groups for key in params)]
    names = names_without_wrappers([key for key in every if isinstance(key, str)])
    parts: dict[Key, list[Key]] = {}
    for stored, name in names.items():
        own: list[str] = [name.replace("wqkv.", f"w{letter}.") for letter in "qkv"]
        if name not in {*own, *model.tensors} and model.tensors.keys() >= {*own}:
            parts[stored] = [*own]
    tensors = dict(saved.catalog.tensors)
    for key, each in parts.items():
        rows = [model.tensors[str(part)].shape[0] for part in each]
        for kind in saved.keys.get(key, ()):
            divided = _divided(tensors.pop(flat_name(key, kind)), rows, config)
            for name, entry in zip((flat_name(part, kind) for part in each), divided, strict=True):
                tensors[name] = replace(entry, fqn=name)
    groups: list[Group] = []
    for params, fields in saved.groups:
        each = [part for key in params for part in parts.get(key, (key,))]
        groups += [([part], fields) for part in each] if saved.flattened else [(each, fields)]
    keys = {part: kinds for key, kinds in saved.keys.items() for part in parts.get(key, (key,))}
    values = {part: own for key, own in saved.values.items() for part in parts.get(key, (key,))}
    catalog = replace(saved.catalog, tensors=tensors)
    return replace(saved, catalog=catalog, keys=keys, values=values, groups=groups)


def _divided(fused: TensorEntry, rows: list[int], config: ModelConfig | None) -> list[TensorEntry]:
    """Return the parts of a fused tensor, of these numbers of rows; a step is the same for all."""
    if not fused.shape:
        return [fused] * len(rows)
    fields = {} if config is None else config.fields
    recorded = [fields.get("num_attention_heads")]
    recorded.append(fields.get("num_key_value_heads", recorded[0]))
    queries, heads = (number if isinstance(number, int) else 0 for number in recorded)
    fits = (fused.shape[0], rows[0] * heads) == (sum(rows), rows[1] * queries)
    if not (fits and 0 < heads <= _MOST_HEADS) or rows[1] % heads or fused.chunks.compressed.any():
        raise NotMergeableError(
            f"tensor {fused.fqn}: it cannot be divided into those of wq, wk and wv",
            expected=f"{sum(rows)} uncompressed rows, and their numbers of heads in config.json",
            found=f"shape {list(fused.shape)}, numbers of heads {recorded}",
            hint="pass the config of the model that was trained: ⟦+--config FILE|DIR⟧",
        )
    sizes, (_, *rest) = [count // heads for count in rows], fused.shape
    parts = []
    for at, size in enumerate(sizes):
        chunks = []
        for head in range(heads):
            box = Box((head * sum(sizes) + sum(sizes[:at]), *(0 for _ in rest)), (size, *rest))
            chunk = sliced(fused.chunks, of_box(box), fused.dtype.itemsize)
            chunks.append((chunk, (head * size, *(0 for _ in rest))))
        parts.append(TensorEntry(fused.fqn, fused.dtype, (rows[at], *rest), joined_parts(chunks)))
    return parts
