"""Finds evidence of lost files of ranks, even if the remaining pieces leave no hole.

A tensor ends where its last piece ends, so the loss of a last piece leaves a smaller tensor that
looks whole. Two kinds of evidence can show the loss.

*The other tensors*, if a rank lacks a file that others have: FSDP cuts all tensors into equally
many pieces, and gives the same place in them to the same ranks (of each replica). torch saves empty
pieces too, so a tensor with fewer pieces ends with an empty piece, or with a smaller one than the
first. A replicated tensor never had more pieces (torch saves one copy). The tensors of other layers
distinguish it from a tensor that lacks a piece: they have the same shape unless pieces are missing.

*The files next to the shards*: an index that torch, transformers or torchtitan wrote when they made
whole files of the same shards; NeMo AutoModel's list of names; the vocabulary and hidden size in
the model's config. Without a config, the columns of a layer's projections give the hidden size. An
index that lacks names of the shards is about other weights, and is not used.

Sources: torchtitan's `last_save_in_hf`, NeMo AutoModel's `ConsolidatedHFAddon`, torch's
`_write_overall_metadata_file`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unshard.console import counted
from unshard.containers.json_file import json_object
from unshard.errors import IncompleteError, UnshardError
from unshard.read.format import Location, shortened
from unshard.read.hub_files import INDEX_NAME, weight_map
from unshard.read.model_config import ConfigFile, ModelConfig, config_at
from unshard.read.safetensors_shards.names import ShardSet
from unshard.tensors.catalog import TensorEntry
from unshard.with_notes import WithNotes

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
_NUMBER = re.compile(r"\d+")
_MOST_SHOWN = 4


def loss_problems(
    location: Location,
    chosen: ShardSet,
    tensors: Mapping[str, TensorEntry],
    config: ModelConfig | None,
) -> WithNotes[Sequence[UnshardError]]:
    """Return errors of lost files, with notes about evidence that was not used.

    The tensors' tables of chunks must have the chosen files, in their order.
    """
    problems: list[UnshardError] = []
    notes: list[str] = []
    # Whole files of the same shards are next to them, or above the folder `sharded`.
    places = [*location.roots, *(r.parent for r in location.roots if r.name == "sharded")]
    for path in (place / INDEX_NAME for place in places if (place / INDEX_NAME).is_file()):
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
    # Gaps in tensors are the best evidence: their errors have the paths of the missing files.
    return WithNotes(_gaps(chosen, tensors) or problems, tuple(notes))


def writer_of(location: Location, config: ModelConfig | None) -> str:
    """Return the tool that wrote the shards, as far as the files next to them show."""
    if any((root / _NEMO).is_dir() for root in location.roots):
        return "NeMo AutoModel"
    if config is None or config.path.parent not in location.roots:
        return "unknown"
    return "transformers" if "transformers_version" in config.fields else "unknown"


def nearest_config(location: Location, known: ConfigFile | None) -> ModelConfig | None:
    """Return the nearest config.json that can be read; `known` may be this file."""
    folders = [*location.roots, *(root / _NEMO for root in location.roots)]
    folders += [root.parent for root in location.roots]
    paths = (folder / "config.json" for folder in folders)
    configs = (config_at(path, known) for path in paths if path.is_file())
    return next((config for config in configs if config is not None), None)


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
            f"{path}: lists {counted(len(absent), 'tensor')} that no shard has",
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
            f"{path}: lists more bytes than the shards have",
            expected=f"{total} bytes in all",
            found=f"{size}",
            hint=_HINT.format(path.name),
        )


def _short_embeddings(
    config: ModelConfig | None, tensors: Mapping[str, TensorEntry]
) -> Iterator[IncompleteError]:
    """Compare the embeddings with the vocabulary, only downwards: padding makes them larger.

    Of several (a speech model's own next to the language model's), the largest counts.
    """
    embeddings = [
        entry for name, entry in tensors.items() if f".{name}".endswith(_EMBEDDING) and entry.shape
    ]
    vocabulary = None if config is None else _field(config, "vocab_size")
    if config is None or not embeddings or not isinstance(vocabulary, int):
        return
    largest = max(embeddings, key=lambda entry: entry.shape[0])
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
    """Compare tensors with a row per hidden unit in decoder layers with the hidden size.

    Without a config, it follows from the projections of the layers: they have a column per hidden
    unit, and a rank has all columns of its rows.
    """
    hidden_size = None if config is None else _field(config, "hidden_size")
    if config is not None and isinstance(hidden_size, int):
        size, source = hidden_size, f"hidden_size in {config.path}"
        hint = _HINT.format(config.path.name)
    else:
        by_columns = {
            entry.shape[1]: name
            for name, entry in tensors.items()
            if _HIDDEN_COLUMNS.fullmatch(name)
            and len(entry.shape) == 2
            and (entry.chunks.sizes[:, 1] == entry.shape[1]).all()
        }
        if len(by_columns) != 1:
            return
        ((size, name),) = by_columns.items()
        source = f"the number of columns of {name}"
        hint = "copy the missing files here from the node that wrote them"
    for name, entry in tensors.items():
        if _HIDDEN_ROWS.fullmatch(name) and 0 < entry.shape[0] < size and _is_cut_evenly(entry):
            yield IncompleteError(
                f"tensor {name} {list(entry.shape)}: has fewer rows than the hidden size, and its "
                "pieces are all of one size, as if the last were missing",
                expected=f"{size} rows ({source})",
                found=f"{entry.shape[0]} rows",
                hint=hint,
            )


def _field(config: ModelConfig, name: str) -> object:
    """Return a field of the config of the text model, or else of the config itself."""
    return config.text.get(name, config.fields.get(name))


class _CutTensor(NamedTuple):
    """A tensor that is cut along one dimension at most, each piece on a rank of its own.

    Attributes:
        entry: the tensor.
        file_index: of its files.
        ranks: of its pieces, in the order of the pieces.
        may_continue: whether more pieces may follow: there is no hole, and the last is as large as
            the others.
    """

    entry: TensorEntry
    file_index: int
    ranks: tuple[int, ...]
    may_continue: bool


class _Spread(NamedTuple):
    """The ranks of all tensors with one number of pieces.

    Attributes:
        example: the name of such a tensor.
        places: for each place in the order of pieces, the ranks that hold such a piece.
    """

    example: str
    places: tuple[set[int], ...]


def _gaps(chosen: ShardSet, tensors: Mapping[str, TensorEntry]) -> list[IncompleteError]:
    """Return errors of missing files, whose evidence are tensors without their last pieces."""
    if chosen.is_complete:
        return []
    numbered = list(chosen.files)
    cut_tensors = [own for entry in tensors.values() if (own := _cut_tensor(entry, numbered))]
    spreads, ranks = _spreads(cut_tensors), {rank for _, rank in chosen.files}
    lacking = {
        index: {rank for rank in ranks if (index, rank) not in chosen.files}
        for index in {own.file_index for own in cut_tensors}
    }
    by_pattern: dict[str, list[_CutTensor]] = defaultdict(list)
    for own in cut_tensors:
        by_pattern[_NUMBER.sub("#", own.entry.fqn)].append(own)
    lost: dict[tuple[int, int], list[str]] = defaultdict(list)
    for own in cut_tensors:
        others = [
            o for o in by_pattern[_NUMBER.sub("#", own.entry.fqn)] if o.file_index != own.file_index
        ]
        for rank, evidence in _missing_pieces(own, lacking[own.file_index], spreads, others):
            lost[own.file_index, rank].append(evidence)
    return [_missing_file(chosen, place, evidence) for place, evidence in sorted(lost.items())]


def _cut_tensor(entry: TensorEntry, numbered: Sequence[tuple[int, int]]) -> _CutTensor | None:
    table = entry.chunks
    cut = np.flatnonzero((table.offsets != table.offsets[:1]).any(axis=0))
    if not entry.shape or len(cut) > 1 or len(set(table.rank.tolist())) < len(table):
        return None
    dim = int(cut[0]) if len(cut) else 0
    order = np.argsort(table.offsets[:, dim])
    starts, sizes = table.offsets[order, dim], table.sizes[order, dim]
    has_hole = (starts != np.cumsum(sizes) - sizes).any()
    ends = (table.sizes == 0).any() or sizes[-1] < sizes[0]
    index, _ = numbered[int(table.file[0])]
    return _CutTensor(entry, index, tuple(table.rank[order].tolist()), not has_hole and not ends)


def _spreads(cut_tensors: Sequence[_CutTensor]) -> list[_Spread]:
    """Return the spreads of tensors with several pieces, none of which is empty."""
    spreads: dict[int, _Spread] = {}
    for own in cut_tensors:
        count = len(own.ranks)
        if count > 1 and (own.entry.chunks.sizes > 0).all():
            new = _Spread(own.entry.fqn, tuple(set() for _ in own.ranks))
            for place, rank in zip(spreads.setdefault(count, new).places, own.ranks, strict=True):
                place.add(rank)
    return list(spreads.values())


def _missing_pieces(
    own: _CutTensor, lacking: set[int], spreads: Sequence[_Spread], others: Sequence[_CutTensor]
) -> Iterator[tuple[int, str]]:
    """Yield the ranks that lack the file with the tensor's next pieces, and the evidence.

    `others` are tensors whose names differ in numbers only, in files of another index.
    """
    larger = next((o.entry for o in others if _is_larger(o.entry, own.entry)), None)
    has_equal = any(other.entry.shape == own.entry.shape for other in others)
    if not own.may_continue or not lacking or (has_equal and larger is None):
        return
    count = len(own.ranks)
    for spread in spreads:
        lost = spread.places[count:]
        fits = all(rank in place for rank, place in zip(own.ranks, spread.places, strict=False))
        if 0 < len(lost) <= count and fits and all(place & lacking for place in lost):
            like = f"{spread.example} has {len(spread.places)}" if larger is None else _form(larger)
            evidence = f"{_form(own.entry)} has {counted(count, 'piece')}, {like}"
            yield from ((rank, evidence) for place in lost for rank in sorted(place & lacking))
            return


def _is_larger(entry: TensorEntry, other: TensorEntry) -> bool:
    if len(entry.shape) != len(other.shape) or entry.shape == other.shape:
        return False
    return all(a >= b for a, b in zip(entry.shape, other.shape, strict=True))


def _form(entry: TensorEntry) -> str:
    return f"{entry.fqn} {list(entry.shape)}"


def _missing_file(
    chosen: ShardSet, place: tuple[int, int], evidence: Sequence[str]
) -> IncompleteError:
    index, rank = place
    rest = len(evidence) - _MOST_SHOWN
    more = f"; and {rest} more tensors" if rest > 0 else ""
    return IncompleteError(
        f"{chosen.path(index, rank)}: missing; rank {rank} has other files, and tensors that other "
        f"ranks have in file {index} lack its pieces",
        found="; ".join(evidence[:_MOST_SHOWN]) + more,
        hint="copy the file here from where it was written, or take another checkpoint",
    )
