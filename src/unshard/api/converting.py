"""From a checkpoint to the output's tensors: adapters, names, ties, selection, dtypes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from unshard.api.adapters import fuse_adapter
from unshard.api.options import MergeOptions
from unshard.convert.critics import critic_config, without_trl_wrapper
from unshard.convert.expected import Expected, check_expected
from unshard.convert.names import Renamed, hub_names, names_of_base
from unshard.convert.outputs import Converted, finish, select, selected
from unshard.convert.precision import Precision, precision
from unshard.convert.recipes import Recipe, Take, shape_of
from unshard.convert.ties import Ties, find_ties, is_head
from unshard.convert.torchtitan import without_native_names
from unshard.errors import ConversionError
from unshard.read.beside.base import Base
from unshard.read.beside.model_config import ModelConfig
from unshard.read.open import Checkpoint
from unshard.tensors.boxes import Box

__all__ = ["Outcome", "convert", "is_stored"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The output's tensors and config, and what a user should know."""

    tensors: list[Converted]
    config: ModelConfig | None
    notes: tuple[str, ...]


def convert(checkpoint: Checkpoint, options: MergeOptions) -> Outcome:
    """Decide names, ties, selection and dtypes of the output."""
    config, base = checkpoint.config, checkpoint.base
    adapted = fuse_adapter(checkpoint, options)
    tensors, notes = without_trl_wrapper(adapted.tensors), list(adapted.notes)
    if options.names == "hub":
        renamed = _named(without_native_names(tensors, config), base, config)
        tensors, notes = renamed.tensors, [*notes, *renamed.notes]
    ties = _ties(tensors, config)
    notes += [
        f"{head} differs from {embedding}, though the model's config says that they are tied: both "
        "are written, and config.json says so"
        for head, embedding in ties.different.items()
    ]
    tensors = {name: one for name, one in tensors.items() if name not in ties.equal}
    whole, tensors = tensors, select(tensors, options.include, options.exclude)
    rule = _precision(base, config, options)
    if base is not None:
        left_out = [name for name in whole if name not in tensors]
        notes += _check_base(tensors, base, options, config, left_out)
    if config is not None:
        config = _resized(config, checkpoint, tensors)
        config = critic_config(config, tensors)
        config = config.untied() if ties.different else config
    return Outcome(finish(tensors, rule), config, tuple(notes))


def _ties(tensors: Mapping[str, Recipe], config: ModelConfig | None) -> Ties:
    """Find tied weights among the output's tensors; one with an adapter in it equals no other."""
    stored = {name: one.entry for name, one in tensors.items() if is_stored(one)}
    computed = {name: shape_of(one) for name, one in tensors.items() if name not in stored}
    return find_ties(stored, computed, config)


def is_stored(recipe: Recipe) -> TypeGuard[Take]:
    """Tell whether a recipe is a whole tensor as it is stored."""
    if not isinstance(recipe, Take) or recipe.permutation is not None:
        return False
    return recipe.box == Box.whole(recipe.entry.shape)


def _named(tensors: Mapping[str, Recipe], base: Base | None, config: ModelConfig | None) -> Renamed:
    """Give tensors the names of the hub, or of the base model where there is one."""
    if base is None:
        return hub_names(tensors, config)
    return names_of_base(tensors, base.files, config, base.shapes)


def _precision(base: Base | None, config: ModelConfig | None, options: MergeOptions) -> Precision:
    dtypes = None if base is None else base.dtypes
    if base is not None and not base.dtypes and options.dtype == "base":
        raise ConversionError(f"--dtype base: the dtypes of {base.name} are not known")
    return precision(options.dtype, config, dtypes, options.keep_fp32)


def _check_base(
    tensors: Mapping[str, Recipe],
    base: Base,
    options: MergeOptions,
    config: ModelConfig | None,
    left_out: Sequence[str],
) -> list[str]:
    """Compare names and shapes with the base's.

    What the user left out is not missed, nor is a head that is tied, on either side.
    """
    kept = selected(base.files, options.include, options.exclude)
    excused = {*left_out, *(base.files.keys() - kept)}
    if config is not None and config.is_tied:
        excused |= {name for name in (*base.files, *tensors) if is_head(name)}
    notes = check_expected(
        tensors,
        Expected(base.name, base.files, base.shapes, excused),
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    if options.dtype == "base":
        unknown = [name for name in tensors if name not in base.dtypes]
        if unknown:
            notes.append(f"{len(unknown)} tensors have no dtype in {base.name} and keep their own")
    return notes


def _resized(
    config: ModelConfig, checkpoint: Checkpoint, tensors: Mapping[str, Recipe]
) -> ModelConfig:
    """Return a config of the base model's with the vocabulary that the embedding has now."""
    base = checkpoint.base
    if base is None or checkpoint.companions.config != base.companions.config:
        return config
    for name, shape in base.shapes.items():
        rows = shape_of(tensors[name])[:1] if name in tensors else ()
        if name.endswith("embed_tokens.weight") and rows and rows != shape[:1]:
            config = config.with_vocabulary(shape[0], rows[0])
    return config
