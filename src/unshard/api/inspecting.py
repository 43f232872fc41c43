"""`inspect`: describe a checkpoint, and the output of its merge."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Unpack

import numpy as np

from unshard.api.converting import convert
from unshard.api.making import PlannedMerge, plan_output
from unshard.api.options import MergeOptions, accepting, given_path
from unshard.api.sources import Sources, read_checkpoint, refuse_unloadable
from unshard.console import counted
from unshard.errors import CheckpointError, ConversionError, NoConfigError, UsageError
from unshard.fronts import PYTHON, reword_warning
from unshard.keywords import ReadKeywords
from unshard.read.beside.adapter_config import lora_names
from unshard.read.finding.candidates import sibling_weights
from unshard.read.finding.markers import find_markers, run_of
from unshard.read.open import Checkpoint
from unshard.read.optimizer.reader import find_optimizer
from unshard.read.optimizer_state import split_name
from unshard.stores.nodes.connection import disconnecting
from unshard.tensors.catalog import Catalog, Skipped, TensorEntry
from unshard.tensors.placements import Sharding
from unshard.write.companions import plain_json


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: name, dtype, global shape, placements as torch prints them, number of chunks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    chunks: int


@dataclass(frozen=True, slots=True)
class ShardCounts:
    """How the tensors of a checkpoint are distributed.

    Attributes:
        keys: number of tensors with parts in each file of weights, in the order of ranks.
        sharded: number of tensors that are cut; replicated: number of all other tensors.
    """

    keys: dict[str, int]
    sharded: int
    replicated: int


def count_shards(catalog: Catalog) -> ShardCounts:
    """Count, without reading any weights."""
    keys: Counter[Path] = Counter()
    sharded = 0
    order: dict[Path, None] = {}
    for entry in catalog.tensors.values():
        chunks = entry.chunks
        order |= dict.fromkeys(chunks.paths)
        keys.update(chunks.paths[file] for file in {*chunks.file.tolist()})
        sharded += bool((chunks.sizes != np.asarray(entry.shape, dtype=np.int64)).any())
    named = {path.name: keys[path] for path in order if path in keys}
    return ShardCounts(named, sharded, len(catalog.tensors) - sharded)


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """The state of an optimizer.

    Attributes:
        tensors: number of tensors of each kind ("exp_avg").
        dtypes: dtypes, with tensor counts; `size_bytes`: bytes of all full tensors.
        step: number of training steps of the parameters; None if unknown, or if they differ.
        groups: the hyper-parameters of each parameter group, and its number of `parameters`.
        names: source of the parameters' names: "recorded" in the files, or "by order".
        problem: why it cannot be read; empty if it can.
    """

    tensors: dict[str, int]
    dtypes: dict[str, int]
    size_bytes: int
    step: float | None
    groups: tuple[dict[str, object], ...]
    names: str
    problem: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """The contents of a checkpoint, and the output of its merge.

    Attributes:
        path: the directory of the weights, or the single file.
        format, writer, step, world_size: as in `Catalog`.
        role, weights: the chosen set of weights.
        meshes: device meshes, as "fsdp=4", or as "4 x 2" without names; with tensor counts.
        placements: placements, with tensor counts; "plain" for tensors without placements, or
            "cut 4 x 1" with the number of parts per dimension, if the format records boxes.
        dtypes: dtypes, with tensor counts.
        parameters: number of elements; `size_bytes`: bytes of the full tensors.
        latest: the latest step of the run by each of its marker files; None for a marker without a
            number.
        has_ema: whether there are EMA weights next to these.
        lora_tensors: number of LoRA tensors among them.
        shared: groups of names that are stored once (tied weights).
        compressed: whether reading needs a temporary decompressed copy on disk (zstd).
        missing: files of ranks that do not exist.
        skipped: values that are not tensors.
        config_dtype: the dtype in config.json.
        companions: names of config, tokenizer and similar files that a merge copies.
        training_state: names of files with optimizer, scheduler or random state.
        optimizer: the state of the optimizer; None if there is none.
        output: default output of `merge`.
        would_write: one line about the output of `merge`.
        notes: the warnings of such a merge, with the options of `unshard merge`.
        tensors: every tensor.
    """

    path: str
    format: str
    writer: str
    step: int | None
    world_size: int
    role: str | None
    weights: str
    meshes: dict[str, int]
    placements: dict[str, int]
    dtypes: dict[str, int]
    parameters: int
    size_bytes: int
    latest: dict[str, int | None]
    has_ema: bool
    lora_tensors: int
    shared: tuple[tuple[str, ...], ...]
    compressed: bool
    missing: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    config_dtype: str | None
    companions: tuple[str, ...]
    training_state: tuple[str, ...]
    optimizer: OptimizerInfo | None
    output: str
    would_write: str
    notes: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of `merge`, with the options of Python."""
        return tuple(reword_warning(note, PYTHON) for note in self.notes)

    def __repr__(self) -> str:
        """Return one line: path, format, step and sizes."""
        step = "" if self.step is None else f", step {self.step}"
        return (
            f"<Inspection of {self.path!r}: {self.format}{step}, "
            f"{counted(self.world_size, 'rank')}, {counted(len(self.tensors), 'tensor')}, "
            f"{self.parameters:,} parameters, {self.size_bytes:,} bytes>"
        )


@accepting(ReadKeywords)
@disconnecting()
def inspect(checkpoint: str | Path, **options: Unpack[ReadKeywords]) -> Inspection:
    """Describe a checkpoint, and the output of its merge; nothing is written.

    Args:
        checkpoint: as for `merge`.
        options: as for `merge`.

    Raises:
        CheckpointError: it cannot be read.
    """
    chosen = MergeOptions(**options)
    source = read_checkpoint(given_path(checkpoint, "the checkpoint"), chosen)
    planned, notes = plan_merge(source, chosen)
    if not isinstance(planned, PlannedMerge):
        return _describe(source, chosen, "nothing: " + planned.subject, notes)
    layout = planned.plan.layout
    files = counted(len(layout.files), "file")
    would_write = f"{source.location.default_output}: {files}, {layout.total_size:,} bytes"
    return _describe(source, chosen, would_write + source.config_source, notes)


def plan_merge(
    checkpoint: Checkpoint, options: MergeOptions
) -> tuple[PlannedMerge | ConversionError | NoConfigError, tuple[str, ...]]:
    """Return a planned merge and its warnings, or its error and advice."""
    sources = Sources((checkpoint,))
    try:
        refuse_unloadable(sources, options)
        prepared = plan_output(sources, convert(sources, options), options)
    except (ConversionError, NoConfigError) as error:
        advice = error.found + "; " * bool(error.found) + error.hint
        return error, (*sources.notes, *filter(None, [advice]))
    return prepared, prepared.warnings


def _describe_optimizer(checkpoint: Checkpoint, options: MergeOptions) -> OptimizerInfo | None:
    try:
        state = find_optimizer(checkpoint, options.reading)
    except (CheckpointError, UsageError) as error:
        return OptimizerInfo({}, {}, 0, None, (), "", "" + error.subject)
    if state is None:
        return None
    steps = {*state.steps.values()}
    entries = state.catalog.tensors.items()
    return OptimizerInfo(
        tensors=_count(split_name(name)[1] for name, _ in entries),
        dtypes=_count(entry.dtype.name for _, entry in entries),
        size_bytes=sum(entry.size_bytes for _, entry in entries),
        step=steps.pop() if len(steps) == 1 else None,
        groups=tuple(
            {key: plain_json(value) for key, value in group.values.items()}
            | {"parameters": len(group.params)}
            for group in state.groups
        ),
        names=state.names,
    )


def _describe(
    checkpoint: Checkpoint, options: MergeOptions, would_write: str, notes: tuple[str, ...]
) -> Inspection:
    catalog, location = checkpoint.catalog, checkpoint.location
    entries = catalog.tensors.values()
    config = ("config.json",) if checkpoint.companions.config_file else ()
    return Inspection(
        path=str(location.place),
        format=catalog.format,
        writer=catalog.writer,
        step=catalog.step,
        world_size=catalog.world_size,
        role=location.role,
        weights=location.weights,
        meshes=_count(_describe_mesh(entry.sharding) for entry in entries if entry.sharding),
        placements=_count(", ".join(_list_placements(entry)) for entry in entries),
        dtypes=_count(entry.dtype.name for entry in entries),
        parameters=sum(prod(entry.shape) for entry in entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        latest=dict(find_markers(run_of(location))),
        has_ema=sibling_weights(location, "ema") is not None,
        lora_tensors=len(lora_names(catalog.tensors)),
        shared=_find_shared(catalog),
        compressed=any(entry.chunks.compressed.any() for entry in entries),
        missing=tuple(path.name for path in catalog.missing),
        skipped=catalog.skipped,
        config_dtype=None if checkpoint.config is None else checkpoint.config.dtype,
        companions=(*config, *checkpoint.companions.files),
        training_state=tuple(
            path.name + ("/" if path.is_dir() else "") for path in catalog.training_state
        ),
        optimizer=_describe_optimizer(checkpoint, options),
        output=str(location.default_output),
        would_write=would_write,
        notes=notes,
        tensors=tuple(
            TensorInfo(one.fqn, one.dtype.name, one.shape, _list_placements(one), len(one.chunks))
            for one in entries
        ),
    )


def _count(names: Iterator[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _list_placements(entry: TensorEntry) -> tuple[str, ...]:
    if entry.sharding is not None:
        return tuple(str(placement) for placement in entry.sharding.placements)
    parts = [len(set(starts)) for starts in entry.chunks.offsets.T.tolist()]
    return ("plain",) if prod(parts) <= 1 else (f"cut {' x '.join(map(str, parts))}",)


def _describe_mesh(sharding: Sharding) -> str:
    mesh = sharding.mesh
    if mesh.dim_names is None:
        return " x ".join(map(str, mesh.shape))
    return ", ".join(f"{n}={size}" for n, size in zip(mesh.dim_names, mesh.shape, strict=True))


def _find_shared(catalog: Catalog) -> tuple[tuple[str, ...], ...]:
    """Return the names whose first chunks are the same bytes of the same file."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, entry in catalog.tensors.items():
        if entry.place is not None:
            groups.setdefault(entry.place, []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
