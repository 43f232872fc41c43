"""From a checkpoint to a plan: read, convert, lay out, plan. Nothing is written here."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from unshard.api.adapters import AdapterPart, adapter_part
from unshard.api.checking import check_names
from unshard.api.combining import combine
from unshard.api.converting import convert
from unshard.api.options import MergeOptions
from unshard.convert.outputs import Converted
from unshard.plan.layout import Layout, lay_out
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.read.beside.base import Base
from unshard.read.beside.companions import Companions
from unshard.read.beside.model_config import ModelConfig
from unshard.read.open import Checkpoint
from unshard.read.training_state.reader import TrainingState, read_training_state
from unshard.showing import counted
from unshard.tensors.catalog import Catalog

__all__ = ["Prepared", "prepare", "with_training_state", "without_config"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that is known before the first byte is written.

    Attributes:
        sources: what is merged; more than one are averaged. The last gives config and companions.
        weights: what each counts in an average.
        tensors: the output's.
        plan: how their files are made.
        config: config.json of the output, if it gets one.
        warnings: what a user should know.
        files: small files to write beside, by name.
        names_checked: by what the names were checked: "config", "base" or "none".
        adapter: the adapter by itself, to be written into a folder of its own.
        training: scheduler and random state, to be written beside.
    """

    sources: tuple[Checkpoint, ...]
    weights: tuple[float, ...]
    tensors: tuple[Converted, ...]
    plan: Plan
    config: ModelConfig | None
    warnings: tuple[str, ...]
    files: Mapping[str, bytes]
    names_checked: str = "none"
    adapter: AdapterPart | None = None
    training: TrainingState = field(default_factory=TrainingState)

    @property
    def checkpoint(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.sources[-1]

    @property
    def loadable(self) -> bool:
        """Whether the output has the config that transformers or PEFT needs to load it."""
        return self.config is not None or bool(self.files)

    @property
    def catalogs(self) -> list[Catalog]:
        """What all sources hold."""
        return [source.catalog for source in self.sources]


def prepare(
    sources: Sequence[Checkpoint], options: MergeOptions, weights: Sequence[float] = (1.0,)
) -> Prepared:
    """Convert, lay out and plan.

    Args:
        sources: what to merge; several are averaged.
        options: as for `merge`.
        weights: what each source counts in an average.

    Raises:
        ConversionError: names or dtypes of the output cannot be resolved.
    """
    source = sources[-1]
    if options.lora == "adapter":
        part = adapter_part(source, options)
        alone = replace(source, companions=Companions())
        said = source.catalog.notes
        return Prepared((alone,), (1.0,), part.tensors, part.plan, None, said, part.files)
    outcome = combine(sources, [convert(one, options) for one in sources], weights)
    checked = check_names(outcome.tensors, outcome.config, source, options)
    plan = _plan_of(outcome.tensors, source.base, options)
    written = _written_dtype(plan.layout)
    notes = (note for one in sources for note in one.catalog.notes)
    config = outcome.config
    return Prepared(
        sources=tuple(sources),
        weights=tuple(weights),
        tensors=tuple(outcome.tensors),
        plan=plan,
        config=None if config is None else config.as_written(written),
        warnings=(
            *notes,
            *outcome.notes,
            *checked.notes,
            *_said_of_config(source, config, written, options),
        ),
        files={},
        names_checked=checked.by,
        adapter=adapter_part(source, options) if options.lora == "both" else None,
    )


def without_config(checkpoint: Checkpoint) -> str:
    """Return what a user should know of a checkpoint that has no config."""
    return (
        f"no config.json was found in or beside {checkpoint.location.weights_dir}: the "
        "weights are complete, but transformers needs one to load them; give it with "
        "--config FILE|DIR or --base MODEL"
    )


def _said_of_config(
    checkpoint: Checkpoint, config: ModelConfig | None, written: str | None, options: MergeOptions
) -> list[str]:
    """Return what a user should know of the config: that there is none, or another dtype in it."""
    if config is None:
        return [without_config(checkpoint)]
    named = config.dtype
    if options.dtype != "keep" or None in (named, written) or named == written:
        return []
    other = (
        f"the weights are {written} and are kept so, but config.json names {named}; "
        "to cast them: --dtype config"
    )
    return [other]


def with_training_state(prepared: Prepared, options: MergeOptions) -> Prepared:
    """Add scheduler and random state of the checkpoint, where the output is to have them.

    Raises:
        UnsafeError: a file of theirs was made to run commands.
    """
    if not options.extra_state or options.lora == "adapter":
        return prepared
    found = prepared.checkpoint
    state = read_training_state(found.location, found.catalog.world_size)
    return replace(prepared, training=state, warnings=(*prepared.warnings, *state.warnings))


def _plan_of(tensors: list[Converted], base: Base | None, options: MergeOptions) -> Plan:
    """Lay out and plan; files as the base model has them, unless a size was asked for."""
    like = None
    if base is not None and options.max_shard_size is None:
        files = base.files
        like = files if all(file.endswith(".safetensors") for file in files.values()) else None
    plan = make_plan(lay_out(tensors, options.shard_bytes, like=like))
    _log.info(
        "plan: %s in %s, %s; copies: %d, tensors made in tiles: %d",
        counted(len(tensors), "tensor"),
        counted(len(plan.layout.files), "file"),
        counted(plan.layout.total_size, "byte"),
        *(len(plan.copies), len(plan.tiled)),
    )
    for one in tensors:
        _log.debug("plan %s: %s, %s", one.name, one.dtype.name, type(one.recipe).__name__)
    return plan


def _written_dtype(layout: Layout) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none."""
    sizes: Counter[str] = Counter()
    for file in layout.files:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return sizes.most_common(1)[0][0] if sizes else None
