"""From the output's tensors to a plan: lay out, plan. Nothing is written here."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unshard.api.flow.converting import Outcome
from unshard.api.flow.sources import Sources
from unshard.api.options import MergeOptions
from unshard.convert.outputs import Converted
from unshard.plan.layout import Layout, lay_out
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.read.beside.base import Base
from unshard.read.beside.companions import Companions
from unshard.read.beside.model_config import ModelConfig
from unshard.read.open import Checkpoint
from unshard.showing import counted
from unshard.write.adapter import ADAPTER_NAME

__all__ = ["Prepared", "plan_output", "without_config"]

_log = logging.getLogger(__name__)

_ONE_FILE = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that is known before the first byte is written.

    Attributes:
        sources: what is merged.
        tensors: the output's.
        plan: how their files are made.
        config: config.json of the output, if it gets one.
        warnings: what a user should know.
        files: small files to write next to the weights, by name.
        names_checked: by what the names were checked: "config", "base" or "none".
        adapter: the adapter by itself, to be written into a folder of its own.
    """

    sources: Sources
    tensors: Sequence[Converted]
    plan: Plan
    config: ModelConfig | None
    warnings: tuple[str, ...]
    files: Mapping[str, bytes]
    names_checked: str = "none"
    adapter: "Prepared | None" = None

    @property
    def checkpoint(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.sources.last

    @property
    def loadable(self) -> bool:
        """Whether the output has the config that transformers or PEFT needs to load it."""
        return self.config is not None or bool(self.files)


def plan_output(sources: Sources, outcome: Outcome, options: MergeOptions) -> Prepared:
    """Lay out the output's files, and plan how they are made."""
    read = tuple(note for one in sources.checkpoints for note in one.catalog.notes)
    if options.lora == "adapter":
        return _plan_adapter(sources, outcome, read)
    plan = make_plan(
        lay_out(outcome.tensors, options.shard_bytes, like=_like(sources.last.base, options))
    )
    _log_plan(outcome.tensors, plan)
    written = _written_dtype(plan.layout)
    config, part = outcome.config, outcome.adapter
    of_config = _notes_of_config(sources.last, config, written, options)
    return Prepared(
        sources,
        outcome.tensors,
        plan,
        config=None if config is None else config.as_written(written),
        warnings=(*read, *outcome.notes, *of_config, *sources.training.warnings),
        files=outcome.files,
        names_checked=outcome.names_checked,
        adapter=None if part is None else _plan_adapter(sources, part, ()),
    )


def _plan_adapter(sources: Sources, outcome: Outcome, notes: tuple[str, ...]) -> Prepared:
    """Plan an adapter as a directory of its own, which PEFT loads, without companions."""
    alone = replace(sources, checkpoints=(replace(sources.last, companions=Companions()),))
    plan = make_plan(lay_out(outcome.tensors, _ONE_FILE, pattern=ADAPTER_NAME))
    return Prepared(alone, outcome.tensors, plan, None, notes, outcome.files)


def without_config(checkpoint: Checkpoint) -> str:
    """Return the warning for a checkpoint that has no config."""
    return (
        f"no config.json was found in or next to {checkpoint.location.weights_dir}: the "
        "weights are complete, but transformers needs one to load them; give it with "
        "--config FILE|DIR or --base MODEL"
    )


def _notes_of_config(
    checkpoint: Checkpoint, config: ModelConfig | None, written: str | None, options: MergeOptions
) -> list[str]:
    """Return a warning if there is no config, or if it names another dtype than is written."""
    if config is None:
        return [without_config(checkpoint)]
    named = config.dtype
    if options.dtype != "keep" or None in (named, written) or named == written:
        return []
    what = f"the weights are {written} and are kept so, but config.json names {named}"
    return [f"{what}; to cast them: --dtype config"]


def _like(base: Base | None, options: MergeOptions) -> Mapping[str, str] | None:
    """Return the base model's files, which the output follows unless a size was asked for."""
    if base is None or options.max_shard_size is not None:
        return None
    return base.files if all(one.endswith(".safetensors") for one in base.files.values()) else None


def _log_plan(tensors: Sequence[Converted], plan: Plan) -> None:
    _log.info(
        "plan: %s in %s, %s; copies: %d, tensors made in tiles: %d",
        counted(len(tensors), "tensor"),
        counted(len(plan.layout.files), "file"),
        counted(plan.layout.total_size, "byte"),
        *(len(plan.copies), len(plan.tiled)),
    )
    for one in tensors:
        _log.debug("plan %s: %s, %s", one.name, one.dtype.name, type(one.recipe).__name__)


def _written_dtype(layout: Layout) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none."""
    sizes: Counter[str] = Counter()
    for file in layout.files:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return sizes.most_common(1)[0][0] if sizes else None
