"""From a checkpoint to a plan: read, convert, lay out, plan. Nothing is written here."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.convert.critics import critic_config, without_trl_wrapper
from unshard.convert.expected import Expected, check_expected
from unshard.convert.names import Renamed, hub_names, names_of_base
from unshard.convert.outputs import Converted, finish, select
from unshard.convert.precision import Fields, Precision, config_dtype, precision
from unshard.convert.recipes import Recipe, Take, take
from unshard.errors import ConversionError
from unshard.plan.layout import Layout, lay_out
from unshard.plan.operations import Plan
from unshard.plan.planner import make_plan
from unshard.read.base import Base, read_base
from unshard.read.companions import completed
from unshard.read.open import Checkpoint, open_latest
from unshard.read.ties import find_ties
from unshard.write.companions import load_config, output_config

__all__ = ["Prepared", "Source", "open_source", "plan_of", "prepare"]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a merge starts from: the checkpoint, and the base model if one was named."""

    checkpoint: Checkpoint
    base: Base | None


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that is known before the first byte is written."""

    source: Source
    tensors: tuple[Converted, ...]
    plan: Plan
    config: Fields | None
    warnings: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """What is merged."""
        return self.source.checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """The output's tensors and config, and what a user should know."""

    tensors: list[Converted]
    config: Fields | None
    notes: tuple[str, ...]


def open_source(path: Path, options: MergeOptions) -> Source:
    """Read the checkpoint that a path means, and the base model.

    Raises:
        UnshardError: either cannot be read.
    """
    base = None if options.base is None else read_base(str(options.base))
    also = [Path(one) for one in options.also]
    checkpoint = open_latest(path, options.request, options.reading, also)
    if base is not None:
        companions = completed(checkpoint.catalog.companions, base.companions)
        catalog = replace(checkpoint.catalog, companions=companions)
        checkpoint = replace(checkpoint, catalog=catalog)
    return Source(checkpoint, base)


def prepare(source: Source, options: MergeOptions) -> Prepared:
    """Convert, lay out and plan.

    Raises:
        ConversionError: names or dtypes of the output cannot be resolved.
    """
    outcome = _convert(source, options)
    plan = plan_of(outcome.tensors, source.base, options)
    written = _written_dtype(plan.layout)
    warnings = [*source.checkpoint.catalog.notes, *outcome.notes]
    config = outcome.config
    if config is None:
        warnings.append(
            f"no config.json was found in or beside {source.checkpoint.location.weights_dir}: the "
            "weights are complete, but transformers needs one to load them; give it with "
            "--config FILE|DIR or --base MODEL"
        )
    named = config_dtype(config)
    if options.dtype == "keep" and None not in (named, written) and named != written:
        warnings.append(
            f"the weights are {written} and stay so, config.json names {named}: "
            f"--dtype config casts them"
        )
    adjusted = None if config is None else output_config(config, written)
    return Prepared(source, tuple(outcome.tensors), plan, adjusted, tuple(warnings))


def plan_of(tensors: list[Converted], base: Base | None, options: MergeOptions) -> Plan:
    """Lay out and plan; files as the base model has them, unless a size was asked for."""
    like = None
    if base is not None and options.max_shard_size is None:
        files = base.files
        like = files if all(file.endswith(".safetensors") for file in files.values()) else None
    return make_plan(lay_out(tensors, options.shard_bytes, like=like))


def _convert(source: Source, options: MergeOptions) -> _Outcome:
    """Decide names, ties, selection and dtypes of the output."""
    catalog = source.checkpoint.catalog
    config = load_config(catalog.companions)
    tensors: dict[str, Recipe] = {name: take(entry) for name, entry in catalog.tensors.items()}
    ties = find_ties(catalog.tensors, config)
    notes = [
        f"{head} differs from {embedding}, though config.json says that they are tied: both are "
        "written, and config.json says so"
        for head, embedding in ties.different.items()
    ]
    _refuse_adapters(catalog.roots[0], tensors)
    tensors = without_trl_wrapper(tensors)
    if options.names == "hub":
        renamed = _named(tensors, source.base, config)
        tensors, notes = renamed.tensors, [*notes, *renamed.notes]
    heads = {id(catalog.tensors[head]) for head in ties.equal}
    tied = {n for n, one in tensors.items() if isinstance(one, Take) and id(one.entry) in heads}
    tensors = {name: one for name, one in tensors.items() if name not in tied}
    tensors = select(tensors, options.include, options.exclude)
    rule = _precision(source.base, config, options)
    if source.base is not None:
        notes += _check_base(tensors, source.base, options, tied)
    if config is not None:
        config = critic_config(config, tensors)
        config = _untied(config) if ties.different else config
    return _Outcome(finish(tensors, rule), config, tuple(notes))


def _named(tensors: Mapping[str, Recipe], base: Base | None, config: Fields | None) -> Renamed:
    """Give tensors the names of the hub, or of the base model where there is one."""
    if base is None:
        return hub_names(tensors, config)
    return names_of_base(tensors, base.files, config, base.shapes)


def _precision(base: Base | None, config: Fields | None, options: MergeOptions) -> Precision:
    dtypes = None if base is None else base.dtypes
    if base is not None and not base.dtypes and options.dtype == "base":
        raise ConversionError(f"--dtype base: the dtypes of {base.name} are not known")
    return precision(options.dtype, config, dtypes, options.keep_fp32)


def _check_base(
    tensors: Mapping[str, Recipe], base: Base, options: MergeOptions, tied: set[str]
) -> list[str]:
    """Compare the names with the base's; those that the user left out are not missed."""
    excused = tied
    if options.include is not None or options.exclude is not None:
        excused = set(base.files)
    return check_expected(
        tensors,
        Expected(base.name, base.files, base.shapes, excused),
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )


def _untied(config: Fields) -> Fields:
    """Return the config with its ties undone, also where a nested config states them."""
    key = "tie_word_embeddings"
    fields = {**config, key: False}
    text = config.get("text_config")
    if isinstance(text, dict) and key in text:
        fields["text_config"] = {**text, key: False}
    return fields


def _refuse_adapters(root: Path, tensors: Mapping[str, Recipe]) -> None:
    """Adapters written out under their own names load as the bare base model, without a word."""
    adapters = [
        name for name in tensors if any(part.startswith("lora_") for part in name.split("."))
    ]
    if adapters:
        raise ConversionError(
            f"{root}: holds {len(adapters)} LoRA tensors ({adapters[0]} …), and this "
            "version cannot fuse them yet",
            hint="merge the adapter into the model with peft before saving",
        )


def _written_dtype(layout: Layout) -> str | None:
    """Return the dtype of most of the floating point bytes; None if there are none."""
    sizes: Counter[str] = Counter()
    for file in layout.files:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.data_offsets[1] - tensor.data_offsets[0]
    return sizes.most_common(1)[0][0] if sizes else None
