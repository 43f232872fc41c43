"""Turn checkpoints into the output's tensors: adapters, names, ties, selection, dtypes, mean."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeGuard

from unshard.api.adapters import (
    PEFT_FILE,
    AdapterFile,
    SeparateAdapter,
    fuse_adapter,
    separate_adapter,
)
from unshard.api.options import MergeOptions
from unshard.api.sources import Sources
from unshard.console import counted, listed
from unshard.containers.chunks import equal_tensors
from unshard.containers.open_files import OpenFiles
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.ignored import complete_mtp, ignored
from unshard.convert.expected.tensors import Expected, check_expected, check_plain
from unshard.convert.heads import (
    EMBEDDINGS,
    Ties,
    critic_config,
    find_ties,
    is_head,
    with_embedding,
    without_trl_wrapper,
)
from unshard.convert.names import hub_names, names_of_base
from unshard.convert.outputs import (
    ConvertedTensor,
    average_tensors,
    finish,
    precision,
    scales_of_kept,
    select_tensors,
)
from unshard.convert.quantised import (
    dequantise,
    is_scale,
    quantisation_config,
    quantise,
    true_config,
)
from unshard.convert.recipes import Recipe, Take, shape_of, stored_dtype, takes
from unshard.errors import ConversionError, raise_all
from unshard.fronts import Text
from unshard.plan.layout import OPTIMIZER_FILES
from unshard.plan.work import make_pair
from unshard.read.format import shortened
from unshard.read.hub_files import MODULES
from unshard.read.model_config import Fields, ModelConfig, config_at
from unshard.read.open import Checkpoint
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DTypeKind
from unshard.with_notes import WithNotes
from unshard.write.companions import OPTIMIZER_NAME, optimizer_json
from unshard.write.execute import are_equal

if TYPE_CHECKING:
    from unshard.read.base import Base

ADAPTER_FOLDER = "lora_adapter"
"""The folder of an adapter that is written next to the fused model."""
_INCIDENTAL_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
"""Keys of config.json that may differ between saves of the same model."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """Output tensors and metadata, before layout.

    Attributes:
        tensors: the tensors of the output.
        config: config.json of the output, but for its dtype.
        notes: messages for the user.
        names_checked: the reference for the names: "config", "base" or "none".
        files: small files to write next to the weights, by their paths.
        beside: other tensors to write, by the pattern of their files: the state of the optimizer,
            a separate adapter.
        adapter: the adapter's file, if the output has one.
    """

    tensors: Sequence[ConvertedTensor]
    config: ModelConfig | None
    notes: tuple[str, ...]
    names_checked: str = "none"
    files: Mapping[str, bytes] = field(default_factory=dict)
    beside: Mapping[str, Sequence[ConvertedTensor]] = field(default_factory=dict)
    adapter: AdapterFile = PEFT_FILE


def convert(sources: Sources, options: MergeOptions, *, all_shapes: bool = True) -> Conversion:
    """Decide the output's tensors, and how each is made; several sources are averaged.

    Shapes are checked against config.json. For remote code, and without `all_shapes`, only those of
    embedding and head are.

    Raises:
        ConversionError: names or dtypes of the output cannot be resolved, or tensors are missing.
    """
    last = sources.last
    if options.lora == "adapter":
        alone = separate_adapter(last, options)
        by, files = alone.names_checked, alone.files
        return Conversion(alone.tensors, None, alone.notes, by, files, adapter=alone.written)
    each = [convert_one(source, options) for source in sources.checkpoints]
    output = each[0] if len(each) == 1 else _average(sources, each)
    if last.base is not None:  # `convert_one` has compared names with the base
        output = replace(output, names_checked="base")
    else:
        output = _checked_by_config(output, last, options, all_shapes=all_shapes)
    if options.quantize is not None:
        tensors = quantise(output.tensors)
        config = output.config and quantisation_config(output.config, tensors.value)
        notes = (*output.notes, *tensors.notes)
        output = replace(output, tensors=tensors.value, config=config, notes=notes)
    if options.lora == "both":
        return _with_adapter(output, separate_adapter(last, options))
    if last.optimizer is None:
        return output
    from unshard.convert.optimizer import convert_optimizer

    moments, state = convert_optimizer(output.tensors, last.catalog, last.optimizer)
    return replace(
        output,
        notes=(*output.notes, *moments.notes),
        files={OPTIMIZER_NAME: optimizer_json(state)},
        beside={OPTIMIZER_FILES: moments.value},
    )


def _checked_by_config(
    output: Conversion, source: Checkpoint, options: MergeOptions, *, all_shapes: bool
) -> Conversion:
    """Compare an output with its config, as far as the config determines names and shapes."""
    folders, config = source.companions.folders, output.config
    recipes = {one.name: one.recipe for one in output.tensors if not one.name.startswith(folders)}
    expected = expected_names(recipes, config, options)
    if config is None or expected is None:
        return output
    expected = expected._replace(name=str(config.path))
    if (model := source.config_of) is not None:
        advice = f"{model.file} names {model.name} as the base model; give another with "
        advice += "⟦--base MODEL⟧ or ⟦--config FILE⟧; for the weights alone: ⟦--config none⟧"
        expected = expected._replace(advice=advice)
    if not all_shapes or config.fields.get("auto_map") is not None:
        expected = expected.with_embeddings_only()
    notes = (*output.notes, *check_expected(recipes, expected, **options.allowed))
    resized = _resize(config, expected.shapes, recipes)
    return replace(output, config=resized, notes=notes, names_checked="config")


def _with_adapter(output: Conversion, adapter: SeparateAdapter) -> Conversion:
    """Return the output with an adapter in a folder of its own."""
    files = {f"{ADAPTER_FOLDER}/{name}": text for name, text in adapter.files.items()}
    beside = {f"{ADAPTER_FOLDER}/{adapter.written.name}": adapter.tensors}
    return replace(output, files=files, beside=beside, adapter=adapter.written)


def convert_one(checkpoint: Checkpoint, options: MergeOptions) -> Conversion:
    """Decide names, ties, selection and dtypes of the tensors of one checkpoint."""
    config, base = checkpoint.config, checkpoint.base
    dtypes = None if base is None else base.dtypes
    if base is not None and not dtypes and options.dtype == "base":
        raise ConversionError(f"⟦--dtype base⟧: the dtypes of {base.name} are unknown")
    rule = precision(options.dtype, config, dtypes, options.keep_fp32)
    adapted = fuse_adapter(checkpoint, options)
    tensors: Mapping[str, Recipe] = without_trl_wrapper(adapted.value)
    notes = adapted.notes
    if options.names == "hub":
        tensors, more = _in_modules(tensors, checkpoint)
        notes += more
    # The checkpoint's own config comes first: the user's may describe the output.
    own = (config_at(path, None) for path in (checkpoint.own_config,) if path is not None)
    tensors = dequantise(tensors, rule, chain(own, [config]))
    if base is not None and not any(map(is_scale, tensors)):  # a base in block FP8 has scales
        base = replace(base, files={n: file for n, file in base.files.items() if not is_scale(n)})
    if options.names == "hub":
        native = _without_trainers_names(tensors, config, checkpoint.catalog.recorded)
        if base is None:
            renamed = hub_names(native.value, config)
        else:
            renamed = names_of_base(native.value, base.files, config, base.shapes)
        tensors, notes = renamed.value, (*notes, *native.notes, *renamed.notes)
    expected = base.files if base else _names_by_config(tensors, config, options)
    tensors = with_embedding(tensors, expected, config)
    ties = _ties(tensors, config)
    notes += ties.notes
    tensors = {name: recipe for name, recipe in tensors.items() if name not in ties.equal}
    rule = replace(rule, scales=scales_of_kept(tensors))
    selected = select_tensors(tensors, options.include, options.exclude)
    tensors, config, more = complete_mtp(selected, tensors, checkpoint.base, config, options.select)
    notes += (*check_plain(tensors, expected, selects=options.reading.selects), *more)
    if base is not None:
        notes += tuple(_check_base(tensors, base, options, config))
    converted = finish(tensors, rule)
    if config is not None:
        resized = config if base is None else _resize(config, base.shapes, tensors)
        config = critic_config(resized, tensors)
        config = true_config(config.untied() if ties.different else config, converted)
    return Conversion(converted, config, notes)


def _in_modules(
    tensors: Mapping[str, Recipe], checkpoint: Checkpoint
) -> WithNotes[Mapping[str, Recipe]]:
    """Rename the tensors of a model of sentence-transformers to the names in its files."""
    modules = checkpoint.companions.files.get(MODULES)
    if modules is None and not any(name.startswith("0.") for name in tensors):
        return WithNotes(tensors)
    from unshard.read.beside.modules import are_unlisted, in_folders, modules_at

    if modules is not None:
        return WithNotes(in_folders(tensors, modules_at(modules)))
    if not are_unlisted(tensors):
        return WithNotes(tensors)
    what = "no modules.json: training names of sentence-transformers are kept"
    return WithNotes(tensors, (Text(f"{what}; for the names of its files: ⟦+--base MODEL⟧"),))


def _without_trainers_names(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, recorded: Fields
) -> WithNotes[Mapping[str, Recipe]]:
    """Rename tensors of Megatron and torchtitan to the training names of transformers."""
    noted = WithNotes(tensors)
    if any("self_attention.linear_" in name for name in tensors):
        from unshard.convert.megatron.names import without_megatron_names

        noted = without_megatron_names(tensors, config, recorded)
    if "tok_embeddings.weight" in tensors:
        from unshard.convert.torchtitan import without_native_names

        return WithNotes(without_native_names(noted.value, config), noted.notes)
    return noted


def _names_by_config(
    tensors: Mapping[str, Recipe], config: ModelConfig | None, options: MergeOptions
) -> Collection[str]:
    """Return the names that the config determines, if the conversion of a tensor depends on them.

    The names of many experts take long, and `convert` derives them for the output anyway.
    """
    is_lone = config is not None and config.is_tied and sum(map(is_head, tensors)) == 1
    entries = (one.entry for recipe in tensors.values() for one in takes(recipe))
    if not is_lone and all(entry.doubt is None for entry in entries):
        return ()
    expected = expected_names(tensors, config, options)
    return () if expected is None else expected.names


def _ties(tensors: Mapping[str, Recipe], config: ModelConfig | None) -> Ties:
    """Find tied weights.

    A computed tensor equals no other. Compressed tensors are compared after decompression.
    """
    stored = {name: recipe.entry for name, recipe in tensors.items() if is_stored(recipe)}
    computed = {name: shape_of(recipe) for name, recipe in tensors.items() if name not in stored}
    plain = {name: entry for name, entry in stored.items() if not entry.chunks.compressed.any()}
    return find_stored_ties(plain, config, computed)


def find_stored_ties(
    stored: Mapping[str, TensorEntry],
    config: ModelConfig | None,
    computed: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Ties:
    """Find tied weights by the bytes in their files; arguments as for `find_ties`."""
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        return find_ties(stored, computed, config, partial(equal_tensors, files=files))


def is_stored(recipe: Recipe) -> TypeGuard[Take]:
    """Return whether a recipe is a whole tensor as it is stored."""
    if not isinstance(recipe, Take) or recipe.permutation is not None:
        return False
    return recipe.box == Box.whole(recipe.entry.shape)


def _check_base(
    tensors: Mapping[str, Recipe], base: "Base", options: MergeOptions, config: ModelConfig | None
) -> list[str]:
    """Compare names and shapes with the base's, except deselected tensors and tied heads."""
    excused = base.files.keys() - {*options.select(base.files)}
    if config is not None and config.is_tied:
        excused |= {name for name in (*base.files, *tensors) if is_head(name)}
    excused |= ignored(config, tensors, [*base.files, *tensors])
    expected = Expected(base.name, base.files, base.shapes, excused)
    notes = check_expected(tensors, expected, **options.allowed)
    if options.dtype == "base":
        unknown = [name for name in tensors if name not in base.dtypes]
        if unknown:
            number = counted(len(unknown), "tensor")
            notes.append(f"not cast, because {base.name} has no dtype for them: {number}")
    return notes


def expected_names(
    names: Collection[str], config: ModelConfig | None, options: MergeOptions
) -> Expected | None:
    """Return the tensors that the config of an output implies; None if it does not."""
    if config is None or options.names != "hub" or options.base is not None:
        return None
    return expected_by_config(config.fields, names, options.select, tied=config.may_be_tied)


def _resize(
    config: ModelConfig, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Recipe]
) -> ModelConfig:
    """Return the config with the vocabulary of the output in place of that of expected shapes."""
    for name, shape in expected.items():
        rows = shape_of(tensors[name])[:1] if name in tensors else ()
        if name.endswith(EMBEDDINGS) and rows and rows != shape[:1]:
            config = config.with_vocabulary(shape[0], rows[0])
    return config


def _average(sources: Sources, conversions: Sequence[Conversion]) -> Conversion:
    """Return the mean of several conversions, with config and companions of the last.

    Integers and booleans that differ, such as counters, come from the last source, with a note.
    """
    names = [str(source.location.weights_dir) for source in sources.checkpoints]
    tables = [conversion.tensors for conversion in conversions]
    tensors, fixed = average_tensors(tables, names, sources.weights)
    notes = dict.fromkeys(note for conversion in conversions for note in conversion.notes)
    notes |= dict.fromkeys(_differing_configs(sources.checkpoints))
    dtypes = (stored_dtype(tensor.recipe) for tensor in tensors if tensor.name not in fixed)
    if any(dtype.itemsize > BY_NAME["float32"].itemsize for dtype in dtypes):
        notes["float64 values are averaged in float32, and lose digits"] = None
    if not sources.compressed_bytes:  # otherwise they are compared after decompression
        scales = scales_of_kept({tensor.name: tensor.recipe for tensor in tables[-1]})
        scaled = {name.rpartition(".")[0] for name in scales}
        notes |= dict.fromkeys(_compare_fixed(list(fixed.values()), names, scaled))
    return Conversion(tensors, conversions[-1].config, tuple(notes))


def _differing_configs(checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
    """Yield a note with the keys for each checkpoint whose config.json differs from the last."""
    *others, last = checkpoints
    for checkpoint in others:
        if checkpoint.config is None or last.config is None:
            continue
        ours, theirs = checkpoint.config.fields, last.config.fields
        keys = sorted((ours.keys() | theirs.keys()) - _INCIDENTAL_KEYS)
        if keys := [key for key in keys if ours.get(key) != theirs.get(key)]:
            yield (
                f"config.json of {checkpoint.location.title} differs from that of the last "
                f"checkpoint, which is used: {shortened(keys, 5)}"
            )


def _compare_fixed(
    fixed: Sequence[tuple[ConvertedTensor, ...]], names: Sequence[str], scaled: AbstractSet[str]
) -> list[str]:
    """Compare tensors that have no mean; return a note about those that differ.

    Integers in or under the names `scaled` are quantised: with a mean of their scales, the result
    would not be a model.
    """
    problems, differing = [], []
    with OpenFiles(os.O_RDONLY, limit=32) as files:
        for first, *others in fixed:
            if all(are_equal(make_pair(first, other), files) for other in others):
                continue
            dtype = stored_dtype(first.recipe)
            above, _, _ = (module := first.name.rpartition(".")[0]).rpartition(".")
            is_scaled = not scaled.isdisjoint({first.name, module, above})
            if dtype.kind in {DTypeKind.INTEGER, DTypeKind.BOOL} and not is_scaled:
                differing.append(first.name)
            else:
                problems.append(
                    ConversionError(
                        f"tensor {first.name}: differs, and {dtype} values cannot be averaged",
                        hint="average the model before it is quantised"
                        if is_scaled or dtype.kind is DTypeKind.FLOAT
                        else "",
                    )
                )
    raise_all(ConversionError, "tensors that cannot be averaged", problems)
    if not differing:
        return []
    return [f"integers are not averaged: {listed(differing, 5)} differ; taken from {names[-1]}"]
