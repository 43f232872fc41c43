"""Evidence next to sharded safetensors that files of the last ranks are missing.

Three things can show it: an index that torch, transformers or torchtitan wrote when they made whole
files of the same shards; NeMo AutoModel's list of names; the vocabulary and hidden size in the
model's config. Without a config, the columns of a layer's projections give the hidden size.
An index without names that the shards have is about other weights, and is not used.

Sources: torchtitan's `last_save_in_hf`, NeMo AutoModel's `ConsolidatedHFAddon`, torch's
`_write_overall_metadata_file`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from unshard.containers.json_file import json_object
from unshard.errors import CorruptError, IncompleteError, UnshardError
from unshard.noted import Noted
from unshard.read.beside.model_config import ModelConfig, read_config
from unshard.read.format import Location, shortened
from unshard.read.hub_files import weight_map
from unshard.tensors.catalog import TensorEntry

__all__ = ["loss_problems", "writer_of"]

_INDEX = "model.safetensors.index.json"
_NEMO = ".hf_metadata"
_NEMO_NAMES = "fqn_to_file_index_mapping.json"
_EMBEDDING = ".embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_HIDDEN_ROWS = re.compile(
    r"model\.(?:norm|layers\.\d+\.(?:input_layernorm|post_attention_layernorm|mlp\.down_proj|"
    r"self_attn\.o_proj))\.weight"
)
_HIDDEN_COLUMNS = re.compile(
    r"model\.layers\.\d+\.(?:mlp\.(?:gate|up)_proj|self_attn\.(?:q|k|v|qkv)_proj)\.weight"
)
_HINT = (
    "copy the missing files here from the node that wrote them. If nothing is missing, move {} "
    "elsewhere"
)


def loss_problems(
    location: Location, tensors: Mapping[str, TensorEntry]
) -> Noted[list[UnshardError]]:
    """Return what shows that files of ranks are missing, and what to say of evidence not used."""
    problems: list[UnshardError] = []
    notes: list[str] = []
    config = _config(location)
    for path in _indices(location):
        listed = set(weight_map(path))
        if not tensors.keys() <= listed:
            notes.append(f"{path} is about other weights, and was not used")
            continue
        problems += _absent_names(path, listed, tensors, config)
        if tensors.keys() == listed:
            problems += _absent_bytes(path, tensors)
    for root in location.roots:
        path = root / _NEMO / _NEMO_NAMES
        if path.is_file() and tensors.keys() <= (listed := set(json_object(path))):
            problems += _absent_names(path, listed, tensors, config)
    problems += _short_embeddings(config, tensors)
    problems += _short_rows(config, tensors)
    return Noted(problems, tuple(notes))


def writer_of(location: Location) -> str:
    """Return the tool that wrote the shards, as far as the files next to them show."""
    if any((root / _NEMO).is_dir() for root in location.roots):
        return "NeMo AutoModel"
    config = _config(location)
    if config is None or config.path.parent not in location.roots:
        return "unknown"
    return "transformers" if "transformers_version" in config.fields else "unknown"


def _places(location: Location) -> Iterator[Path]:
    """Yield where the model that the shards belong to may be described."""
    for root in location.roots:
        yield root
        if root.name == "sharded":
            yield root.parent


def _indices(location: Location) -> Iterator[Path]:
    return (path for place in _places(location) if (path := place / _INDEX).is_file())


def _config(location: Location) -> ModelConfig | None:
    """Return the nearest config.json that can be read."""
    folders = [*location.roots, *(root / _NEMO for root in location.roots)]
    folders += [root.parent for root in location.roots]
    for folder in folders:
        path = folder / "config.json"
        if path.is_file():
            with suppress(CorruptError):
                return read_config(path)
    return None


def _absent_names(
    path: Path,
    listed: Collection[str],
    tensors: Mapping[str, TensorEntry],
    config: ModelConfig | None,
) -> Iterator[IncompleteError]:
    absent = sorted(name for name in listed if name not in tensors)
    if config is not None and config.may_be_tied:
        absent = [name for name in absent if not name.endswith(_OUTPUT)]
    if absent:
        yield IncompleteError(
            f"{path}: lists {len(absent)} tensors that no shard has",
            expected=shortened(absent),
            found=f"shards of {len(tensors)} other tensors",
            hint=_HINT.format(path.name),
        )


def _absent_bytes(path: Path, tensors: Mapping[str, TensorEntry]) -> Iterator[IncompleteError]:
    """Compare bytes only downwards: an index may count tensors that share memory once."""
    metadata = json_object(path).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(entry.size_bytes for entry in tensors.values())
    if isinstance(total, int) and size < total:
        yield IncompleteError(
            f"{path}: states more bytes than the shards have",
            expected=f"{total} bytes in all",
            found=f"{size}",
            hint=_HINT.format(path.name),
        )


def _short_embeddings(
    config: ModelConfig | None, tensors: Mapping[str, TensorEntry]
) -> Iterator[IncompleteError]:
    """Compare the embeddings with the vocabulary, only downwards: padding makes them larger.

    Of several (a speech model's own next to the language model's), the largest is meant.
    """
    found = [one for name, one in tensors.items() if f".{name}".endswith(_EMBEDDING) and one.shape]
    vocabulary = None if config is None else _stated(config, "vocab_size")
    if config is None or not found or not isinstance(vocabulary, int):
        return
    largest = max(found, key=lambda entry: entry.shape[0])
    if largest.shape[0] < vocabulary and _is_cut_evenly(largest):
        yield IncompleteError(
            f"tensor {largest.fqn} {list(largest.shape)}: smaller than the vocabulary, and its "
            "pieces are all of one size, as if the last were missing",
            expected=f"{vocabulary} rows or more (vocab_size in {config.path})",
            found=f"{largest.shape[0]} rows",
            hint=_HINT.format(config.path.name),
        )


def _is_cut_evenly(entry: TensorEntry) -> bool:
    """Return whether all pieces are equal ranges of rows: FSDP's last piece is often smaller."""
    sizes = entry.chunks.sizes
    return bool((sizes == sizes[0]).all() and np.array_equal(sizes[0, 1:], entry.shape[1:]))


def _short_rows(
    config: ModelConfig | None, tensors: Mapping[str, TensorEntry]
) -> Iterator[IncompleteError]:
    """Compare what has a row per hidden unit in decoder layers with the hidden size."""
    hidden = _hidden_size(config, tensors)
    if hidden is None:
        return
    size, said, hint = hidden
    for name, entry in tensors.items():
        if _HIDDEN_ROWS.fullmatch(name) and 0 < entry.shape[0] < size and _is_cut_evenly(entry):
            yield IncompleteError(
                f"tensor {name} {list(entry.shape)}: has fewer rows than the hidden size, and its "
                "pieces are all of one size, as if the last were missing",
                expected=f"{size} rows ({said})",
                found=f"{entry.shape[0]} rows",
                hint=hint,
            )


def _hidden_size(
    config: ModelConfig | None, tensors: Mapping[str, TensorEntry]
) -> tuple[int, str, str] | None:
    """Return the hidden size, where it is from, and what to do if the tensors are smaller.

    Without a config, it follows from the projections of the layers: they have a column per hidden
    unit, and a rank has all columns of its rows.
    """
    stated = None if config is None else _stated(config, "hidden_size")
    if config is not None and isinstance(stated, int):
        return stated, f"hidden_size in {config.path}", _HINT.format(config.path.name)
    found = {
        entry.shape[1]: name
        for name, entry in tensors.items()
        if _HIDDEN_COLUMNS.fullmatch(name) and _has_whole_columns(entry)
    }
    if len(found) != 1:
        return None
    ((size, name),) = found.items()
    hint = "copy the missing files here from the node that wrote them"
    return size, f"the number of columns of {name}", hint


def _has_whole_columns(entry: TensorEntry) -> bool:
    return len(entry.shape) == 2 and bool((entry.chunks.sizes[:, 1] == entry.shape[1]).all())


def _stated(config: ModelConfig, name: str) -> object:
    """Return a field of a config; that of its text model, if it has one of its own."""
    return config.text.get(name, config.fields.get(name))
