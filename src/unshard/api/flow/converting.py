"""From checkpoints to the output's tensors: adapters, names, ties, selection, dtypes, mean."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeGuard

from unshard.api.flow.adapters import fuse_adapter, separate_adapter
from unshard.api.flow.sources import Sources
from unshard.api.options import MergeOptions
from unshard.containers.chunks import equal_tensors
from unshard.containers.open_files import OpenFiles
from unshard.convert.averaging import average_tensors
from unshard.convert.critics import critic_config, without_trl_wrapper
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.tensors import Expected, check_expected
from unshard.convert.names import hub_names, names_of_base
from unshard.convert.outputs import Converted, finish, select_names, select_tensors
from unshard.convert.precision import Precision, precision
from unshard.convert.recipes import Recipe, Take, shape_of, stored_dtype
from unshard.convert.ties import Ties, find_ties, is_head
from unshard.convert.torchtitan import without_native_names
from unshard.errors import ConversionError, raise_all
from unshard.noted import Noted
from unshard.plan.work import make_pair
from unshard.read.beside.base import Base
from unshard.read.beside.model_config import ModelConfig
from unshard.read.open import Checkpoint
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DTypeKind
from unshard.write.execute import are_equal

__all__ = ["Outcome", "convert", "convert_one", "expected_names", "find_stored_ties", "is_stored"]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What becomes of the checkpoints, before it has places in files.

    Attributes:
        tensors: the output's.
        config: config.json of the output, but for its dtype.
        notes: what a user should know.
        names_checked: by what the names were checked: "config", "base" or "none".
        files: small files to write next to the weights, by name.
        adapter: the adapter, if it is to be written by itself too.
    """

    tensors: Sequence[Converted]
    config: ModelConfig | None
    notes: tuple[str, ...]
    names_checked: str = "none"
    files: Mapping[str, bytes] = field(default_factory=dict)
    adapter: "Outcome | None" = None


def convert(sources: Sources, options: MergeOptions) -> Outcome:
    """Decide what the output's tensors are, and how each is made; several sources are averaged.

    Raises:
        ConversionError: names or dtypes of the output cannot be resolved, or tensors are missing.
    """
    if options.lora == "adapter":
        return _adapter_alone(sources.last, options)
    each = [convert_one(one, options) for one in sources.checkpoints]
    made = each[0] if len(each) == 1 else _mean(sources, each)
    checked = _check_names(made, sources.last, options)
    adapter = _adapter_alone(sources.last, options) if options.lora == "both" else None
    notes = (*made.notes, *checked.notes)
    return replace(made, notes=notes, names_checked=checked.value, adapter=adapter)


def _adapter_alone(checkpoint: Checkpoint, options: MergeOptions) -> Outcome:
    tensors, files = separate_adapter(checkpoint, options)
    return Outcome(tensors, None, (), files=files)


def convert_one(checkpoint: Checkpoint, options: MergeOptions) -> Outcome:
    """Decide names, ties, selection and dtypes of what one checkpoint becomes."""
    config, base = checkpoint.config, checkpoint.base
    adapted = fuse_adapter(checkpoint, options)
    tensors, notes = without_trl_wrapper(adapted.value), adapted.notes
    if options.names == "hub":
        trained = without_native_names(tensors, config)
        renamed = (
            hub_names(trained, config)
            if base is None
            else names_of_base(trained, base.files, config, base.shapes)
        )
        tensors, notes = renamed.value, (*notes, *renamed.notes)
    ties = _ties(tensors, config)
    notes += tuple(
        f"{head} differs from {embedding}, though the model's config says that they are tied: both "
        "are written, and config.json records that"
        for head, embedding in ties.different.items()
    )
    tensors = {name: one for name, one in tensors.items() if name not in ties.equal}
    whole, tensors = tensors, select_tensors(tensors, options.include, options.exclude)
    rule = _precision(base, config, options)
    if base is not None:
        left_out = [name for name in whole if name not in tensors]
        notes += tuple(_check_base(tensors, base, options, config, left_out))
    if config is not None:
        config = _resized(config, checkpoint, tensors)
        config = critic_config(config, tensors)
        config = config.untied() if ties.different else config
    return Outcome(finish(tensors, rule), config, notes)


def _ties(tensors: Mapping[str, Recipe], config: ModelConfig | None) -> Ties:
    """Find tied weights among the output's tensors; a fused one is not equal to any other.

    Compressed tensors cannot be compared: they are looked at again when they are decompressed.
    """
    stored = {name: one.entry for name, one in tensors.items() if is_stored(one)}
    computed = {name: shape_of(one) for name, one in tensors.items() if name not in stored}
    there = {name: one for name, one in stored.items() if not one.chunks.compressed.any()}
    return find_stored_ties(there, config, computed)


def find_stored_ties(
    stored: Mapping[str, TensorEntry],
    config: ModelConfig | None,
    computed: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Ties:
    """Find tied weights by the bytes in their files; arguments as for `find_ties`.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        return find_ties(stored, computed, config, partial(equal_tensors, files=files))


def is_stored(recipe: Recipe) -> TypeGuard[Take]:
    """Return whether a recipe is a whole tensor as it is stored."""
    if not isinstance(recipe, Take) or recipe.permutation is not None:
        return False
    return recipe.box == Box.whole(recipe.entry.shape)


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
    """Compare names and shapes with the base's; the user's choice and tied heads are excused."""
    kept = select_names(base.files, options.include, options.exclude)
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


def _check_names(made: Outcome, checkpoint: Checkpoint, options: MergeOptions) -> Noted[str]:
    """Compare the names of an output with those that its config says there are.

    Where there is a base model, they were compared with its names already.

    Returns:
        By what the names were checked.

    Raises:
        ConversionError: tensors are missing, or do not belong to the model.
    """
    if checkpoint.base is not None:
        return Noted("base")
    recipes = {one.name: one.recipe for one in made.tensors}
    expected = expected_names(recipes, made.config, options)
    if expected is None:
        return Noted("none")
    notes = check_expected(
        recipes,
        replace(expected, name=str(checkpoint.companions.config)),
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
    )
    return Noted("config", tuple(notes))


def expected_names(
    names: Collection[str], config: ModelConfig | None, options: MergeOptions
) -> Expected | None:
    """Return what an output of these names has by its config; None if that is not known."""
    if config is None or options.names != "hub" or options.base is not None:
        return None

    def kept(known: Iterable[str]) -> list[str]:
        return select_names(known, options.include, options.exclude)

    return expected_by_config(config.fields, names, kept, tied=config.may_be_tied)


def _resized(
    config: ModelConfig, checkpoint: Checkpoint, tensors: Mapping[str, Recipe]
) -> ModelConfig:
    """Return the config with the output's vocabulary, if it is the base model's config."""
    base = checkpoint.base
    if base is None or checkpoint.companions.config != base.companions.config:
        return config
    for name, shape in base.shapes.items():
        rows = shape_of(tensors[name])[:1] if name in tensors else ()
        if name.endswith("embed_tokens.weight") and rows and rows != shape[:1]:
            config = config.with_vocabulary(shape[0], rows[0])
    return config


def _mean(sources: Sources, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the mean of several outcomes, with config and companions of the last.

    Integers and booleans that differ, counters for example, are the last source's, and named.

    Raises:
        ConversionError: names, shapes or dtypes differ, or tensors that have no mean.
    """
    names = [str(one.location.weights_dir) for one in sources.checkpoints]
    mean = average_tensors([one.tensors for one in outcomes], names, sources.weights)
    notes = dict.fromkeys(note for one in outcomes for note in one.notes)
    added = (one for one in mean.tensors if one.name not in mean.fixed)
    if any(stored_dtype(one.recipe).itemsize > BY_NAME["float32"].itemsize for one in added):
        notes["float64 values are averaged in float32, and lose digits"] = None
    if not sources.compressed_bytes:  # otherwise they are compared once decompressed
        notes |= dict.fromkeys(_differing(list(mean.fixed.values()), names))
    return Outcome(mean.tensors, outcomes[-1].config, tuple(notes))


def _differing(fixed: Sequence[tuple[Converted, ...]], names: Sequence[str]) -> list[str]:
    """Compare tensors that have no mean; return a note about those that differ."""
    problems, taken = [], []
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        for first, *others in fixed:
            if all(are_equal(make_pair(first, other), files) for other in others):
                continue
            dtype = stored_dtype(first.recipe)
            if dtype.kind in {DTypeKind.INTEGER, DTypeKind.BOOL}:
                taken.append(first.name)
            else:
                problems.append(
                    ConversionError(
                        f"tensor {first.name}: differs, and {dtype} values cannot be averaged",
                        hint="average the model before it is quantised",
                    )
                )
    raise_all(ConversionError, "tensors that cannot be averaged", problems)
    if not taken:
        return []
    listed = ", ".join(taken[:5]) + (f" and {len(taken) - 5} more" if len(taken) > 5 else "")
    return [f"integers are not averaged: {listed} differ; {names[-1]} provides them"]
