"""From a checkpoint to the output's tensors: adapters, names, ties, selection, dtypes."""

from collections.abc import Mapping
from dataclasses import dataclass

from unshard.api.adapters import fuse_adapter
from unshard.api.options import MergeOptions
from unshard.api.sources import Source
from unshard.convert.critics import critic_config, without_trl_wrapper
from unshard.convert.expected import Expected, check_expected
from unshard.convert.names import Renamed, hub_names, names_of_base
from unshard.convert.outputs import Converted, finish, select
from unshard.convert.precision import Fields, Precision, precision
from unshard.convert.recipes import Recipe, Take
from unshard.errors import ConversionError
from unshard.read.base import Base
from unshard.read.ties import find_ties
from unshard.tensors.catalog import Catalog
from unshard.write.companions import load_config

__all__ = ["Outcome", "convert"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The output's tensors and config, and what a user should know."""

    tensors: list[Converted]
    config: Fields | None
    notes: tuple[str, ...]


def convert(source: Source, options: MergeOptions) -> Outcome:
    """Decide names, ties, selection and dtypes of the output."""
    catalog = source.checkpoint.catalog
    config = load_config(catalog.companions)
    adapted = fuse_adapter(source, options)
    tensors: dict[str, Recipe] = dict(adapted.tensors)
    ties = find_ties(catalog.tensors, config)
    notes = [
        f"{head} differs from {embedding}, though config.json says that they are tied: both are "
        "written, and config.json says so"
        for head, embedding in ties.different.items()
    ]
    notes += adapted.notes
    tensors = without_trl_wrapper(tensors)
    if options.names == "hub":
        renamed = _named(tensors, source.base, config)
        tensors, notes = renamed.tensors, [*notes, *renamed.notes]
    tied = _repeated(tensors, catalog, ties.equal)
    tensors = {name: one for name, one in tensors.items() if name not in tied}
    tensors = select(tensors, options.include, options.exclude)
    rule = _precision(source.base, config, options)
    if source.base is not None:
        notes += _check_base(tensors, source.base, options, tied)
    if config is not None:
        config = critic_config(config, tensors)
        untied = ties.different or len(tied) < len(ties.equal)
        config = _untied(config) if untied else config
    return Outcome(finish(tensors, rule), config, tuple(notes))


def _repeated(
    tensors: Mapping[str, Recipe], catalog: Catalog, equal: Mapping[str, str]
) -> set[str]:
    """Return the output names of tied heads, as long as both they and the embedding stay as stored.

    An embedding that an adapter was fused into is no longer the head's.
    """
    stored = {id(one.entry): name for name, one in tensors.items() if isinstance(one, Take)}
    pairs = ((catalog.tensors[head], catalog.tensors[other]) for head, other in equal.items())
    return {
        stored[id(head)]
        for head, embedding in pairs
        if id(head) in stored and id(embedding) in stored
    }


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
